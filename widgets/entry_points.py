"""What the panel calls of the launcher."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.core.events import DeviceRow
    from notebook_launcher.launcher.preflight import Preflight
    from notebook_launcher.launcher.run import Run
    from notebook_launcher.widgets.form_model import Chosen


class ShownRun(Protocol):
    """A run's monitor, as the panel uses it."""

    @property
    def widget(self) -> Any:
        """Its live form, an ipywidget."""

    def without_stop(self) -> None:
        """Show no stop button in it: the panel has one."""

    def html(self) -> str:
        """How the run stands, as static HTML."""

    def close(self) -> None:
        """Take its live form away."""


@dataclasses.dataclass(frozen=True)
class EntryPoints:
    """What the panel calls; a test puts its own functions here."""

    launch: Callable[[Chosen], Run]
    devices: Callable[[], Sequence[DeviceRow]]
    monitor: Callable[[Run], ShownRun]
    check: Callable[[LaunchConfig, Callable[[Run], None]], Preflight]


def launcher() -> EntryPoints:
    """The launcher's own."""
    from notebook_launcher.launcher import warm
    from notebook_launcher.widgets.monitor import monitor

    return EntryPoints(_launch, warm.devices, monitor, _check)


def _launch(chosen: Chosen) -> Run:
    from notebook_launcher.launcher import launch, payload

    payload.check_call(chosen.function, chosen.args, chosen.kwargs)
    packed = payload.for_call(chosen.function, chosen.args, chosen.kwargs)
    return launch.launch_payload(packed, chosen.config, wait=False, sink="none")


def _check(config: LaunchConfig, begun: Callable[[Run], None]) -> Preflight:
    """A preflight with ``config`` as it stands; ``begun`` is told of its run."""
    from notebook_launcher.launcher.launch import launch_payload
    from notebook_launcher.launcher.preflight import run_check

    def launching(*args: object, **options: object) -> Run:
        run = launch_payload(*args, **options)  # type: ignore[arg-type]
        begun(run)
        return run

    return run_check(config, launching)
