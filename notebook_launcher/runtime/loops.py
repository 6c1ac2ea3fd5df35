"""How far this process's loops have come, told to whoever watches the run: a few messages a second."""

from __future__ import annotations

import operator
import time
from typing import TYPE_CHECKING, TypeVar

from notebook_launcher.core import events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_T = TypeVar("_T")
_EVERY_S = 0.25
_ENDS_EVERY_S = 0.05  # the end of a loop is told at once, unless they come by the hundred


class Loops:
    """The loops that are open, one inside another."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives seconds."""
        self._clock = clock
        self._num_open = 0
        self._told_s: dict[tuple[int, bool], float] = {}  # when a loop of that level, or its end, was told of last

    def track(self, iterable: Iterable[_T], total: int | None, name: str) -> Iterator[_T]:
        """What ``iterable`` gives, its progress reported; ``total`` None asks it for its length."""
        if total is None:
            total = operator.length_hint(iterable, -1)
            total = None if total < 0 else total
        level, began_s, done = self._num_open, self._clock(), 0
        self._num_open += 1
        try:
            self._tell(events.Steps(0, total, name, 0.0, level), began_s)
            for item in iterable:
                yield item
                done += 1
                now_s = self._clock()
                if now_s - self._told_s[level, False] >= _EVERY_S:
                    self._tell(events.Steps(done, total, name, now_s - began_s, level), now_s)
            total = done
        finally:
            self._num_open = level
            now_s = self._clock()
            self._tell(events.Steps(done, total, name, now_s - began_s, level), now_s, is_end=True)

    def _tell(self, steps: events.Steps, now_s: float, *, is_end: bool = False) -> None:
        last_s = self._told_s.get((steps.level, is_end))
        if last_s is None or now_s - last_s >= (_ENDS_EVERY_S if is_end else _EVERY_S):
            self._told_s[steps.level, is_end] = now_s
            events.emit(steps)
