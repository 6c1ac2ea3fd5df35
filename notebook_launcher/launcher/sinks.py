"""Sinks: whoever shows a run. A cell, a terminal, a test; adding one is one file and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from notebook_launcher.core.registry import Registry

if TYPE_CHECKING:
    from notebook_launcher.core.events import DeviceMemory, Display, Steps
    from notebook_launcher.launcher.metric_rows import MetricRows
    from notebook_launcher.launcher.output import OutputLog
    from notebook_launcher.launcher.state import RunState

SINKS = Registry(
    "sink",
    {
        "cell": "notebook_launcher.kernel_ext.cell_output:CellSink",
        "monitor": "notebook_launcher.kernel_ext.monitor_output:MonitorSink",
        "terminal": "notebook_launcher.launcher.terminal:TerminalSink",
        "none": "notebook_launcher.launcher.terminal:NullSink",
    },
)


class RunView(Protocol):
    """What a sink may read of a run, at any time and from any thread."""

    headline: str  # "2 processes · CPU (gloo) · bf16 · DDP"
    notes: list[str]  # where options came from, warnings, captured objects' sizes: a line each
    status: str  # "starting", "running", "stopping", "finished", "failed", "stopped"
    output: OutputLog
    summary: str  # "" while running; at the end one line: "finished in 3.2 s", "rank 1 failed: ValueError: ..."
    error: str  # of a run that failed, what the notebook shows of the error; else ""
    num_ranks: int
    state: RunState | None  # of each rank; None before there are workers
    metrics: MetricRows  # which only ever get more
    steps: dict[int, list[Steps]]  # how far each rank's loops have come, the outermost first
    device_memory: dict[int, DeviceMemory]
    pids: dict[int, int]
    hosts: dict[int, str]

    @property
    def elapsed_s(self) -> float:
        """Seconds since the launch, until its end."""

    def stop(self) -> None:
        """Ask the run to stop; a second time, to end at once. Harmless when it is over."""


class Sink(Protocol):
    """Shows one run. Calls come in this order, ``opened`` on the launching thread, the others on the supervisor's."""

    def opened(self, view: RunView) -> None:
        """The run was accepted; its workers are about to start. Returns fast."""

    def changed(self, view: RunView) -> None:
        """Something in ``view`` has changed since the last call; called at most ten times a second."""

    def displayed(self, rank: int, display: Display) -> None:
        """A rank displayed a rich object (figure, frame): show it with its rank."""

    def closed(self, view: RunView) -> None:
        """The run has ended; ``view`` is final. Show it in the form that stays."""
