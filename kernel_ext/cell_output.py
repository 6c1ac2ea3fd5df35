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

from notebook_launcher.core.errors import ConfigError
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


class Cell:
    """A place to publish to: the cell that is running on this thread, now and after it has ended."""

    def __init__(self) -> None:
        """Take hold of the running cell."""
        from IPython.core.getipython import get_ipython

        shell: Any = get_ipython()
        if shell is None:
            msg = "sink 'cell' needs a notebook: this process has no IPython shell. Use 'terminal'"
            raise ConfigError(msg)
        self._publisher: Any = shell.display_pub
        self._session: Any = getattr(self._publisher, "session", None)
        self._parent: dict[str, Any] = dict(getattr(self._publisher, "parent_header", None) or {})
        self._events: Any = shell.events
        self._over = threading.Event()
        self._events.register("post_run_cell", self._ended)

    @property
    def live(self) -> bool:
        """Whether a front end shows what is published, at once; ``%%capture`` only keeps it."""
        return self._session is not None

    @property
    def running(self) -> bool:
        """Whether the cell is still the one that runs, so that front ends take new displays for it."""
        return not self._over.is_set()

    def display(self, data: dict[str, Any], metadata: dict[str, Any] | None = None, *, name: str = "") -> None:
        """Add an output to the cell; ``name`` is its display id, for updates."""
        self._send("display_data", data, metadata, name, self._parent)

    def update(self, data: dict[str, Any], metadata: dict[str, Any] | None = None, *, name: str) -> None:
        """Replace the output that has this display id."""
        # The cell that runs now is the parent: nbclient drops everything that names another one.
        parent = self._publisher.parent_header if self.live else {}
        self._send("update_display_data", data, metadata, name, parent)

    def close(self) -> None:
        """Let the shell forget this."""
        if not self._over.is_set():
            self._over.set()
            self._events.unregister("post_run_cell", self._ended)

    def _ended(self, *_: object) -> None:
        self.close()

    def _send(
        self, kind: str, data: dict[str, Any], metadata: dict[str, Any] | None, name: str, parent: dict[str, Any]
    ) -> None:
        transient = {"display_id": name} if name else {}
        if self._session is None:
            update = kind == "update_display_data"
            self._publisher.publish(data, metadata or {}, transient=transient, update=update)
            return
        content = {"data": data, "metadata": metadata or {}, "transient": transient}
        self._session.send(self._publisher.pub_socket, kind, content, parent=parent, ident=self._publisher.topic)


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
