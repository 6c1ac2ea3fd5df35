"""The panel: the form, what to do with it, and the run that came of it.

Callbacks return fast, and hold one lock: some kernels call them on threads of their own. Nothing is printed from them;
what goes wrong is said in the panel.
"""

from __future__ import annotations

import threading
import time
import traceback
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.config import LaunchConfig, snapshot
from notebook_launcher.core.errors import ConfigError, NotebookLauncherError
from notebook_launcher.widgets import panel_html
from notebook_launcher.widgets.busy_hint import BusyHint
from notebook_launcher.widgets.cell import Cell, has_front_end
from notebook_launcher.widgets.check import CHECKING, Check, progress
from notebook_launcher.widgets.code import config_code, launch_code
from notebook_launcher.widgets.entry_points import EntryPoints, ShownRun, launcher
from notebook_launcher.widgets.form_model import FormError, FormModel
from notebook_launcher.widgets.told_warnings import told_warnings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_launcher.core.events import DeviceRow, Display
    from notebook_launcher.launcher.run import Run
    from notebook_launcher.launcher.sinks import RunView
    from notebook_launcher.widgets.controls import Held
    from notebook_launcher.widgets.panel_view import PanelView

_WIDGET = "application/vnd.jupyter.widget-view+json"
_shown: list[weakref.ref[Panel]] = []


def panel() -> Panel:
    """A form that launches the notebook's functions, for a cell's last line or ``display``; ``%launcher`` shows one.

    It offers the functions that the notebook defines, their arguments and the options of ``launch``; it shows every
    rank, stops the run, and gives the code that does the same. Raises ``ConfigError`` outside IPython.
    """
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    if shell is None:
        raise ConfigError("panel() needs a notebook: this process has no IPython shell. Use launch(...) in a script.")
    return Panel(shell, launcher())


def latest() -> Panel | None:
    """The panel that was shown last."""
    return next((one for one in (reference() for reference in reversed(_shown)) if one is not None), None)


class Panel:
    """One panel, in as many places as it is displayed. ``run`` is what it launched last."""

    def __init__(self, shell: Any, entry_points: EntryPoints) -> None:
        """A form over the notebook of ``shell``. Nothing is shown yet."""
        self.run: Run | None = None
        self._shell = shell
        self._entry_points = entry_points
        self._model = FormModel(shell.user_ns, cell_numbers=self._cell_numbers)
        self._view: PanelView | None = None
        self._monitor: ShownRun | None = None
        self._lock = threading.RLock()
        self._places: list[tuple[Cell, str]] = []
        self._stored = ""  # the form as the notebook holds it
        # JupyterLab says of a widget in a notebook that its author opens again that it is missing, whatever HTML is
        # stored with it. So the run is stored in an output of its own, which the live panel hides. Where no Jupyter
        # server has started the kernel, the page is another's, and would show both.
        self._is_apart = "JPY_SESSION_NAME" in snapshot()
        self._looking: threading.Thread | None = None
        self._check: Check | None = None  # while it goes on

    # --- showing ------------------------------------------------------------------------------------------------------

    def _ipython_display_(self) -> None:
        """Put the panel into the cell that is running; where nobody can press anything, as it would be stored."""
        cell = Cell()
        _close_those_before(cell, self)
        _shown.append(weakref.ref(self))
        if not has_front_end(self._shell):
            self._look_at_devices()
            with self._lock:
                cell.display(self._bundle())
            cell.close()
            return
        with self._lock:
            name = f"notebook-launcher-{uuid.uuid4().hex}"
            self._start()
            cell.display(self._bundle(), name=name)
            if self._is_apart:
                cell.display(self._run_bundle(), name=_of_run(name))
            self._places = [place for place in self._places if not place[0].is_run_again_by(cell)]
            self._places.append((cell, name))

    def __repr__(self) -> str:
        """The panel as text."""
        with self._lock:
            return panel_html.as_text(self._model, repr(self.run) if self.run is not None else "")

    @property
    def widget(self) -> Any:
        """The live panel as one ipywidget."""
        with self._lock:
            return self._start().box

    def was_in(self, cell: Cell) -> bool:
        """Whether this is shown nowhere but in an earlier run of ``cell``."""
        return bool(self._places) and all(place.is_run_again_by(cell) for place, _ in self._places)

    def close(self) -> None:
        """Take the panel away. Its run goes on."""
        threads = [self._looking, self._check.thread if self._check is not None else None]
        self._leave()
        for thread in threads:
            if thread is not None:
                thread.join()

    def _leave(self) -> None:
        with self._lock:
            if self._monitor is not None:
                self._monitor.close()
            if self._check is not None:
                self._check.stop()
            if self._view is not None:
                self._shell.events.unregister("post_run_cell", self._after_cell)
                self._busy_hint.close()
                self._view.close()
                self._view = None

    # --- what a person does -------------------------------------------------------------------------------------------

    def set(self, name: str, held: Held) -> None:
        """A control was changed."""
        with self._lock:
            self._model.set(name, held)
            self._show()

    def launch(self) -> None:
        """Launch what the form says, unless something in it can't be."""
        with self._lock:
            self._refuse_two()
            with told_warnings() as told:
                run = self._entry_points.launch(self._model.chosen())
            self.run = run
            name = self._model.kept_as
            if name:
                self._shell.user_ns[name] = run
            self._model.kept(run)
            last, self._monitor = self._monitor, self._entry_points.monitor(run)
            view = self._start()
            view.say("\n".join(told))
            self._monitor.without_stop()
            view.show_run(self._monitor.widget)
            if last is not None:
                last.close()
            view.show_state(run.status)
            if not run.show_in(_End(self)):
                self._ended()
            elif self._is_apart:
                self._store_run()  # else a notebook that is saved meanwhile would hold the last run's end
            self._show()

    def check(self) -> None:
        """Try out the processes that the form asks for, and say in the panel what was found. Returns at once."""
        with self._lock:
            self._refuse_two()
            config, view = self._model.config_of_check(), self._start()
            headline = self._model.sentence() if self._model.devices is not None else ""

            def tell(status: str = "") -> None:
                self.guarded(lambda: self._say(progress(headline, status), bad=False))

            tell()
            self._check = Check(lambda begun: self._entry_points.check(config, begun), tell, self._checked)
            view.show_state(CHECKING)

    def _checked(self, text: str, is_bad: bool) -> None:  # noqa: FBT001 - what a check calls
        def show() -> None:
            self._check = None
            self._say(text, bad=is_bad)
            if self._view is not None:
                self._view.show_state(self.run.status if self.run is not None else "")

        self.guarded(show)

    def _refuse_two(self) -> None:
        if self._check is not None:
            raise ConfigError("the panel's check still goes on: stop it, or wait for its end.")
        if self.run is not None and self.run.status in panel_html.GOING_ON:
            raise ConfigError("the panel's last run still goes on: stop it, or wait for its end.")

    def stop(self) -> None:
        """Ask the run, or the check, to stop; the second time, kill it."""
        if self._check is not None:
            self._check.stop()
            self._start().show_state(CHECKING)
        elif self.run is not None:
            self.run.stop()
            self._start().show_state(self.run.status)

    def code(self) -> tuple[str, str]:
        """The launch as code: one call, and a ``LaunchConfig`` and a call."""
        with self._lock:
            self._model.look()
            call, options = self._model.code()
            kept_as = self._model.kept_as
            return launch_code(call, options, kept_as=kept_as), config_code(call, options, kept_as=kept_as)

    def save(self, path: str) -> None:
        """Write the options into a YAML file. Raises ``ConfigError`` where that can't be, ``FormError`` too."""
        with self._lock:
            _check_file(path, written=True)
            self._model.config().save(path)

    def load(self, path: str) -> list[str]:
        """Show the options of a YAML file; returns its warnings. Raises ``ConfigError`` where it can't be read."""
        with self._lock:
            _check_file(path)
            with told_warnings() as told:
                self._model.load(LaunchConfig.load(path))
            self._show()
        return told

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start(self) -> PanelView:
        """The live form, made when it is first shown."""
        from notebook_launcher.widgets.panel_view import PanelView

        if self._view is None:
            self._view = PanelView(self._model, self, self.guarded)
            self._busy_hint = BusyHint(self._shell, self._view.hint)
            self._shell.events.register("post_run_cell", self._after_cell)
            self._looking = threading.Thread(
                target=self._look_at_devices, name="notebook-launcher-devices", daemon=True
            )
            self._looking.start()
        return self._view

    def guarded(self, act: Callable[[], None]) -> None:
        """Do what a callback does; what goes wrong is said in the panel, since nobody sees what a callback raises."""
        with self._lock:
            try:
                act()
            except FormError as error:
                self._show()
                self._say_refused(error)
            except NotebookLauncherError as error:
                self._say("\n".join([str(error), *getattr(error, "__notes__", ())]))
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - see above
                self._say("".join(traceback.format_exception(error)))

    def _say(self, text: str, *, bad: bool = True) -> None:
        if self._view is not None:
            self._view.say(text, bad=bad)

    def _say_refused(self, error: FormError) -> None:
        labels = {one.name: one.label for one in self._model.controls()}
        told = [f"{labels[name]}: {text}" if name in labels else text for name, text in error.texts.items()]
        self._say("\n".join([f"Nothing was {error.undone}.", *told]))

    def _show(self) -> None:
        if self._view is not None:
            self._view.show()

    def _look_at_devices(self) -> None:
        def look() -> None:
            self._model.devices = rows
            self._show()

        rows: Sequence[DeviceRow] = ()
        try:
            rows = self._entry_points.devices()
        except Exception as error:  # noqa: BLE001 - a launch would meet it again; here it must not end a thread in silence
            text = f"This machine's devices can't be told: {type(error).__name__}: {error}"
            self.guarded(lambda: self._say(text))
            return
        self.guarded(look)

    def _after_cell(self, *_: object) -> None:
        """A cell has run: it may have defined a function, and nobody is at the panel, so that it can be stored anew."""

        def look() -> None:
            self._model.look()
            self._show()
            if panel_html.static(self._model) != self._stored:
                self._store()

        self.guarded(look)

    def _cell_numbers(self) -> Mapping[str, int]:
        numbers = getattr(getattr(self._shell, "compile", None), "_filename_map", None)
        return dict(numbers) if isinstance(numbers, dict) else {}

    def _ended(self) -> None:
        if self._view is not None and self.run is not None:
            self._view.show_state(self.run.status)
        if self._is_apart:
            self._store_run()
        else:
            self._store()

    def _store_run(self) -> None:
        bundle = self._run_bundle()
        for cell, name in self._places:
            if cell.live:
                cell.update(bundle, name=_of_run(name))

    def _run_bundle(self) -> dict[str, Any]:
        if self.run is None or self._monitor is None:
            return {"text/html": panel_html.stored(""), "text/plain": ""}
        going_on = self.run.status in panel_html.GOING_ON
        page = panel_html.not_over(self._model.sentence(), time.time()) if going_on else self._monitor.html()
        return {"text/html": panel_html.stored(page), "text/plain": repr(self.run)}

    def _store(self) -> None:
        """Bring what a saved notebook holds up to date; not at every change, since front ends draw the panel anew."""
        bundle = self._bundle()
        for cell, name in self._places:
            if cell.live:
                cell.update(bundle, name=name)

    def _bundle(self) -> dict[str, Any]:
        self._stored = panel_html.static(self._model)
        run_html = self._monitor.html() if self._monitor is not None and not self._is_apart else ""
        bundle: dict[str, Any] = {"text/html": self._stored + run_html, "text/plain": repr(self)}
        if self._view is not None:
            bundle[_WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": self._view.box.model_id}
        return bundle


def _close_those_before(cell: Cell, shown: Panel) -> None:
    """Close the panels that ``cell`` has shown when it was run before; else each would go on following the notebook."""
    known = [(reference, reference()) for reference in _shown]
    old = [one for _, one in known if one is not None and one is not shown and one.was_in(cell)]
    _shown[:] = [reference for reference, one in known if one is not None and one not in old]
    for one in {id(one): one for one in old}.values():
        one._leave()  # noqa: SLF001 - the same module


def _check_file(path: str, *, written: bool = False) -> None:
    if not path:
        raise ConfigError("no file is named: write one into the field Config file, such as config.yaml.")
    place = Path(path)
    if written and place.is_file() and place.suffix not in {".yaml", ".yml", ".json"}:
        raise ConfigError(f"{path} is a file of another kind, which would be lost: choose another name.")


def _of_run(name: str) -> str:
    """The name of the output that a panel's run is stored in."""
    return f"{name}-run"


class _End:
    """A sink that waits for a run's end."""

    def __init__(self, of: Panel) -> None:
        self._panel = of

    def opened(self, view: RunView) -> None:
        """Nothing to do."""

    def changed(self, view: RunView) -> None:
        """Nothing to do."""

    def displayed(self, rank: int, display: Display) -> None:
        """Nothing to do."""

    def closed(self, view: RunView) -> None:
        """The run is over."""
        del view
        self._panel.guarded(self._panel._ended)  # noqa: SLF001 - the same module
