"""``%launch``, ``%%launch`` and ``%launcher``: thin; they read a line, check it, and hand it to the launcher."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import difflib
import inspect
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand
from IPython.utils.text import DollarFormatter

from notebook_launcher.core.cell_labels import in_cells
from notebook_launcher.core.config import snapshot
from notebook_launcher.core.errors import ConfigError, NotebookLauncherError, PayloadError
from notebook_launcher.core.registry import unknown_name
from notebook_launcher.kernel_ext.completion import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from IPython.core.interactiveshell import InteractiveShell

    from notebook_launcher.core.events import DeviceRow
    from notebook_launcher.kernel_ext.arguments import Arguments
    from notebook_launcher.launcher.past_runs import RunFacts
    from notebook_launcher.launcher.run import Run

_EXAMPLE = "%launch -n 2 train(3, lr=1e-3)"
_LAUNCH_PURPOSE = (
    "Run a call on every device, with the notebook's functions and values. In front of a cell (%%launch) the whole "
    "cell runs on every rank and its last expression is the rank's result. Gives back the Run: results, logs, stop()."
)
_PANEL_PURPOSE = (
    "Alone it shows a form that launches the notebook's functions, watches every rank, stops the run, and gives the\n"
    "code that does the same. The kernel stays free meanwhile. A button that is pressed while a cell runs is heard\n"
    "when the cell has ended (with ipykernel 7.0 to 7.3 at once)."
)
_GOING_ON = ("starting", "running", "stopping")
_STOP_WAIT_S = 5.0
_SLICE_S = 0.05


@dataclasses.dataclass(frozen=True)
class EntryPoints:
    """What the magics call; a test puts its own functions here."""

    for_cell: Callable[..., Any]
    launch_payload: Callable[..., Run]
    devices: Callable[[], Sequence[DeviceRow]]
    history: Callable[[], Sequence[Run]]
    runs: Callable[[], Sequence[RunFacts]]
    panel: Callable[[], Any] = dataclasses.field(default=lambda: _panel())  # noqa: PLW0108 - loaded when it is called
    check: Callable[[], Any] = dataclasses.field(default=lambda: _check())  # noqa: PLW0108 - likewise


def launcher() -> EntryPoints:
    """The launcher's own, imported when a magic is first used."""
    from notebook_launcher.launcher import launch, payload, run, warm

    return EntryPoints(payload.for_cell, launch.launch_payload, warm.devices, run.history, run.all_facts)


@magics_class
class LauncherMagics(Magics):
    """The magics of one shell."""

    def __init__(self, shell: InteractiveShell, entry_points: Callable[[], EntryPoints] = launcher) -> None:
        super().__init__(shell)
        self._ip: Any = shell  # half of IPython's methods have no annotations
        self._entry_points = entry_points

    @no_var_expand
    @line_cell_magic
    def launch(self, line: str, cell: str | None = None) -> Run | None:
        """Run a call (%launch [options] train(3)) or a cell (%%launch [options]) on every device; -h shows options."""
        from notebook_launcher.kernel_ext import arguments

        with _one_line_errors():
            given = arguments.parse(line, self._expand)
            if given.help:
                usage = f"%launch [options] {_EXAMPLE.split(maxsplit=3)[-1]}\n%%launch [options]"
                _show(arguments.help_text(usage, _LAUNCH_PURPOSE))
                return None
            source, name = self._call(given) if cell is None else self._body(given, line, cell)
            return self._launch(given, source, name)

    @no_var_expand
    @line_magic
    def launcher(self, line: str) -> None:
        """A form that launches (%launcher), or a look: %launcher devices, check, runs, status; and %launcher stop."""
        with _one_line_errors():
            words = line.split()
            if not words:
                self._display(self._entry_points().panel())
            elif words[0] in {"-h", "--help"}:
                _show(_launcher_help())
            elif len(words) > 1 or words[0] not in COMMANDS:
                raise unknown_name("%launcher command", line.strip(), COMMANDS)
            elif words[0] == "devices":
                _show("\n".join(_device_lines(self._entry_points().devices())))
            elif words[0] == "check":
                _show(str(self._entry_points().check()))
            elif words[0] == "code":
                self._ip.set_next_input(_panel_code())
            elif words[0] == "runs":
                _show_table(self._ip, self._entry_points().runs())
            elif words[0] == "status":
                _show("\n".join(map(repr, self._entry_points().history())) or "no run yet in this kernel")
            else:
                _show("\n".join(_stop(self._entry_points().history())))

    def _display(self, shown: Any) -> None:
        from IPython.display import display

        show: Any = display  # half of IPython's functions have no annotations
        show(shown)

    def _launch(self, given: Arguments, source: str, name: str) -> Run:
        from notebook_launcher.core.config import LaunchConfig

        config = LaunchConfig.make(given.config, **given.options)
        entry_points = self._entry_points()
        try:
            payload = entry_points.for_cell(source, self._ip.user_ns, self._filename(source), name=name)
        except SyntaxError as error:
            raise CellSyntaxError(error) from None
        run = entry_points.launch_payload(payload, config, wait=not given.background, monitor=given.monitor)
        if given.save:
            self._ip.push({given.save: run.results})
        return run

    def _filename(self, source: str) -> str:
        """The name that tracebacks show for the source: that of the cell whose line calls the magic."""
        number, _ = self._place()
        if hasattr(self._ip.compile, "_filename_map"):
            return str(self._ip.compile.cache(source, number))
        return f"Cell In[{number}]"  # up to IPython 7, which would name a temporary file

    def _place(self) -> tuple[int, int]:
        """The number of the cell whose code calls the magic, and the line in it, counted from 1."""
        number = self._ip.displayhook.prompt_count  # execution_count is the next cell's in some versions of IPython
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the documented way to look at the callers
        while frame is not None and frame.f_globals is not self._ip.user_global_ns:
            frame = frame.f_back
        if frame is None:
            return number, 1
        numbers = getattr(self._ip.compile, "_filename_map", {})
        return numbers.get(frame.f_code.co_filename, number), frame.f_lineno

    def _expand(self, value: str) -> str:
        """``{n}`` and ``$n`` in an option's value, as in other magics; the Python after the options is left alone."""
        if "{" not in value and "$" not in value:
            return value
        try:
            return DollarFormatter().vformat(value, [], self._ip.user_ns)
        except Exception as error:
            raise ConfigError(f"{value} in the options can't be filled in: {type(error).__name__}: {error}.") from error

    def _call(self, given: Arguments) -> tuple[str, str]:
        """The call's text and the name of what it calls, checked as far as the notebook can tell."""
        if not given.rest:
            raise ConfigError(f"%launch needs a call, such as {_EXAMPLE}; no call was given.")
        try:
            tree = ast.parse(given.rest, mode="eval").body
        except SyntaxError as error:
            raise ConfigError(
                f"%launch can't read {given.rest!r}: {error.msg}. It takes a call on one line, such as {_EXAMPLE}; "
                "%%launch takes a whole cell."
            ) from None
        if not isinstance(tree, ast.Call):
            hint = f" Did you mean {given.rest}()?" if isinstance(tree, ast.Name | ast.Attribute) else ""
            raise ConfigError(f"%launch needs a call, such as {_EXAMPLE}; {given.rest!r} is none.{hint}")
        _check_call(tree, self._ip.user_ns)
        return "\n" * (self._place()[1] - 1) + given.rest, ast.unparse(tree.func)

    def _body(self, given: Arguments, line: str, cell: str) -> tuple[str, str]:
        """The cell's body as Python, its lines numbered as in the cell."""
        if given.rest:
            raise ConfigError(
                f"%%launch takes options only, and runs the lines below it; {given.rest!r} was left over in its line."
            )
        blank = len(cell) - len(cell.lstrip("\n"))  # IPython drops these, and so moves the lines
        source = f"# %%launch {line}".rstrip() + "\n" * (blank + 1) + self._ip.transform_cell(cell)
        return source, "cell"


class CellSyntaxError(NotebookLauncherError):
    """A launched cell is no Python. Not a ``SyntaxError``: IPython would show those with all frames of the magic."""

    def __init__(self, error: SyntaxError) -> None:
        super().__init__(f"{error.msg} (line {error.lineno})")
        self._told = "".join(traceback.format_exception_only(error))

    def _render_traceback_(self) -> list[str]:
        """The place, the line, a mark under what is wrong, and what is wrong with it."""
        return in_cells(self._told).splitlines()


# --- the call, checked in the kernel ----------------------------------------------------------------------------------


def _check_call(call: ast.Call, namespace: dict[str, Any]) -> None:
    """Refuse a call of what isn't there or can't be called, and arguments that its signature doesn't take."""
    from notebook_launcher.launcher.payload import check_arguments

    name = ast.unparse(call.func)
    try:
        function = _resolve(call.func, namespace)
    except LookupError:
        return  # only the workers will know
    if not callable(function):
        raise ConfigError(f"%launch calls {name}, which is a {type(function).__name__}: it takes a function's call.")
    check_arguments(function, call)


def _resolve(node: ast.expr, namespace: dict[str, Any]) -> Any:
    """What a dotted name stands for; ``LookupError`` where that takes running something."""
    if isinstance(node, ast.Name):
        if node.id in namespace:
            return namespace[node.id]
        if hasattr(builtins, node.id):
            return getattr(builtins, node.id)
        near = difflib.get_close_matches(node.id, [name for name in namespace if not name.startswith("_")], n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"%launch calls {node.id!r}, which the notebook hasn't defined.{guess}")
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, namespace)
        static = inspect.getattr_static(owner, node.attr, None)
        if static is not None and not isinstance(static, property):
            return getattr(owner, node.attr)
    raise LookupError


# --- texts -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """A mistake in an option or in what would travel is a line in the cell, without frames of ours."""
    try:
        yield
    except (ConfigError, PayloadError) as error:
        if getattr(error, "run", None) is not None:
            raise  # a rank's own, with its rank and traceback
        _usage_error(error)


def _usage_error(error: Exception) -> NoReturn:
    raise UsageError("\n".join([str(error), *getattr(error, "__notes__", ())])) from error


def _stop(history: Sequence[Run]) -> Iterator[str]:
    """Ask every run that goes on to stop, and give each one's state once it has ended, or after a few seconds."""
    asked = [run for run in history if run.status in _GOING_ON]
    for run in asked:
        run.stop()
    if not asked:
        yield "no run is going on"
        return
    yield f"asked {len(asked)} run{'s' * (len(asked) > 1)} to stop:"
    deadline_s = time.monotonic() + _STOP_WAIT_S
    while (left := [run for run in asked if run.status in _GOING_ON]) and time.monotonic() < deadline_s:
        time.sleep(_SLICE_S)
    yield from map(repr, asked)
    if left:
        yield "its ranks have not ended yet: %launcher stop once more kills them"


def _show_table(shell: Any, runs: Sequence[RunFacts]) -> None:
    from notebook_launcher.widgets.run_table import run_table, run_text

    shell.display_pub.publish({"text/html": run_table(runs), "text/plain": run_text(runs)})


def _device_lines(rows: Sequence[DeviceRow]) -> list[str]:
    from notebook_launcher.launcher.device_table import device_table

    return device_table(rows, snapshot()).lines()


def _check() -> Any:
    from notebook_launcher.launcher.preflight import check

    return check()


def _panel() -> Any:
    from notebook_launcher.widgets.panel import panel

    return panel()


def _panel_code() -> str:
    """What the panel that was shown last would launch, as code."""
    from notebook_launcher.widgets.form_model import FormError
    from notebook_launcher.widgets.panel import latest

    shown = latest()
    if shown is None:
        raise ConfigError("%launcher code puts a panel's launch into a new cell, and no panel is shown: run %launcher.")
    try:
        return shown.code()[0]
    except FormError as error:
        raise ConfigError(f"the panel has no launch to put into a cell:\n{error}") from None


def _show(text: str) -> None:
    print(text)  # noqa: T201 - the cell's output


def _launcher_help() -> str:
    width = max(map(len, COMMANDS)) + 2
    commands = [f"  {name.ljust(width)}{text}" for name, text in COMMANDS.items()]
    return "\n".join(["%launcher " + f"[{'|'.join(COMMANDS)}]", "", _PANEL_PURPOSE, "", *commands])
