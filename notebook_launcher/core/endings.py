"""What is owed when a launched function ends, whichever way it ends: a tracker's run is closed, for one.

Code below the function registers it; the worker has it done before it reports the end. In a process that nobody
launched it is done as the interpreter ends.
"""

from __future__ import annotations

import atexit
import os
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_owed: dict[Callable[[bool], object], None] = {}  # in the order in which they were registered


def register(callback: Callable[[bool], object]) -> None:
    """Have ``callback`` called at the end, with whether the function failed."""
    _owed[callback] = None


def unregister(callback: Callable[[bool], object]) -> None:
    """It is not owed any more; nothing happens where it never was."""
    _owed.pop(callback, None)


def pending() -> bool:
    """Whether anything is owed."""
    return bool(_owed)


def run(*, failed: bool = False) -> None:
    """Do what is owed, the latest first, each once. What one raises is printed, and keeps no other from being done."""
    while True:
        try:
            callback, _ = _owed.popitem()
        except KeyError:  # asking first would not do: another thread may do the same
            return
        try:
            callback(failed)
        except BaseException:  # noqa: BLE001 - an interrupt too: the function's own end must still be reported
            traceback.print_exc()


atexit.register(run)
os.register_at_fork(after_in_child=_owed.clear)  # a forked child owes nothing: the runs are its parent's
