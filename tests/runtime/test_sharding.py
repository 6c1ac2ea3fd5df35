import itertools

import numpy as np
import pytest
import torch

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import sharding
from notebook_launcher.runtime.sharding import Plan


def batches(num_samples, size, *, drop_last=False):
    indices = list(range(num_samples))
    cut = [indices[start : start + size] for start in range(0, num_samples, size)]
    return [batch for batch in cut if len(batch) == size or not drop_last]


def dealt(num_samples, size, num_ranks, **options):
    plan = Plan(num_ranks, size, **options)
    stream = batches(num_samples, size, drop_last=plan.drop_last)
    return list(sharding.rounds(stream, plan, sharding.INDICES))


def real(rounds):
    """The real samples of all rounds, ranks in order."""
    return [
        index
        for round_ in rounds
        for part, count in zip(round_.parts, round_.counts, strict=False)
        for index in part[:count]
    ]


EVERY = list(itertools.product(range(20), (1, 2, 3), (1, 2, 3, 4)))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_every_sample_is_real_once_and_in_order(even, split):
    for num_samples, size, num_ranks in EVERY:
        own_size = size * num_ranks if split else size
        rounds = dealt(num_samples, own_size, num_ranks, even=even, split=split)
        assert real(rounds) == list(range(num_samples)), (num_samples, size, num_ranks)


@pytest.mark.parametrize("split", [False, True])
def test_even_shares_are_full_and_equal(split):
    for num_samples, size, num_ranks in EVERY:
        if num_ranks == 1:
            continue
        own_size = size * num_ranks if split else size
        for round_ in dealt(num_samples, own_size, num_ranks, split=split):
            assert [len(part) for part in round_.parts] == [size] * num_ranks
            assert round_.sizes == (size,) * num_ranks


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_the_end_and_the_length_are_known(drop_last, even, split):
    for num_samples, size, num_ranks in EVERY:
        own_size = size * num_ranks if split else size
        rounds = dealt(num_samples, own_size, num_ranks, even=even, drop_last=drop_last, split=split)
        plan = Plan(num_ranks, own_size, even=even, drop_last=drop_last, split=split)
        num_batches = len(batches(num_samples, own_size, drop_last=drop_last))
        for rank in range(num_ranks):
            ends = [round_.is_last[rank] for round_ in rounds if rank < len(round_.parts)]
            assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)
            assert len(ends) == sharding.num_rounds(num_batches, plan, rank, num_samples)


def test_the_last_round_is_filled_from_the_start():
    last = dealt(5, 2, 2)[-1]
    assert last.parts == [[4, 0], [1, 2]]
    assert last.counts == (1, 0)


def test_a_tiny_data_set_repeats_as_often_as_it_takes():
    (only,) = dealt(1, 2, 3)
    assert only.parts == [[0, 0]] * 3
    assert only.counts == (1, 0, 0)


def test_drop_last_drops_what_does_not_fill_a_round():
    assert real(dealt(11, 2, 2, drop_last=True)) == list(range(8))


def test_one_process_keeps_a_short_last_batch_short():
    assert [round_.parts[0] for round_ in dealt(5, 2, 1)] == [[0, 1], [2, 3], [4]]


def test_batches_of_no_fixed_size_are_dealt_whole():
    rounds = list(sharding.rounds([[0, 1, 2], [3], [4, 5]], Plan(2, None), sharding.INDICES))
    assert [round_.parts for round_ in rounds] == [[[0, 1, 2], [3]], [[4, 5], [0, 1, 2]]]
    assert rounds[-1].counts == (2, 0)


def test_single_indices_are_dealt_too():
    rounds = list(sharding.rounds([7, 8, 9], Plan(2, None), sharding.INDICES))
    assert [round_.parts for round_ in rounds] == [[7, 8], [9, 7]]


def test_data_is_dealt_like_indices():
    for num_samples, size, num_ranks in EVERY:
        plan = Plan(num_ranks, size)
        stream = batches(num_samples, size)
        indices = sharding.rounds(stream, plan, sharding.INDICES)
        data = sharding.rounds(
            [torch.tensor(batch) for batch in stream], plan, sharding.data_operations(plan.batch_size)
        )
        for left, right in zip(indices, data, strict=True):
            assert left.parts == [part.tolist() for part in right.parts]
            assert left[1:] == right[1:]


def test_data_that_can_not_be_joined_is_filled_with_whole_batches():
    stream = [torch.ones(1, length) for length in (3, 5, 2)]
    last = list(sharding.rounds(stream, Plan(2, 1), sharding.data_operations(1)))[-1]
    assert [tuple(part.shape) for part in last.parts] == [(1, 2), (1, 3)]
    assert last.counts == (1, 0)


def test_a_split_that_does_not_come_out_even_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"batch of 7 among 2 processes"):
        Plan(2, 7, split=True)


def test_no_more_than_one_batch_is_read_ahead():
    taken = []

    def stream():
        for index in range(6):
            taken.append(index)
            yield [index]

    first = next(iter(sharding.rounds(stream(), Plan(2, 1), sharding.INDICES)))
    assert first.parts == [[0], [1]]
    assert taken == [0, 1, 2]


def test_a_rank_that_gets_no_piece_of_the_last_batch_knows_its_own_last():
    rounds = dealt(8, 6, 2, split=True, even=False)
    assert [round_.parts for round_ in rounds] == [[[0, 1, 2], [3, 4, 5]], [[6, 7]]]
    assert [round_.is_last for round_ in rounds] == [(False, True), (True, True)]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda batch: range(batch[0], batch[-1] + 1)])
def test_a_batch_sampler_may_yield_any_kind_of_sequence(kind):
    plan = Plan(2, 2, drop_last=True)
    (only,) = sharding.rounds(map(kind, batches(5, 2)), plan, sharding.INDICES)
    assert [list(part) for part in only.parts] == [[0, 1], [2, 3]]


def images_as_lists(indices):
    return [torch.full((3, 2, 2), float(index)) for index in indices]


def images_and_targets(indices):
    return tuple(images_as_lists(indices)), tuple({"boxes": torch.full((index, 4), float(index))} for index in indices)


def dictionaries(indices):
    return [{"ids": torch.full((index + 1,), float(index))} for index in indices]


def arrays(indices):
    return {"x": torch.tensor(indices), "ids": np.array(indices)}


KINDS = {
    images_as_lists: lambda batch: [int(image.max()) for image in batch if image.shape == (3, 2, 2)],
    images_and_targets: lambda batch: [len(target["boxes"]) for target in batch[1]],
    dictionaries: lambda batch: [len(sample["ids"]) - 1 for sample in batch],
    arrays: lambda batch: batch["ids"].tolist(),
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_data_are_cut_between_samples_however_they_hold_them(kind, size, split):
    plan = Plan(2, size, split=split)
    stream = batches(7, size)
    indices = sharding.rounds(stream, plan, sharding.INDICES)
    data = sharding.rounds(map(kind, stream), plan, sharding.data_operations(size))
    for left, right in zip(indices, data, strict=True):
        assert left.parts == [KINDS[kind](part) for part in right.parts]
        assert left[1:] == right[1:]


def test_batches_that_nobody_can_cut_are_dealt_whole_and_refused_where_they_must_be_split():
    stream = [frozenset({0, 1}), frozenset({2, 3}), frozenset({4})]
    last = list(sharding.rounds(stream, Plan(2, 2), sharding.data_operations(2)))[-1]
    assert (last.parts, last.counts) == ([stream[2], stream[0]], (1, 0))
    with pytest.raises(ValueError, match="a frozenset, has a length"):
        list(sharding.rounds(stream, Plan(2, 2, split=True), sharding.data_operations(2)))


def test_a_split_batch_of_another_length_is_filled_from_itself():
    stream = [torch.ones(2, 2), torch.full((1, 3), 7.0)]
    last = list(sharding.rounds(stream, Plan(2, 2, split=True), sharding.data_operations(2)))[-1]
    assert [part.tolist() for part in last.parts] == [[[7.0] * 3]] * 2
    assert last.counts == (1, 0)
