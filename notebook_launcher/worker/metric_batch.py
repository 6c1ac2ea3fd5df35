"""Metrics on their way to the launcher: whoever logs by the hundred a second sends five messages or twenty."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from notebook_launcher.core import events

if TYPE_CHECKING:
    from collections.abc import Callable

_EVERY_S, _MANY_EVERY_S = 0.05, 0.2
_MANY = 20  # in one message: who logs that fast is not looked at that often
_MAX_WAITING = 1000
_PLAIN = frozenset({float, int, bool, str, type(None)})


class MetricBatch:
    """Sends metrics in order. What comes rarely goes at once, so that a process that dies then has told it.

    Safe from several threads. What ``send`` raises, the call that made it send raises.
    """

    def __init__(self, send: Callable[[events.Event], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Send by ``send``; ``clock`` gives seconds."""
        self._send = send
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: list[events.Metric] = []
        self._next_s = 0.0

    def add(self, metric: events.Metric) -> None:
        """Send it, or keep it until a later call. Only what can neither change nor fail any more is kept."""
        with self._lock:
            if not _PLAIN.issuperset(map(type, metric.values.values())):
                self._send_all()
                self._send(metric)
                return
            if self._waiting and list(self._waiting[-1].values) != list(metric.values):
                self._send_all()
            self._waiting.append(metric)
            if self._clock() >= self._next_s or len(self._waiting) >= _MAX_WAITING:
                self._send_all()

    def flush(self) -> None:
        """Send what waits."""
        with self._lock:
            self._send_all()

    def _send_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._next_s = self._clock() + (_EVERY_S if len(waiting) < _MANY else _MANY_EVERY_S)
            self._send(waiting[0] if len(waiting) == 1 else _together(waiting))


def _together(metrics: list[events.Metric]) -> events.Metrics:
    return events.Metrics(
        columns={name: [one.values[name] for one in metrics] for name in metrics[0].values},
        steps=[one.step for one in metrics],
        times_s=[one.time_s for one in metrics],
    )
