"""What a rank has started and does not own any more: the system gives it to the nearest ancestor that adopts.

Each worker adopts, and so does the fork server. A daemon that a rank starts thus stays among the rank's descendants,
whatever session it makes, and when the rank has ended, it is the fork server's, who ends it: it has no other children.
"""

from __future__ import annotations

import ctypes
import os
import pathlib

_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # looked up now, and not in each worker
if _prctl is not None:
    _prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


def adopt() -> bool:
    """Adopt from now on what descendants leave behind; False where the system knows no such thing."""
    return _prctl is not None and _prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def children() -> set[int]:
    """The processes whose parent is this one's main thread, adopted ones too; none where the system lists none."""
    try:
        text = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return set()
    return set(map(int, text.split()))
