"""Memory: giving it back, and models that take none."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator


def release(device: torch.device) -> None:
    """Collect what nothing refers to, and give ``device``'s unused memory back to it."""
    gc.collect()
    empty_cache = getattr(getattr(torch, device.type, None), "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:  # noqa: FBT001 - Accelerate's
    """A context in which models are made without memory for their parameters, which are on the device "meta".

    ``include_buffers`` True: the same for buffers, and for whatever else is made. Weights are put in with
    ``load_state_dict(..., assign=True)``.
    """
    if include_buffers:
        with torch.device("meta"):
            yield
        return
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
