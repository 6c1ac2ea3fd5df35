"""The worker's standard streams: descriptors 1 and 2 are pipes to the launcher, so C code's output goes there too."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading

_flush_lock = threading.Lock()


def redirect(stdout: int, stderr: int) -> None:
    """Make ``stdout`` and ``stderr`` the descriptors 1 and 2, and build Python's streams anew on them."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        if source != target:
            os.close(source)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the process's life
    # A surrogate in a file name must not make print fail: it arrives escaped.
    sys.stdout = _text(1)
    sys.stderr = _text(2)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))


def _text(number: int) -> io.TextIOWrapper:
    raw = open(number, "wb", closefd=False)  # noqa: SIM115 - for the process's life
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def flush() -> None:
    """Hand over what Python has buffered. Lines go by themselves; this is for what has no newline yet."""
    with _flush_lock:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, OSError, AttributeError):  # closed or replaced by the user's code
                stream.flush()


# A data loader's worker, forked while another thread flushes, would inherit the stream's lock and wait for ever.
os.register_at_fork(before=_flush_lock.acquire, after_in_child=_flush_lock.release, after_in_parent=_flush_lock.release)
