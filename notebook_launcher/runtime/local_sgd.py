"""Local SGD: each rank trains by itself for some steps, then the models are averaged."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import checks

if TYPE_CHECKING:
    from typing import Self

    from notebook_launcher.runtime.accelerator import Accelerator


class LocalSGD:
    """A context in which gradients stay on their rank; every ``local_sgd_steps`` calls of ``step`` average the models.

    Parameters and floating-point buffers become their mean over the ranks, also at the end; optimizers keep their own
    state. Every rank makes the same number of calls. With ``enabled`` False, or alone, it changes nothing.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,  # noqa: FBT001, FBT002 - Accelerate's signature
    ) -> None:
        """``model`` is a prepared one; raises ``ConfigError`` for one whose gradients are not exchanged anyway."""
        checks.instance("LocalSGD", model, nn.Module, "a prepared model")
        checks.flags(enabled=enabled)
        num_steps = checks.whole("local_sgd_steps", local_sgd_steps, of="steps")
        if enabled and not accelerator._strategy.trains_apart:  # noqa: SLF001
            raise ConfigError(
                "LocalSGD has each rank train a whole model by itself for some steps, and strategy="
                f"{accelerator._strategy.name!r} leaves each a part of the work: use strategy='ddp'"  # noqa: SLF001
            )
        self._model = model
        self._num_steps = num_steps
        self._enabled = enabled and accelerator.use_distributed
        self._taken = 0
        self._local = accelerator.no_sync(model)
        if self._enabled and isinstance(self._local, contextlib.nullcontext):
            raise ConfigError(
                f"LocalSGD was given a {type(model).__name__} that has no gradient exchange to put off; give it the "
                "model that accelerator.prepare(model) returned, under the strategy 'ddp'"
            )

    def __enter__(self) -> Self:
        if self._enabled:
            self._local.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if self._enabled:
            self._local.__exit__(None, None, None)
            if kind is None:  # else the other ranks may never come
                self._average()

    def step(self) -> None:
        """Count one call; average the models when it is the last of ``local_sgd_steps``."""
        self._taken += 1
        if self._enabled and self._taken % self._num_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if tensor.is_floating_point():
                dist.all_reduce(tensor)
                tensor.div_(dist.get_world_size())
