"""What is known of a run: written by its supervisor, read by sinks and by the ``Run`` that the user holds."""

from __future__ import annotations

import collections
import functools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from notebook_launcher.launcher.memory import MemoryMeter
from notebook_launcher.launcher.metric_rows import MetricRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from notebook_launcher.core.events import DeviceMemory, Finished, Metrics, Started, Steps
    from notebook_launcher.launcher.output import OutputLog
    from notebook_launcher.launcher.state import RunState

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
        self.metrics = MetricRows()
        self.last_values: dict[str, Any] = {}  # of each metric
        self.steps: dict[int, list[Steps]] = {}  # how far each rank's loops have come, the outermost first
        self.device_memory: dict[int, DeviceMemory] = {}
        self.state: RunState | None = None  # what is known of each rank; None before there are workers
        self.error = ""  # of a run that failed, as the notebook shows it
        self._ask_to_stop: weakref.WeakMethod[Callable[[], None]] | None = None
        self.never_made: dict[int, str] = {}  # why a rank never had a process
        self.memory = ""  # how much was in use when a process ended
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

    def add_metrics(self, rank: int, event: Metrics) -> None:
        """A rank logged values."""
        self.metrics.add(rank, event)
        self.last_values.update({name: values[-1] for name, values in event.columns.items()})
        self.changed = True

    def came(self, rank: int, event: Steps) -> None:
        """A loop of a rank has come further; those that were inside it are over."""
        self.steps.setdefault(rank, [])[event.level :] = [event]
        self.changed = True

    def holds(self, rank: int, event: DeviceMemory) -> None:
        """A rank holds so much of its device's memory."""
        self.device_memory[rank] = event
        self.changed = True

    def stopped_by(self, method: Callable[[], None]) -> None:
        """``stop`` calls ``method``, the run's; the run is not kept by that."""
        self._ask_to_stop = weakref.WeakMethod(method)

    def stop(self) -> None:
        """Ask the run to stop; a second time, to end at once. Harmless when it is over."""
        method = self._ask_to_stop() if self._ask_to_stop is not None else None
        if method is not None:
            method()

    def note(self, lines: Iterable[str]) -> None:
        """Add what a person should know, each line once."""
        for line in lines:
            if line not in self.notes:
                self.notes.append(line)
                self.changed = True

    def begin_again(self, line: str) -> None:
        """The run failed and is started once more: what its ranks had come to counts no longer."""
        self.note([line])
        for known in (self.hosts, self.pids, self.finished, self.never_made, self.steps, self.device_memory):
            known.clear()

    def watch_memory(self, now_s: float) -> None:
        """Look at the memory in use, at most once a second: after a process's death it is free again."""
        if self._memory_used and now_s - self._memory_used[-1][0] < _MEMORY_EVERY_S:
            return
        self._memory_used.append((now_s, self._meter.used_bytes()))
        while self._memory_used[0][0] < now_s - _MEMORY_KEPT_S:
            self._memory_used.popleft()

    def note_memory(self) -> None:
        """A process has ended: keep the highest memory use of the seconds before."""
        used = max((used for _, used in self._memory_used), default=self._meter.used_bytes())
        self.memory = self._meter.told(used)

    @functools.cached_property
    def _meter(self) -> MemoryMeter:
        return MemoryMeter()  # made when it is first asked, which is not before the workers are started

    def end(self, status: str, summary: str, error: str = "") -> None:
        """The run is over; ``error`` is what a failed one shows."""
        self._ended_s = time.monotonic()
        self.error = error
        self.status, self.summary = status, summary
        self.changed = True
