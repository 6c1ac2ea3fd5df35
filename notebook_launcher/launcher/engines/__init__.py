"""Engines: where worker processes come from. One file and one line here each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from notebook_launcher.core.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.core.channel import SocketChannel
    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.core.events import Run

ENGINES = Registry(
    "engine",
    {
        "local": "notebook_launcher.launcher.engines.local:LocalEngine",
        "xla": "notebook_launcher.launcher.engines.xla:XlaEngine",
    },
)
ENGINE_OF = {"tpu": "xla"}  # by kind of device, where it takes one of its own; else "local"


class Worker(Protocol):
    """One worker process as the supervisor sees it."""

    channel: SocketChannel
    streams: dict[str, int]  # "stdout", "stderr" -> descriptor to read, for engines whose workers write to pipes
    missed: bool  # it was gone before it had taken its command

    @property
    def status(self) -> int:
        """Descriptor to read pid and exit code from, as ``core.forking.STATUS`` lays them out."""

    @property
    def orphaned(self) -> bool:
        """Whether whoever reaps it has died: its end shows by its channel's only."""

    @property
    def pid(self) -> int | None:
        """The process's id on its host, None until known."""

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while running or where nobody knows it."""

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know of how it was made, a line each; complete once it has started."""

    def why_never_made(self) -> str:
        """For a worker whose status ended without a pid: why there never was a process."""

    def read_status(self) -> bool:
        """Read what ``status`` has, without waiting; True when nothing more will come."""

    def see_to(self, *, hung_up: bool) -> None:
        """Called a few times a second: see to it that what ``status`` is to say next does come.

        ``hung_up``: whether its channel has ended.
        """

    def signal(self, number: int) -> None:
        """Send a signal to the worker, and with SIGKILL to all that it started; harmless once it has ended."""

    def close(self) -> None:
        """Drop the launcher's ends of all lines."""


class Engine(Protocol):
    """Starts one worker a command, in rank order, each with its ``Run`` command already under way."""

    def check(self, config: LaunchConfig) -> Sequence[str]:
        """What a person should know before anything starts; raises ``ConfigError`` where this notebook can't launch."""

    def prepare(self, num_workers: int, config: LaunchConfig) -> None:
        """So many commands are about to come: begin with what needs none of them. Returns at once, raises nothing."""

    def start(self, commands: Sequence[Run], config: LaunchConfig) -> Sequence[Worker]:
        """Return at once; a worker that can't start ends by its status. Raises ``EngineError``."""

    def stand_by(self, num_workers: int, config: LaunchConfig) -> None:
        """A run of ``num_workers`` ranks has ended: make the next launch fast, where that is possible."""
