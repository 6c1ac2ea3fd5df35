"""What is known of a run: written by its supervisor, read by sinks and by the ``Run`` that the user holds."""

from __future__ import annotations

import collections
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

    from notebook_launcher.core.events import Finished, Metric, Started
    from notebook_launcher.launcher.output import OutputLog

_GIB = 1 << 30
_MEMORY_EVERY_S = 1.0
_MEMORY_KEPT_S = 5.0  # a process that is killed for memory has used it shortly before


class Record:
    """The facts of one run. It is the ``RunView`` that sinks are given."""

    def __init__(self, headline: str, notes: list[str], output: OutputLog, num_ranks: int) -> None:
        """Begin with what the launch says of itself."""
        self.headline = headline
        self.notes = notes
        self.output = output
        self.status = "starting"
        self.summary = ""
        self.changed = True
        self.hosts: dict[int, str] = {}
        self.pids: dict[int, int] = {}
        self.finished: dict[int, Finished] = {}
        self.metrics: list[dict[str, Any]] = []
        self.never_made: dict[int, str] = {}  # why a rank never had a process
        self.memory = ""  # the machine's use when a process ended
        self._memory_used: collections.deque[tuple[float, int]] = collections.deque()
        self.num_ranks = num_ranks
        self.began_s = time.monotonic()
        self.shown = threading.Event()  # a sink is told of the run's opening before anything else
        self.shown.set()
        self._ended_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the launch, until its end."""
        return (self._ended_s if self._ended_s is not None else time.monotonic()) - self.began_s

    def started(self, rank: int, event: Started) -> None:
        """A rank's function began."""
        self.hosts[rank], self.pids[rank] = event.host, event.pid
        self.changed = True

    def metric(self, rank: int, event: Metric) -> None:
        """A rank logged values: one row, as a table of them would have it."""
        self.metrics.append({"rank": rank, "step": event.step, "time_s": event.time_s, **event.values})
        self.changed = True

    def note(self, lines: Iterable[str]) -> None:
        """Add what a person should know, each line once."""
        for line in lines:
            if line not in self.notes:
                self.notes.append(line)
                self.changed = True

    def begin_again(self, line: str) -> None:
        """The run failed and is started once more: what its ranks had come to counts no longer."""
        self.note([line])
        for known in (self.hosts, self.pids, self.finished, self.never_made):
            known.clear()

    def watch_memory(self, now_s: float) -> None:
        """Look at the machine's memory use, at most once a second: after a process's death it is free again."""
        if self._memory_used and now_s - self._memory_used[-1][0] < _MEMORY_EVERY_S:
            return
        self._memory_used.append((now_s, _memory_used()))
        while self._memory_used[0][0] < now_s - _MEMORY_KEPT_S:
            self._memory_used.popleft()

    def note_memory(self) -> None:
        """A process has ended: keep the highest memory use of the seconds before."""
        used = max(self._memory_used, key=lambda seen: seen[1], default=(0.0, _memory_used()))[1]
        total = psutil.virtual_memory().total
        self.memory = f"{used / _GIB:.1f} of {total / _GIB:.1f} GiB in use just before"

    def end(self, status: str, summary: str) -> None:
        """The run is over."""
        self._ended_s = time.monotonic()
        self.status, self.summary = status, summary
        self.changed = True


def _memory_used() -> int:
    memory = psutil.virtual_memory()
    used: int = memory.total - memory.available
    return used
