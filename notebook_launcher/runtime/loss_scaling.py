"""Loss scaling: fp16 has so narrow a range that small gradients vanish, unless the loss is multiplied first.

Each accumulation group has a scale of its own, so that one model's overflow, or its step, does not change the scale
between another's micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.runtime.optim import parameters_of
from notebook_launcher.runtime.plugins import changed

if TYPE_CHECKING:
    from notebook_launcher.runtime.plugins import GradScalerKwargs


class LossScaling:
    """Torch's ``GradScaler`` over the life of one group's gradients."""

    def __init__(self, device_type: str, options: GradScalerKwargs | None = None) -> None:
        """Begin with torch's usual scale, or that of ``options``; it adapts by itself."""
        self._scaler = torch.amp.GradScaler(device_type, **(changed(options) if options else {}))
        self._has_scaled = False
        self._checked: dict[int, tuple[torch.optim.Optimizer, bool]] = {}  # unscaled since the scale last changed

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the scale, for the backward that follows."""
        if self._checked:
            self._update()
        self._has_scaled = True
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Bring ``optimizer``'s gradients to their true size, once; False where they aren't finite."""
        if not self._has_scaled:
            return True
        if id(optimizer) not in self._checked:
            self._scaler.unscale_(optimizer)
            found = self._scaler._found_inf_per_device(optimizer)  # noqa: SLF001 - torch has no public way to ask
            self._checked[id(optimizer)] = optimizer, not any(value.item() for value in found.values())
        return self._checked[id(optimizer)][1]

    def true_size(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of gradients that are scaled now, as it will be when they are not."""
        return norm / self._factor(norm.device) if self._has_scaled else norm

    def state_dict(self) -> dict[str, Any]:
        """The scale that the next loss gets, and how long it has held."""
        self._update()
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the scale of ``state``."""
        self._update()
        self._scaler.load_state_dict(state)

    def _update(self) -> None:
        """Adapt the scale to what was found. Gradients that stay behind are scaled again: a backward adds to them."""
        parameters = [one for optimizer, _ in self._checked.values() for one in parameters_of(optimizer)]
        held = [one.grad for one in parameters if one.grad is not None]
        if any(self._scaler._found_inf_per_device(optimizer) for optimizer, _ in self._checked.values()):  # noqa: SLF001
            self._scaler.update()
        self._checked.clear()
        for gradient in held:
            gradient.mul_(self._factor(gradient.device))

    def _factor(self, device: torch.device) -> torch.Tensor:
        return self._scaler.scale(torch.ones((), device=device))
