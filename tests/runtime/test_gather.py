import inspect
import math
import os
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import notebook_launcher
from notebook_launcher import Accelerator, ConfigError
from notebook_launcher.runtime.gather import broadcast, gather_object


class Both(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def conjugates():
    accelerator = Accelerator(cpu=True)
    number = torch.full((2,), complex(1, accelerator.process_index)).conj()
    received = broadcast(torch.full((2,), complex(1, accelerator.process_index)).conj())
    return [one.tolist() for one in (accelerator.gather(number), accelerator.gather_for_metrics(number), received)]


def test_numbers_that_are_conjugated_only_when_read_travel_too(on_ranks):
    for gathered, for_metrics, received in on_ranks(conjugates):
        assert gathered == for_metrics == [1, 1, 1 - 1j, 1 - 1j]
        assert received == [1, 1]


def single_elements():
    accelerator = Accelerator(cpu=True)
    one = torch.full((1, 2), accelerator.process_index)[:, 0]  # with a stride of 2
    return [gathered.tolist() for gathered in (accelerator.gather(one), accelerator.gather_for_metrics(one))]


def test_a_single_element_of_a_larger_tensor_travels(on_ranks):
    assert on_ranks(single_elements) == [[[0, 1], [0, 1]]] * 2


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


def arrays():
    accelerator = Accelerator(cpu=True)
    found = []
    for batch in accelerator.prepare(DataLoader(list(range(5)), batch_size=2)):
        one = batch.numpy()
        found.append(accelerator.gather_for_metrics({"one": one, "two": [one, one + 1], "scalar": np.array(1)}))
        found.append(accelerator.gather_for_metrics(one, use_gather_object=True))
    return found


def test_samples_in_arrays_of_numpy_come_once_too(on_ranks):
    for first, as_objects, last, last_as_objects in on_ranks(arrays):
        assert first["one"].tolist() == as_objects.tolist() == [0, 1, 2, 3]
        assert last["one"].tolist() == last_as_objects.tolist() == [4]
        assert [one.tolist() for one in last["two"]] == [[4], [5]]
        assert last["scalar"].tolist() == [1, 1]


def before_anything():
    rank = int(os.environ["RANK"])
    return notebook_launcher.gather_object([rank]), notebook_launcher.reduce(torch.tensor(rank), "sum").item()


def test_the_first_collective_meets_the_others(on_ranks):
    assert on_ranks(before_anything) == [([0, 1], 1)] * 2


def words():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader([(text, 0) for text in "abcde"], batch_size=2))
    return [accelerator.gather_for_metrics(batch[0]) for batch in loader]


def test_a_batch_of_strings_is_one_of_samples(on_ranks):
    for gathered in on_ranks(words):
        assert gathered == [("a", "b", "c", "d"), ("e",)]


def fields():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    pairs, nests, losses = [], [], []
    for batch in loader:  # of two samples, and so are the lists
        pairs.append(accelerator.gather_for_metrics([batch, batch + 1]))
        nests.append(accelerator.gather_for_metrics([batch, (batch + 1, None)]))
        losses.append(accelerator.gather_for_metrics([batch, batch.sum()]))
    return pairs, nests, losses


def test_a_list_of_batched_tensors_is_not_a_list_of_samples(on_ranks):
    for pairs, nests, losses in on_ranks(fields):
        assert [[tensor.tolist() for tensor in pair] for pair in pairs] == [[[0, 1, 2, 3], [1, 2, 3, 4]], [[4], [5]]]
        assert [(nest[0].tolist(), nest[1][0].tolist()) for nest in nests] == [([0, 1, 2, 3], [1, 2, 3, 4]), ([4], [5])]
        assert [[tensor.tolist() for tensor in loss] for loss in losses] == [[[0, 1, 2, 3], [1, 5]], [[4], [4, 3]]]


def different_lengths():
    accelerator = Accelerator(cpu=True)
    accelerator.gather_for_metrics(torch.ones(2, 3 + accelerator.process_index))


def test_lengths_that_differ_are_an_error_with_all_shapes(on_ranks):
    with pytest.raises(ValueError, match=r"\(2, 3\), \(2, 4\)"):
        on_ranks(different_lengths)


EXTREMES = {"max": max, "min": min, "sum": sum, "mean": lambda values: sum(values) / len(values), "prod": math.prod}
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


def every_reduction():
    rank = Accelerator(cpu=True).process_index
    found = {}
    for dtype in DTYPES:
        tensor = torch.tensor([[1, 0, 3], [rank, 1, 2]]).to(dtype).t()  # not contiguous
        for name in EXTREMES:
            found[name, dtype] = notebook_launcher.reduce({"x": [tensor, tensor[0, 1]], "s": "text"}, name)
    return found


def test_reduce_computes_every_reduction_of_every_dtype(on_ranks):
    for found in on_ranks(every_reduction, num_processes=3):
        for (name, dtype), tree in found.items():
            values = [torch.tensor(rank).to(dtype).item() for rank in range(3)]
            matrix, scalar = tree["x"]
            assert scalar.item() == pytest.approx(EXTREMES[name](values), rel=1e-3)
            assert matrix.shape == (3, 2)
            assert (matrix[0, 1], tree["s"]) == (scalar, "text")
            kept = dtype.is_floating_point or name in {"max", "min"}
            assert matrix.dtype == (dtype if kept else torch.float32 if name == "mean" else torch.int64)


def scaled():
    accelerator = Accelerator(cpu=True)
    tensor = torch.tensor([accelerator.process_index + 1.0], requires_grad=True)
    results = [
        accelerator.reduce(tensor),
        notebook_launcher.reduce(tensor),
        accelerator.reduce(tensor, "max", scale=0.5),
        accelerator.reduce(torch.tensor([4]), "max", scale=0.5),
        accelerator.reduce(torch.full((1,), 60000.0, dtype=torch.float16), "mean"),
    ]
    assert accelerator.reduce(tensor, "none") is tensor
    return [result.tolist() for result in results], tensor.tolist(), results[0].requires_grad


def test_reduce_sums_as_a_method_and_averages_as_a_function(on_ranks):
    assert on_ranks(scaled) == [([[3.0], [1.5], [1.0], [2.0], [60000.0]], [rank], False) for rank in (1.0, 2.0)]


def test_reduce_alone_changes_nothing_but_scales():
    tree = {"x": torch.tensor([2, 4])}
    assert notebook_launcher.reduce(tree, "mean") is tree
    assert notebook_launcher.reduce(tree, "sum", scale=0.5)["x"].tolist() == [1.0, 2.0]


def test_an_unknown_reduction_gets_a_guess():
    with pytest.raises(ConfigError, match=r"reduction 'men' is not known. Did you mean 'mean'"):
        notebook_launcher.reduce(torch.ones(1), "men")


def number(call):
    getattr(notebook_launcher, call)({"loss": 0.5, "name": "text", "nothing": None})


@pytest.mark.parametrize("call", ["reduce", "broadcast", "gather"])
def test_numbers_are_refused_where_they_would_differ_in_silence(on_ranks, call):
    with pytest.raises(TypeError, match=rf"{call} takes tensors, and was given 0.5"):
        on_ranks(_joined, number, call)


def from_no_rank(call, value, rank):
    getattr(notebook_launcher, call)(value, from_process=rank)


@pytest.mark.parametrize(("call", "value"), [("broadcast", torch.ones(1)), ("broadcast_object_list", [1])])
def test_a_source_that_is_no_rank(on_ranks, call, value):
    with pytest.raises(ConfigError, match=rf"{call}\(from_process=1\).*no such rank among 1 process; give 0$"):
        from_no_rank(call, value, 1)
    with pytest.raises(ConfigError, match=rf"{call}\(from_process=5\).*no such rank among 2 processes; give 0 to 1\n"):
        on_ranks(from_no_rank, call, value, 5)


def _joined(function, *args):
    Accelerator(cpu=True)
    return function(*args)


def broadcasts():
    rank = Accelerator(cpu=True).process_index
    tensors = [torch.full((2, 3), rank).to(dtype).t() for dtype in (*DTYPES, torch.complex64, torch.float8_e4m3fn)]
    tree = {"x": tensors, "y": torch.tensor(rank), "z": torch.ones(0, 2), "s": f"{rank}"}
    returned = notebook_launcher.broadcast(tree, from_process=1)
    same = all(one is two for one, two in zip(returned["x"], tensors, strict=True))
    gathered = [notebook_launcher.gather(tensor) for tensor in tensors]
    return [float(one.real.float().sum()) for one in tensors], returned["y"].item(), returned["s"], same, gathered


def test_broadcast_fills_the_tensors_given_of_any_dtype(on_ranks):
    for rank, (sums, scalar, text, same, gathered) in enumerate(on_ranks(broadcasts)):
        assert sums == [6.0] * 10
        assert (scalar, text, same) == (1, str(rank), True)
        assert all(tensor.shape == (6, 2) for tensor in gathered)


def objects():
    rank = Accelerator(cpu=True).process_index
    mine = [rank, {"a": rank}][: rank + 1]  # of different lengths
    returned = notebook_launcher.broadcast_object_list(mine, from_process=1)
    assert returned is mine
    return mine, notebook_launcher.gather_object([rank, "x"]), notebook_launcher.gather_object([1] if rank else 0)


def test_objects_travel(on_ranks):
    assert on_ranks(objects) == [([1, {"a": 1}], [0, "x", 1, "x"], [0, [1]])] * 2


def test_objects_alone():
    assert notebook_launcher.gather_object("one") == ["one"]
    assert notebook_launcher.gather_object(["one"]) == ["one"]
    assert notebook_launcher.broadcast_object_list(["one"]) == ["one"]


def paddings(dim, first):
    rank = Accelerator(cpu=True).process_index
    ragged = torch.ones(2, 1 + rank, dtype=torch.int64)
    tree = {"x": Both(ragged, ragged.bool()), "0-d": torch.tensor(1), "1-d": torch.ones(3), "none": None}
    return notebook_launcher.pad_across_processes(tree, dim=dim, pad_index=9, pad_first=first)


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("first", [False, True])
def test_padding_makes_one_dim_equal_and_leaves_what_lacks_it(on_ranks, dim, first):
    short, long = on_ranks(paddings, dim, first)
    assert short["x"].x.tolist() == [[9, 1] if first else [1, 9]] * 2
    assert short["x"].y.dtype == torch.bool
    assert long["x"].x.tolist() == [[1, 1]] * 2
    for rank in (short, long):
        assert (rank["0-d"].shape, rank["1-d"].shape, rank["none"]) == ((), (3,), None)


def other_number():
    rank = Accelerator(cpu=True).process_index
    notebook_launcher.pad_across_processes([torch.ones(1)] * (rank + 1))


def test_padding_needs_as_many_tensors_everywhere(on_ranks):
    with pytest.raises(ValueError, match=r"was given \[1, 2\] tensors, by rank"):
        on_ranks(other_number)


def other_dims():
    rank = Accelerator(cpu=True).process_index
    with pytest.raises(ValueError, match="tensors that have a dim 1 on some ranks only"):
        notebook_launcher.pad_across_processes(torch.ones(*[2] * (rank + 1)), dim=1)
    return notebook_launcher.pad_across_processes(torch.ones(rank + 1), dim=1).shape


def test_padding_needs_the_dim_on_all_ranks_or_none(on_ranks):
    assert on_ranks(other_dims) == [(1,), (2,)]


def padded_gradient():
    tensor = torch.ones(1 + Accelerator(cpu=True).process_index, requires_grad=True)
    notebook_launcher.pad_across_processes(tensor * 2).sum().backward()
    return tensor.grad.tolist()


def test_gradients_flow_through_padding(on_ranks):
    assert on_ranks(padded_gradient) == [[2.0], [2.0, 2.0]]


def empty_loader(num_samples):
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.ones(num_samples, 1)))
    num_steps = 0
    for batch in loader:
        accelerator.backward(model(batch).sum())
        num_steps += 1
    accelerator.wait_for_everyone()
    return num_steps, accelerator.gather(torch.tensor(num_steps)).tolist()


@pytest.mark.parametrize("num_samples", [0, 1, 3])
def test_a_rank_whose_loader_is_empty_ends_like_the_others(on_ranks, num_samples):
    num_steps = -(-num_samples // 2)
    assert on_ranks(empty_loader, num_samples) == [(num_steps, [num_steps, num_steps])] * 2


def test_help_tells_of_shapes_dtypes_and_errors():
    for name in ("gather", "reduce"):
        text = inspect.getdoc(getattr(Accelerator, name))
        assert "dtype" in text
        assert "Raises ``ValueError``" in text


def after_the_group():
    accelerator = Accelerator(cpu=True)
    accelerator.destroy_process_group()
    one = torch.ones(1)
    calls = [
        lambda: accelerator.gather(one),
        lambda: accelerator.reduce(one),
        lambda: accelerator.gather_for_metrics(one),
        lambda: notebook_launcher.gather_object([1]),
        accelerator.check_trigger,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="one of 2 and can't reach the others: their process group was taken"):
            call()
    return Accelerator(cpu=True).gather(one).tolist()


def test_a_call_when_the_group_is_gone_is_an_error_until_a_new_one_is_made(on_ranks):
    assert on_ranks(after_the_group) == [[1.0, 1.0]] * 2


def local_objects():
    accelerator = Accelerator(cpu=True)

    class Local:
        number = accelerator.process_index

    found = []
    for collective in (gather_object, accelerator.gather_for_metrics):
        try:
            collective(Local())
            found.append("")
        except TypeError as error:
            found.append(str(error))
    return found


def test_an_object_that_can_not_be_sent_is_named_with_what_to_do(on_ranks):
    for told in on_ranks(local_objects):
        for text in told:
            assert "<locals>.Local" in text
            assert "Define classes outside of functions" in text
