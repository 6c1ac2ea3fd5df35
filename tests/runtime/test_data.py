import collections
import functools
import random
import typing

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from notebook_launcher import Accelerator, ConfigError, skip_first_batches
from notebook_launcher.runtime import trees
from notebook_launcher.runtime.plugins import DataLoaderConfiguration


def epochs(seed, num_epochs, *, split=False, batch_size=2):
    """What each rank reads of 0..14, by epoch."""
    accelerator = Accelerator(cpu=True, split_batches=split)
    torch.manual_seed(seed)
    loader = accelerator.prepare(DataLoader(range(15), batch_size=batch_size, shuffle=True))
    return [[batch.tolist() for batch in loader] for _ in range(num_epochs)]


def in_order(ranks, epoch):
    """The ranks' batches of an epoch as one process would read them."""
    return [index for round_ in zip(*(rank[epoch] for rank in ranks), strict=True) for part in round_ for index in part]


def test_the_first_epoch_is_that_of_plain_torch():
    torch.manual_seed(5)
    plain = [batch.tolist() for batch in DataLoader(range(15), batch_size=2, shuffle=True)]
    state = torch.get_rng_state()
    assert epochs(5, 1) == [plain]
    assert torch.equal(torch.get_rng_state(), state), "another number of random numbers was drawn"


def test_every_epoch_has_a_new_order_the_same_for_any_number_of_processes(on_ranks):
    alone = epochs(5, 3)
    assert alone[0] != alone[1] != alone[2]
    for num_processes in (2, 3):
        for split in (False, True):
            size = 2 * num_processes if split else 2
            ranks = on_ranks(lambda s, b: epochs(5, 3, split=s, batch_size=b), split, size, num_processes=num_processes)
            for epoch in range(3):
                assert in_order(ranks, epoch)[:15] == [index for batch in alone[epoch] for index in batch]


def test_set_epoch_brings_an_order_back():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(15), shuffle=True))
    first, second = ([int(x) for x in loader] for _ in range(2))
    loader.set_epoch(0)
    assert [int(x) for x in loader] == first
    assert [int(x) for x in loader] == second


def with_generators_that_differ():
    accelerator = Accelerator(cpu=True)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(8), shuffle=True, generator=generator))
    return [[int(x) for x in loader] for _ in range(2)]


def test_a_generator_of_the_loaders_own_is_made_equal_on_all_ranks(on_ranks):
    ranks = on_ranks(with_generators_that_differ)
    for epoch in range(2):
        assert sorted(in_order([[[[i] for i in e] for e in rank] for rank in ranks], epoch)) == list(range(8))
    generator = torch.Generator().manual_seed(0)
    plain = DataLoader(range(8), shuffle=True, generator=generator)
    for epoch in range(2):
        assert in_order([[[[i] for i in e] for e in rank] for rank in ranks], epoch) == [int(x) for x in plain]


def test_the_users_own_sampler_is_left_as_it_was():
    loader = DataLoader(range(4), shuffle=True)
    prepared = Accelerator(cpu=True).prepare(loader)
    list(prepared)
    assert loader.sampler.generator is None
    assert prepared is not loader
    assert type(loader) is DataLoader


class EpochSampler(torch.utils.data.Sampler):
    def __init__(self):
        self.epoch = -1
        self.heard = []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.heard.append(epoch)

    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


def test_set_epoch_reaches_a_batch_sampler_and_a_data_set():
    sampler = EpochSampler()
    loader = Accelerator(cpu=True).prepare(DataLoader(range(4), batch_sampler=sampler))
    loader.set_epoch(7)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert sampler.heard[0] == 7


def already_sharded():
    accelerator = Accelerator(cpu=True)
    sampler = DistributedSampler(range(8), accelerator.num_processes, accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(8), sampler=sampler))
    first, second = ([int(x) for x in loader] for _ in range(2))
    sampler.set_epoch(0)
    return first, second, [int(x) for x in loader], len(loader)


def test_a_loader_that_is_sharded_already_is_not_sharded_again(on_ranks):
    (first, second, again, length), other = on_ranks(already_sharded)
    assert sorted(first + other[0]) == list(range(8))
    assert length == 4
    assert first != second, "epochs count themselves"
    assert again == first, "a sampler whose epoch the user sets is the user's"


def ends(options, num_samples, batch_size):
    accelerator = Accelerator(cpu=True, **options)
    loader = accelerator.prepare(DataLoader(range(num_samples), batch_size=batch_size))
    seen = [(loader.end_of_dataloader, loader.remainder) for _ in loader]
    return seen, len(loader), loader.total_batch_size, loader.total_dataset_length, loader.batch_size


def test_the_loader_says_what_it_is(on_ranks):
    for rank in on_ranks(ends, {}, 5, 2):
        assert rank == ([(False, -1), (True, 1)], 2, 4, 5, 2)
    for rank in on_ranks(ends, {"split_batches": True}, 6, 4):
        assert rank == ([(False, -1), (True, 2)], 2, 4, 6, 4)


def test_a_batch_that_can_not_be_split_is_refused(on_ranks):
    with pytest.raises(ConfigError, match="batch of 3 among 2"):
        on_ranks(ends, {"split_batches": True}, 6, 3)


class Noise(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(1).item() + random.random()  # noqa: S311


def worker_noise():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    loader = accelerator.prepare(DataLoader(Noise(), num_workers=1))
    return [round(float(x), 9) for x in loader]


def plain_worker_noise():
    torch.manual_seed(0)
    return [round(float(x), 9) for x in DataLoader(Noise(), num_workers=1)]


def test_loader_workers_of_each_rank_have_random_numbers_of_their_own(on_ranks):
    first, second = on_ranks(worker_noise)
    assert len(first) == len(second) == 2
    assert not set(first) & set(second)
    (plain,) = on_ranks(plain_worker_noise, num_processes=1)
    assert first == plain[:2], "rank 0's workers are seeded as plain torch seeds them"


class Words(IterableDataset):
    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __iter__(self):
        return ({"number": index, "word": f"w{index}"} for index in range(self.num_samples))


def read_words(num_samples):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Words(num_samples), batch_size=2))
    batches = list(loader)
    kept = [accelerator.gather_for_metrics(batch) for batch in loader]
    return batches, kept


@pytest.mark.parametrize("num_samples", [0, 1, 3, 4, 5, 8])
def test_a_stream_is_read_once_and_shared_out(on_ranks, num_samples):
    for batches, kept in on_ranks(read_words, num_samples):
        assert len(batches) == -(-num_samples // 4)
        assert all(len(batch["word"]) == len(batch["number"]) == 2 for batch in batches)
        assert [word for batch in kept for word in batch["word"]] == [f"w{i}" for i in range(num_samples)]
        assert [int(i) for batch in kept for i in batch["number"]] == list(range(num_samples))


class Images(IterableDataset):
    """Images of different shapes, with their labels."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __iter__(self):
        return ((torch.full((5, index + 2), float(index)), {"label": index}) for index in range(self.num_samples))


def in_columns(samples):
    return tuple(zip(*samples, strict=True))


def read_images(num_samples, options, num_workers):
    accelerator = Accelerator(cpu=True, **settings(**options))
    found = []
    for collate in (list, in_columns):
        loader = accelerator.prepare(
            DataLoader(Images(num_samples), batch_size=4, collate_fn=collate, num_workers=num_workers)
        )
        batches = list(loader) if collate is in_columns else [in_columns(batch) for batch in loader]
        assert all(
            int(image[0, 0]) == target["label"] for batch in batches for image, target in zip(*batch, strict=True)
        )
        found.append([[target["label"] for target in targets] for _, targets in batches])
    first, second = found
    assert first == second
    assert loader.collate_fn is in_columns
    return first, loader.remainder


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize(
    ("num_samples", "options", "expected"),
    [
        (1, {}, [[[0, 0, 0, 0]]] * 2),
        (2, {}, [[[0, 1, 0, 1]]] * 2),  # as many as there are columns
        (3, {"split_batches": True}, [[[0, 1]], [[2, 0]]]),
        (3, {"split_batches": True, "even_batches": False}, [[[0, 1]], [[2]]]),
        (3, {"even_batches": False}, [[[0, 1, 2]], []]),
    ],
)
def test_lists_of_samples_are_cut_right_where_there_are_less_than_one_batch(
    on_ranks, num_samples, options, expected, dispatch
):
    found = on_ranks(read_images, num_samples, {"dispatch_batches": dispatch, **options}, 0)
    assert [batches for batches, _ in found] == expected
    assert found[0][1] == num_samples


def test_loader_workers_tell_the_size_of_a_short_batch(on_ranks):
    assert on_ranks(read_images, 3, {}, 1) == [([[0, 1, 2, 0]], 3), ([[1, 2, 0, 1]], 3)]


class Broken(IterableDataset):
    def __iter__(self):
        yield 1
        raise OSError("the file is gone")


def test_an_error_while_reading_is_the_run_s_error(on_ranks):
    with pytest.raises(OSError, match="the file is gone"):
        on_ranks(lambda: list(Accelerator(cpu=True).prepare(DataLoader(Broken()))))


class Own(DataLoader):
    extra = "kept"


def a_loader_of_ones_own():
    loader = Own(range(6), batch_size=2, num_workers=2, persistent_workers=True)
    prepared = Accelerator(cpu=True).prepare(loader)
    assert isinstance(prepared, Own)
    assert prepared.extra == "kept"
    for _ in range(2):
        assert [batch.tolist() for batch in prepared] == [[0, 1], [2, 3], [4, 5]]


class Shifting(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch + 10


def shifted():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(Shifting(range(5), batch_size=2))
    return [accelerator.gather_for_metrics(batch).tolist() for _ in range(2) for batch in loader]


def test_a_loader_may_iterate_in_a_way_of_its_own(on_ranks):
    for num_processes, expected in ((1, [[10, 11], [12, 13], [14]]), (2, [[10, 11, 12, 13], [14]])):
        assert on_ranks(shifted, num_processes=num_processes)[0] == expected * 2


def shifted_from_the_second():
    loader = Accelerator(cpu=True).prepare(Shifting(range(12), batch_size=2))
    return [batch.tolist() for batch in skip_first_batches(loader, 2)]


def test_batches_of_a_loader_with_a_way_of_its_own_may_be_skipped(on_ranks):
    assert on_ranks(shifted_from_the_second, num_processes=1)[0] == [[14, 15], [16, 17], [18, 19], [20, 21]]
    assert on_ranks(shifted_from_the_second) == [[[18, 19]], [[20, 21]]]


class Records(IterableDataset):
    def __iter__(self):
        return ({"text": f"t{number}", "label": number} for number in range(6))


def new_loader(kind=DataLoader, num_batches=4):
    return Accelerator(cpu=True).prepare(kind(torch.arange(num_batches), batch_size=1))


def labels(profile):
    return sum(event.count for event in profile.key_averages() if event.key.startswith("enumerate(DataLoader)"))


def test_no_time_is_spent_on_labels_of_a_profile_that_nobody_takes(monkeypatch):
    made = []
    record_function = torch.autograd.profiler.record_function
    monkeypatch.setattr(
        torch.autograd.profiler, "record_function", lambda *given: made.append(given) or record_function(*given)
    )
    assert [int(batch) for batch in new_loader()] == [0, 1, 2, 3]
    assert made == []
    next(iter(DataLoader(range(1))))
    assert made  # by plain torch


def test_a_profile_shows_the_batches_that_are_read_while_it_is_taken():
    with torch.profiler.profile() as profile:
        plain = list(DataLoader(torch.arange(4), batch_size=1))
    with torch.profiler.profile() as ours:
        assert list(new_loader()) == plain
    assert labels(ours) == labels(profile) == 5  # the last one finds the end
    batches = iter(new_loader())
    next(batches)
    with torch.profiler.profile() as from_the_second:
        next(batches)
    assert [int(batch) for batch in batches] == [2, 3]
    assert labels(from_the_second) == 1


class Counting(DataLoader):
    def __iter__(self):
        batches = super().__iter__()
        kind = type(batches)
        batches.__class__ = type(kind.__name__, (kind,), {"__next__": lambda one: kind.__next__(one) + 10})
        return batches


class Noting(DataLoader):
    """Looks at what torch's iterator counts."""

    def __iter__(self):
        batches = super().__iter__()
        kind = type(batches)
        batches.__class__ = type(
            kind.__name__, (kind,), {"_next_data": lambda one: kind._next_data(one) + one._num_yielded}
        )
        return batches


def test_an_iterator_of_ones_own_finds_torchs_count():
    assert [int(batch) for batch in new_loader(Noting)] == [0, 2, 4, 6]


def test_an_iterator_of_ones_own_is_asked_as_it_wants_to_be():
    assert [int(batch) for batch in new_loader(Counting)] == [10, 11, 12, 13]


def read_records(dispatch):
    loader = DataLoader(Records(), batch_size=4, collate_fn=list)
    loader = Accelerator(cpu=True, **settings(dispatch_batches=dispatch, split_batches=True)).prepare(loader)
    return [[record["label"] for record in batch] for batch in loader]


@pytest.mark.parametrize("dispatch", [False, True])
def test_lists_of_samples_without_arrays_are_shared_out_too(on_ranks, dispatch):
    assert on_ranks(read_records, dispatch) == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]


def drawn_after_passes(*, persistent_workers):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    loader = accelerator.prepare(DataLoader(range(4), num_workers=1, persistent_workers=persistent_workers))
    for _ in range(2):
        list(loader)
    return torch.rand(1).item()


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_workers_leave_the_ranks_random_streams_equal(on_ranks, persistent):
    first, second = on_ranks(functools.partial(drawn_after_passes, persistent_workers=persistent))
    assert first == second


def test_a_loader_keeps_its_type_and_workers(on_ranks):
    on_ranks(a_loader_of_ones_own, num_processes=1)


def test_unbatched_loaders_and_odd_batches_pass():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader([{"a": None, "b": "x"}] * 2, batch_size=None))
    assert list(loader) == [{"a": None, "b": "x"}] * 2


def test_a_prepared_loader_is_prepared():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(3)))
    assert accelerator.prepare(loader) is loader


def settings(**options):
    return {"dataloader_config": DataLoaderConfiguration(**options)}


@pytest.mark.parametrize("dispatch", [False, True])
def test_shares_may_be_uneven(on_ranks, dispatch):
    options = settings(even_batches=False, dispatch_batches=dispatch)
    first, second = on_ranks(no_metrics, options, 5, {"batch_size": 2})
    assert (first, second) == ([[0, 1], [4]], [[2, 3]])
    first, second = on_ranks(no_metrics, options, 1, {"batch_size": 2})
    assert (first, second) == ([[0]], []), "a rank whose share is empty ends like the others"
    options = settings(even_batches=False, dispatch_batches=dispatch, split_batches=True)
    first, second = on_ranks(no_metrics, options, 5, {"batch_size": 4})
    assert (first, second) == ([[0, 1], [4]], [[2, 3]])


def no_metrics(options, num_samples, loader_options):
    accelerator = Accelerator(cpu=True, **options)
    loader = accelerator.prepare(DataLoader(range(num_samples), **loader_options))
    seen = [batch.tolist() for batch in loader]
    assert len(seen) == len(loader)
    accelerator.wait_for_everyone()
    return seen


class Odd(IterableDataset):
    def __iter__(self):
        yield Encoding({"text": "t0", "flag": torch.tensor([True])})


class Encoding(collections.UserDict):
    """As a tokenizer's ``BatchEncoding``: a mapping that is no dictionary, with something beside its items."""

    def __init__(self, data, note="kept"):
        super().__init__(data)
        self.note = note

    def to(self, device):
        return Encoding({key: trees.move(value, device) for key, value in self.items()}, note="moved")


def test_a_batch_that_can_move_itself_does(monkeypatch):
    loader = Accelerator(cpu=True).prepare(DataLoader(Odd(), batch_size=None))
    loader._share.device = torch.device("meta")
    batch = next(iter(loader))
    assert batch.note == "moved"
    assert batch["flag"].device.type == "meta"
    assert batch["text"] == "t0"


def order(options, draws):
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(7)
    torch.rand(draws)  # what came before
    loader = accelerator.prepare(DataLoader(range(8), shuffle=True))
    return [[int(x) for x in loader] for _ in range(2)]


def test_the_order_can_depend_on_the_seed_alone(on_ranks):
    assert order({}, 1) != order({}, 2)
    seedable = settings(use_seedable_sampler=True)
    assert order(seedable, 1) == order(seedable, 2)
    seeded = settings(data_seed=5)
    assert order(seeded, 1) == order(seeded, 2) != order(settings(data_seed=6), 1)
    assert order(seeded, 1)[0] != order(seeded, 1)[1], "each epoch has an order of its own"
    for options in (seedable, seeded):
        ranks = on_ranks(order, options, 1)
        assert [in_order([[[[i] for i in e] for e in rank] for rank in ranks], n) for n in range(2)] == order(
            options, 1
        )


def test_batches_move_without_waiting_where_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(trees, "move", lambda batch, _device, *, non_blocking: asked.append(non_blocking) or batch)
    for non_blocking in (False, True):
        loader = Accelerator(cpu=True, **settings(non_blocking=non_blocking)).prepare(DataLoader(range(1)))
        loader._share.device = torch.device("meta")
        list(loader)
    assert asked == [False, True]


def test_a_loader_that_another_accelerator_prepared_is_refused():
    loader = Accelerator(cpu=True).prepare(DataLoader(range(3)))
    with pytest.raises(ConfigError, match="over range was prepared by another Accelerator"):
        Accelerator(cpu=True).prepare(loader)


class Pair(typing.NamedTuple):
    x: torch.Tensor
    y: str


def test_collate_functions_and_named_tuples_pass():
    loader = DataLoader(range(4), batch_size=2, collate_fn=lambda indices: Pair(torch.tensor(indices), "text"))
    batches = list(Accelerator(cpu=True).prepare(loader))
    assert [(type(batch) is Pair, batch.x.tolist(), batch.y) for batch in batches] == [
        (True, [0, 1], "text"),
        (True, [2, 3], "text"),
    ]


def joined(even_batches):
    """Weights after a pass in which rank 0 has a batch more."""
    accelerator = Accelerator(cpu=True)
    given = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(given.weight)
    model, optimizer, loader = accelerator.prepare(
        given, torch.optim.SGD(given.parameters(), lr=1.0), DataLoader(torch.ones(3, 1))
    )
    num_steps = 0
    with accelerator.join_uneven_inputs([model], even_batches=even_batches):
        for x in loader:
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
    return num_steps, given.weight.item(), len(loader)


def test_ranks_may_train_on_uneven_shares(on_ranks):
    assert on_ranks(joined, False) == [(2, -1.5, 2), (1, -1.5, 2)]  # noqa: FBT003
    assert on_ranks(joined, None) == [(2, -2.0, 2)] * 2
    assert joined(False) == (3, -3.0, 3)  # noqa: FBT003
