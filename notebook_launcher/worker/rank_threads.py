"""Several ranks as threads of a process, where XLA drives several devices from one: on the CPU, and on TPU v2 and v3.

Each rank has its lines to the launcher, and serves them as a process of its own would. They share what a process has
but once: the environment (without RANK, which would be wrong on all but one), global variables, generators, and the
descriptors 1 and 2, which are the first rank's.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

from notebook_launcher.core import events
from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.shared_memory import unpack
from notebook_launcher.worker import serve, streams, surroundings, xla

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from types import FrameType

    from notebook_launcher.core.channel import Channel

_OWN = ("RANK", "LOCAL_RANK")  # each rank's own, which no environment of all can say


class ThreadServer(serve.Server):
    """Serves one rank on the thread that calls ``carry_out``; ``problem`` is why it can't run its function at all."""

    def __init__(self, channel: Channel, problem: BaseException | None = None) -> None:
        """Serve on ``channel``."""
        super().__init__(channel)
        self._problem = problem
        self._hears = False
        self._speaking = threading.Lock()

    def report(self, event: events.Event) -> None:
        """Send what this rank's code reports."""
        self._report(event)

    def _prepare(self, command: events.Run) -> None:
        if self._problem is not None:
            raise self._problem
        xla.check_size(command.world)

    def _load(self, command: events.Run) -> Any:
        return self._loaded(command)

    def _report(self, event: events.Event) -> None:
        with self._speaking:  # no interrupt is raised in the middle of a message
            self._channel.send(event)

    def _on_interrupt(self, action: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        with self._speaking:
            self._hears = callable(action)

    def _release(self) -> None:
        """Nothing: connections are the process's, whose other ranks go on."""

    def _interrupting(self) -> None:
        """Raise in this rank's thread alone; it comes when the thread is next in Python code."""
        with self._speaking:
            if self._hears and not self._interrupted.is_set():
                self._interrupted.set()
                exception = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main_thread), exception)


class _ByThread(io.TextIOBase):
    """A stream that each rank's thread has for its own; other threads write to the first rank's."""

    def __init__(self, first: TextIO) -> None:
        self._first = first
        self._others: dict[int, TextIO] = {}

    def give(self, stream: TextIO) -> None:
        """Let what this thread writes go to ``stream``."""
        self._others[threading.get_ident()] = stream

    @property
    def _own(self) -> TextIO:
        return self._others.get(threading.get_ident(), self._first)

    def write(self, text: str) -> int:
        return self._own.write(text)

    def flush(self) -> None:
        """Of all ranks: whoever flushes by the clock has no thread of a rank's."""
        for stream in (self._first, *list(self._others.values())):
            stream.flush()

    def fileno(self) -> int:
        return self._own.fileno()

    @property
    def buffer(self) -> Any:
        return self._own.buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._first.encoding

    def writable(self) -> bool:
        return True


class Host:
    """The process of several ranks."""

    def __init__(self, line: SocketChannel, command: events.RunThreads) -> None:
        """Serve ``command``, which came on ``line``, the first rank's own."""
        self._runs = command.runs
        self._channels = [line]
        self._kept = [one.status for one in command.lines]  # their end tells the launcher of this process's
        self._streams: list[tuple[TextIO, TextIO] | None] = [None]
        for one in command.lines:
            self._channels.append(SocketChannel(socket.socket(fileno=one.channel.detach())))
            self._streams.append((streams.text(one.stdout.detach()), streams.text(one.stderr.detach())))
        self._servers: dict[int, ThreadServer] = {}
        self._begun: set[int] = set()
        self._outputs = _ByThread(sys.stdout), _ByThread(sys.stderr)

    def run(self) -> int:
        """Run every rank; returns the process's exit code once the launcher has let all go."""
        sys.stdout, sys.stderr = self._outputs
        events.install(self._report)
        try:
            self._put_on()
            pjrt = xla.module("torch_xla._internal.pjrt")
            world, size = self._runs[0].world, len(self._runs)
            # As torch_xla.launch does in each process that it starts.
            pjrt._run_thread_per_device(  # noqa: SLF001
                world.local_rank // size, world.local_world_size // size, self._run_here, self._initialize
            )
        except BaseException as error:  # noqa: BLE001 - told by every rank that it has kept from beginning
            self._tell_all(error)
        serve.say_goodbye()
        return 0

    def _put_on(self) -> None:
        world = self._runs[0].world
        surroundings.put_on(pickle.loads(unpack(self._runs[0].surroundings)[0]), world)
        surroundings.without(*_OWN)
        xla.set_up()

    def _initialize(self, local_rank: int, local_world_size: int) -> None:
        xla.module("torch_xla._internal.pjrt").initialize_multiprocess(local_rank, local_world_size)
        found = len(xla.module("torch_xla.core.xla_model").get_xla_supported_devices())
        if found != len(self._runs):
            raise ConfigError(
                f"{len(self._runs)} ranks are to be threads of this process, and torch_xla finds {found} devices in it"
            )
        xla.seed(self._runs[0].world)

    def _run_here(self) -> None:
        """On the thread of a device: be its rank."""
        index = xla.module("torch_xla.runtime").local_ordinal() % len(self._runs)
        self._carry_out(index, None)

    def _carry_out(self, index: int, problem: BaseException | None) -> None:
        self._begun.add(index)
        own = self._streams[index]
        if own is not None:
            for output, stream in zip(self._outputs, own, strict=True):
                output.give(stream)
        server = self._servers[threading.get_ident()] = ThreadServer(self._channels[index], problem)
        server.carry_out(self._runs[index])

    def _tell_all(self, error: BaseException) -> None:
        left = [index for index in range(len(self._runs)) if index not in self._begun]
        threads = [threading.Thread(target=self._carry_out, args=(index, error)) for index in left]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _report(self, event: events.Event) -> None:
        """Of the rank whose thread this is; of the first rank where it is none's."""
        server = self._servers.get(threading.get_ident())
        if server is not None:
            server.report(event)
        else:
            self._channels[0].send(event)
