"""Pipeline parallelism beside its strategy: how a model is cut into stages, and what ``Accelerator`` has for it."""

from __future__ import annotations

import bisect
import collections
import itertools
import operator
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.registry import unknown_name
from notebook_launcher.runtime import models

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_launcher.runtime.plugins import PipelineParallelPlugin


class Pipelined(models.Wrapper):
    """A model that a strategy has cut into stages, which run together in ``run``."""

    def run(self, inputs: tuple[Any, ...], target: Any, *, training: bool, needs_outputs: bool) -> Any:
        """The loss of a batch, its gradients added where ``training``; or its outputs. Every rank calls it."""
        raise NotImplementedError


class Pipelining:
    """Steps by microbatches. Whoever inherits sets ``_models``, ``_pipelining`` and ``backward``."""

    _models: list[tuple[nn.Module, nn.Module]]
    _pipelining: PipelineParallelPlugin
    backward: Callable[..., None]

    def pipeline_step(
        self, batch: Any, target: Any, *, model: nn.Module | None = None, training: bool = True
    ) -> torch.Tensor:
        """The loss of ``batch``, 0-d, detached, on all ranks of the pipeline; its gradients are added, unless told not.

        ``batch`` is the model's input, or a tuple of its inputs, and ``loss_fn(outputs, target)`` of
        ``PipelineParallelPlugin`` is a mean over samples: what is returned is that of the whole batch, whatever its
        size. With other strategies it is forward, loss and ``backward``, so that one training function does for all.
        ``training`` False: no gradients. ``model`` says which one, where several are prepared.

        Raises ``ConfigError`` without a ``loss_fn``, and where ranks of one pipeline have batches of different sizes.
        """
        model, inputs = self._pipelined(model), batch if isinstance(batch, tuple) else (batch,)
        loss_fn = loss_of(self._pipelining)
        if isinstance(model, Pipelined):
            loss: torch.Tensor = model.run(inputs, target, training=training, needs_outputs=False)
            return loss
        with torch.set_grad_enabled(training):
            loss = loss_fn(model(*inputs), target)
        if training:
            self.backward(loss)
        return loss.detach()

    def pipeline_forward(self, batch: Any, *, model: nn.Module | None = None) -> Any:
        """The model's outputs for ``batch``, without gradients, on all ranks of the pipeline."""
        model, inputs = self._pipelined(model), batch if isinstance(batch, tuple) else (batch,)
        if isinstance(model, Pipelined):
            return model.run(inputs, None, training=False, needs_outputs=True)
        with torch.no_grad():
            return model(*inputs)

    def _pipelined(self, model: nn.Module | None) -> nn.Module:
        found = [prepared for _, prepared in self._models] if model is None else [model]
        if len(found) != 1:
            raise ConfigError(
                f"{len(found)} models are prepared, and a pipeline step is one model's: say which, by model=..., of "
                "those that accelerator.prepare gave"
            )
        inner = models.compiled_from(found[0])
        return inner if isinstance(inner, Pipelined) else found[0]


def loss_of(plugin: PipelineParallelPlugin) -> Callable[..., torch.Tensor]:
    """The plugin's ``loss_fn``; ``ConfigError`` where it has none."""
    if plugin.loss_fn is None:
        raise ConfigError(
            "pipeline_step computes the loss where the last stage is, and was given no loss_fn: give "
            "Accelerator(pipeline_plugin=PipelineParallelPlugin(loss_fn=...)), called as loss_fn(outputs, target)"
        )
    return plugin.loss_fn


def cut(model: nn.Module, num_stages: int, begins: Sequence[str | int] | None, example: Any = None) -> list[nn.Module]:
    """``model`` in consecutive stages: as even in parameters as its modules allow, or begun by those named.

    One that is no ``nn.Sequential`` is traced with ``example``, a microbatch's inputs. Raises ``ConfigError`` for names
    that don't fit, and for a model that can't be cut there.
    """
    if begins is not None and len(begins) + 1 != num_stages:
        raise ConfigError(
            f"split_points={list(begins)} make {len(begins) + 1} stages, and the schedule takes {num_stages}"
        )
    kind = type(model).__name__
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        if begins is None or example is None:
            raise ConfigError(
                f"strategy='pp' cuts an nn.Sequential between its modules, and {kind} is none: make the model one, "
                "nn.Sequential(*modules), or have torch trace it, by PipelineParallelPlugin(split_points=names of the "
                "modules that begin a stage, example=the inputs of a microbatch)"
            )
        return _traced(model, [str(name) for name in begins], example if isinstance(example, tuple) else (example,))
    layers = dict(model.named_children())
    names = list(layers)
    if begins is None:
        if len(names) < num_stages:
            raise ConfigError(f"{kind} has {len(names)} modules, too few for {num_stages} stages: each needs one")
        bounds = _even([sum(p.numel() for p in layer.parameters()) for layer in layers.values()], num_stages)
    else:
        told = [str(name) for name in begins]
        bounds = [0, *(names.index(name) for name in told if name in names), len(names)]
        if len(bounds) <= num_stages or sorted(set(bounds)) != bounds:
            raise ConfigError(
                f"split_points={list(begins)} must name modules of the {kind} that begin a stage after the first, in "
                f"their order: of {names[1:]}"
            )
    ranges = itertools.pairwise(bounds)
    return [nn.Sequential(collections.OrderedDict((n, layers[n]) for n in names[a:b])) for a, b in ranges]


def _traced(model: nn.Module, begins: Sequence[str], example: tuple[Any, ...]) -> list[nn.Module]:
    """The stages that torch's tracing makes, which share the model's parameters, under their names."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    kind = type(model).__name__
    if any(one.is_meta for one in model.parameters()):
        raise ConfigError(
            f"the {kind} is on 'meta', and torch traces only a model with values: make it outside init_empty_weights, "
            "or an nn.Sequential, which need not be traced"
        )
    known = {name for name, _ in model.named_modules()}
    unknown = [name for name in begins if name not in known]
    if unknown:
        raise unknown_name(f"split_points for {kind}:", unknown[0], known - {""})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's about itself
        pipe = pipeline(model, mb_args=example, split_spec=dict.fromkeys(begins, SplitPoint.BEGINNING))
    calls = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    for number, (before, node) in enumerate(itertools.pairwise(calls), 1):
        given = [user for user in before.users if user.target is operator.getitem] or [before]
        if list(node.args) != sorted(given, key=lambda one: one.args[1] if len(one.args) > 1 else 0):
            raise ConfigError(
                f"the {kind} can't be cut at split_points={list(begins)}: stage {number} takes {list(node.args)}, and "
                f"stage {number - 1} gives it {given}. Only what one stage gives goes to the next: carry masks and "
                "skip connections through the modules, or cut elsewhere."
            )
    return [pipe.get_stage_module(number) for number in range(pipe.num_stages)]


def _even(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Where consecutive parts begin, and the end, so that the largest is as small as can be; none is empty."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(sizes, middle)) <= num_parts + 1 else (middle + 1, high)
    bounds = _filled(sizes, low)
    while len(bounds) <= num_parts:  # fewer would do: divide those that can be
        at = next(i for i, (a, b) in enumerate(itertools.pairwise(bounds)) if b - a > 1)
        bounds.insert(at + 1, bounds[at + 1] - 1)
    return bounds


def _filled(sizes: Sequence[int], limit: int) -> list[int]:
    """The bounds of parts filled one after the other, each to at most ``limit``."""
    totals, bounds = [0, *itertools.accumulate(sizes)], [0]
    while bounds[-1] < len(sizes):
        bounds.append(bisect.bisect_right(totals, totals[bounds[-1]] + limit) - 1)
    return bounds


def runs(num_samples: int, num_microbatches: int, is_valid: Callable[[int], bool]) -> list[tuple[int, int]]:
    """(microbatches, samples in each) of the schedules that a batch takes, one after the other.

    Microbatches of a schedule are alike. One that can't be divided has a last, shorter one in a schedule of its own;
    and so have those that would be too many for ``is_valid``.
    """
    size = -(-num_samples // num_microbatches)
    count, rest = divmod(num_samples, size)
    found = []
    while count:
        several = next(n for n in range(count, 0, -1) if n == 1 or is_valid(n))
        found.append((several, size))
        count -= several
    return [*found, (1, rest)] if rest else found
