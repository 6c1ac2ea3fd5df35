"""``MonitorSink``: a run shown by a monitor in the cell that launches it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.getipython import get_ipython

from notebook_launcher.kernel_ext import error_display
from notebook_launcher.widgets.monitor import Monitor

if TYPE_CHECKING:
    from notebook_launcher.core.events import Display
    from notebook_launcher.launcher.sinks import RunView


class MonitorSink:
    """Shows one run in the current cell by a ``Monitor``."""

    def __init__(self) -> None:
        """Show nothing until ``opened``."""
        self._monitor: Monitor | None = None

    def opened(self, view: RunView) -> None:
        """Put the monitor into the current cell."""
        self._monitor = Monitor(view)
        self._monitor.opened(view)
        shell = get_ipython()
        if shell is not None:
            error_display.install(shell)  # the run may fail without the extension being loaded

    def changed(self, view: RunView) -> None:
        """Have it painted."""
        if self._monitor is not None:
            self._monitor.changed(view)

    def displayed(self, rank: int, display: Display) -> None:
        """Show what a rank displayed."""
        if self._monitor is not None:
            self._monitor.displayed(rank, display)

    def closed(self, view: RunView) -> None:
        """Put the form that stays in its place."""
        if self._monitor is not None:
            self._monitor.closed(view)
