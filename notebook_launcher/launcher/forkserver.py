"""The kernel's end of the fork server: started in the background, asked for workers, replaced when it has died."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from typing import IO, TYPE_CHECKING

from notebook_launcher.core import config
from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.errors import ChannelClosedError, EngineError
from notebook_launcher.core.forking import STATUS, Fork, Loading, Warm
from notebook_launcher.core.lifeline import Lifeline
from notebook_launcher.core.shared_memory import FileDescriptor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DEATH_S = 0.5  # from a process's last word to the moment that the system counts it as gone
_ANSWER_S = 2.0  # how long a warm server may sleep over what it was asked; forking takes milliseconds
_BUSY_S = 20.0  # and how long, where it does not sleep: the machine may be short of memory
_READ_AT_LOAD = {"PYTORCH_ENABLE_MPS_FALLBACK": "1"}  # on a Mac: what has no kernel on its GPU runs on the CPU
_open_channels: weakref.WeakSet[SocketChannel] = weakref.WeakSet()


def _hang_up_in_child() -> None:
    for channel in list(_open_channels):
        channel.abandon()


# A process that the user's code forks from the kernel must not hold our lines open past the kernel's death.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hang_up_in_child)


class LocalWorker:
    """A worker process on this machine, known by its channel, its two streams and its status pipe."""

    def __init__(self, channel: SocketChannel, stdout: int, stderr: int, status: int) -> None:
        """Take over the launcher's ends."""
        self.channel = channel
        self.streams = {"stdout": stdout, "stderr": stderr}
        self.status = status
        self.server: ForkServer | None = None  # who makes it
        self._told = b""
        self.orphaned = False  # the server died before it could tell the exit code; the worker may well live
        self._process = -1  # a pidfd: signals through it can't hit a stranger that got the same pid
        self.missed = False  # it was gone before it had taken its command
        self._owed_since_s: float | None = None  # since when its server owes it a word
        self.lifeline: Lifeline | None = None  # its own, where no server has one for it

    @property
    def pid(self) -> int | None:
        """The process's id, None until the server has forked it."""
        return STATUS.unpack_from(self._told)[0] if len(self._told) >= STATUS.size else None

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while running or where nobody knows it."""
        known = len(self._told) >= 2 * STATUS.size
        return STATUS.unpack_from(self._told, STATUS.size)[0] if known else None

    @property
    def notes(self) -> Sequence[str]:
        """What the server that made it could not preload."""
        return self.server.notes if self.server is not None else ()

    def why_never_made(self) -> str:
        """For a worker whose status ended without a pid: why there never was a process."""
        if self.server is not None and self.server.ended(within_s=_DEATH_S):
            return f"the fork server ended before it had made the process: {self.server.last_words()}"
        return "the system refused another process"

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
    def gone(self) -> bool:
        """Whether its process has ended, also where its server does not know it yet."""
        return self.read_status() or self._has_ended()

    def _has_ended(self) -> bool:
        if self._process < 0:
            return False
        poller = select.poll()
        poller.register(self._process, select.POLLIN)  # a pidfd can be read once the process has ended
        return bool(poller.poll(0))

    def see_to(self, *, hung_up: bool) -> None:
        """Where its server owes a word on it, its pid or its exit code, see to it that it comes, or ends instead.

        To be called a few times a second. ``hung_up``: whether its channel has ended.
        """
        if self.server is None or not self._is_owed_a_word(hung_up=hung_up):
            self._owed_since_s = None
            return
        if self._owed_since_s is None:
            self._owed_since_s = time.monotonic()
        hangs = self.server.press(self._owed_since_s)
        if hangs:
            self.read_status()  # it may have answered since the last look, and sleep for that reason
            if self._is_owed_a_word(hung_up=hung_up):
                self.server.give_up(hangs)

    def _is_owed_a_word(self, *, hung_up: bool) -> bool:
        if self.exit_code is not None or self.orphaned:
            return False
        return self.pid is None or (self._has_ended() if self._process >= 0 else hung_up)

    @property
    def closed(self) -> bool:
        """Whether the launcher has dropped it."""
        return self.status < 0

    def signal(self, number: int) -> None:
        """Send a signal to the worker, and with SIGKILL to all that it started; harmless once it has ended."""
        if self.pid is None:
            self.read_status()
        pid = self.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL and self.exit_code is None:
                os.killpg(pid, number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process >= 0:
                signal.pidfd_send_signal(self._process, number)
            elif self.exit_code is None:
                os.kill(pid, number)

    def close(self) -> None:
        """Drop the launcher's ends of all lines. What the worker left running, its server has ended."""
        if self.orphaned and self.pid is not None:  # no server has
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.channel.close()
        if self.lifeline is not None:
            self.lifeline.close()
        numbers = [*self.streams.values(), self.status, self._process]
        self.streams, self.status, self._process = {}, -1, -1
        for number in numbers:
            if number >= 0:
                os.close(number)


def worker_lines(*, fresh: bool = False) -> tuple[LocalWorker, Fork]:
    """The lines of one worker to be: the launcher's ends, and the request that carries the worker's.

    Raises ``EngineError`` where the system has no descriptors left.
    """
    with contextlib.ExitStack() as opened:
        try:
            ours, theirs = SocketChannel.pair()
            opened.callback(ours.close)
            opened.callback(theirs.close)
            ends = {}
            for name in ("stdout", "stderr", "status"):
                ends[name] = os.pipe()
                for number in ends[name]:
                    opened.callback(os.close, number)
        except OSError as error:
            raise EngineError(
                f"the lines to a worker can't be opened: {error}. Ask for fewer processes, or raise the limit of open "
                "files (ulimit -n)."
            ) from error
        opened.pop_all()
    _open_channels.add(ours)
    for name in ends:
        os.set_blocking(ends[name][0], False)
    worker = LocalWorker(ours, *(ends[name][0] for name in ends))
    written = {name: FileDescriptor(ends[name][1]) for name in ends}
    return worker, Fork(channel=theirs.detach(), **written, fresh=fresh)


def server_environment(environment: Mapping[str, str], platform: str) -> dict[str, str]:
    """What the server is started with: the kernel's environment, and what torch reads only as it is loaded."""
    return {**(_READ_AT_LOAD if platform == "darwin" else {}), **environment}


class ForkServer:
    """One fork server process. It loads the modules in ``preload``, then those in ``wanted``, before it forks."""

    def __init__(self, preload: Sequence[str], wanted: Sequence[str] = ()) -> None:
        """Start it and return at once; it takes seconds to load torch, and requests wait in its channel meanwhile.

        ``wanted`` are those that the user asked for: where one can't be loaded, ``notes`` say so.
        """
        self.preload = [*preload, *wanted]
        self.wanted = tuple(wanted)
        self.problems: tuple[str, ...] = ()
        self.warm = threading.Event()
        self._warm_s = math.inf
        self._given_up = ""  # why it was ended from here
        self._loading = ""  # the module that it loads now
        self._workers: list[LocalWorker] = []
        self._channel, theirs = SocketChannel.pair()
        _open_channels.add(self._channel)
        self._lifeline = Lifeline()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server; it has no name
        self._process = self._start(theirs)
        theirs.abandon()  # the server has its own copy
        self._watcher = threading.Thread(target=self._watch, name="notebook-launcher-server", daemon=True)
        self._watcher.start()

    def _start(self, theirs: SocketChannel) -> subprocess.Popen[bytes]:
        # Numbers from 3 on: 0 to 2 become the server's streams.
        number, kernels_end = (fcntl.fcntl(one, fcntl.F_DUPFD, 3) for one in (theirs.fileno(), self._lifeline.reader))
        # The path goes without "": a random.py beside the notebook must not become the server's.
        path = [entry for entry in sys.path if entry]
        code = (
            f"import sys; sys.path[:] = {path!r}; from notebook_launcher.worker.server import main; "
            f"main({number}, {kernels_end}, {self.preload!r})"
        )
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[number, kernels_end],
                env=server_environment(config.snapshot(), sys.platform),
                start_new_session=True,
                cwd="/",  # the notebook's may be gone
            )
        except OSError as error:
            self._channel.close()
            self._lifeline.close()
            theirs.close()
            self._log.close()
            raise EngineError(f"the fork server can't be started with {sys.executable!r}: {error}") from error
        finally:
            os.close(number)
            os.close(kernels_end)
            self._lifeline.hand_over()

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self._process.poll() is None

    def ended(self, within_s: float) -> bool:
        """Whether the server is gone, or will be within that time."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def notes(self) -> Sequence[str]:
        """Which of the modules that the user wanted it could not load, a line each."""
        told = [text for text in self.problems if text.partition(":")[0] in self.wanted]
        return [f"preload={text}; it is not loaded before the ranks start, and each imports it itself" for text in told]

    def fork(self, *, fresh: bool = False) -> LocalWorker:
        """Ask for a worker and return its lines at once; raises ``EngineError`` when the server has died."""
        worker, request = worker_lines(fresh=fresh)
        worker.server = self
        try:
            self._channel.send(request)
        except ChannelClosedError as error:
            worker.close()
            for end in (request.channel, request.stdout, request.stderr, request.status):
                end.close()
            words = self.last_words() if self.ended(_DEATH_S) else str(error)
            raise EngineError(f"the fork server can't be asked for a worker: {words}") from error
        self._workers = [one for one in self._workers if not one.closed] + [worker]
        return worker

    @property
    def busy(self) -> bool:
        """Whether a worker that it forked is still in use."""
        return any(not one.closed for one in self._workers)

    def press(self, owed_since_s: float) -> str:
        """Let it go on if it was stopped: it has owed an answer since then. Returns how it hangs, "" where it does not.

        What it still loads takes as long as it takes.
        """
        self._process.send_signal(signal.SIGCONT)
        waited_s = time.monotonic() - max(owed_since_s, self._warm_s)
        if waited_s < _ANSWER_S or not self.alive:
            return ""
        import psutil  # only now: loading the extension takes no time for it

        with contextlib.suppress(psutil.Error):
            status = psutil.Process(self.pid).status()
            if status == psutil.STATUS_SLEEPING or waited_s >= _BUSY_S:
                return f"it did not answer for {waited_s:.1f} s ({status}), and was ended"
        return ""

    def give_up(self, reason: str) -> None:
        """End it: it hangs, and nobody else will."""
        self._given_up = reason
        self._process.kill()

    def last_words(self) -> str:
        """What is known of a server's end: its exit code, what it was loading, the last that it wrote."""
        self._watcher.join(_DEATH_S)  # until it has read all that the server told
        code = self._process.poll()
        how = f"signal {-code} ({signal.strsignal(-code)})" if code is not None and code < 0 else f"exit code {code}"
        how = self._given_up or how
        if self._loading:
            how += f" while it loaded {self._loading!r}"
            how += " (preload)" if self._loading in self.wanted else ""
        with contextlib.suppress(ValueError):  # closed, with all that it held
            size = os.fstat(self._log.fileno()).st_size
            text = os.pread(self._log.fileno(), 2000, max(0, size - 2000)).decode(errors="replace").strip()
            how += f"\n{text}" if text else ""
        return how

    def close(self) -> None:
        """End the server and every worker it has forked; returns when it is gone."""
        self._channel.close()
        self._process.send_signal(signal.SIGCONT)  # it may have been stopped
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lifeline.close()  # and with it what it could not end
        self._watcher.join(5)
        self._log.close()

    def _watch(self) -> None:
        try:
            while not self.warm.is_set():
                answer = self._channel.receive(None)
                if isinstance(answer, Loading):
                    self._loading = answer.module
                elif isinstance(answer, Warm):
                    self.problems, self._loading = answer.problems, ""
                    self._warm_s = time.monotonic()
                    self.warm.set()
        except (ChannelClosedError, OSError, ValueError):
            self.warm.set()  # who waits for it finds that it has died
