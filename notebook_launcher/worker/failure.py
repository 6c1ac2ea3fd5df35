"""What a rank tells of the exception that ended it."""

from __future__ import annotations

import pathlib
import re
import time
import traceback
from typing import TYPE_CHECKING

from notebook_launcher.core import pickling
from notebook_launcher.core.events import Failed

if TYPE_CHECKING:
    from types import TracebackType

_PACKAGE = pathlib.Path(__file__).parent.parent
_OURS = (str(_PACKAGE / "worker"), str(_PACKAGE / "core"))
_MAX_TEXT = 100_000
# What gloo and NCCL say when another rank has gone: never the cause of a run's failure.
_PEER_LOST = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|Socket closed|remote process exited"
    r"|connectFullMesh failed|Timed out waiting \d+ms for|store->get|DistNetworkError|recvBytes"
)


def describe(error: BaseException) -> Failed:
    """The report of ``error``: itself where it can travel, and its text in any case."""
    return Failed(
        error=pickling.dump_error(error),
        type_name=type(error).__qualname__,
        message=_text(error),
        traceback_text=traceback_text(error),
        time_ns=time.monotonic_ns(),
        peer_lost=isinstance(error, RuntimeError) and _PEER_LOST.search(_text(error)) is not None,
    )


def traceback_text(error: BaseException) -> str:
    """The traceback, chained exceptions included, without the frames that called the function."""
    try:
        lines = traceback.format_exception(type(error), error, without_our_frames(error.__traceback__))
        text = "".join(lines)
    except Exception as problem:  # noqa: BLE001 - an exception's own __str__ may raise anything
        text = f"{type(error).__qualname__} (its traceback can't be shown: {type(problem).__name__})\n"
    if len(text) > _MAX_TEXT:
        half = _MAX_TEXT // 2
        text = f"{text[:half]}\n... {len(text) - _MAX_TEXT} characters not shown ...\n{text[-half:]}"
    return text


def without_our_frames(frames: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins with the user's own code; all of it where there is none."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_OURS):
        first = first.tb_next
    return first or frames


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - user code
        return f"(its text can't be shown: {type(problem).__name__})"
