"""One process: the model as it is. And what strategies with whole, replicated parameters have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from notebook_launcher.runtime import models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from notebook_launcher.runtime.process import Process


def backward(loss: torch.Tensor, **options: Any) -> None:
    """``loss.backward``."""
    loss.backward(**options)  # type: ignore[no-untyped-call]


def clip(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip gradients that every rank has in full."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
    """``optimizer.step``."""
    return optimizer.step() if closure is None else optimizer.step(closure)


def full_state(model: nn.Module) -> dict[str, Any]:
    """The state of a model that every rank has in full."""
    return models.unwrap(model, keep_torch_compile=False).state_dict()


@final
class Single:
    """One process, nothing to spread."""

    name = "single"
    backward = staticmethod(backward)
    clip = staticmethod(clip)
    step = staticmethod(step)
    full_state = staticmethod(full_state)

    def __init__(self, process: Process) -> None:
        """Train on the process's device."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def no_sync(self, model: nn.Module) -> None:
        """None: there is nobody to sync with."""
