"""``monitor(run)``: a run as one watches it, live in the notebook, and as static HTML once it has ended."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from notebook_launcher.widgets import monitor_html
from notebook_launcher.widgets.cell import Cell
from notebook_launcher.widgets.process_memory import ProcessMemory
from notebook_launcher.widgets.rendering import render_display
from notebook_launcher.widgets.view_model import ViewModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.core.events import Display
    from notebook_launcher.launcher.run import Run
    from notebook_launcher.launcher.sinks import RunView
    from notebook_launcher.widgets.live_view import LiveView

_PAINT_S, _SLOWEST_PAINT_S = 0.1, 0.19
_CPU_SHARE = 0.03  # of a core, for painting: a view that costs more is painted less often
_IDLE_S = 1.0  # the time that has passed is shown, too
_WIDGET = "application/vnd.jupyter.widget-view+json"


def monitor(run: Run, *, compare: Run | None = None, log_scale: bool = False) -> Monitor:
    """A monitor of ``run``, for a cell's last line or ``display``; of a run that has ended, how it ended.

    It shows a row a rank, the curves of what ``Accelerator.log`` sends, each rank's output, and a stop button. When the
    run ends, plain HTML takes its place. ``compare`` lays another run's curves under this one's; ``log_scale`` draws
    them on a logarithmic scale. Figures that ranks displayed before the monitor was shown are not in it.
    """
    return Monitor(
        run.view,
        compare=compare.view if compare is not None else None,
        log_scale=log_scale,
        attach=run.show_in,
    )


class Monitor:
    """Shows one run, in as many places as it is displayed. It is a sink: the supervisor tells it what happens."""

    def __init__(
        self,
        record: RunView,
        *,
        compare: RunView | None = None,
        log_scale: bool = False,
        attach: Callable[[Monitor], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``attach`` makes the run tell this of what comes, once somebody looks, and says whether anything will."""
        self._record = record
        self._model = ViewModel(record, compare=compare)
        self._log_scale = log_scale
        self._attach: Callable[[Monitor], bool] | None = attach
        self._clock = clock
        self._memory = ProcessMemory(clock)
        self._lock = threading.RLock()
        self._wake, self._over = threading.Event(), threading.Event()
        self._painter: threading.Thread | None = None
        self._live: LiveView | None = None
        self._is_embedded = False
        self._places: list[tuple[Cell, str]] = []
        self._embedded: dict[str, str] = {}  # display's name -> its HTML

    # --- showing ------------------------------------------------------------------------------------------------------

    @property
    def widget(self) -> Any:
        """The live form as one ipywidget, for whoever builds a page of several; it stays when the run has ended."""
        with self._lock:
            self._is_embedded = True
            return self._start().box

    def without_stop(self) -> None:
        """Leave stopping to whoever shows the live form beside a button of their own for it."""
        with self._lock:
            self._start().stop_button.layout.display = "none"

    def close(self) -> None:
        """Take the live form away, wherever it is shown. The run goes on."""
        with self._lock:
            live, self._live = self._live, None
            if live is not None:
                live.close()

    def html(self) -> str:
        """How the run stands, as static HTML."""
        with self._lock:
            return self._bundle()["text/html"]

    def _ipython_display_(self) -> None:
        """Put the monitor into the cell that is running."""
        cell = Cell()
        with self._lock:
            if self._has_ended() or not hasattr(cell.shell, "kernel"):
                cell.display(self._bundle())
                cell.close()
                return
            name = f"notebook-launcher-{uuid.uuid4().hex}"
            if cell.live:
                view = self._start().box
                reference = {"version_major": 2, "version_minor": 0, "model_id": view.model_id}
                cell.display({**self._bundle(), _WIDGET: reference}, name=name)
            self._places.append((cell, name))
            self._wake.set()

    def __repr__(self) -> str:
        """The monitor as text."""
        with self._lock:
            return self._bundle()["text/plain"]

    # --- what the run tells -------------------------------------------------------------------------------------------

    def opened(self, view: RunView) -> None:
        """Show the run in the cell that launches it."""
        del view
        self._attach = None
        for stream in (sys.stdout, sys.stderr):  # what was printed before the launch stands above it
            stream.flush()
        self._ipython_display_()

    def changed(self, view: RunView) -> None:
        """Have the painter look; returns at once."""
        del view
        self._wake.set()

    def displayed(self, rank: int, display: Display) -> None:
        """Keep what a rank displayed, to be shown below the output."""
        given = display.transient.get("display_id")
        name = f"{rank}-{given or uuid.uuid4().hex}"
        if display.update and name not in self._embedded:
            return
        with self._lock:
            self._embedded[name] = render_display(rank, display)
        self._wake.set()

    def closed(self, view: RunView) -> None:
        """Put the final form into every place where the monitor is shown."""
        del view
        self._over.set()
        self._wake.set()
        if self._painter is not None:
            self._painter.join()
        with self._lock:
            self._attach = None
            bundle = self._bundle()
            for cell, name in self._places:
                (cell.update if cell.live else cell.display)(bundle, name=name)
                cell.close()
            self._places.clear()
            if self._live is not None and self._is_embedded:
                self._paint(at_once=True)
            elif self._live is not None:
                self._live.close()
                self._live = None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _has_ended(self) -> bool:
        """Whether nothing will come any more; the first time, ask the run to tell what does come."""
        if self._attach is not None:
            attach, self._attach = self._attach, None
            if not attach(self):
                self._over.set()
        return self._over.is_set()

    def _start(self) -> LiveView:
        """The live form, painted from now on."""
        from notebook_launcher.widgets.live_view import LiveView

        if self._live is None:
            self._live = LiveView(self._record, log_scale=self._log_scale, clock=self._clock)
            self._live.wake = self._chosen
            self._paint(at_once=True)
        if self._painter is None and not self._has_ended():
            name = "notebook-launcher-monitor"
            self._painter = threading.Thread(target=self._paint_until_over, name=name, daemon=True)
            self._painter.start()
        return self._live

    def _chosen(self) -> None:
        """A person has chosen something: show it, after the end too."""
        self._wake.set()
        if self._over.is_set():
            with self._lock:
                self._paint(at_once=True)

    def _paint_until_over(self) -> None:
        """Paint when something has changed, at most ten times a second, and once a second for the time that passes."""
        wait_s = _IDLE_S
        while not self._over.is_set():
            self._wake.wait(wait_s)
            self._wake.clear()
            began_s = time.thread_time()
            try:
                with self._lock:
                    is_late = self._paint()
            except Exception as error:  # noqa: BLE001 - a broken view must not end in silence, nor go on for ever
                self._record.notes.append(f"the monitor has stopped: {type(error).__name__}: {error}")
                return
            wait_s = _PAINT_S if is_late else _IDLE_S
            took_s = time.thread_time() - began_s
            self._over.wait(min(_SLOWEST_PAINT_S, max(_PAINT_S, took_s / _CPU_SHARE)))

    def _paint(self, *, at_once: bool = False) -> bool:
        """Bring the live form up to date; whether something has to wait for its pace."""
        if self._live is None:
            return False
        memory = {} if self._over.is_set() else self._memory.look(self._model.local_pids())
        cell_runs = any(cell.running for cell, _ in self._places)
        self._log_scale = bool(self._live.log_scale.value)
        displays = list(self._embedded.values())
        takes_curves = at_once or self._live.curves_due
        view = self._model.view(memory, curves=takes_curves)
        is_late = self._live.paint(view, displays, cell_runs=cell_runs, at_once=at_once)
        return is_late or not takes_curves

    def _bundle(self) -> dict[str, str]:
        view = self._model.view()
        page = monitor_html.final(view, self._record, embedded=list(self._embedded.values()), log_scale=self._log_scale)
        return {"text/html": page, "text/plain": monitor_html.text(view, self._record)}
