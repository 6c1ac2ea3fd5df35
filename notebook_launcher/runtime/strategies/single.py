"""One process: the model as it is. And what strategies with whole, replicated parameters have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import holdings, models, optim, shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from notebook_launcher.runtime.backends import Backend
    from notebook_launcher.runtime.plugins import Keywords
    from notebook_launcher.runtime.process import Process
    from notebook_launcher.runtime.shards import Models, Optimizers
    from notebook_launcher.runtime.storage import Draft


backward = torch.Tensor.backward
clip = torch.nn.utils.clip_grad_norm_  # of gradients that every rank has in full, as the next
clip_value = torch.nn.utils.clip_grad_value_
step = optim.plain_step


def moved(model: nn.Module, backend: Backend) -> Any:
    """``model`` on the device; raises ``ConfigError`` where it has no values: each rank takes its own."""
    name = next((name for name, one in model.named_parameters() if one.is_meta), None)
    if name is not None:
        raise ConfigError(
            f"the {type(model).__name__} has {name} on the device 'meta', without a value: load its weights before "
            "prepare, or use strategy='fsdp' on several processes, where those of rank 0 are enough"
        )
    return backend.moved(model)


def gradients(parameters: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """The parameters' own."""
    return (parameter.grad for parameter in parameters if parameter.grad is not None)


def pair(optimizer: torch.optim.Optimizer) -> None:
    """Do nothing: any optimizer goes with any model."""


def full_state(model: nn.Module) -> dict[str, Any]:
    """The state of a model that every rank has in full."""
    return models.unwrap(model, keep_torch_compile=False).state_dict()


def save(draft: Draft, models_: Models, optimizers: Optimizers, *, safe: bool) -> None:
    """States that every rank has in full: those that write do."""
    shards.save(draft, models_, optimizers, 0, safe=safe, sharded=False)


load = shards.load


def go_on() -> None:
    """Do nothing: all steps compute alike."""


def forget() -> None:
    """Do nothing: what holds a model goes with it."""


@final
class Single:
    """One process, nothing to spread."""

    name = "single"
    layout = "native"
    trains_apart = True
    backward = staticmethod(backward)
    clip = staticmethod(clip)
    clip_value = staticmethod(clip_value)
    gradients = staticmethod(gradients)
    pair = staticmethod(pair)
    step = staticmethod(step)
    full_state = staticmethod(full_state)
    save = staticmethod(save)
    load = staticmethod(load)
    go_on = staticmethod(go_on)
    forget = staticmethod(forget)
    held = staticmethod(holdings.whole)

    def __init__(self, process: Process, keywords: Keywords) -> None:  # noqa: ARG002 - as all strategies are made
        """Train on the process's device."""
        self._process = self.data_process = process

    def place(self, model: nn.Module) -> Any:
        """The model on the device."""
        return moved(model, self._process.backend)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def no_sync(self, model: nn.Module) -> None:
        """None: there is nobody to sync with."""

    sync_in_backward = no_sync

    def join(self, models: Sequence[nn.Module]) -> None:
        """None: there is nobody to wait for."""
