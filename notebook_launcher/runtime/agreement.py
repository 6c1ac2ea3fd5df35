"""Whether the ranks do the same: where they don't, torch would wait for ever, abort the process or corrupt the data.

Shapes and dtypes are compared before tensors travel. With the debug switch the calls themselves are, through the
process group's store, since there is no collective that ranks in different ones could join.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import linecache
import logging
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.core import endings
from notebook_launcher.runtime import trees

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

is_on = False  # the debug switch
_NOT_THE_USERS = (str(pathlib.Path(__file__).parent.parent), contextlib.__file__)
_TELL_S = 10.0  # after which a rank says whom it waits for
_LIMIT_S = 1800.0  # as long as torch's collectives wait
_MORAL = "Every rank must make the same calls in the same order, none under a condition that only some ranks meet."
_logger = logging.getLogger(__name__)

Call = list[Any]  # name, the user's line, and path, dtype and shape of each tensor; of what JSON can carry


def switch(*, on: bool) -> None:
    """Turn the debug switch; every rank of a process group does."""
    global is_on  # noqa: PLW0603 - the process's switch, of which there is one
    is_on = on
    if on:
        _log()


def check(call: str, tree: Any = None) -> None:
    """Raise, on every rank, where the ranks can't do ``call`` together; without a tree only the debug switch looks.

    ``ValueError`` for tensors in ``tree`` that differ in shape or dtype; ``RuntimeError`` for different calls.
    """
    if is_on:
        if dist.is_initialized() and dist.get_world_size() > 1:
            _refuse_differences(_exchanged([call, _users_line(), list(_tensors(tree))]))
    elif tree is not None:
        tensors = list(_tensors(tree))
        if not alike(tensors):
            calls: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(calls, [call, _users_line(), tensors])
            _refuse_differences(calls)


def alike(thing: object, group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks' things have the same ``repr``; one small exchange, whatever their size."""
    number = int.from_bytes(hashlib.blake2b(repr(thing).encode(), digest_size=7).digest(), "big")
    highest, lowest = largest(number, -number, group=group)
    return highest == -lowest


def largest(*numbers: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """The largest of each number over all ranks, or those of ``group``."""
    found = torch.tensor(numbers, dtype=torch.int64, device=carrier())
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return found.tolist()


def carrier() -> torch.device | None:
    """A device whose tensors the process group carries: wherever it can the CPU's, for which nobody has to wait."""
    return torch.device("cpu") if "cpu:" in dist.get_backend_config() else torch.accelerator.current_accelerator()


def _tensors(tree: Any, path: str = "") -> Iterator[str]:
    if isinstance(tree, torch.Tensor):
        yield f"{path} {str(tree.dtype).removeprefix('torch.')} {tuple(tree.shape)}".strip()
    else:
        for key, child in trees.children(tree):
            yield from _tensors(child, f"{path}[{key!r}]" if isinstance(key, str | int) else f"{path}[{type(key)}]")


def _users_line() -> str:
    frame = sys._getframe()  # noqa: SLF001 - the documented way to look at the callers
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"line {frame.f_lineno} of {frame.f_code.co_name}" + (f": {text}" if text else "")


class _Log:
    """The calls in one process group, by number and rank, where all ranks can read them."""

    latest: _Log | None = None
    num_logs = 0

    def __init__(self, group: Any) -> None:
        self.group, self.number, _Log.latest = group, 0, self
        _Log.num_logs += 1  # a later group may have the same store
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other way to it
        self.store = dist.PrefixStore(f"notebook_launcher/calls/{_Log.num_logs}", store)  # type: ignore[attr-defined]
        endings.register(self.end)

    def end(self, failed: bool) -> None:  # noqa: FBT001 - core.endings calls it
        """Leave word that this rank calls nothing more; where it failed, whoever launched it ends the others."""
        if not failed and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the store has gone with its host
                self.store.set(f"ended/{dist.get_rank()}", "")


def _log() -> _Log:
    log = _Log.latest
    return log if log is not None and log.group is dist.group.WORLD else _Log(dist.group.WORLD)


def _exchanged(call: Call) -> list[Call]:
    """What each rank calls now; waits for those who are late, and raises where one never comes."""
    log = _log()
    log.number += 1
    log.store.set(f"{log.number}/{dist.get_rank()}", json.dumps(call))
    log.store.delete_key(f"{log.number - 2}/{dist.get_rank()}")  # all have read it: they came to the one after
    return [_awaited(log, other, call) for other in range(dist.get_world_size())]


def _awaited(log: _Log, other: int, call: Call) -> Call:
    key, began_s, is_told = f"{log.number}/{other}", time.monotonic(), False
    waits = f"rank {dist.get_rank()} waits in {call[0]} ({call[1]}) for rank {other}"
    while True:
        has_ended = log.store.check([f"ended/{other}"])  # asked first: it may call and end in between
        if log.store.check([key]):
            return json.loads(log.store.get(key))  # type: ignore[no-any-return]
        waited_s = time.monotonic() - began_s
        if has_ended or waited_s > _LIMIT_S:
            fate = "has ended" if has_ended else f"has not come for {_LIMIT_S:g} s"
            raise RuntimeError(f"{waits}, which {fate}. {_MORAL}")
        if waited_s > _TELL_S and not is_told:
            is_told = True
            _logger.warning("%s.", waits)
        time.sleep(min(max(waited_s, 0.001), 0.05))


def _refuse_differences(calls: Sequence[Call]) -> None:
    name, _, tensors = calls[0]
    if any(call[0] != name for call in calls):
        places = _by_rank([f"{call[0]}, {call[1]}" for call in calls])
        raise RuntimeError(f"the ranks are in different calls, where they would wait for ever:{places}\n{_MORAL}")
    if any(call[2] != tensors for call in calls):
        columns = itertools.zip_longest(*(call[2] for call in calls), fillvalue="no tensor")
        first = next(column for column in columns if len(set(column)) > 1)
        found = _by_rank([f"{tensor}, {call[1]}" for tensor, call in zip(first, calls, strict=True)])
        raise ValueError(
            f"{name} needs the same tensors on every rank, and these differ:{found}\npad_across_processes makes "
            "lengths equal, gather_for_metrics joins a loader's batches of any length, gather_object takes anything."
        )


def _by_rank(texts: Sequence[str]) -> str:
    """A line for each text, with the ranks whose it is."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    return "".join(f"\n  rank{'s' * (len(who) > 1)} {', '.join(who)}: {text}" for text, who in ranks.items())
