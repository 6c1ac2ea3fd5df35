"""Mixed precision: which one is in force, and the context that a forward pass runs in."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.precisions import usable
from notebook_launcher.core.registry import unknown_name
from notebook_launcher.runtime.loss_scaling import LossScaling
from notebook_launcher.runtime.plugins import AutocastKwargs, GradScalerKwargs, Keywords

if TYPE_CHECKING:
    from torch import nn

    from notebook_launcher.runtime.backends import Backend

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Precision:
    """A precision on one kind of device: "no" (fp32), "bf16" or "fp16"."""

    name: str
    device_type: str
    autocasting: AutocastKwargs = dataclasses.field(default_factory=AutocastKwargs)
    scaling: GradScalerKwargs = dataclasses.field(default_factory=GradScalerKwargs)

    @property
    def dtype(self) -> torch.dtype:
        """What autocast computes in."""
        return DTYPES[self.name]

    @property
    def is_mixed(self) -> bool:
        """Whether autocast changes anything."""
        return self.name != "no"

    def autocast(self, options: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """A context in which operations run in this precision; it can be entered again once it was left."""
        if not self.is_mixed:
            return contextlib.nullcontext()
        options = options or self.autocasting
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    def new_scaling(self) -> LossScaling | None:
        """Loss scaling for one accumulation group; None where gradients keep their range without."""
        return LossScaling(self.device_type, self.scaling) if self.name == "fp16" and self.scaling.enabled else None

    def check(self, model: nn.Module) -> None:
        """Raise ``ConfigError`` for a model whose gradients can't be unscaled: fp16 needs fp32 weights to train."""
        if self.name != "fp16" or not self.scaling.enabled:
            return
        half = [name for name, one in model.named_parameters() if one.requires_grad and one.dtype == torch.float16]
        if half:
            raise ConfigError(
                f"mixed_precision='fp16' can't train weights that are torch.float16 themselves, as {len(half)} of "
                f"{type(model).__name__} are ({', '.join(half[:3])}): gradients of a scaled loss need fp32 weights. "
                "Load the model in fp32 (model.float()), or freeze them (requires_grad_(False))."
            )


def choose(name: str, backend: Backend, why: str, keywords: Keywords) -> Precision:
    """The precision ``name`` on ``backend``; ``why`` says how the device came to be chosen.

    Raises ``ConfigError`` for a name that isn't known, or for a precision that the device can't do.
    """
    if name not in DTYPES:
        raise unknown_name("mixed_precision", name, DTYPES)
    refusal = backend.refusals[name]
    if refusal:
        raise ConfigError(
            f"mixed_precision={name!r} can't be used on the device {backend.device_type!r}: {refusal}. The device is "
            f"{backend.device_type!r} because {why}. Use mixed_precision={usable(backend.refusals)}, or another device."
        )
    return Precision(name, backend.device_type, keywords[AutocastKwargs], keywords[GradScalerKwargs])
