import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from notebook_launcher import Accelerator


def pieces(accelerator, *, lr=1.0):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


def test_nothing_happens_before_the_group_is_complete():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = pieces(accelerator)
    weights, gradients = [], []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            gradients.append(model.weight.grad.item())
            optimizer.zero_grad()
            weights.append(model.weight.item())
    assert weights == [1, 0, 0, -1]
    assert gradients == [0.5, 1, 0.5, 1]
    assert model.weight.grad is None


def test_a_group_that_is_given_up_leaves_nothing():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = pieces(accelerator)
    for index in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), float(index))).sum())
            if accelerator.sync_gradients and index == 1:  # a loss that is not finite
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == 1 - (2 + 3) / 2


def test_gradients_whose_zeroing_waits_become_what_was_asked_for():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = pieces(accelerator)
    for _ in range(2):
        with accelerator.accumulate(model):
            optimizer.zero_grad(set_to_none=False)
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
    with accelerator.accumulate(model):
        assert model.weight.grad.item() == 0, "zeros, which code may go on to read, and not None"


def test_without_accumulation_zero_grad_always_acts():
    model, optimizer = pieces(Accelerator(cpu=True))
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.zero_grad()
        assert model.weight.grad is None


def test_it_is_an_optimizer_to_everyone_else():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = accelerator.prepare(inner)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    assert called == [1]
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.05
    optimizer.param_groups[0]["lr"] = 0.3
    assert inner.param_groups[0]["lr"] == 0.3
    assert optimizer.state is inner.state
    assert optimizer.state_dict()["state"].keys() == inner.state_dict()["state"].keys()
    optimizer.load_state_dict(inner.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_a_closure_is_run_and_its_loss_returned():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 1)) - 3).square().sum()
        accelerator.backward(loss)
        return loss

    assert optimizer.step(closure).item() > 0
    assert abs(model.weight.item() - 3) < 1e-3


def test_a_closure_that_is_run_again_does_not_count_its_items_again():
    weights = []
    for weighs in (True, False):
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5))

        def closure(model=model, optimizer=optimizer, accelerator=accelerator, weighs=weighs):
            optimizer.zero_grad()
            squares = (model(torch.ones(4, 1)) - 3).square()
            accelerator.backward(squares.sum() if weighs else squares.mean(), num_items=4 if weighs else None)
            return squares.mean()

        with accelerator.accumulate(model):
            optimizer.step(closure)
        weights.append(model.weight.item())
    assert weights[0] == pytest.approx(weights[1], abs=1e-6)


def test_it_pickles_with_its_state():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    _, optimizer = pieces(accelerator)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.param_groups[0]["lr"] == 1.0
    twin.param_groups[0]["params"][0].grad = torch.ones(1, 1)
    twin.step()
    assert twin.param_groups[0]["params"][0].item() == 0


def rates(make, options, num_micro_batches):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, make(optimizer))
    found = []
    for _ in range(num_micro_batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append(scheduler.get_last_lr()[0])
    return found


def halving(optimizer):
    return StepLR(optimizer, 1, 0.5)


def test_a_scheduler_steps_once_per_optimizer_step(on_ranks):
    assert on_ranks(rates, halving, {}, 6) == [[1, 0.5, 0.5, 0.25, 0.25, 0.125]] * 2


def test_accelerates_rule_on_request(on_ranks):
    per_process = {"scheduler_steps_per_process": True}
    assert on_ranks(rates, halving, per_process, 4) == [[1, 0.25, 0.25, 0.0625]] * 2
    assert on_ranks(rates, halving, {**per_process, "split_batches": True}, 4) == [[1, 0.5, 0.5, 0.25]] * 2


def one_cycle(optimizer):
    return OneCycleLR(optimizer, max_lr=1.0, total_steps=3)


def test_accelerates_rule_does_not_overshoot_a_schedule_with_an_end(on_ranks):
    assert len(on_ranks(rates, one_cycle, {"scheduler_steps_per_process": True}, 4)[0]) == 4


def test_stepping_can_be_left_to_the_caller():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    model, optimizer = pieces(accelerator)
    scheduler = accelerator.prepare(halving(optimizer))
    with accelerator.accumulate(model):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_a_plateau_scheduler_gets_its_metric():
    accelerator = Accelerator(cpu=True)
    _, optimizer = pieces(accelerator)
    scheduler = accelerator.prepare(ReduceLROnPlateau(optimizer, factor=0.5, patience=0))
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_rule_in_force_is_said_once_where_there_are_several(on_ranks, capfd):
    on_ranks(rates, halving, {}, 2)
    assert capfd.readouterr().out.count("Schedulers step once, not once a process") == 1
