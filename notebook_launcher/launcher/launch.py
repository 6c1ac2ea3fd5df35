"""``launch``: run a function on every device of this machine."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pathlib
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.config import LaunchConfig, field_rows
from notebook_launcher.core.errors import ConfigError, RunInterrupted
from notebook_launcher.core.notices import warn
from notebook_launcher.core.options import parameters
from notebook_launcher.launcher import payload as payloads
from notebook_launcher.launcher import warm
from notebook_launcher.launcher.commands import commands, pack_surroundings
from notebook_launcher.launcher.device_choice import started_for
from notebook_launcher.launcher.engines import ENGINES
from notebook_launcher.launcher.output import OutputLog
from notebook_launcher.launcher.plan import make_plan
from notebook_launcher.launcher.record import Record
from notebook_launcher.launcher.run import Run
from notebook_launcher.launcher.sinks import SINKS
from notebook_launcher.launcher.supervisor import tell

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from notebook_launcher.launcher.engines import Worker
    from notebook_launcher.launcher.payload import Payload
    from notebook_launcher.launcher.sinks import Sink


@contextlib.contextmanager
def _short_interrupts() -> Iterator[None]:
    """Tell an interrupt of a launch that has not got as far as waiting in one line."""
    try:
        yield
    except RunInterrupted:
        raise
    except KeyboardInterrupt:
        raise RunInterrupted("stopped before it had started") from None


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_processes: int | None = None,
    config: LaunchConfig | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    wait: bool = True,
    monitor: bool = False,
    **options: Any,
) -> Run:
    """Run ``fn(*args, **kwargs)`` on every device of this machine and return the ``Run``.

    ``config`` is a ``LaunchConfig``, a dictionary of options or the path of a YAML file; ``options`` are the fields of
    ``LaunchConfig`` and override it. With ``wait=False`` the call returns at once and the run goes on by itself.
    ``monitor=True`` shows it by a monitor: a row a rank, curves, a stop button; outside notebooks, as always.

    Raises ``ConfigError`` or ``PayloadError`` before anything starts when an option or a captured object can't be; then
    what ``Run.wait`` raises: the worker's own exception, with a ``WorkerError`` as its ``__cause__``.
    """
    if num_processes is not None:
        options["num_processes"] = num_processes
    with _short_interrupts():
        payloads.check_call(fn, args, kwargs)
        chosen = LaunchConfig.make(config, **options)
        return launch_payload(payloads.for_call(fn, args, kwargs), chosen, wait=wait, monitor=monitor)


def _signature() -> inspect.Signature:
    """The options by their names, where the code has ``**options``: for help and completion."""
    written = inspect.signature(launch)
    own = [one for one in written.parameters.values() if one.kind is not one.VAR_KEYWORD]
    return written.replace(
        parameters=[*own, *(one for one in parameters(field_rows()) if one.name not in written.parameters)]
    )


launch.__signature__ = _signature()  # type: ignore[attr-defined]


def launch_payload(
    payload: Payload, config: LaunchConfig, *, wait: bool, sink: str | None = None, monitor: bool = False
) -> Run:
    """Run a packed function or cell as ``config`` says; ``launch`` and the magics end here.

    ``sink`` names who shows the run: by default the cell in a notebook (with ``monitor``, a monitor in it), else the
    terminal.
    """
    shown_by = sink or _default_sink()
    if monitor and shown_by == "cell":
        shown_by = "monitor"
    with _short_interrupts():
        return _launch(payload, config, wait=wait, sink=shown_by)


def _launch(payload: Payload, config: LaunchConfig, *, wait: bool, sink: str) -> Run:
    _warn_of_large(payload)
    plan = make_plan(config, functools.partial(warm.devices, config.env))
    engine, making = ENGINES.load(plan.engine)(), started_for(config, plan.device)
    notes = [*plan.notes, *payload.notes, *engine.check(config)]
    folder = _log_folder(config.log_dir)
    shown = {0} if config.output == "main" else None
    output = OutputLog(len(plan.worlds), folder=folder, shown_ranks=shown)
    record = Record(plan.headline, notes, output, len(plan.worlds))
    sinks: list[Sink] = [SINKS.load(sink)()]
    surroundings = pack_surroundings(payload.sources, plan.environment)
    engine.prepare(len(plan.worlds), making)

    def start(attempt: int) -> list[Worker]:
        with commands(plan.worlds, surroundings, payload.packed, attempt) as ready:
            return list(engine.start(ready, making))

    run = Run(payload.name, config, record, sinks, start)

    def after() -> None:
        if payload.packed.mapping is not None:
            payload.packed.mapping.close()  # whoever keeps the run for its results doesn't keep a copy of what it took
        engine.stand_by(len(plan.worlds), making)

    record.shown.clear()
    try:
        run.begin(after)
        tell(sinks, record, lambda one: one.opened(record))  # now, so that the ranks do not wait for a front end
        record.shown.set()
        if payload.packed.mapping is not None:
            payload.packed.mapping.hold(payload.packed.mapping_bytes)
        return run.wait() if wait else run
    except KeyboardInterrupt:
        _kill(run)  # harmless when wait has ended it already
        raise
    finally:
        record.shown.set()


def _kill(run: Run) -> None:
    """End a run that its user can't reach, whatever further interrupts come."""
    while True:
        try:
            run.kill()
        except KeyboardInterrupt:
            continue
        return


def _log_folder(name: str | None) -> pathlib.Path | None:
    """The folder for log files, made now: where it can't be, nothing is started."""
    if name is None:
        return None
    folder = pathlib.Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(
            f"log_dir={name!r} can't hold log files: {error.strerror}. Name a folder that can be written to."
        ) from None


def _default_sink() -> str:
    """Who shows a run: the cell where IPython runs in a kernel, else the terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return "cell" if getattr(shell, "kernel", None) is not None else "terminal"


def _warn_of_large(payload: Payload) -> None:
    for name, size in payload.large:
        warn(f"the launch sends {name!r} along, {size / 1e6:,.0f} MB; the ranks share one copy until they write to it")
