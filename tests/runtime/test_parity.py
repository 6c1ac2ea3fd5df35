"""The same numbers as hand-written torch, for the same global batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator

GLOBAL_BATCH = 4
NUM_MICRO_BATCHES = 10  # groups of 4, 4 and 2
USUAL = (False, False)  # zero_grad last, a loader's batches are one process's


def pieces():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    x = torch.randn(GLOBAL_BATCH * NUM_MICRO_BATCHES, 5)
    return model, optimizer, scheduler, TensorDataset(x, x.sum(1, keepdim=True).sin())


def by_hand(num_steps, rank, num_processes, *, model_of=lambda model: model):
    """Weights after two epochs, every detail of accumulation written out."""
    model, optimizer, scheduler, dataset = pieces()
    model = model_of(model)
    share = GLOBAL_BATCH // num_processes
    for _ in range(2):
        for index in range(NUM_MICRO_BATCHES):
            start = index * GLOBAL_BATCH + rank * share
            x, y = dataset[start : start + share]
            group_start = index - index % num_steps
            group_size = min(num_steps, NUM_MICRO_BATCHES - group_start)
            (nn.functional.mse_loss(model(x), y) / group_size).backward()
            if index == group_start + group_size - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def by_hand_with_ddp(num_steps):
    Accelerator(cpu=True)  # the process group
    model_of = DistributedDataParallel
    return by_hand(num_steps, dist.get_rank(), dist.get_world_size(), model_of=model_of)


def ours(num_steps, zero_first, split):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps, split_batches=split)
    model, optimizer, scheduler, dataset = pieces()
    size = GLOBAL_BATCH if split else GLOBAL_BATCH // accelerator.num_processes
    loader = DataLoader(dataset, batch_size=size)
    # In an order that is none of the usual ones.
    scheduler, loader, model, optimizer = accelerator.prepare(scheduler, loader, model, optimizer)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                if zero_first:
                    optimizer.zero_grad()
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                if not zero_first:
                    optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_one_process_equals_hand_written_torch_to_the_bit(num_steps, zero_first):
    assert torch.equal(ours(num_steps, zero_first, split=False), by_hand(num_steps, 0, 1))


@pytest.mark.parametrize("num_steps", [1, 4])
def test_two_processes_equal_hand_written_ddp_and_one_process(on_ranks, num_steps):
    expected = by_hand(num_steps, 0, 1)
    for zero_first, split in (USUAL, (True, True)):
        for weights in on_ranks(ours, num_steps, zero_first, split):
            assert torch.allclose(weights, expected, rtol=0, atol=1e-6)
    for ddp, weights in zip(on_ranks(by_hand_with_ddp, num_steps), on_ranks(ours, num_steps, *USUAL), strict=True):
        assert torch.allclose(weights, ddp, rtol=0, atol=1e-6)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[index] for index in range(len(self.dataset)))


def ours_from_a_stream(num_steps):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    model, optimizer, scheduler, dataset = pieces()
    loader = DataLoader(Stream(dataset), batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_data_of_unknown_length_gives_the_same(on_ranks):
    expected = by_hand(4, 0, 1)
    assert torch.allclose(ours_from_a_stream(4), expected, rtol=0, atol=1e-6)
    for weights in on_ranks(ours_from_a_stream, 4):
        assert torch.allclose(weights, expected, rtol=0, atol=1e-6)
