"""The kernel's end of the fork server: started in the background, asked for workers, replaced when it has died."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from typing import IO

from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.errors import ChannelClosedError, EngineError
from notebook_launcher.core.forking import STATUS, Fork, Warm
from notebook_launcher.core.shared_memory import FileDescriptor

_open_channels: weakref.WeakSet[SocketChannel] = weakref.WeakSet()


def _hang_up_in_child() -> None:
    for channel in list(_open_channels):
        channel.abandon()


# A process that the user's code forks from the kernel must not hold our lines open past the kernel's death.
os.register_at_fork(after_in_child=_hang_up_in_child)


class LocalWorker:
    """A worker process on this machine, known by its channel, its two streams and its status pipe."""

    def __init__(self, channel: SocketChannel, stdout: int, stderr: int, status: int) -> None:
        """Take over the launcher's ends."""
        self.channel = channel
        self.streams = {"stdout": stdout, "stderr": stderr}
        self.status = status
        self._told = b""
        self.orphaned = False  # the server died before it could tell the exit code; the worker may well live
        self._process = -1  # a pidfd: signals through it can't hit a stranger that got the same pid

    @property
    def pid(self) -> int | None:
        """The process's id, None until the server has forked it."""
        return STATUS.unpack_from(self._told)[0] if len(self._told) >= STATUS.size else None

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while running or where nobody knows it."""
        known = len(self._told) >= 2 * STATUS.size
        return STATUS.unpack_from(self._told, STATUS.size)[0] if known else None

    def read_status(self) -> bool:
        """Read what the status pipe has, without waiting; True when nothing more will come."""
        while self.exit_code is None and not self.orphaned:
            try:
                data = os.read(self.status, 2 * STATUS.size)
            except BlockingIOError:
                break
            self._told += data
            self.orphaned = not data
        if self._process < 0 and self.pid is not None and self.exit_code is None and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._process = os.pidfd_open(self.pid)
        return self.exit_code is not None or self.orphaned

    @property
    def closed(self) -> bool:
        """Whether the launcher has dropped it."""
        return self.status < 0

    def signal(self, number: int) -> None:
        """Send a signal to the worker, and with SIGKILL to all that it started; harmless once it has ended."""
        pid = self.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(pid, number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process >= 0:
                signal.pidfd_send_signal(self._process, number)
            elif self.exit_code is None:
                os.kill(pid, number)

    def close(self) -> None:
        """Drop the launcher's ends of all lines, and end what the worker left running in its process group."""
        if self.exit_code is not None and self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.channel.close()
        numbers = [*self.streams.values(), self.status, self._process]
        self.streams, self.status, self._process = {}, -1, -1
        for number in numbers:
            if number >= 0:
                os.close(number)


def worker_lines(*, fresh: bool = False) -> tuple[LocalWorker, Fork]:
    """The lines of one worker to be: the launcher's ends, and the request that carries the worker's."""
    ours, theirs = SocketChannel.pair()
    _open_channels.add(ours)
    ends = {name: os.pipe() for name in ("stdout", "stderr", "status")}
    for name in ends:
        os.set_blocking(ends[name][0], False)
    worker = LocalWorker(ours, *(ends[name][0] for name in ends))
    written = {name: FileDescriptor(ends[name][1]) for name in ends}
    return worker, Fork(channel=theirs.detach(), **written, fresh=fresh)


class ForkServer:
    """One fork server process. ``preload`` are the modules that it loads before it forks."""

    def __init__(self, preload: list[str]) -> None:
        """Start it and return at once; it takes seconds to load torch, and requests wait in its channel meanwhile."""
        self.preload = list(preload)
        self.problems: tuple[str, ...] = ()
        self.warm = threading.Event()
        self._workers: list[LocalWorker] = []
        self._channel, theirs = SocketChannel.pair()
        _open_channels.add(self._channel)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server; it has no name
        self._process = self._start(theirs)
        theirs.abandon()  # the server has its own copy
        self._watcher = threading.Thread(target=self._watch, name="notebook-launcher-server", daemon=True)
        self._watcher.start()

    def _start(self, theirs: SocketChannel) -> subprocess.Popen[bytes]:
        number = theirs.fileno()
        # The path goes without "": a random.py beside the notebook must not become the server's.
        path = [entry for entry in sys.path if entry]
        code = (
            f"import sys; sys.path[:] = {path!r}; from notebook_launcher.worker.server import main; "
            f"main({number}, {self.preload!r})"
        )
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[number],
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"the fork server can't be started with {sys.executable!r}: {error}") from error

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self._process.poll() is None

    def fork(self, *, fresh: bool = False) -> LocalWorker:
        """Ask for a worker and return its lines at once; raises ``EngineError`` when the server has died."""
        worker, request = worker_lines(fresh=fresh)
        try:
            self._channel.send(request)
        except ChannelClosedError as error:
            worker.close()
            raise EngineError(f"the fork server has ended: {self.last_words()}") from error
        self._workers = [one for one in self._workers if not one.closed] + [worker]
        return worker

    @property
    def busy(self) -> bool:
        """Whether a worker that it forked is still in use."""
        return any(not one.closed for one in self._workers)

    def last_words(self) -> str:
        """What the server wrote to its standard error, its last 2,000 characters."""
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace").strip() or f"exit code {self._process.poll()}"

    def close(self) -> None:
        """End the server and every worker it has forked; returns when it is gone."""
        self._channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._watcher.join(5)
        self._log.close()

    def _watch(self) -> None:
        try:
            answer = self._channel.receive(None)
        except (ChannelClosedError, OSError, ValueError):
            return
        finally:
            self.warm.set()
        if isinstance(answer, Warm):
            self.problems = answer.problems
