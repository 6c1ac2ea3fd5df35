"""How much memory the ranks' processes use, looked at while somebody watches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_EVERY_S = 1.0


class ProcessMemory:
    """Resident memory by rank. Pages that processes share, torch's code for one, count for each of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives seconds."""
        self._clock = clock
        self._next_s = 0.0
        self._found: dict[int, int] = {}

    def look(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Bytes by rank, of the processes that are there; looked at once a second at most."""
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + _EVERY_S
            self._found = {rank: used for rank, pid in pids.items() if (used := _resident(pid)) is not None}
        return {rank: used for rank, used in self._found.items() if rank in pids}


def _resident(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None
