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


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.first, self.second = net(), nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x):
        trunk = self.trunk(x)
        return self.first(trunk), self.second(trunk)


def of_two_heads(backward, model, x):
    first, second = model(x)
    backward(first.square().mean(), retain_graph=True)
    backward(second.abs().mean())


def of_a_head_each(backward, model, x):
    (first, _), (_, second) = model(x), model(-x)
    backward(first.square().mean())
    backward(second.abs().mean())


def too_few_in_the_last(is_static):
    kwargs = DistributedDataParallelKwargs(static_graph=is_static)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    heads = Heads()
    model, optimizer = accelerator.prepare(heads, torch.optim.SGD(heads.parameters(), 0.1))
    for head in (slice(2), slice(2), slice(1)):
        outputs = model(samples(0)[0])
        accelerator.backward(sum(one.sum() for one in outputs[head]))
        optimizer.step()


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = net(), net()

    def forward(self, x):
        return self.first(x), self.second(x)


def trained(losses, num_micro_batches, make=net, **options):
    kwargs = [DistributedDataParallelKwargs(**options)]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_micro_batches, kwargs_handlers=kwargs)
    model, alone = make(), make()
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


def trained_each(losses, make, *options):
    return max(trained(losses, count, make, **chosen) for count in (1, 2, 5) for chosen in options)


@pytest.mark.parametrize("losses", [of_one_forward, of_two_forwards, with_another_s_between])
def test_several_backwards_before_a_step_are_averaged(on_ranks, losses):
    options = {}, {"find_unused_parameters": True}, {"static_graph": True}
    assert max(on_ranks(trained_each, losses, net, *options)) < 1e-6


def test_backwards_that_reach_all_parameters_together_are_averaged(on_ranks):
    assert max(on_ranks(trained_each, of_two_heads, Towers, {}, {"find_unused_parameters": True})) < 1e-6


@pytest.mark.parametrize("losses", [of_two_heads, of_a_head_each])
def test_each_backward_may_reach_other_parameters_where_ddp_looks_for_them(on_ranks, losses):
    assert max(on_ranks(trained_each, losses, Heads, {"find_unused_parameters": True})) < 1e-6


@pytest.mark.parametrize("is_static", [False, True])
def test_a_backward_that_reaches_too_few_parameters_is_refused_before_the_step(on_ranks, is_static):
    with pytest.raises(RuntimeError, match=r"A backward reached only some of .* Add the losses up and call backward"):
        on_ranks(too_few_in_the_last, is_static)


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
