"""Fewer, larger pages for the fork server, so that a fork has a smaller table of pages to copy.

A fork copies an entry for each page of the process's own memory, some forty thousand with torch loaded, and that is
most of what it costs. Linux 6.1 can collapse them into pages of 2 MiB on demand (``MADV_COLLAPSE``); a worker's write
still copies 4 KiB only. Where the system can't, nothing changes.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_COLLAPSE = 25  # MADV_COLLAPSE
_HUGE_BYTES = 2 << 20
_OWN_MEMORY = re.compile(r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) rw-p \S+ \S+ 0\s*(\[heap\])?$")


def collapse() -> int:
    """Collapse what can be; returns the number of bytes that are in huge pages now. Takes about half a second."""
    try:
        maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return 0  # not Linux
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return sum(size for start, size in regions(maps) if madvise(start, size, _COLLAPSE) == 0)


def regions(maps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Start and size, in bytes, of the whole huge pages in each of a process's own mappings, as /proc lists them."""
    for line in maps:
        found = _OWN_MEMORY.match(line)
        if found is None:
            continue
        start = -(-int(found["start"], 16) // _HUGE_BYTES) * _HUGE_BYTES
        end = int(found["end"], 16) // _HUGE_BYTES * _HUGE_BYTES
        if end > start:
            yield start, end - start
