from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator


class Both(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def everything():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    tree = {
        "scalar": torch.tensor(rank),
        "bools": torch.tensor([rank == 0, True]),
        "half": Both(torch.full((1, 2), rank, dtype=torch.bfloat16), torch.ones(2, 3).t()),
        "text": "left as it is",
        "learned": torch.full((1,), float(rank), requires_grad=True),
    }
    return accelerator.gather(tree), accelerator.gather_for_metrics([torch.tensor(rank), f"r{rank}", None])


def test_gather_joins_any_nesting_and_dtype(on_ranks):
    for gathered, loose in on_ranks(everything):
        assert gathered["scalar"].tolist() == [0, 1]
        assert gathered["bools"].tolist() == [True, True, False, True]
        assert gathered["half"].x.dtype == torch.bfloat16
        assert gathered["half"].x.tolist() == [[0, 0], [1, 1]]
        assert gathered["half"].y.shape == (6, 2)
        assert gathered["text"] == "left as it is"
        assert not gathered["learned"].requires_grad
        assert loose[0].tolist() == [0, 1]
        assert loose[1:] == [["r0", "r1"], None]


def test_alone_everything_comes_back_as_it_is():
    accelerator = Accelerator(cpu=True)
    tree = {"x": torch.tensor(1)}
    assert accelerator.gather(tree) is tree
    assert accelerator.gather_for_metrics(tree) is tree


def metrics(num_samples, batch_size, options):
    accelerator = Accelerator(cpu=True, **options)
    size = batch_size * (accelerator.num_processes if options else 1)
    loader = accelerator.prepare(DataLoader(range(num_samples), batch_size=size))
    ids, squares, words, flat = [], [], [], []
    for batch in loader:
        found = accelerator.gather_for_metrics(
            {
                "pair": (batch, Both(batch**2, batch)),
                "words": [f"w{int(i)}" for i in batch],
                "flat": batch.repeat_interleave(3),
            }
        )
        ids += found["pair"][0].tolist()
        squares += found["pair"][1].x.tolist()
        words += found["words"]
        flat += accelerator.gather_for_metrics(batch.repeat_interleave(3)).tolist()
    return ids, squares, words, flat


def all_metrics():
    return {
        (num_samples, batch_size, split): metrics(num_samples, batch_size, {"split_batches": True} if split else {})
        for num_samples in (1, 2, 5, 7, 12)
        for batch_size in (1, 2, 3)
        for split in (False, True)
    }


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_every_sample_comes_once_and_in_order(on_ranks, num_processes):
    for rank in on_ranks(all_metrics, num_processes=num_processes):
        for (num_samples, *_), (ids, squares, words, flat) in rank.items():
            assert ids == list(range(num_samples))
            assert squares == [i * i for i in range(num_samples)]
            assert words == [f"w{i}" for i in range(num_samples)]
            assert flat == [i for i in range(num_samples) for _ in range(3)]


def several_loaders():
    accelerator = Accelerator(cpu=True)
    outer, inner = accelerator.prepare(DataLoader(range(5), batch_size=2), DataLoader(range(3)))
    seen, inside = [], []
    for batch in outer:
        for other in inner:
            inside += accelerator.gather_for_metrics(other).tolist()
        seen += accelerator.gather_for_metrics(batch).tolist()
    return seen, inside


def test_loaders_may_be_used_in_turn(on_ranks):
    for seen, inside in on_ranks(several_loaders):
        assert seen == list(range(5))
        assert inside == [0, 1, 2] * 2


def ragged():
    accelerator = Accelerator(cpu=True)
    images = [{"boxes": torch.full((n, 4), float(n)), "name": f"i{n}"} for n in (3, 1, 1, 1, 2)]
    loader = accelerator.prepare(DataLoader(images, batch_size=2, collate_fn=lambda batch: batch))
    as_dicts, as_tensors = [], []
    for batch in loader:
        as_dicts += accelerator.gather_for_metrics(batch)
        as_tensors += accelerator.gather_for_metrics([image["boxes"] for image in batch])
    return as_dicts, as_tensors


def test_one_entry_a_sample_stays_so_whatever_the_sizes(on_ranks):
    for as_dicts, as_tensors in on_ranks(ragged):
        assert [len(image["boxes"]) for image in as_dicts] == [3, 1, 1, 1, 2]
        assert [len(boxes) for boxes in as_tensors] == [3, 1, 1, 1, 2]


def fields():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    return [accelerator.gather_for_metrics([batch, batch + 1]) for batch in loader]


def test_a_list_of_batched_tensors_is_not_a_list_of_samples(on_ranks):
    for first, last in on_ranks(fields):
        assert [tensor.tolist() for tensor in first] == [[0, 1, 2, 3], [1, 2, 3, 4]]
        assert [tensor.tolist() for tensor in last] == [[4], [5]]


def different_lengths():
    accelerator = Accelerator(cpu=True)
    accelerator.gather_for_metrics(torch.ones(2, 3 + accelerator.process_index))


def test_lengths_that_differ_are_an_error_with_all_shapes(on_ranks):
    with pytest.raises(ValueError, match=r"\(2, 3\), \(2, 4\)"):
        on_ranks(different_lengths)
