"""The worker's standard streams: descriptors 1 and 2 are pipes to the launcher, so C code's output goes there too."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import getpass
import io
import os
import sys
import threading
from typing import Any, NoReturn

_LINE_BUFFERED = 1  # C's _IOLBF, the same on Linux and macOS

_flush_lock = threading.Lock()
_c_stdout: tuple[Any, Any] | None = None  # C's fflush and the stream that it is for


def redirect(stdout: int, stderr: int) -> None:
    """Make ``stdout`` and ``stderr`` the descriptors 1 and 2, and build Python's streams anew on them."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        if source != target:
            os.close(source)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the process's life
    # A surrogate in a file name must not make print fail: it arrives escaped.
    sys.stdout = text(1)
    sys.stderr = text(2)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    builtins.input = getpass.getpass = _refuse_to_ask
    buffer_c_by_lines()


def text(number: int) -> io.TextIOWrapper:
    """A stream to descriptor ``number``, for the process's life; it takes what can't be encoded, too."""
    raw = open(number, "wb", closefd=False)  # noqa: SIM115 - for the process's life
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _refuse_to_ask(*_: object, **__: object) -> NoReturn:
    """Stand in for ``input`` and ``getpass``: several ranks would ask, and none of them owns the cell."""
    raise EOFError(
        "a rank can't ask for input. Ask in the notebook before the launch, and pass the answer as an argument: "
        "launch(train, args=(answer,))"
    )


def buffer_c_by_lines() -> None:
    """Make the lines of C code go as they come, as in a terminal: for a pipe it would collect some kilobytes first.

    What is forked from this process goes on so.
    """
    global _c_stdout  # noqa: PLW0603 - the process has one
    if _c_stdout is not None:
        return
    library = ctypes.CDLL(None)
    try:
        stream = ctypes.c_void_p.in_dll(library, "__stdoutp" if sys.platform == "darwin" else "stdout")
        library.setvbuf(stream, None, _LINE_BUFFERED, ctypes.c_size_t(0))
    except (AttributeError, ValueError):  # another C library, with other names
        return
    _c_stdout = library.fflush, stream


def flush() -> None:
    """Hand over what Python and C have buffered. Lines go by themselves; this is for what has no newline yet."""
    with _flush_lock:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the user's code may have closed it, or put anything in its place
                stream.flush()
        if _c_stdout is not None:
            function, stream = _c_stdout
            function(stream)


# A data loader's worker, forked while another thread flushes, would inherit the stream's lock and wait for ever.
os.register_at_fork(before=_flush_lock.acquire, after_in_child=_flush_lock.release, after_in_parent=_flush_lock.release)
