import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn

from notebook_launcher import Accelerator, ConfigError, find_executable_batch_size
from notebook_launcher.runtime import batch_size
from notebook_launcher.runtime.batch_size import is_out_of_memory

NO_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB."


def fits(limit, tried):
    """A function that has memory for batches of up to ``limit``, and notes what it was given."""

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size, *args, **kwargs):
        tried.append((batch_size, args, kwargs))
        if batch_size > limit:
            raise torch.OutOfMemoryError(NO_MEMORY)
        return batch_size

    return train


def test_the_batch_is_halved_until_it_fits(caplog):
    tried = []
    assert fits(30, tried)("data", lr=1) == 25
    assert tried == [(size, ("data",), {"lr": 1}) for size in (100, 50, 25)]
    assert "train ran out of memory with the batch size 100; next is 50." in caplog.messages


def test_each_call_begins_anew():
    train = fits(30, [])
    assert [train(), train()] == [25, 25]


def test_when_no_size_is_left_it_says_so(caplog):
    with pytest.raises(RuntimeError, match="no batch size is small enough for train: 100 and smaller"):
        fits(0, [])()
    assert caplog.messages[-1] == "train ran out of memory with the batch size 1; next is none."


def test_another_error_is_raised_as_it_is():
    @find_executable_batch_size
    def train(batch_size):
        raise ValueError(batch_size)

    with pytest.raises(ValueError, match="128"):
        train()


def test_the_next_size_may_be_chosen():
    sizes = iter([9, 3])

    @find_executable_batch_size(starting_batch_size=10, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size):
        if batch_size > 5:
            raise MemoryError
        return batch_size

    assert train() == 3


def test_a_batch_size_in_the_call_is_an_error():
    @find_executable_batch_size
    def train(batch_size, data):
        return batch_size

    assert list(inspect.signature(train).parameters) == ["batch_size", "data"]
    with pytest.raises(TypeError, match=r"train was called with 2 arguments and takes 2.*leave it out of the call"):
        train(64, "data")


@pytest.mark.parametrize("size", [0, -1, 1.5, "64"])
def test_a_batch_size_to_start_with_is_a_number_of_samples(size):
    with pytest.raises(ConfigError, match=f"starting_batch_size={size!r} is no number of samples"):
        find_executable_batch_size(starting_batch_size=size)


def test_what_makes_the_size_smaller_is_looked_at():
    def train(batch_size):
        raise MemoryError

    with pytest.raises(TypeError, match=r"reduce_batch_size_fn=...\) takes a function, and was given 3"):
        find_executable_batch_size(train, reduce_batch_size_fn=3)
    with pytest.raises(ConfigError, match=r"reduce_batch_size_fn\(\)=57.6 is no number of samples"):
        find_executable_batch_size(train, 64, lambda: 64 * 0.9)()


def test_a_function_must_take_the_batch_size():
    def train():
        raise AssertionError

    with pytest.raises(TypeError, match=r"gives train the batch size, and train takes no argument; .* train\(batch_"):
        find_executable_batch_size(train)
    with pytest.raises(TypeError, match="find_executable_batch_size takes a function, and was given 64"):
        find_executable_batch_size(64)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(NO_MEMORY), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.07 GB)"), True),
        (RuntimeError("Invalid buffer size: 40.00 GB"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) == expected


def test_a_real_allocation_that_fails_counts():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def one_rank_runs_out(place):
    accelerator = Accelerator(cpu=True)
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(size):
        tried.append(size)
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            loss = model(torch.ones(size, 1)).mean()
            if size > 4 and accelerator.process_index == 1 and (place == "at once" or step == 2):
                raise torch.OutOfMemoryError(NO_MEMORY)
            accelerator.backward(loss)
            optimizer.step()
            if size > 4 and accelerator.process_index == 1 and place == "after the others":
                accelerator.wait_for_everyone()
        return accelerator.gather(model.weight.detach()).tolist()

    weights = train()
    return tried, weights[0] == weights[1], dist.get_world_size()


@pytest.mark.parametrize("place", ["at once", "in the middle"])
def test_ranks_that_wait_for_one_without_memory_try_again_with_it(on_ranks, place):
    assert on_ranks(one_rank_runs_out, place) == [([16, 8, 4], True, 2)] * 2


def a_rank_that_is_done(num_ranks_out):
    @find_executable_batch_size(starting_batch_size=2)
    def train(size):
        if size == 2 and dist.get_rank() < num_ranks_out:
            raise torch.OutOfMemoryError(NO_MEMORY)
        return size

    return train(), train()


@pytest.mark.parametrize("num_ranks_out", [1, 2, 3])
def test_all_ranks_use_the_size_that_fits_the_last(on_ranks, num_ranks_out):
    assert on_ranks(a_rank_that_is_done, num_ranks_out, num_processes=3) == [(1, 1)] * 3


def fails_on_rank_1():
    @find_executable_batch_size
    def train(size):
        if dist.get_rank() == 1:
            raise ValueError("no such file")
        dist.barrier()

    train()


def test_another_error_of_one_rank_ends_the_run(on_ranks):
    with pytest.raises(ValueError, match="no such file"):
        on_ranks(fails_on_rank_1)


def never_comes_out():
    batch_size._LEAVE_S = 0.5
    kept = []

    @find_executable_batch_size
    def train(size):
        kept.append(dist.group.WORLD)  # so that the connection stays
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError(NO_MEMORY)
        dist.barrier()

    train()


def test_a_rank_that_does_not_come_out_is_an_error_not_a_hang(on_ranks):
    with pytest.raises(RuntimeError, match="has not come out of its collective to try a smaller batch"):
        on_ranks(never_comes_out)
