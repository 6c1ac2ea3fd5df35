"""The XLA engine: TPUs, through torch_xla. Processes come from the local engine; their number is XLA's affair.

Two modes, chosen by the strategy. By default a rank has a device: a process for each chip, and where XLA drives several
devices from one process (on the CPU, TPU v2 and v3), its ranks are threads of it. With the strategies of SPMD there is
one rank, and one process has all devices. The notebook's process never uses XLA: who uses a TPU keeps it from others.
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import config as environment
from notebook_launcher.core.errors import ChannelClosedError, ConfigError, EngineError
from notebook_launcher.core.events import RunThreads
from notebook_launcher.launcher import warm
from notebook_launcher.launcher.engines.local import LocalEngine
from notebook_launcher.launcher.forkserver import worker_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.core.channel import SocketChannel
    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.core.events import Run
    from notebook_launcher.launcher.engines import Worker
    from notebook_launcher.launcher.forkserver import LocalWorker

_PRELOAD = ("torch_xla", "torch_xla.distributed.spmd")  # seconds, which no rank should take again; see warm


class XlaEngine:
    """Workers that use XLA."""

    def __init__(self) -> None:
        """Nothing is started."""
        self._local = LocalEngine()

    def check(self, config: LaunchConfig) -> Sequence[str]:
        """What a person should know before; ``ConfigError`` where the notebook has made a launch impossible."""
        torch_xla: Any = sys.modules.get("torch_xla")
        if torch_xla is None or not torch_xla._XLAC._xla_runtime_is_initialized():  # noqa: SLF001
            return ()
        if config.start_method == "fork":
            raise ConfigError(
                "the notebook has used an XLA device, and start_method='fork' would hand its runtime on, which works "
                "in one process only. Leave out start_method."
            )
        kind = {**environment.snapshot(), **config.env}.get("PJRT_DEVICE", "TPU")
        if not kind.startswith("CPU"):
            raise ConfigError(
                "the notebook has used the TPU itself (torch_xla.device(), or a tensor on it), so it has the chips, "
                "and no launched process can get them. Restart the notebook's kernel, and use the device only in the "
                "function that is launched."
            )
        return ("the notebook has used XLA itself; the ranks have a runtime of their own",)

    def prepare(self, num_workers: int, config: LaunchConfig) -> None:
        """As the local engine, with torch_xla loaded before the processes are made."""
        self._local.prepare(num_workers // _ranks_each(num_workers, config), _with_xla(config))

    def start(self, commands: Sequence[Run], config: LaunchConfig) -> Sequence[Worker]:
        """Start the processes; the ranks that share one are its threads. Raises ``EngineError``."""
        size = _ranks_each(len(commands), config)
        if size == 1:
            return self._local.start(commands, _with_xla(config))
        hosts = self._local.take(len(commands) // size, _with_xla(config))
        started: list[Worker] = []
        for number, host in enumerate(hosts):
            started += _start_threads(host, commands[number * size : (number + 1) * size])
        return started

    def stand_by(self, num_workers: int, config: LaunchConfig) -> None:
        """As the local engine."""
        self._local.stand_by(num_workers // _ranks_each(num_workers, config), config)


def _with_xla(config: LaunchConfig) -> LaunchConfig:
    return config.model_copy(update={"preload": [*config.preload, *_PRELOAD]})


def _ranks_each(num_workers: int, config: LaunchConfig) -> int:
    """How many ranks one process has."""
    if num_workers == 1:
        return 1
    try:
        row = next((row for row in warm.devices(config.env) if row.kind == "tpu"), None)
    except EngineError:
        return 1  # nothing can be started, as start is about to say
    return row.per_process if row is not None and num_workers % max(row.per_process, 1) == 0 else 1


def _start_threads(host: LocalWorker, commands: Sequence[Run]) -> list[Worker]:
    made = [worker_lines() for _ in commands[1:]]
    threads: list[Worker] = [ThreadRank(host, own) for own in (host, *(own for own, _ in made))]
    try:
        host.channel.send(RunThreads(tuple(commands), tuple(lines for _, lines in made)))
    except ChannelClosedError:
        for thread in threads:
            thread.missed = True
    for _, lines in made:  # the process has its own by now, and its end is to end them
        for end in (lines.channel, lines.stdout, lines.stderr, lines.status):
            end.close()
    return threads


class ThreadRank:
    """A rank that is a thread: with lines of its own, and the life of the process ``host``."""

    def __init__(self, host: LocalWorker, own: LocalWorker) -> None:
        """``own`` has the lines; the first rank's are the host's."""
        self._host, self._own = host, own
        self.channel: SocketChannel = own.channel
        self.streams = own.streams
        self.missed = False

    @property
    def status(self) -> int:
        """Ends with the process; of the first rank, tells how."""
        return self._own.status

    @property
    def orphaned(self) -> bool:
        """Whether who reaps the process has died."""
        return self._host.orphaned

    @property
    def pid(self) -> int | None:
        """The process's id, that of several ranks."""
        return self._host.pid

    @property
    def exit_code(self) -> int | None:
        """The process's exit code."""
        return self._host.exit_code

    @property
    def notes(self) -> Sequence[str]:
        """What the server that made the process could not preload."""
        return self._host.notes

    def why_never_made(self) -> str:
        """Why there never was a process."""
        return self._host.why_never_made()

    def read_status(self) -> bool:
        """Read what is told of the process."""
        return self._host.read_status()

    def see_to(self, *, hung_up: bool) -> None:
        """See to it that it is told."""
        self._host.see_to(hung_up=hung_up)

    def signal(self, number: int) -> None:
        """Send a signal to the process, and so to all its ranks; an interrupt each hears of by its channel."""
        if number != signal.SIGINT:
            self._host.signal(number)

    def close(self) -> None:
        """Drop the lines."""
        self._own.close()
