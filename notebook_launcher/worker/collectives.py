"""The collectives that this rank began, from torch's flight recorder: what a hung call leaves to be known.

A collective on a GPU is begun and returns at once; the thread then waits elsewhere, so that its stack does not tell.
Run with gloo; with NCCL, written for it and never run.
"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.events import Pending

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    entries = [entry for record in _records() for entry in record.get("entries", ())]
    return told(max(entries, key=_made)) if entries else ""


def num_begun() -> dict[str, tuple[int, int]]:
    """How many collectives this rank has begun and how many of them are done, by record and group; {} for none.

    This is the cheap look: the whole record takes a tenth of a second.
    """
    found = {}
    for number, record in enumerate(_records(whole=False)):
        for group, status in record.get("pg_status", {}).items():
            begun, done = (status.get(f"last_{what}_collective", 0) for what in ("enqueued", "completed"))
            found[f"{number}/{group}"] = (int(begun), int(done))
    return found


def pending(thread: int, rank: int, world_size: int) -> Pending | None:
    """The collective that ``thread`` has waited for longest, for a process group of gloo's.

    None where the newest that it began is done, where torch keeps no record, and where the default process group is
    another than that of this launch's ``rank`` and ``world_size``: its ranks would have other numbers.
    """
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    default = getattr(world, "default_pg", None)
    if default is None or (default.rank(), default.size()) != (rank, world_size):
        return None
    members = {str(name): tuple(world.pg_group_ranks.get(group, ())) for group, name in list(world.pg_names.items())}
    entries = [entry for record in _records() for entry in record.get("entries", ()) if not entry.get("is_p2p")]
    present = _of_present_groups([entry for entry in entries if _group(entry) in members])
    own = [entry for entry in present if _is_of(thread, entry)]
    waiting = [entry for entry in own if not _is_done(entry)]
    if not waiting or _is_done(max(own, key=_made)):
        return None
    oldest = min(waiting, key=_made)
    reached: dict[str, int] = {}
    for entry in present:
        reached[_group(entry)] = max(reached.get(_group(entry), 0), entry.get("collective_seq_id", 0))
    groups = {entry.get("pg_id") for entry in entries}
    is_whole = len(groups) >= len(num_begun())  # else a group's collectives may be so long ago that none is kept
    name, group = str(oldest.get("profiling_name", "")).partition(":")[2], _group(oldest)
    number = oldest.get("collective_seq_id", 0)
    return Pending(group, number, name, _inputs(oldest), _sizes(oldest), members[group], reached, is_whole)


def _of_present_groups(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those of a group that was destroyed, whose name a later one has: its calls may never be done."""
    newest: dict[str, int] = {}
    for entry in entries:
        newest[_group(entry)] = max(newest.get(_group(entry), 0), entry.get("pg_id", 0))
    return [entry for entry in entries if entry.get("pg_id", 0) == newest[_group(entry)]]


def _is_of(thread: int, entry: dict[str, Any]) -> bool:
    """Whether ``thread`` began it, or autograd for it: a checkpoint's thread, for one, waits for itself."""
    began = entry.get("thread_id")
    return began is None or str(began) == str(thread) or str(entry.get("thread_name", "")).startswith("pt_autograd")


def _is_done(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _records(*, whole: bool = True) -> Iterator[dict[str, Any]]:
    """What torch has recorded; with ``whole=False`` without the single collectives."""
    bindings = sys.modules.get("torch._C._distributed_c10d")
    for name in _DUMPS:
        dump = getattr(bindings, name, None)
        if dump is None:
            continue
        try:
            yield json.loads(dump(whole, False))  # noqa: FBT003 - torch's own: with collectives, not only active ones
        except Exception:  # noqa: BLE001, S112 - a private surface of torch's; who hangs is told of without it
            continue


def _made(entry: dict[str, Any]) -> int:
    return int(entry.get("time_created_ns", 0))


def _group(entry: dict[str, Any]) -> str:
    return str((entry.get("process_group") or [""])[0])


def _sizes(entry: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """The dtype and number of elements of each tensor given."""
    shapes = zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()), strict=False)
    return tuple((str(dtype), math.prod(shape)) for dtype, shape in shapes)


def told(entry: dict[str, Any]) -> str:
    """An entry of the record, such as "all_reduce number 3 of Float (64, 10), which is under way"."""
    group, _, name = str(entry.get("profiling_name", "")).partition(":")
    inputs = _inputs(entry)
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    waiting = "which has not begun on the device" if group == "nccl" else "which is not done"
    state = "which is done" if entry.get("retired") else _STATES.get(str(entry.get("state")), waiting)
    text = f"{name or 'a collective'} number {number}" + (f" of {inputs}" if inputs else "")
    return f"{text}, {state}"


def _inputs(entry: dict[str, Any]) -> str:
    shapes = zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()), strict=False)
    return ", ".join(f"{dtype} ({', '.join(map(str, shape))})" for dtype, shape in shapes)
