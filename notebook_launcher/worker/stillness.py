"""Whether this rank stands still in a collective: told to the launcher, which sees all ranks and who waits for whom.

A rank that waits is not at fault by itself: another may be late. So nothing is ended here. Only for gloo: NCCL counts
its collectives apart from gloo's under the same names, looking at its record touches the GPU, and its own watchdog ends
what hangs.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from notebook_launcher.core.events import Waits
from notebook_launcher.worker import collectives

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.core.events import Pending
    from notebook_launcher.core.world import World

_STILL_S = 2.0  # in the same instruction for so long: most collectives never take it, and the record is not looked at


class StillnessWatch:
    """Looks at one thread whenever it is asked."""

    def __init__(self, thread: int, world: World, clock: Callable[[], float] = time.monotonic) -> None:
        """``thread`` is the identifier of the one in which the function runs; ``clock`` gives seconds."""
        self._thread, self._clock = thread, clock
        self._rank, self._world_size = world.rank, world.world_size
        # The launcher on each of several machines sees that machine's ranks only.
        self._looks = world.device == "cpu" and world.num_machines == 1 and world.world_size > 1
        self._place: tuple[int, int] | None = None
        self._since_s = clock()
        self._begun: dict[str, tuple[int, int]] = {}
        self._told: Pending | None = None

    def news(self) -> Waits | None:
        """What the launcher does not know yet: that the thread waits in a collective, or that it goes on."""
        if not self._looks:
            return None
        try:
            return self._look()
        except Exception:  # noqa: BLE001 - a private record of torch's, in another shape than this one knows
            self._looks = False
            return self._say(None)

    def _look(self) -> Waits | None:
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - the documented way to look at another thread
        place = None if frame is None else (id(frame), frame.f_lasti)
        del frame  # it holds the function's variables
        now_s = self._clock()
        if place != self._place:
            self._place, self._since_s, self._begun = place, now_s, {}
            return self._say(None)
        if now_s - self._since_s < _STILL_S:
            return None
        self._since_s = now_s  # look again after as long: a thread in native code may come from one call to the next
        begun = collectives.num_begun()
        if all(number <= done for number, done in begun.values()):
            return self._say(None)
        if begun == self._begun:
            return None
        self._begun = begun
        return self._say(collectives.pending(self._thread, self._rank, self._world_size))

    def _say(self, pending: Pending | None) -> Waits | None:
        if pending == self._told:
            return None
        self._told = pending
        return Waits(pending)
