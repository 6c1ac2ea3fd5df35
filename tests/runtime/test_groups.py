"""Several models, each with its own ``accumulate``: a step sees the mean over the micro-batches of its own group."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from notebook_launcher import Accelerator
from notebook_launcher.runtime.accumulation import Accumulation
from notebook_launcher.runtime.groups import Groups
from notebook_launcher.runtime.optim import PreparedOptimizer
from notebook_launcher.runtime.strategies.single import Single


class Stream(IterableDataset):
    def __init__(self, num_batches):
        self.num_batches = num_batches

    def __iter__(self):
        return iter(torch.arange(1.0, self.num_batches + 1)[:, None])


def loader_of(num_batches, *, is_sized):
    """Batches 1, 2, 3, ... of one sample."""
    if is_sized:
        return DataLoader(torch.arange(1.0, num_batches + 1)[:, None], batch_size=1)
    return DataLoader(Stream(num_batches), batch_size=1)


def weight():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


class Pair:
    """A discriminator and a generator; ``seen`` has the gradients at each of their optimizers' real steps."""

    def __init__(self, num_steps, num_batches, *, is_sized=True):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
        given = {"D": weight(), "G": weight()}
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.0) for name, model in given.items()}
        self.seen = {name: [] for name in given}
        for name, optimizer in optimizers.items():
            optimizer.register_step_pre_hook(
                lambda *_, name=name: self.seen[name].append(given[name].weight.grad.item())
            )
        self.models = {name: self.accelerator.prepare(model) for name, model in given.items()}
        self.optimizers = {name: self.accelerator.prepare(optimizer) for name, optimizer in optimizers.items()}
        self.loader = self.accelerator.prepare(loader_of(num_batches, is_sized=is_sized))

    def train(self, name, x, *, style="usual"):
        model, optimizer = self.models[name], self.optimizers[name]
        if style == "zero grad before the context":
            optimizer.zero_grad()
        with self.accelerator.accumulate(model):
            if style == "zero grad first":
                optimizer.zero_grad()
            self.accelerator.backward(model(x).sum())
            if style == "usual":
                optimizer.step()
                optimizer.zero_grad()
            elif style != "step after the context" and self.accelerator.sync_gradients:
                optimizer.step()
                if style == "step in the last":
                    optimizer.zero_grad()
        if style == "step after the context":
            optimizer.step()
            optimizer.zero_grad()


def means(values, num_steps):
    return [
        pytest.approx(sum(values[start : start + num_steps]) / len(values[start : start + num_steps]))
        for start in range(0, len(values), num_steps)
    ]


STYLES = ["usual", "zero grad first", "zero grad before the context", "step in the last", "step after the context"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("is_sized", [True, False])
@pytest.mark.parametrize("num_batches", [4, 6, 7])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_two_models_in_turn_are_as_two_loops(num_steps, num_batches, is_sized, style):
    pair = Pair(num_steps, num_batches, is_sized=is_sized)
    for _ in range(2):
        for x in pair.loader:
            pair.train("D", x, style=style)
            pair.train("G", 10 * x, style=style)
    one_epoch = list(range(1, num_batches + 1))
    assert pair.seen["D"] == means(one_epoch, num_steps) * 2
    assert pair.seen["G"] == means([10 * value for value in one_epoch], num_steps) * 2


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_generator_that_is_trained_less_often(num_steps):
    pair = Pair(num_steps, 12)
    for index, x in enumerate(pair.loader):
        pair.train("D", x)
        if index % 2 == 1:
            pair.train("G", x)
    assert pair.seen["D"] == means(range(1, 13), num_steps)
    assert pair.seen["G"] == means(range(2, 13, 2), num_steps)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("num_read", [1, 2, 3, 5])
def test_a_break_drops_what_is_unfinished_of_both_and_nothing_else(num_steps, num_read):
    pair = Pair(num_steps, 8)
    for index, x in enumerate(pair.loader):
        pair.train("D", x)
        pair.train("G", x)
        if index + 1 == num_read:
            break
    for x in pair.loader:
        pair.train("D", x)
        pair.train("G", x)
    whole = means(range(1, num_read - num_read % num_steps + 1), num_steps)
    assert pair.seen["D"] == pair.seen["G"] == whole + means(range(1, 9), num_steps)


def test_a_break_between_the_two_drops_the_group_of_one_only():
    pair = Pair(2, 8)
    for index, x in enumerate(pair.loader):
        pair.train("D", x)
        if index == 1:
            break
        pair.train("G", x)
    for x in pair.loader:
        pair.train("D", x)
        pair.train("G", x)
    assert pair.seen["D"] == [1.5, *means(range(1, 9), 2)]
    assert pair.seen["G"] == means(range(1, 9), 2)


@pytest.mark.parametrize("is_sized", [True, False])
def test_a_model_that_is_trained_elsewhere_keeps_its_gradients(is_sized):
    pair = Pair(4, 6, is_sized=is_sized)
    pair.models["G"].weight.grad = torch.full((1, 1), 5.0)
    for num_read in (2, 6):  # a group that is given up, and a short one
        for index, x in enumerate(pair.loader):
            pair.train("D", x, style="step in the last")
            if index + 1 == num_read:
                break
    assert pair.seen["D"] == [2.5, 5.5]
    assert pair.models["G"].weight.grad.item() == 5.0


def stepped_with(make, *, steps_always):
    """Gradients, at a short last group of unknown length, of what is trained beside the model in ``accumulate``."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    beside = make(accelerator)
    (parameter,) = beside.parameters() if isinstance(beside, nn.Module) else [beside]
    other, seen = torch.optim.SGD([parameter], lr=0.0), []
    other.register_step_pre_hook(lambda *_: seen.append(parameter.grad.item()))
    model = weight()
    model, optimizer, other, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), other, loader_of(6, is_sized=False)
    )
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) + parameter * x).sum())
            if steps_always or accelerator.sync_gradients:
                optimizer.step()
                other.step()
                optimizer.zero_grad()
                other.zero_grad()
    return seen


@pytest.mark.parametrize("steps_always", [True, False])
def test_a_parameter_of_no_model_belongs_to_the_group_that_it_is_trained_in(steps_always):
    assert stepped_with(lambda _: nn.Parameter(torch.ones(1, 1)), steps_always=steps_always) == [2.5, 5.5]


def test_a_model_that_accumulate_does_not_name_belongs_to_the_group_that_it_is_trained_in():
    assert stepped_with(lambda accelerator: accelerator.prepare(weight()), steps_always=True) == [2.5, 5.5]


def test_one_optimizer_of_two_models_follows_the_group_that_the_code_is_in():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = weight(), weight()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0)
    first, second, optimizer = accelerator.prepare(first, second, optimizer)
    for model in (first, first, second, second):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert [first.weight.item(), second.weight.item()] == [0, 0]


def test_each_scheduler_follows_its_own_optimizer():
    pair = Pair(2, 6)
    schedulers = [
        pair.accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, float))
        for optimizer in pair.optimizers.values()
    ]
    num_stepped = []
    pair.train("G", torch.ones(1, 1))  # from here on G is a micro-batch ahead
    for _ in range(4):
        for name in ("D", "G"):
            pair.train(name, torch.ones(1, 1))
        for scheduler in schedulers:
            scheduler.step()
        num_stepped.append([scheduler.last_epoch for scheduler in schedulers])
    assert num_stepped == [[0, 1], [1, 1], [1, 2], [2, 2]]


def test_an_optimizer_prepared_after_the_group_was_made_is_its_own():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = accelerator.prepare(weight(), weight())
    for model in (first, second):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer = accelerator.prepare(torch.optim.SGD(first.parameters(), lr=1.0))
    with accelerator.accumulate(first):
        accelerator.backward(first(torch.ones(1, 1)).sum())
    with accelerator.accumulate(second):
        pass
    with accelerator.accumulate(second):  # another group is unfinished now
        optimizer.step()
    assert first.weight.item() == 0


def gan(num_steps):
    """Weights after an epoch in which each of two models is trained on its own batches."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2)]
    x = torch.randn(20, 3)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4 // accelerator.num_processes)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    prepared = accelerator.prepare(*models, *optimizers, loader)
    for features, target in prepared[4]:
        for model, optimizer in zip(prepared[:2], prepared[2:4], strict=True):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(features), target))
                optimizer.step()
                optimizer.zero_grad()
    return [nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_two_models_on_two_processes_are_as_on_one(on_ranks, num_steps):
    alone = gan(num_steps)
    for weights in on_ranks(gan, num_steps):
        for ours, expected in zip(weights, alone, strict=True):
            assert torch.allclose(ours, expected, rtol=0, atol=1e-6)


def test_a_set_of_models_has_one_group():
    shared = Accumulation(2)
    optimizers = []
    groups = Groups(shared, None, Single(None, None), optimizers, [])
    model = weight()
    group = groups[model,]
    assert groups[model,] is group
    assert groups[()] is not group
    optimizers.append(PreparedOptimizer(torch.optim.SGD(model.parameters()), shared))
    groups.link()
    assert optimizers[0].is_led
    assert optimizers[0].window is group
    assert group.optimizers == groups[()].optimizers == []
    assert groups[model, model].optimizers == group.optimizers == optimizers


def nested():
    """Whether gradients are exchanged within and after contexts of one model that lie in one another."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(weight())
    with accelerator.accumulate(model), accelerator.no_sync(model):
        with accelerator.accumulate(model):
            within = model.require_backward_grad_sync
        between = model.require_backward_grad_sync
    return within, between, model.require_backward_grad_sync


def test_contexts_of_one_model_in_one_another_leave_it_exchanging(on_ranks):
    assert on_ranks(nested) == [(False, False, True)] * 2


def named_twice():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(weight())
    found = []
    for _ in range(2):
        with accelerator.accumulate(model, model):
            found.append(model.require_backward_grad_sync)
        found.append(model.require_backward_grad_sync)
    return found


def test_a_model_that_is_named_twice_exchanges_in_the_end(on_ranks):
    assert on_ranks(named_twice) == [[False, True, True, True]] * 2


@pytest.mark.parametrize("clips_value", [False, True])
def test_clipping_follows_the_group_of_the_parameters(clips_value):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models = [accelerator.prepare(weight()) for _ in range(2)]
    for model in models:
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    first, second = models
    with accelerator.accumulate(second):  # so that the two are out of step
        accelerator.backward(second(torch.full((1, 1), 8.0)).sum())
    for expected in ([4.0, 8.0], [1.0, 4.0]):  # halves, of the groups of two that are not complete; then clipped
        for model in (first, second):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 1), 8.0)).sum())
        clip = accelerator.clip_grad_value_ if clips_value else accelerator.clip_grad_norm_
        clip(first.parameters(), 1.0)
        assert [model.weight.grad.item() for model in models] == pytest.approx(expected, rel=1e-5)
        second.zero_grad()


def test_after_a_break_a_loop_without_accumulate_steps_at_every_batch():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    loader = torch.utils.data.DataLoader(torch.ones(6, 1))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        break
    for x in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.item() == -6 / 4
