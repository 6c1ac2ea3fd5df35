"""The order in which DDP lays gradients into its buckets, kept in checkpoints so that a resumed run sums as it did.

In its first step DDP has one bucket, in the order of registration; from the second on the order is that in which the
gradients first arrived on rank 0. Where in its bucket a gradient lies decides in which order a ring of three ranks and
more adds it up, and so how the sum is rounded. A run that resumes would take its first step in the order of
registration, and differ by that rounding: so it first sends zeros around in the order that was saved.
"""

from __future__ import annotations

import functools
import json
import weakref
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.runtime import models, storage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

FILE = "gradient_order.json"


class Arrivals:
    """In which order the gradients of a model behind DDP arrive in the first backward that exchanges them."""

    def __init__(self, model: DistributedDataParallel) -> None:
        """Listen to ``model``, which has not been trained yet, until that backward is over."""
        self.order: list[str] | None = None  # names of parameters; None until it is known
        self._model = weakref.ref(model)
        self._parameters = _exchanged(model)
        self._arrived: dict[str, None] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._arrive, name)
            )
            for name, parameter in self._parameters.items()
        ]

    def _arrive(self, name: str, _: torch.Tensor) -> None:
        model = self._model()
        if model is None or not model.require_backward_grad_sync:
            return
        if name in self._arrived:  # the backward before left some out
            self._arrived.clear()
        self._arrived[name] = None
        if len(self._arrived) == len(self._parameters):
            self._settle(list(self._arrived))

    def _settle(self, order: list[str]) -> None:
        self.order = order
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._parameters.clear()

    def can_replay(self, order: Sequence[str]) -> bool:
        """Whether ``replay`` would have the model exchange its gradients in ``order``, and do nothing else."""
        model = self._model()
        if model is None or self.order is not None or sorted(order) != sorted(self._parameters):
            return False
        return _arranges_by_arrival(model) and all(
            # Hooks that are not ours would take the zeros for gradients; so would an optimizer that steps in backward.
            one.requires_grad and not one._backward_hooks and len(one._post_accumulate_grad_hooks or ()) == 1  # noqa: SLF001
            for one in self._parameters.values()
        )

    def replay(self, order: Sequence[str]) -> None:
        """Exchange zeros in ``order``, as every rank does: the next forward arranges the buckets by it.

        Gradients are afterwards what they were; no module runs, and nothing is drawn.
        """
        model: Any = self._model()
        parameters = [self._parameters[name] for name in order]
        self._settle(list(order))
        before = [one.grad for one in parameters]
        if model.gradient_as_bucket_view:  # they may lie in the bucket itself
            before = [None if grad is None else grad.clone() for grad in before]
        for one in parameters:
            one.grad = None
        model.reducer.prepare_for_backward([])
        for one in parameters:  # a backward of its own for each: within one, autograd chooses the order
            torch.autograd.backward(one, torch.zeros_like(one))
        for one, grad in zip(parameters, before, strict=True):
            one.grad = grad


def _exchanged(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters whose gradients ``model`` exchanges, by their names in its module."""
    named = models.unwrap(model, keep_torch_compile=False).named_parameters()
    return {name: one for name, one in named if one.requires_grad and name not in model.parameters_to_ignore}


def _arranges_by_arrival(model: Any) -> bool:
    """Whether ``model`` arranges its buckets after its first backward, and zeros leave no trace in what exchanges."""
    is_sparse = any(getattr(module, "sparse", False) for module in model.module.modules())
    is_usual = not (model.find_unused_parameters or model.static_graph or is_sparse)
    return is_usual and not (model._comm_hooks or model.mixed_precision or model._use_python_reducer)  # noqa: SLF001


def write(draft: storage.Draft, arrivals: Mapping[str, Arrivals], num_processes: int) -> None:
    """The orders that are known, under the models' names."""
    orders = {name: one.order for name, one in arrivals.items() if one.order is not None}
    if orders and draft.writes:
        draft.put(FILE, [json.dumps({"num_processes": num_processes, "orders": orders}, indent=1).encode()])


def read(folder: Path, num_processes: int) -> dict[str, list[str]]:
    """What ``write`` wrote for as many processes; nothing from others, or from a checkpoint without it."""
    if FILE not in storage.manifest(folder)["files"]:
        return {}
    told: dict[str, Any] = json.loads((folder / FILE).read_text())
    return told["orders"] if told["num_processes"] == num_processes else {}
