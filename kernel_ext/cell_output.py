"""``CellSink``: shows a run in the notebook cell that launched it.

The cell gets one display, which the supervisor's thread repaints. From a thread only messages that name their place
arrive there: an update of a display by its id, which every front end takes at any time, and a new display that carries
the launching cell's message as its parent, which every front end takes for as long as the cell runs. What a rank
displays after that becomes part of the run's own display.
"""

from __future__ import annotations

import base64
import sys
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from notebook_launcher.kernel_ext import error_display
from notebook_launcher.widgets.cell import Cell
from notebook_launcher.widgets.rendering import rank_heading, render, render_display, render_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.core.events import Display
    from notebook_launcher.launcher.sinks import RunView

_LIVE_LINES = 200
_PAINT_S = 0.1
_BYTES_PER_S = 1_000_000
_WIDGET = "application/vnd.jupyter.widget-view+json"  # its model lives in the worker: no front end can show it


class CellSink:
    """Shows one run in the current cell: repainted at most ten times and about a megabyte a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Show nothing until ``opened``; ``clock`` gives seconds."""
        self._clock = clock
        self._name = f"notebook-launcher-{uuid.uuid4().hex}"
        self._cell: Cell | None = None
        self._view: RunView | None = None
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._next_paint_s = 0.0
        self._embedded: dict[str, str] = {}  # display's name -> its HTML, in order of first appearance

    def opened(self, view: RunView) -> None:
        """Put the run's display into the current cell."""
        self._cell, self._view = Cell(), view
        error_display.install(self._cell.shell)  # the run may fail without the extension being loaded
        for stream in (sys.stdout, sys.stderr):  # what was printed before the launch stands above it
            stream.flush()
        if self._cell.live:
            self._cell.display(_bundle(view, last=_LIVE_LINES), name=self._name)

    def changed(self, view: RunView) -> None:
        """Repaint, now or as soon as the pace allows."""
        with self._lock:
            wait_s = self._next_paint_s - self._clock()
            if wait_s <= 0:
                self._paint(view)
            elif self._timer is None:
                self._timer = threading.Timer(wait_s, self._paint_late, (view,))
                self._timer.daemon = True
                self._timer.start()

    def displayed(self, rank: int, display: Display) -> None:
        """Show what a rank displayed, under a heading with its rank."""
        if self._cell is None or self._view is None:
            return
        given = display.transient.get("display_id")
        name = f"{self._name}-{rank}-{given or uuid.uuid4().hex}"
        data = _jsonable(display.data)
        with self._lock:
            if display.update and name not in self._embedded:
                self._cell.update(data, display.metadata, name=name)
            elif self._cell.running and not display.update:
                self._cell.display({"text/html": rank_heading(rank), "text/plain": f"[{rank}] displayed:"})
                self._cell.display(data, display.metadata, name=name)
            else:
                self._embedded[name] = render_display(rank, display)
                self.changed(self._view)

    def closed(self, view: RunView) -> None:
        """Paint the form that stays in the notebook."""
        with self._lock:
            timer, self._timer = self._timer, None
            if timer is not None:
                timer.cancel()
            if self._cell is not None:
                show = self._cell.update if self._cell.live else self._cell.display
                show(_bundle(view, embedded=self._embedded), name=self._name)
                self._cell.close()
            self._cell = self._view = None
        if timer is not None:
            timer.join()

    def _paint_late(self, view: RunView) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer = None
                self._paint(view)

    def _paint(self, view: RunView) -> None:
        if self._cell is None or not self._cell.live:
            return
        bundle = _bundle(view, last=_LIVE_LINES, embedded=self._embedded)
        self._cell.update(bundle, name=self._name)
        num_bytes = sum(map(len, bundle.values()))
        self._next_paint_s = self._clock() + max(_PAINT_S, num_bytes / _BYTES_PER_S)


def _bundle(view: RunView, *, last: int | None = None, embedded: dict[str, str] | None = None) -> dict[str, str]:
    html = render(view, last=last, embedded=[*(embedded or {}).values()])
    return {"text/html": html, "text/plain": render_text(view, last=last)}


def _jsonable(data: dict[str, Any]) -> dict[str, Any]:
    """A MIME bundle as Jupyter's messages want it: binary forms in base64, no form that only the worker could fill."""
    return {
        kind: base64.b64encode(form).decode("ascii") if isinstance(form, bytes) else form
        for kind, form in data.items()
        if kind != _WIDGET
    }
