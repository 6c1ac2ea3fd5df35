"""The same numbers as hand-written torch, for the same global batch: losses, gradient norms and weights.

Every combination runs within one launch per number of processes. There are two references. One is written from scratch,
with ``all_reduce`` by hand; it adds up the ranks' gradients in another order than DDP does, so fp32 is compared to
1e-6. The other is torch's DDP as people write it: the arithmetic is the same, so every bit is.
"""

import contextlib
import functools
import itertools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator, DataLoaderConfiguration

pytestmark = pytest.mark.slow  # a single test may be quick, the file as a whole is not

GLOBAL_BATCH = 12  # of 1, 2, 3 or 4 processes
NUM_SAMPLES = {  # ten global batches: groups of 4, 4 and 2
    "even": 120,
    "filled": 115,  # the last batch has 7 samples, and begins again from the start
    "ragged": 119,  # it has 11, shared as they come, so that some rank has fewer
    "joined": 115,  # it has 7, and some rank none
}
NUM_EPOCHS = 2
MAX_NORM = 0.5
COMBINATIONS = list(itertools.product((1, 4), NUM_SAMPLES, ("no", "bf16")))
NUM_PROCESSES = (1, 2, 3, 4)


class Trace(NamedTuple):
    losses: torch.Tensor  # this rank's, a micro-batch each
    norms: torch.Tensor  # of the gradients before clipping, an optimizer step each
    weights: torch.Tensor


def pieces(num_samples=NUM_SAMPLES["even"]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
    x = torch.randn(num_samples, 5)
    return model, optimizer, scheduler, TensorDataset(x, x.sum(1, keepdim=True).sin())


def trace(losses, norms, model):
    return Trace(
        torch.stack(losses).detach(), torch.stack(norms), nn.utils.parameters_to_vector(model.parameters()).detach()
    )


# --- by hand ---------------------------------------------------------------------------------------------------------


def place():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def parts_of_batches(data, num_processes):
    """Each global batch's indices, as consecutive parts, one a rank."""
    share = GLOBAL_BATCH // num_processes
    order = list(range(NUM_SAMPLES[data]))
    if data == "filled" and num_processes > 1:
        order += order[: -len(order) % GLOBAL_BATCH]
    return [
        [
            order[start + rank * share : start + (rank + 1) * share][: len(order) - start]
            for rank in range(num_processes)
        ]
        for start in range(0, len(order), GLOBAL_BATCH)
    ]


def groups_of(batches, num_steps):
    """Ends of accumulation groups: when they are full, and when a rank has no more to give."""
    group = []
    for batch, following in itertools.zip_longest(batches, batches[1:], fillvalue=[[]]):
        group.append(batch)
        if len(group) == num_steps or not all(following):
            yield group
            group = []


def average_and_clip(parameters, taking_part):
    """The norm of the ranks' average gradient, which is scaled to ``MAX_NORM`` at most."""
    _, num_processes = place()
    gradients = [parameter.grad if taking_part else torch.zeros_like(parameter) for parameter in parameters]
    if num_processes > 1:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient.div_(num_processes)
    norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
    for gradient in gradients:
        gradient.mul_(min(1.0, MAX_NORM / (norm + 1e-6)))
    return norm


def loss_of(model, dataset, indices, precision):
    x, y = dataset[indices]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        predicted = model(x)
    return nn.functional.mse_loss(predicted.float(), y)


def from_scratch(num_steps, data, precision):
    model, optimizer, scheduler, dataset = pieces(NUM_SAMPLES[data])
    rank, num_processes = place()
    losses, norms = [], []
    for _ in range(NUM_EPOCHS):
        for group in groups_of(parts_of_batches(data, num_processes), num_steps):
            for parts in group:
                if parts[rank]:
                    losses.append(loss_of(model, dataset, parts[rank], precision))
                    (losses[-1] / len(group)).backward()
            taking_part = bool(group[0][rank])
            norm = average_and_clip(model.parameters(), taking_part)
            if taking_part:
                norms.append(norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        for parameter in model.parameters() if num_processes > 1 else ():
            dist.broadcast(parameter.data, src=0)  # to ranks that had no part in the last step
    return trace(losses, norms, model)


def with_ddp(num_steps, data, precision):
    model, optimizer, scheduler, dataset = pieces(NUM_SAMPLES[data])
    rank, num_processes = place()
    wrapped = DistributedDataParallel(model) if num_processes > 1 else model
    losses, norms = [], []
    for _ in range(NUM_EPOCHS):
        with Join([wrapped]) if num_processes > 1 and data == "joined" else contextlib.nullcontext():
            for group in groups_of(parts_of_batches(data, num_processes), num_steps):
                for parts in group if group[0][rank] else ():
                    is_last = parts is group[-1]
                    with wrapped.no_sync() if num_processes > 1 and not is_last else contextlib.nullcontext():
                        losses.append(loss_of(wrapped, dataset, parts[rank], precision))
                        (losses[-1] / len(group)).backward()
                    if is_last:
                        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
    return trace(losses, norms, model)


# --- ours ------------------------------------------------------------------------------------------------------------


def loader_of(accelerator, dataset, *, split):
    size = GLOBAL_BATCH if split else GLOBAL_BATCH // accelerator.num_processes
    return DataLoader(dataset, batch_size=size)


def ours(num_steps, data="even", precision="no", *, zero_first=False, split=False, as_stream=False):
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=num_steps,
        mixed_precision=precision,
        dataloader_config=DataLoaderConfiguration(split_batches=split, even_batches=data != "ragged"),
    )
    model, optimizer, scheduler, dataset = pieces(NUM_SAMPLES[data])
    loader = loader_of(accelerator, Stream(dataset) if as_stream else dataset, split=split)
    # In an order that is none of the usual ones.
    scheduler, loader, model, optimizer = accelerator.prepare(scheduler, loader, model, optimizer)
    joined = data == "joined"
    losses, norms = [], []
    for _ in range(NUM_EPOCHS):
        with accelerator.join_uneven_inputs([model], even_batches=False) if joined else contextlib.nullcontext():
            for x, y in loader:
                with accelerator.accumulate(model):
                    if zero_first:
                        optimizer.zero_grad()
                    losses.append(nn.functional.mse_loss(model(x), y))
                    accelerator.backward(losses[-1])
                    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                    if accelerator.sync_gradients:
                        norms.append(norm)
                    optimizer.step()
                    scheduler.step()
                    if not zero_first:
                        optimizer.zero_grad()
    return trace(losses, norms, model)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[index] for index in range(len(self.dataset)))


VARIANTS = {  # of the even data and fp32, where all of them must give the same
    "zero_grad first": {"zero_first": True},
    "split batches": {"split": True},
    "a stream": {"as_stream": True},
}


# --- tokens that all count the same ----------------------------------------------------------------------------------

NUM_TOKENS = 50


def sequences():
    """Of 2 to 9 tokens; ten global batches: groups of 4, 4 and 2."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 10, (10 * GLOBAL_BATCH,), generator=generator)
    return [torch.randint(NUM_TOKENS, (int(length),), generator=generator) for length in lengths]


def language_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(NUM_TOKENS, 8), nn.Linear(8, NUM_TOKENS)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def summed_loss(model, batch):
    inputs, targets = torch.cat([one[:-1] for one in batch]), torch.cat([one[1:] for one in batch])
    return nn.functional.cross_entropy(model(inputs), targets, reduction="sum")


def num_targets(batch):
    return sum(len(one) - 1 for one in batch)


def tokens_by_hand():
    """One process, one batch a group."""
    model, optimizer = language_model()
    data = sequences()
    for start in range(0, len(data), 4 * GLOBAL_BATCH):
        group = data[start : start + 4 * GLOBAL_BATCH]
        (summed_loss(model, group) / num_targets(group)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def prepared_language_model(num_steps):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    data = DataLoader(sequences(), batch_size=GLOBAL_BATCH // accelerator.num_processes, collate_fn=list)
    return accelerator, *accelerator.prepare(*language_model(), data)


def tokens_of_a_group_read_ahead():
    """The count is known first: the way that Accelerate's guide shows."""
    accelerator, model, optimizer, loader = prepared_language_model(4)
    batches = iter(loader)
    while group := list(itertools.islice(batches, 4)):
        count = accelerator.gather(torch.tensor(sum(map(num_targets, group)))).sum()
        for index, batch in enumerate(group):
            with accelerator.no_sync(model) if index < len(group) - 1 else contextlib.nullcontext():
                loss = summed_loss(model, batch) / count
                accelerator.backward(loss * accelerator.num_processes * accelerator.gradient_accumulation_steps)
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def tokens_counted_on_the_way():
    """The gradients of sums, divided by the count when the group is complete."""
    accelerator, model, optimizer, loader = prepared_language_model(4)
    counts = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(summed_loss(model, batch))
            counts.append(num_targets(batch))
            if accelerator.sync_gradients:
                mean_count = accelerator.gather(torch.tensor(counts)).double().mean()
                for parameter in model.parameters():
                    parameter.grad /= mean_count
                counts.clear()
            optimizer.step()
            optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def tokens_counted_by_backward():
    accelerator, model, optimizer, loader = prepared_language_model(4)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(summed_loss(model, batch), num_items=num_targets(batch))
            optimizer.step()
            optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


TOKEN_WAYS = (tokens_counted_by_backward, tokens_of_a_group_read_ahead, tokens_counted_on_the_way)


# --- the matrix ------------------------------------------------------------------------------------------------------


class Runs(NamedTuple):
    combinations: dict  # to ours, from scratch, with DDP
    variants: dict
    of_tokens: dict


def every_combination():
    Accelerator(cpu=True)  # the process group
    runs = {
        combination: (ours(*combination), from_scratch(*combination), with_ddp(*combination))
        for combination in COMBINATIONS
    }
    variants = {(name, num_steps): ours(num_steps, **VARIANTS[name]) for name in VARIANTS for num_steps in (1, 4)}
    return Runs(runs, variants, {way: way() for way in TOKEN_WAYS})


@functools.cache
def results(on_ranks, num_processes):
    """By rank."""
    return [every_combination()] if num_processes == 1 else on_ranks(every_combination, num_processes=num_processes)


@functools.cache
def of_one_process(num_steps):
    return from_scratch(num_steps, "even", "no")


def assert_close(got, expected, tolerance):
    for name, one, other in zip(Trace._fields, got, expected, strict=True):
        assert one.shape == other.shape, name
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance), (name, (one - other).abs().max())


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
@pytest.mark.parametrize("num_processes", NUM_PROCESSES)
def test_all_numbers_are_those_of_hand_written_torch(on_ranks, num_processes, combination):
    for rank, runs in enumerate(results(on_ranks, num_processes)):
        got, scratch, ddp = runs.combinations[combination]
        assert all(map(torch.equal, got, ddp)), (rank, got, ddp)
        # Where the order of adding up turns a weight's last bit, bf16 may round it to the next of its numbers.
        assert_close(got, scratch, 1e-6 if "no" in combination else 2**-8)
    weights = [runs.combinations[combination][0].weights for runs in results(on_ranks, num_processes)]
    assert all(torch.equal(weights[0], other) for other in weights)


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("num_processes", NUM_PROCESSES)
def test_any_number_of_processes_trains_as_one_with_the_whole_batch(on_ranks, num_processes, num_steps):
    expected = of_one_process(num_steps)
    found = [runs.combinations[num_steps, "even", "no"][0] for runs in results(on_ranks, num_processes)]
    mean = torch.stack([one.losses for one in found]).mean(0)
    assert_close(Trace(mean, *found[0][1:]), expected, 1e-6)


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("num_processes", NUM_PROCESSES)
def test_other_ways_to_write_the_loop_give_the_same(on_ranks, num_processes, name, num_steps):
    for runs in results(on_ranks, num_processes):
        assert_close(runs.variants[name, num_steps], runs.combinations[num_steps, "even", "no"][0], 1e-6)


@pytest.mark.parametrize("way", TOKEN_WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("num_processes", NUM_PROCESSES)
def test_every_token_can_count_the_same(on_ranks, num_processes, way):
    expected = tokens_by_hand()
    for runs in results(on_ranks, num_processes):
        assert torch.allclose(runs.of_tokens[way], expected, rtol=0, atol=1e-12)
