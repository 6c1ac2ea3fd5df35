"""fp16 on the CPU, which is refused to users since it is slow there: the same code, with the refusal taken out."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from notebook_launcher import Accelerator
from notebook_launcher.runtime.backends import torch_devices
from notebook_launcher.runtime.loss_scaling import LossScaling

given_cpu = torch_devices.cpu


def cpu_with_fp16(world):
    return dataclasses.replace(given_cpu(world), refusals=dict.fromkeys(("no", "fp16", "bf16"), ""))


@pytest.fixture(autouse=True)
def _cpu_does_fp16(monkeypatch):
    monkeypatch.setattr(torch_devices, "cpu", cpu_with_fp16)


def fp16_accelerator(**options):
    torch_devices.cpu = cpu_with_fp16  # on a rank, which ends with the function
    return Accelerator(cpu=True, mixed_precision="fp16", **options)


def weight(value=1.0):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


UNIT = 2.0**-8  # a gradient whose like, times the first loss scale of 65,536, fp16 still holds
INFINITE = 1e9


def pieces(accelerator, *, lr=1 / UNIT):
    """A weight of 1, and an optimizer that moves it by 1 for a gradient of UNIT."""
    model = weight()
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


def loss_of(model, x):
    return model(torch.ones(1, 1)).sum() * (x * UNIT)


def test_a_step_is_taken_with_gradients_of_their_true_size():
    accelerator = fp16_accelerator()
    model, optimizer = pieces(accelerator)
    assert model(torch.ones(1, 1)).dtype == torch.float32
    accelerator.backward(loss_of(model, 0.25))
    assert model.weight.grad.item() == 0.25 * UNIT * 65536
    optimizer.step()
    assert model.weight.item() == 0.75
    assert not accelerator.optimizer_step_was_skipped


def test_small_gradients_survive():
    tiny = 2.0**-30  # fp16's smallest number is 2**-24
    for scaled, expected in ((True, tiny), (False, 0.0)):
        accelerator = fp16_accelerator()
        model, optimizer = pieces(accelerator, lr=0.0)
        loss = model(torch.ones(1, 1)).sum() * tiny
        if scaled:
            accelerator.backward(loss)
            accelerator.unscale_gradients(optimizer)
        else:
            loss.backward()
        assert model.weight.grad.item() == expected


def train(accelerator, model, optimizer, x, scheduler=None):
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, x))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("num_steps", [1, 2])
def test_an_overflow_skips_the_step_and_the_scheduler_and_halves_the_scale(num_steps):
    accelerator = fp16_accelerator(gradient_accumulation_steps=num_steps)
    model, optimizer = pieces(accelerator)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))
    weights, skipped, epochs = [], [], []
    for x in (0.5, INFINITE, 0.25, 0.125):
        for _ in range(num_steps):
            train(accelerator, model, optimizer, x, scheduler)
        weights.append(model.weight.item())
        skipped.append(accelerator.optimizer_step_was_skipped)
        epochs.append(scheduler.last_epoch)
    assert weights == [0.5, 0.5, 0.25, 0.125]
    assert skipped == [False, True, False, False]
    assert epochs == [1, 1, 2, 3]
    group = accelerator.accumulate(model)
    assert group.scaling.scale(torch.ones(())).item() == 65536 / 2


def test_clipping_sees_true_gradients_and_unscales_once():
    accelerator = fp16_accelerator(gradient_accumulation_steps=2)
    model, optimizer = pieces(accelerator)
    norms = []
    for x in (2.0, 4.0):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x))
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5 * UNIT).item() / UNIT)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5 * UNIT).item() / UNIT)
            optimizer.step()
            optimizer.zero_grad()
    assert norms == pytest.approx([1.0, 1.0, 3.0, 0.5], rel=1e-3)
    assert model.weight.item() == pytest.approx(0.5, rel=1e-3)


def test_a_step_without_gradients_or_backward_is_plain():
    accelerator = fp16_accelerator()
    model, optimizer = pieces(accelerator)
    optimizer.step()
    other = accelerator.prepare(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    for _ in range(2):
        accelerator.backward(loss_of(model, 1))
        optimizer.step()
        other.step()
        optimizer.zero_grad()
    assert model.weight.item() == -1


def test_gradients_that_stay_after_a_clip_are_added_to_at_their_scale():
    accelerator = fp16_accelerator()
    model, optimizer = pieces(accelerator, lr=0.0)
    for _ in range(2):  # accumulation by hand
        accelerator.backward(loss_of(model, 1))
        norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
    assert norm.item() == 2 * UNIT
    optimizer.step()
    optimizer.step()
    assert model.weight.grad.item() == 2 * UNIT


def test_two_models_overflow_each_for_itself():
    accelerator = fp16_accelerator(gradient_accumulation_steps=2)
    (first, first_optimizer), (second, second_optimizer) = pieces(accelerator), pieces(accelerator)
    train(accelerator, second, second_optimizer, 0.5)  # in mid-group while the other's scale changes
    for x in (INFINITE, INFINITE, 0.25, 0.25):
        train(accelerator, first, first_optimizer, x)
    train(accelerator, second, second_optimizer, 0.25)
    assert first.weight.item() == 0.75
    assert second.weight.item() == 0.625


def test_two_optimizers_of_one_loss_use_the_scale_that_it_had():
    accelerator = fp16_accelerator()
    (first, first_optimizer), (second, second_optimizer) = pieces(accelerator), pieces(accelerator)
    for x in (INFINITE, 0.25):
        accelerator.backward(loss_of(first, x) + loss_of(second, 0.25))
        for optimizer in (first_optimizer, second_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    assert first.weight.item() == 0.75
    assert second.weight.item() == 0.5, "its own gradients were finite both times"


def test_a_closure_is_refused():
    accelerator = fp16_accelerator()
    _, optimizer = pieces(accelerator)
    with pytest.raises(RuntimeError, match=r"SGD.step was given a closure.*'bf16'"):
        optimizer.step(lambda: 0.0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(1.0, 7.0)[:, None])


def short_group():
    """What each step moved the weight by, in groups of at most 4, one rank's loss being infinite in the first."""
    accelerator = fp16_accelerator(gradient_accumulation_steps=4)
    model, optimizer = pieces(accelerator)
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=1))
    weights, skipped = [], []
    for epoch in range(2):
        for index, x in enumerate(loader):
            overflows = epoch == index == 0 and accelerator.is_last_process
            train(accelerator, model, optimizer, INFINITE if overflows else x.item())
        weights.append(next(model.parameters()).item())
        skipped.append(accelerator.optimizer_step_was_skipped)
    return weights, skipped


def test_a_short_group_is_scaled_right():
    weights, skipped = short_group()
    assert skipped == [False, False]  # the last step of each epoch
    assert weights == pytest.approx([1 - 5.5, 1 - 5.5 - 2.5 - 5.5])


def test_one_rank_s_overflow_skips_the_step_of_all(on_ranks):
    for weights, skipped in on_ranks(short_group):
        assert skipped == [True, False]  # three batches each: one group an epoch
        assert weights == pytest.approx([1, 1 - 3.5], rel=1e-3)  # a third is not exact in fp16


def test_scaling_starts_at_torchs_scale():
    assert LossScaling("cpu").scale(torch.ones(())).item() == torch.amp.GradScaler("cpu").get_scale()
