import collections

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from notebook_launcher import Accelerator
from notebook_launcher.core.errors import DeadlockError
from notebook_launcher.runtime.plugins import DataLoaderConfiguration


def settings(**options):
    return {"dataloader_config": DataLoaderConfiguration(**options)}


class Words(IterableDataset):
    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __iter__(self):
        return ({"number": index, "word": f"w{index}"} for index in range(self.num_samples))


def read_all(options, num_samples, loader_options):
    """This rank's batches of two epochs, and what it keeps of the second for metrics."""
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(3)
    loader = accelerator.prepare(DataLoader(range(num_samples), **loader_options))
    first = [batch.tolist() for batch in loader]
    second, kept, ends = [], [], []
    for batch in loader:
        second.append(batch.tolist())
        kept += accelerator.gather_for_metrics(batch).tolist()
        ends.append(loader.end_of_dataloader)
    assert len(loader) == len(first)
    assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)
    return first, second, kept, torch.rand(1).item()


@pytest.mark.parametrize("options", [{}, {"split_batches": True}])
@pytest.mark.parametrize("more", [{"shuffle": True}, {"shuffle": True, "drop_last": True}, {"num_workers": 1}])
def test_data_with_indices_is_dispatched_as_it_would_be_shared(on_ranks, options, more):
    more = {"batch_size": 2, **more}
    shared = on_ranks(read_all, settings(**options), 11, more)
    dispatched = on_ranks(read_all, settings(dispatch_batches=True, **options), 11, more)
    assert dispatched == shared
    assert sorted(shared[0][2]) == list(range(11)) or "drop_last" in more


def reads_here(dispatch):
    accelerator = Accelerator(cpu=True, **settings(dispatch_batches=dispatch))
    read = []

    class Counting(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            read.append(index)
            return index

    loader = DataLoader(Counting(), shuffle=True)
    list(accelerator.prepare(loader))
    return len(read), loader.sampler.generator


def test_only_rank_0_reads_what_it_dispatches(on_ranks):
    assert on_ranks(reads_here, True) == [(4, None), (0, None)]  # noqa: FBT003
    assert on_ranks(reads_here, False) == [(2, None), (2, None)]  # noqa: FBT003


class Odd(IterableDataset):
    def __iter__(self):
        for index in range(2):
            yield Encoding(
                {
                    "text": f"t{index}",
                    "none": None,
                    "flag": torch.tensor([True, False]),
                    "scalar": torch.tensor(index),
                    "empty": torch.zeros(0, 3),
                    "columns": torch.arange(6.0).view(2, 3).T,
                    "half": torch.ones(2, dtype=torch.bfloat16),
                    "sparse": torch.eye(2).to_sparse(),
                }
            )


class Encoding(collections.UserDict):
    """As a tokenizer's ``BatchEncoding``: a mapping that is no dictionary, with something beside its items."""

    def __init__(self, data, note="kept"):
        super().__init__(data)
        self.note = note


def odd_batches():
    loader = Accelerator(cpu=True).prepare(DataLoader(Odd(), batch_size=None))
    (batch,) = loader
    return (
        type(batch).__name__,
        batch.note,
        {key: value.to_dense().tolist() if isinstance(value, torch.Tensor) else value for key, value in batch.items()},
    )


def test_whatever_a_batch_holds_is_dispatched_as_it_is(on_ranks):
    for rank, (kind, note, batch) in enumerate(on_ranks(odd_batches)):
        assert (kind, note) == ("Encoding", "kept")
        assert batch == {
            "text": f"t{rank}",
            "none": None,
            "flag": [True, False],
            "scalar": rank,
            "empty": [],
            "columns": [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]],
            "half": [1.0, 1.0],
            "sparse": [[1.0, 0.0], [0.0, 1.0]],
        }


def left_early():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Words(9), batch_size=1))
    next(iter(loader))
    return [batch["word"] for batch in loader]


def test_a_dispatched_pass_may_be_left_early(on_ranks):
    first, second = on_ranks(left_early)
    assert first[:4] == [["w0"], ["w2"], ["w4"], ["w6"]]
    assert second[:4] == [["w1"], ["w3"], ["w5"], ["w7"]]


class Unsendable(IterableDataset):
    def __iter__(self):
        yield from (
            [torch.ones(1), 1],
            [torch.ones(1), 2],
            [torch.ones(1), lambda: None],
            [torch.ones(1), lambda: None],
        )


def read_all_of(data):
    read = []
    try:
        read += Accelerator(cpu=True).prepare(DataLoader(data, batch_size=None))
    except Exception as error:  # noqa: BLE001
        return len(read), type(error).__name__, str(error)
    return len(read), "no error", ""


def test_a_batch_that_can_not_be_sent_is_an_error_on_every_rank(on_ranks):
    first, second = on_ranks(read_all_of, Unsendable())
    assert first[:2] == (1, "TypeError")
    assert "a batch that rank 0 read can't be sent" in first[2]
    assert "<lambda>" in first[2]
    assert "dispatch_batches=False" in first[2]
    assert second[:2] == (1, "PeerError")
    assert "rank 0, which reads this loader's data" in second[2]


def test_a_batch_that_can_not_be_sent_is_the_runs_error(on_ranks):
    with pytest.raises(TypeError, match="can't be sent") as caught:
        on_ranks(lambda: list(Accelerator(cpu=True).prepare(DataLoader(Unsendable(), batch_size=None))))
    assert "rank 0" in "".join(caught.value.__notes__)


class Broken(IterableDataset):
    def __iter__(self):
        yield torch.ones(1)
        yield torch.ones(1)
        raise LookupError("no such file")


def test_data_that_can_not_be_read_end_the_pass_of_no_rank_quietly(on_ranks):
    first, second = on_ranks(read_all_of, Broken())
    assert first[1:] == ("LookupError", "no such file")
    assert second[1] == "PeerError"


def left_by_one(goes_on):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Words(9), batch_size=1))
    for number, _ in enumerate(loader):
        if accelerator.process_index == 1 and number == 1:
            break
    if goes_on:
        next(iter(loader))
    accelerator.wait_for_everyone()


def test_a_batch_of_an_earlier_pass_is_not_taken_for_one_of_this(on_ranks):
    with pytest.raises(RuntimeError, match=r"pass [12] over .* others are in pass [12]: ranks have left a loop"):
        on_ranks(left_by_one, True)  # noqa: FBT003


@pytest.mark.slow
def test_a_rank_that_leaves_a_dispatched_pass_by_itself_is_named(on_ranks):
    with pytest.raises(DeadlockError, match=r"rank 0: all_reduce .*\n.*rank 1: barrier"):
        on_ranks(left_by_one, False)  # noqa: FBT003
