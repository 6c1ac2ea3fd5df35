"""Which memory is collapsed into huge pages, and that doing so keeps its content."""

from __future__ import annotations

import subprocess
import sys

from notebook_launcher.worker.huge_pages import regions

MAPS = """\
555555554000-555555a00000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
7f0000500000-7f0000600000 rw-p 00000000 00:00 0
7f0000800000-7f0000c00000 r--p 00000000 00:00 0
7f0000c00000-7f0001000000 rw-p 00000000 103:02 77                        /lib/libx.so
7f0001000000-7f0001400000 rw-s 00000000 00:01 9                          /memfd:x (deleted)
7ffc00000000-7ffc00400000 rw-p 00000000 00:00 0                          [stack]
""".splitlines()


def test_whole_huge_pages_of_the_heap_and_of_anonymous_memory():
    assert list(regions(MAPS)) == [(0x555555600000, 0x400000), (0x7F0000000000, 0x400000)]


def test_what_was_in_memory_stays():
    code = (
        "from notebook_launcher.worker.huge_pages import collapse\n"
        "kept = [bytes([i % 256]) * 1000 for i in range(20_000)]\n"
        "done = collapse()\n"
        "assert kept == [bytes([i % 256]) * 1000 for i in range(20_000)]\n"
        "print(done >= 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
