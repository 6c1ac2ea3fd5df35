"""The last collective that this rank began, from torch's flight recorder: what a hung NCCL call leaves to be known.

A collective on a GPU is begun and returns at once; the thread then waits elsewhere, so that its stack does not tell.
Run with gloo; with NCCL, written for it and never run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_NUM_KEPT = "200"  # collectives that a rank remembers
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # NCCL's own record, and that of the other groups
_STATES = {"completed": "which is done", "started": "which is under way"}


def recorder_settings() -> dict[str, str]:
    """The variables that have torch keep its record; they must be set before a process group is made."""
    bindings = sys.modules.get("torch._C._distributed_c10d")
    name = "TORCH_FR_BUFFER_SIZE" if hasattr(bindings, _DUMPS[1]) else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    return {name: _NUM_KEPT}


def last_collective() -> str:
    """The last collective of this process in words, "" where torch keeps no record or there was none."""
    bindings = sys.modules.get("torch._C._distributed_c10d")
    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        dump = getattr(bindings, name, None)
        if dump is None:
            continue
        try:
            entries += json.loads(dump(True, False)).get("entries", ())  # noqa: FBT003 - torch's own: all, with collectives
        except Exception:  # noqa: BLE001, S112 - a private surface of torch's; who hangs is told of without it
            continue
    return told(max(entries, key=lambda entry: entry.get("time_created_ns", 0))) if entries else ""


def told(entry: dict[str, Any]) -> str:
    """An entry of the record, such as "all_reduce number 3 of Float (64, 10), which is under way"."""
    group, _, name = str(entry.get("profiling_name", "")).partition(":")
    shapes = zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()), strict=False)
    inputs = ", ".join(f"{dtype} ({', '.join(map(str, shape))})" for dtype, shape in shapes)
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    waiting = "which has not begun on the device" if group == "nccl" else "which is not done"
    state = "which is done" if entry.get("retired") else _STATES.get(str(entry.get("state")), waiting)
    text = f"{name or 'a collective'} number {number}" + (f" of {inputs}" if inputs else "")
    return f"{text}, {state}"
