"""DDP where torch's own leaves the ranks with different weights: backwards that share a forward, late unfreezing."""

import copy

import pytest
import torch
from torch import nn

from notebook_launcher import Accelerator, ConfigError, DistributedDataParallelKwargs

NUM_STEPS = 4


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def samples(step):
    return torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(step))


def furthest(accelerator, model, alone):
    """The largest difference of any rank's weights to those of one process."""
    own = nn.utils.parameters_to_vector(accelerator.unwrap_model(model).parameters())
    expected = nn.utils.parameters_to_vector(alone.parameters())
    return accelerator.gather((own - expected).abs().max()).max().item()


def of_one_forward(backward, model, x):
    out = model(x)
    backward(out.square().mean(), retain_graph=True)
    backward(out.abs().mean())


def of_two_forwards(backward, model, x):
    real, fake = model(x), model(-x)
    backward(real.square().mean())
    backward(fake.abs().mean())


def with_another_s_between(backward, model, x):
    out = model(x)
    backward((x.detach().requires_grad_() * 2).sum())  # of no model
    of_one_forward(backward, lambda _: out, x)


def trained(losses, num_micro_batches):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_micro_batches)
    model, alone = net(), net()
    optimizer, other = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, alone))
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(NUM_STEPS * num_micro_batches):
        batches = samples(step)
        with accelerator.accumulate(model):
            losses(accelerator.backward, model, batches[accelerator.process_index])
            optimizer.step()
            optimizer.zero_grad()
        for x in batches:
            losses(lambda loss, **options: (loss / (2 * num_micro_batches)).backward(**options), alone, x)
        if (step + 1) % num_micro_batches == 0:
            other.step()
            other.zero_grad()
    return furthest(accelerator, model, alone)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("losses", [of_one_forward, of_two_forwards, with_another_s_between])
def test_several_backwards_before_a_step_are_averaged(on_ranks, losses, num_micro_batches):
    assert max(on_ranks(trained, losses, num_micro_batches)) < 1e-6


def unfrozen_late(_):
    accelerator = Accelerator(cpu=True)
    model = net()
    model[0].requires_grad_(requires_grad=False)
    model = accelerator.prepare(model)
    accelerator.backward(model(samples(0)[0]).sum())
    model.module[0].requires_grad_(requires_grad=True)
    model(samples(0)[0])


def test_a_parameter_that_is_unfrozen_after_prepare_is_named(on_ranks):
    with pytest.raises(ConfigError, match=r"0.weight was frozen when prepare .*find_unused_parameters=True\)"):
        on_ranks(unfrozen_late, None)


def frozen_and_unfrozen():
    """As the error says: all trained when it is prepared, frozen after it."""
    kwargs = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    model, alone = net(), net()
    optimizer, other = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, alone))
    model, optimizer = accelerator.prepare(model, optimizer)
    before = copy.deepcopy(alone[0].weight.detach())
    for step in range(NUM_STEPS):
        for one in (accelerator.unwrap_model(model), alone):
            one[0].requires_grad_(requires_grad=step >= 2)
        batches = samples(step)
        accelerator.backward(model(batches[accelerator.process_index]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        for x in batches:
            (alone(x).square().mean() / 2).backward()
        other.step()
        other.zero_grad()
        assert torch.equal(alone[0].weight, before) == (step < 2)
    return furthest(accelerator, model, alone)


def test_what_is_frozen_after_prepare_may_be_unfrozen(on_ranks):
    assert max(on_ranks(frozen_and_unfrozen)) < 1e-6
