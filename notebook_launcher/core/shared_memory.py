"""Bytes that travel once: packed into one anonymous mapping, which every receiver maps copy-on-write.

The mapping has no name, so nothing is left behind whoever dies; its file descriptor travels over the channel.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import tempfile
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

INLINE_BYTES = 64 * 1024  # below this a copy through the channel beats a mapping
_POPULATE_READ = 22  # Linux's MADV_POPULATE_READ, which Python's mmap has no name for
_POPULATE_BYTES = 64 << 20  # a call; Python's other threads wait for its end, some milliseconds
_READ_BYTES = 8 << 20  # below this a copy beats a mapping, which holds a descriptor for as long as its content lives
_ALIGN_BYTES = 64  # what torch and numpy want of a buffer's start
_WRITE_BYTES = 1 << 30  # Linux writes at most 2 GiB a call


class FileDescriptor:
    """An open file descriptor that may travel over a channel; closed when dropped, unless ``detach`` was called."""

    def __init__(self, number: int) -> None:
        """Take over ``number``."""
        self.number = number
        self._owner = os.getpid()
        self._held: mmap.mmap | None = None
        self._lock = threading.Lock()  # a run may end, and close it, while it is still being held

    def fileno(self) -> int:
        """The descriptor's number, -1 once detached."""
        return self.number

    def detach(self) -> int:
        """Give the number to the caller, who closes it."""
        number, self.number = self.number, -1
        return number

    def hold(self, size_bytes: int) -> None:
        """Map ``size_bytes`` of it here too, every page, until it is closed.

        A page that only one process maps counts as that process's own, though it is shared: with the sender's mapping
        each receiver's figures are right whichever of them reads first.
        """
        for start in range(0, size_bytes, _POPULATE_BYTES):
            with self._lock:
                if self.number < 0:
                    return  # closed meanwhile, by the end of what it was for
                if self._held is None:
                    self._held = mmap.mmap(self.number, size_bytes, access=mmap.ACCESS_READ)
                try:
                    self._held.madvise(_POPULATE_READ, start, min(_POPULATE_BYTES, size_bytes - start))
                except OSError:
                    return  # kernels before 5.14 don't know it: then pages are mapped when read

    def close(self) -> None:
        """Close; harmless when repeated, and while another thread holds it."""
        with self._lock:
            if self._held is not None:
                self._held.close()
                self._held = None
            if self.number >= 0:
                os.close(self.detach())

    def __del__(self) -> None:
        """Close with the last reference; a process forked meanwhile may have given the number to something else."""
        if self._owner == os.getpid():
            self.close()


@dataclasses.dataclass(frozen=True)
class Packed:
    """A pickle and its out-of-band buffers: small parts inline, large ones at (offset, size) of a shared mapping."""

    parts: tuple[bytes | tuple[int, int], ...]  # the pickle itself first
    mapping: FileDescriptor | None = None
    mapping_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(len(part) if isinstance(part, bytes) else part[1] for part in self.parts)


def pack(pickle_bytes: bytes, buffers: Sequence[memoryview | bytes]) -> Packed:
    """Lay the pickle and its buffers out: one copy of each large buffer, made here."""
    parts: list[bytes | tuple[int, int]] = []
    large: list[memoryview] = []
    end = 0
    for buffer in (pickle_bytes, *buffers):
        view = memoryview(buffer).cast("B")
        if view.nbytes <= INLINE_BYTES:
            parts.append(bytes(view))
            continue
        parts.append((end, view.nbytes))
        large.append(view)
        end += -(-view.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    if not large:
        return Packed(tuple(parts))
    mapping = FileDescriptor(_anonymous_file())
    os.ftruncate(mapping.number, end)
    offsets = [part[0] for part in parts if isinstance(part, tuple)]
    for offset, view in zip(offsets, large, strict=True):
        _write(mapping.number, view, offset)
    return Packed(tuple(parts), mapping, end)


def unpack(packed: Packed) -> tuple[memoryview, list[memoryview]]:
    """The pickle and its buffers. Buffers are writable; a write copies the page and stays in this process."""
    mapped = memoryview(b"")
    if packed.mapping is not None and packed.mapping_bytes <= _READ_BYTES:
        mapped = memoryview(bytearray(packed.mapping_bytes))
        os.preadv(packed.mapping.fileno(), [mapped], 0)
    elif packed.mapping is not None:
        mapped = memoryview(mmap.mmap(packed.mapping.fileno(), packed.mapping_bytes, access=mmap.ACCESS_COPY))
    views = [
        # bytearray: numpy and torch expect to be able to write to what they are given.
        memoryview(bytearray(part)) if isinstance(part, bytes) else mapped[part[0] : part[0] + part[1]]
        for part in packed.parts
    ]
    return views[0], views[1:]


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("notebook-launcher", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(number: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < view.nbytes:
        done += os.pwrite(number, view[done : done + _WRITE_BYTES], offset + done)
