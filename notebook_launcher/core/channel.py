"""The line between the launcher and one worker: ``send``, ``receive(timeout_s)``, ``close``.

``SocketChannel`` is one end of an unnamed Unix socket pair: nobody else can connect, and when either process dies,
however it dies, the other reads its end. ``MemoryChannel`` is the same within one process, for tests.
"""

from __future__ import annotations

import collections
import contextlib
import io
import pickle
import select
import socket
import struct
import threading
import time
from typing import Any, Protocol

from notebook_launcher.core.errors import ChannelClosedError
from notebook_launcher.core.shared_memory import FileDescriptor

_HEADER = struct.Struct("!QI")  # bytes of the body, file descriptors that came with it
_READ_BYTES = 1 << 16
_DESCRIPTOR = struct.Struct("i")
_ROOM_FOR_DESCRIPTORS = socket.CMSG_LEN(64 * _DESCRIPTOR.size)


class Channel(Protocol):
    """A duplex line that carries whole messages, in order."""

    def send(self, message: object) -> None:
        """Deliver ``message``; raise ``ChannelClosedError`` when the other end is gone."""

    def receive(self, timeout_s: float | None) -> Any:
        """Return the next message.

        ``timeout_s`` None waits without limit, 0 only looks. Raises ``TimeoutError`` when no message came in time,
        ``ChannelClosedError`` when none ever will.
        """

    @property
    def drained(self) -> bool:
        """Whether all was received that had come by the last look: to look again at once would find nothing."""

    def close(self) -> None:
        """Hang up; harmless when repeated."""

    def abandon(self) -> None:
        """Drop this process's hold of the line without hanging up: after a fork it is the other process's."""


class _Pickler(pickle.Pickler):
    """Collects the file descriptors of a message, which travel beside its bytes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.descriptors: list[int] = []

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, FileDescriptor):
            return None
        if obj.fileno() not in self.descriptors:
            self.descriptors.append(obj.fileno())
        return self.descriptors.index(obj.fileno())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, descriptors: list[FileDescriptor]) -> None:
        super().__init__(file)
        self._descriptors = descriptors

    def persistent_load(self, pid: int) -> FileDescriptor:
        return self._descriptors[pid]


class SocketChannel:
    """One end of a Unix socket pair. ``send`` is safe from several threads; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over ``sock``, a connected stream socket in blocking mode."""
        self._socket = sock
        self._lock = threading.Lock()
        self._unread = bytearray()
        self._descriptors: collections.deque[FileDescriptor] = collections.deque()
        self._was_short = False  # the last read found less than it had room for

    @property
    def drained(self) -> bool:
        """Whether all was received that had come by the last look; see ``Channel.drained``."""
        return self._was_short and not self._has_frame

    @classmethod
    def pair(cls) -> tuple[SocketChannel, SocketChannel]:
        """Two connected ends."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def fileno(self) -> int:
        """The socket's descriptor, to wait on; -1 once closed."""
        return self._socket.fileno()

    def detach(self) -> FileDescriptor:
        """Give up the socket: its descriptor, to be sent to the process that will use it."""
        return FileDescriptor(self._socket.detach())

    def send(self, message: object) -> None:
        """Deliver ``message`` with the file descriptors in it; blocks while the other end reads slower than this."""
        body = io.BytesIO()
        pickler = _Pickler(body)
        pickler.dump(message)
        data = memoryview(_HEADER.pack(body.getbuffer().nbytes, len(pickler.descriptors)) + body.getvalue())
        with self._lock:
            try:
                done = socket.send_fds(self._socket, [data], pickler.descriptors) if pickler.descriptors else 0
                self._socket.sendall(data[done:])
            except OSError as error:
                msg = f"the process at the other end is gone ({error})"
                raise ChannelClosedError(msg) from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; see ``Channel.receive``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            frame = self._take_frame()
            if frame is not None:
                body, descriptors = frame
                return _Unpickler(io.BytesIO(body), descriptors).load()
            if self._socket.fileno() < 0:
                msg = "the channel was closed on this side"
                raise ChannelClosedError(msg)
            if timeout_s != 0:
                self._wait(deadline)
            if not self._read() and timeout_s == 0:
                raise TimeoutError

    def close(self) -> None:
        """Hang up and drop what was not read; the other end, and a thread that waits here, notice at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.abandon()

    def abandon(self) -> None:
        """Close this process's copy only: after a fork, the line belongs to the other process."""
        self._socket.close()
        self._descriptors.clear()

    def _wait(self, deadline: float | None) -> None:
        """Return when there is something to read. ``poll``, since ``select`` refuses descriptors past 1,023."""
        left_ms = None if deadline is None else max(0, round((deadline - time.monotonic()) * 1000))
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLIN)
        if not poller.poll(left_ms):
            raise TimeoutError

    def _read(self) -> bool:
        """Read what is there; whether there was anything."""
        try:
            # Not first asking whether there is anything: each call lets the kernel's other threads go first, five
            # milliseconds long where one of them computes. And not by recv_fds, which forgets the flag in Python 3.11.
            data, sent_along, _, _ = self._socket.recvmsg(_READ_BYTES, _ROOM_FOR_DESCRIPTORS, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._was_short = True
            return False
        except OSError as error:
            msg = f"the process at the other end is gone ({error})"
            raise ChannelClosedError(msg) from error
        for _, _, numbers in sent_along:
            self._descriptors.extend(FileDescriptor(number) for (number,) in _DESCRIPTOR.iter_unpack(numbers))
        if not data:
            msg = "the process at the other end is gone"
            raise ChannelClosedError(msg)
        self._was_short = len(data) < _READ_BYTES
        self._unread += data
        return True

    @property
    def _has_frame(self) -> bool:
        had = len(self._unread) - _HEADER.size
        return had >= 0 and had >= _HEADER.unpack_from(self._unread)[0]

    def _take_frame(self) -> tuple[bytes, list[FileDescriptor]] | None:
        if not self._has_frame:
            return None
        size, num_descriptors = _HEADER.unpack_from(self._unread)
        body = bytes(self._unread[_HEADER.size : _HEADER.size + size])
        del self._unread[: _HEADER.size + size]
        return body, [self._descriptors.popleft() for _ in range(num_descriptors)]


class _Inbox:
    def __init__(self) -> None:
        self.messages: collections.deque[object] = collections.deque()
        self.changed = threading.Condition()
        self.closed = False


class MemoryChannel:
    """The same line within one process: what ``send`` is given, ``receive`` at the other end returns."""

    def __init__(self, inbox: _Inbox, outbox: _Inbox) -> None:
        """Read from ``inbox``, write to ``outbox``; ``pair`` makes two ends that are connected."""
        self._inbox = inbox
        self._outbox = outbox

    @classmethod
    def pair(cls) -> tuple[MemoryChannel, MemoryChannel]:
        """Two connected ends."""
        one, other = _Inbox(), _Inbox()
        return cls(one, other), cls(other, one)

    @property
    def drained(self) -> bool:
        """Whether all was received that had come; see ``Channel.drained``."""
        with self._inbox.changed:
            return not self._inbox.messages and not self._inbox.closed

    def send(self, message: object) -> None:
        """Put ``message`` into the other end's inbox."""
        with self._outbox.changed:
            if self._outbox.closed:
                msg = "the other end was closed"
                raise ChannelClosedError(msg)
            self._outbox.messages.append(message)
            self._outbox.changed.notify_all()

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; see ``Channel.receive``."""
        inbox = self._inbox
        with inbox.changed:
            inbox.changed.wait_for(lambda: inbox.messages or inbox.closed, timeout_s)
            if inbox.messages:
                return inbox.messages.popleft()
            if inbox.closed:
                msg = "the other end was closed"
                raise ChannelClosedError(msg)
            raise TimeoutError

    def close(self) -> None:
        """Hang up: the other end reads what was sent, then ``ChannelClosedError``."""
        for inbox in (self._inbox, self._outbox):
            with inbox.changed:
                inbox.closed = True
                inbox.changed.notify_all()

    def abandon(self) -> None:
        """Do nothing: a line within one process has no other holder."""
