"""The local engine: workers on this machine, from the fork server, a fresh interpreter, or a fork of the kernel."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import traceback
import warnings
from typing import TYPE_CHECKING, NoReturn

from notebook_launcher.core.errors import ChannelClosedError, EngineError
from notebook_launcher.core.forking import STATUS, Fork
from notebook_launcher.core.lifeline import Lifeline
from notebook_launcher.launcher import warm
from notebook_launcher.launcher.forkserver import LocalWorker, worker_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.core.events import Run


class LocalEngine:
    """Workers on this machine."""

    def check(self, config: LaunchConfig) -> Sequence[str]:  # noqa: ARG002 - an engine's
        """Nothing to say."""
        return ()

    def prepare(self, num_workers: int, config: LaunchConfig) -> None:
        """Have the workers forked that do not stand by yet, while their commands are being put together."""
        if config.start_method == "forkserver":
            warm.prepare(num_workers, config.preload)

    def start(self, commands: Sequence[Run], config: LaunchConfig) -> list[LocalWorker]:
        """Start one worker a command and send it; returns at once. Raises ``EngineError``."""
        workers = self.take(len(commands), config)
        for worker, command in zip(workers, commands, strict=True):
            try:
                worker.channel.send(command)
            except ChannelClosedError:
                worker.missed = True  # it has died: its status says so to the supervisor
        return workers

    def take(self, num_workers: int, config: LaunchConfig) -> list[LocalWorker]:
        """So many workers, which wait for their commands. Raises ``EngineError``."""
        if sys.platform == "win32":
            raise EngineError("launching on Windows is not supported yet: workers are forked; use WSL")
        if config.start_method == "fork":
            return [_fork_kernel() for _ in range(num_workers)]
        return warm.take(num_workers, fresh=config.start_method == "spawn", preload=config.preload)

    def stand_by(self, num_workers: int, config: LaunchConfig) -> None:
        """Keep as many workers waiting for the next launch as the last one used, or as ``config.standby`` says."""
        if config.start_method == "forkserver":
            warm.stand_by(num_workers if config.standby is None else config.standby)


def _fork_kernel() -> LocalWorker:
    """Fork the kernel itself. What it has used (OpenMP threads, a CUDA context) is broken in the child."""
    worker, request = worker_lines()
    try:
        worker.lifeline = Lifeline()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: whoever asks for "fork" was told
            pid = os.fork()
    except OSError as error:
        worker.close()
        raise EngineError(f"the kernel can't be forked: {error}") from error
    if pid == 0:
        _become_worker(request, worker.lifeline.reader)
    worker.lifeline.hand_over()
    status = request.status.detach()
    os.write(status, STATUS.pack(pid))
    threading.Thread(target=_reap, args=(pid, status), name="notebook-launcher-reaper", daemon=True).start()
    return worker


def _reap(pid: int, status: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what it left running, while its number is still its own
        _, raw = os.waitpid(pid, 0)
        os.write(status, STATUS.pack(os.waitstatus_to_exitcode(raw)))
    except (ChildProcessError, BrokenPipeError):
        pass  # another waiter in the kernel took its status, or nobody wants it any more
    finally:
        os.close(status)


def _become_worker(request: Fork, kernels_end: int) -> NoReturn:
    try:
        kept = [*(item.detach() for item in (request.channel, request.stdout, request.stderr)), kernels_end]
        request.status.detach()
        _close_all_but({0, 1, 2, *kept})  # the kernel's sockets above all: a restart would find its ports taken
        # By name: the launcher does not know the worker's room; this process is about to move there.
        importlib.import_module("notebook_launcher.worker.main").main(*kept)
    except BaseException:  # noqa: BLE001 - above this frame is the kernel's code, and this is not the kernel
        traceback.print_exc()
    finally:
        os._exit(1)


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - numbers are wanted, not paths
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
                os.close(int(name))
