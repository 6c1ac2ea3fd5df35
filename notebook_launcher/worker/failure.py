"""What a rank tells of the exception that ended it."""

from __future__ import annotations

import os
import pathlib
import re
import time
import traceback
from typing import TYPE_CHECKING

from notebook_launcher.core import pickling
from notebook_launcher.core.errors import PeerError
from notebook_launcher.core.events import Failed
from notebook_launcher.core.excerpts import excerpt
from notebook_launcher.worker import out_of_memory

if TYPE_CHECKING:
    from types import TracebackType

    from notebook_launcher.core.shared_memory import Packed

_PACKAGE = pathlib.Path(__file__).parent.parent
_OURS = tuple(f"{_PACKAGE / room}{os.sep}" for room in ("worker", "core"))
_MAX_TEXT = 100_000
# What gloo, NCCL and the rendezvous store say when another rank has gone: never the cause of a run's failure.
_PEER_LOST = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|Socket closed|remote process exit(ed|ing)"
    r"|unexpected exit of a remote peer|Application timeout caused pair closure|connectFullMesh failed"
    r"|Timed out (waiting \d+ms for|after \d+ seconds waiting for clients)|wait timeout after \d+ms"
    r"|store->get|recvBytes"
)
_PEER_LOST_TYPES = ("DistNetworkError", "DistStoreError")


def describe(error: BaseException) -> Failed:
    """The report of ``error``: itself where it can travel, and its text in any case."""
    _add_notes(error)
    return Failed(
        error=_packed(error),
        type_name=type(error).__qualname__,
        message=excerpt(_text(error), _MAX_TEXT),
        traceback_text=traceback_text(error),
        time_ns=time.monotonic_ns(),
        peer_lost=_is_peer_lost(error),
    )


def _add_notes(error: BaseException) -> None:
    more = out_of_memory.explain(error)
    if more and isinstance(getattr(error, "__notes__", []), list):
        error.add_note(more)


def _is_peer_lost(error: BaseException) -> bool:
    if isinstance(error, PeerError):
        return True
    if type(error).__module__.startswith("torch") and type(error).__name__ in _PEER_LOST_TYPES:
        return True
    return isinstance(error, RuntimeError) and _PEER_LOST.search(_text(error)) is not None


def _packed(error: BaseException) -> Packed | None:
    try:
        return pickling.dump_error(error)
    except BaseException:  # noqa: BLE001 - the exception's own __reduce__ may raise SystemExit too
        return None


def traceback_text(error: BaseException) -> str:
    """The traceback, chained exceptions included, without the frames that called the function."""
    try:
        lines = traceback.format_exception(type(error), error, without_our_frames(error.__traceback__))
        text = "".join(lines)
    except BaseException as problem:  # noqa: BLE001 - an exception's own __str__ may raise anything
        text = f"{type(error).__qualname__} (its traceback can't be shown: {type(problem).__name__})\n"
    return excerpt(_encodable(text), _MAX_TEXT)


def without_our_frames(frames: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins with the user's own code; all of it where there is none."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_OURS):
        first = first.tb_next
    return first or frames


def _text(error: BaseException) -> str:
    try:
        return _encodable(str(error))
    except BaseException as problem:  # noqa: BLE001 - user code
        return f"(its text can't be shown: {type(problem).__name__})"


def _encodable(text: str) -> str:
    """The text with what is not UTF-8 (half a surrogate pair) escaped, as notebooks and terminals need it."""
    return text.encode("utf-8", "backslashreplace").decode()
