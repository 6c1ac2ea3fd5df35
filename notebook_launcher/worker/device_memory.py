"""What this rank holds of its device's memory, told about once a second, where the rank uses a device.

Looks only at what torch's allocator counts anyway: nothing is initialised, and nobody waits for the device. Written for
CUDA, ROCm, XPU and MPS; never run on such hardware.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.events import DeviceMemory

if TYPE_CHECKING:
    from collections.abc import Callable

_EVERY_S = 1.0


class DeviceMemoryWatch:
    """Looks once a second and gives what has changed."""

    def __init__(self, kind: str, index: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``kind`` is the run's device: "cuda", "xpu", "mps", "cpu"; ``index`` this rank's; ``clock`` gives seconds."""
        self._look = {"cuda": _allocated, "xpu": _allocated, "mps": _of_mps}.get(kind)
        self._kind, self._index = kind, index  # torch's current device is each thread's own
        self._clock = clock
        self._next_s = 0.0
        self._last: DeviceMemory | None = None

    def news(self) -> DeviceMemory | None:
        """How much is held now; None where nothing has changed, or nothing is in use."""
        torch = sys.modules.get("torch")
        module = getattr(torch, self._kind, None)
        if self._look is None or module is None or self._clock() < self._next_s:
            return None
        self._next_s = self._clock() + _EVERY_S
        try:
            found = self._look(module, self._index)
        except Exception:  # noqa: BLE001 - a figure for a table is not worth the rank's death
            self._look = None
            return None
        if found is None or found == self._last:
            return None
        self._last = found
        return found


def _allocated(module: Any, index: int) -> DeviceMemory | None:
    """Of ``torch.cuda`` and ``torch.xpu``, once the function has used them."""
    if not module.is_initialized():
        return None
    return DeviceMemory(module.memory_reserved(index), module.get_device_properties(index).total_memory)


def _of_mps(module: Any, _index: int) -> DeviceMemory | None:
    used = module.driver_allocated_memory()
    return DeviceMemory(used, module.recommended_max_memory()) if used else None
