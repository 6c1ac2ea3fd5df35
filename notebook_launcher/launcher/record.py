"""What is known of a run: written by its supervisor, read by sinks and by the ``Run`` that the user holds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from notebook_launcher.core.events import Finished, Metric, Started
    from notebook_launcher.launcher.output import OutputLog

_GIB = 1 << 30


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
        self.memory = ""
        self.num_ranks = num_ranks
        self._began_s = time.monotonic()
        self._ended_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the launch, until its end."""
        return (self._ended_s if self._ended_s is not None else time.monotonic()) - self._began_s

    def started(self, rank: int, event: Started) -> None:
        """A rank's function began."""
        self.hosts[rank], self.pids[rank] = event.host, event.pid
        self.changed = True

    def metric(self, rank: int, event: Metric) -> None:
        """A rank logged values: one row, as a table of them would have it."""
        self.metrics.append({"rank": rank, "step": event.step, "time_s": event.time_s, **event.values})
        self.changed = True

    def note_memory(self) -> None:
        """Keep the machine's memory use as it is now: a process has just ended."""
        memory = psutil.virtual_memory()
        used = memory.total - memory.available
        self.memory = f"{used / _GIB:.1f} of {memory.total / _GIB:.1f} GiB in use just after"

    def end(self, status: str, summary: str) -> None:
        """The run is over."""
        self._ended_s = time.monotonic()
        self.status, self.summary = status, summary
        self.changed = True
