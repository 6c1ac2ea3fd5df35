"""The panel's check: a preflight on a thread of its own, how far it is and what came of it, in words."""

from __future__ import annotations

import threading
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.core.events import Display
    from notebook_launcher.launcher.preflight import Preflight
    from notebook_launcher.launcher.run import Run
    from notebook_launcher.launcher.sinks import RunView

CHECKING = "checking"  # what a panel does that neither waits for a person nor runs their function
_DOES = {
    "": "looking at this machine",
    "starting": "the processes start",
    "running": "they compute, and exchange what they have",
    "stopping": "the processes are being ended",
}


def progress(headline: str, status: str = "") -> str:
    """What is said while a check goes on; ``status`` is its run's, "" before there is one."""
    return f"Checking{headline and f' {headline}'}: {_DOES[status]} ... Stop ends it."


def answer(found: Preflight) -> tuple[str, bool]:
    """What a check has found, a line each; and whether something is wrong."""
    if found.is_stopped:
        return "The check was stopped before its end.", False
    verdict = "All is well" if found.ok else "Something is wrong"
    lines = [f"{'✓' if one.ok else '✗'} {one.name}: {one.text}" for one in found.checks]
    return "\n".join([f"{verdict}{found.headline and f': {found.headline}'}", *lines]), not found.ok


class Check:
    """One check, and the sink that follows its run. It begins when it is made, and is over when ``over`` is called."""

    def __init__(
        self,
        check: Callable[[Callable[[Run], None]], Preflight],
        tell: Callable[[str], None],
        over: Callable[[str, bool], None],
    ) -> None:
        """``check`` is given what to call with its run; ``tell`` is told its status, ``over`` what came of it."""
        self._check, self._tell, self._over = check, tell, over
        self._run: Run | None = None
        self._num_stops = 0
        self._told = ""
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._work, name="notebook-launcher-check", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End it; the second time, at once."""
        with self._lock:
            self._num_stops += 1
            run = self._run
        if run is not None:
            run.stop()

    def _work(self) -> None:
        try:
            text, is_bad = answer(self._check(self._begun))
        except BaseException as error:  # noqa: BLE001 - nobody sees what a thread raises
            text, is_bad = "".join(traceback.format_exception(error)), True
        self._over(text, is_bad)

    def _begun(self, run: Run) -> None:
        run.show_in(self)
        self.changed(run.view)
        with self._lock:
            self._run = run
            num_stops = self._num_stops
        for _ in range(num_stops):  # they came before there was a run
            run.stop()

    def opened(self, view: RunView) -> None:
        """Nothing to do."""

    def changed(self, view: RunView) -> None:
        """Something about the run has changed; its status may."""
        if view.status in _DOES and view.status != self._told:
            self._told = view.status
            self._tell(view.status)

    def displayed(self, rank: int, display: Display) -> None:
        """Nothing to do."""

    def closed(self, view: RunView) -> None:
        """Nothing to do: the preflight has its answer then."""
