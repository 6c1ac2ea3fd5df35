"""``torch.compile`` in every order, and optimizers with a mind of their own, under DDP and FSDP as on one process."""

import functools

import pytest
import torch
from torch import nn

from notebook_launcher import Accelerator

NUM_STEPS = 4
STRATEGIES = ("ddp", "fsdp")


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: a second sequence of points, numbers in its groups, and modes that exchange the weights."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "weight_sum": 0.0, "train_mode": True})

    def _move(self, *, training, weight):
        for group in self.param_groups:
            if group["train_mode"] != training:
                group["train_mode"] = training
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], weight(group["beta"]))

    def train(self):
        self._move(training=True, weight=lambda beta: 1 - beta)

    def eval(self):
        self._move(training=False, weight=lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002 - torch's
        for group in self.param_groups:
            assert group["train_mode"], "optimizer.train() was not called"
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            share = group["lr"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, share).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class EightBit(torch.optim.Optimizer):
    """Momentum in bytes, with a scale for each row."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002 - torch's
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                momentum = p.grad.clone()
                if state:
                    momentum += 0.9 * (state["codes"].float() - 128) * state["scales"]
                scales = momentum.abs().amax(-1, keepdim=True) / 127 if p.dim() > 1 else torch.full_like(p, 1e-3)
                codes = (momentum / scales.clamp(min=1e-12)).round().clamp(-127, 127) + 128
                state |= {"codes": codes.to(torch.uint8), "scales": scales, "name": "8-bit"}
                p.sub_(momentum, alpha=group["lr"])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(way, kind=torch.optim.AdamW):
    """The whole weights after some steps on halves of one batch; what ``prepare`` gave for the optimizer."""
    accelerator = Accelerator(cpu=True, dynamo_backend="aot_eager" if way == "by prepare" else None)
    model = net()
    optimizer = kind(model.parameters())
    given = torch.compile(model, backend="aot_eager") if way == "before" else model
    model, prepared = accelerator.prepare(given, optimizer)
    called = torch.compile(model, backend="aot_eager") if way == "after" else model
    size, rank = 8 // accelerator.num_processes, accelerator.process_index
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        if hasattr(prepared, "train"):
            prepared.train()
        x = torch.randn(8, 4, generator=generator)[rank * size : (rank + 1) * size]
        accelerator.backward(called(x).square().mean())
        prepared.step()
        prepared.zero_grad()
    if hasattr(prepared, "eval"):
        prepared.eval()
    kept = {
        type(v).__name__ if isinstance(v, str) else str(v.dtype) for s in prepared.state.values() for v in s.values()
    }
    return accelerator.get_state_dict(model), prepared.optimizer is optimizer, sorted(kept)


WAYS = ("eager", "by prepare", "before", "after")
KINDS = (ScheduleFree, EightBit)


def everything(strategy):
    ways = {way: train(way) for way in WAYS if strategy is not None or way == "eager"}
    return ways | {kind.__name__: train("eager", kind) for kind in KINDS}


@functools.cache
def found_on(on_ranks, strategy):
    if strategy is None:
        return [everything(None)]
    return on_ranks(everything, strategy, strategy=strategy)


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    assert all(torch.allclose(got[name], expected[name], atol=1e-6) for name in expected)
    assert not all(torch.equal(value, net().state_dict()[name]) for name, value in got.items())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_models_train_as_others(strategy, way, on_ranks):
    expected = found_on(on_ranks, None)[0]["eager"][0]
    for found in found_on(on_ranks, strategy):
        assert_same(found[way][0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_optimizers_of_all_kinds_pass_through_untouched(strategy, kind, on_ranks):
    expected, _, kept = found_on(on_ranks, None)[0][kind.__name__]
    for found in found_on(on_ranks, strategy):
        state, is_itself, types = found[kind.__name__]
        assert is_itself
        assert types == kept
        assert_same(state, expected)
