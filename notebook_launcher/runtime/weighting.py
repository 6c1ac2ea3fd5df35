"""Losses that are sums, over tokens or boxes: weighted so that a group's gradient is that of the mean over them all.

How many there are on all ranks is known when the group ends. Until then its losses are divided by what its first
micro-batch held, which keeps gradients in range; at the end what was collected is brought to the right size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime.accumulation import Group

if TYPE_CHECKING:
    from notebook_launcher.runtime.accumulation import Accumulation
    from notebook_launcher.runtime.process import Process


def weigh(
    loss: torch.Tensor, num_items: float | torch.Tensor | None, shared: Accumulation, process: Process
) -> torch.Tensor:
    """``loss``, a sum over ``num_items``, as its part in the mean over the items of its group on all ranks.

    ``process`` is one of those that share the data.

    Raises ``ValueError`` where only some losses of a group come with their number of items, ``ConfigError`` for a
    number that is negative or not finite. One in a tensor is believed: to look at it would be to wait for the device.
    """
    if not isinstance(num_items, torch.Tensor | None) and not 0 <= num_items < math.inf:
        raise ConfigError(
            f"backward(num_items={num_items!r}): the loss is a sum over so many items; give their number, 0 or more"
        )
    window = shared.current
    is_going_on = isinstance(window, Group) and window.is_pending and (shared.entered or not window.sync)
    if is_going_on and (window.items is None) != (num_items is None):
        raise ValueError(
            "backward was given num_items for some losses of an accumulation group and not for others; give it for "
            "each of them, or for none"
        )
    if num_items is None:
        window.items = None
        return loss / window.divisor
    dtype = torch.promote_types(loss.dtype, torch.float32)  # a count of integers would make the quotient fp32
    items = torch.as_tensor(num_items, device=loss.device, dtype=dtype).detach()
    if not isinstance(window, Group):
        if window.divisor != 1:
            raise ValueError(
                f"backward(loss, num_items=...) with gradient_accumulation_steps={window.divisor} must know where a "
                "group ends: call it in `with accelerator.accumulate(model):`"
            )
        return loss * (process.num_processes / _total(items, process))
    is_first = window.items is None or not window.is_pending
    if is_first:
        window.items = torch.zeros_like(items)
        window.unit = torch.ones_like(items) if shared.sync_each_batch else items.clamp(min=1)
    window.items = window.items + items
    if not window.sync:
        part: torch.Tensor = loss / window.unit
        return part
    factor: torch.Tensor = process.num_processes / _total(window.items, process)
    if not is_first:
        window.rescale(window.unit * factor)
    window.unit = 1 / factor
    return loss * factor


def _total(items: torch.Tensor, process: Process) -> torch.Tensor:
    """All ranks' items, at least 1."""
    total = items.clone()
    if process.num_processes > 1:
        dist.all_reduce(total, group=process.group)
    return total.clamp_(min=1)
