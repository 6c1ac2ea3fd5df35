"""Which ranks wait for each other for ever: from the collective that each of them stands in.

Pure: the ranks' words go in, ranks come out. Right only for ranks that have stood there for a while: a message of one
may be older than that of another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_launcher.core.events import Pending

_SAME_SIZES = ("all_reduce", "broadcast", "reduce")  # in which each rank's tensors have as many elements
_ONE_WAY = ("broadcast", "reduce", "gather", "scatter")  # in which a rank need not wait for all


def locked(waiting: Mapping[int, Pending]) -> tuple[int, ...]:
    """The ranks, of those that wait, that no other rank can release, in order; () where there are none.

    Two cases. Ranks have come to the same collective of a process group, by its number, and it is not the same call.
    Or each waits for a rank that has not come to its collective, which itself waits so: taking away, again and again,
    whoever may still be released leaves the ranks that wait in a circle (the condition of Holt, "Some deadlock
    properties of computer systems", 1972, for requests of which all must be granted).
    """
    ranks = sorted(waiting)
    apart = {rank for rank in ranks for other in ranks if _differ(waiting[rank], waiting[other])}
    if apart:
        return tuple(sorted(apart))
    stuck = set(ranks)
    while True:
        free = {rank for rank in stuck if not any(_misses(waiting[rank], other, waiting) for other in stuck - {rank})}
        if not free:
            return tuple(sorted(stuck))
        stuck -= free


def _differ(one: Pending, other: Pending) -> bool:
    """Whether two ranks are in the same collective of a group by number, and in different ones by what they call.

    Groups that only their own ranks have made may have the same name and other ranks.
    """
    if not one.members or (one.group, one.number, one.members) != (other.group, other.number, other.members):
        return False
    return one.name != other.name or (one.name in _SAME_SIZES and _lengths(one) != _lengths(other))


def _lengths(one: Pending) -> list[object]:
    """What the tensors of a call must have in common: a broadcast only moves bytes."""
    return [size if one.name == "broadcast" else (dtype, size) for dtype, size in one.sizes]


def _misses(one: Pending, other: int, waiting: Mapping[int, Pending]) -> bool:
    """Whether ``one`` can't go on before rank ``other`` comes, which has certainly not come."""
    if one.name in _ONE_WAY:
        return False
    its = waiting[other]
    return other in one.members and its.reached.get(one.group, 0 if its.is_whole else one.number) < one.number
