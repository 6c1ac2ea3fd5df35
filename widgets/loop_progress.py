"""How far a rank's loops have come: as ``Accelerator.progress`` reports it, or as read off the bars that tqdm draws."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from notebook_launcher.widgets.quantities import rate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from notebook_launcher.core.events import Steps

_BAR = re.compile(
    r"^(?:(?P<name>.*?): *)?(?P<percent>\d{1,3})%\|.*\| *(?P<done>[\d.]+[kMGT]?)/(?P<total>[\d.]+[kMGT]?) "
    r"\[(?P<elapsed>[\d:]+)<(?P<left>[\d:]+|\?)(?:, *(?P<rate>[^,\]]+))?"
)
_OPEN = re.compile(r"^(?:(?P<name>.*?): *)?(?P<done>[\d.]+[kMGT]?)[a-z]+ \[(?P<elapsed>[\d:]+), *(?P<rate>[^,\]]+)")
_MAX_BAR_CHARS = 1000  # no bar is wider, and no line of another kind must cost


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop. ``fraction`` counts what the loops inside it have done of their part."""

    place: str  # "epoch 3/10"
    fraction: float | None
    rate: str
    left_s: float | None


def counted(reported: Sequence[Steps]) -> list[Loop]:
    """The loops that a rank reports, the outermost first."""
    loops: list[Loop] = []
    inner: float | None = 0.0  # of the loop inside the one that is looked at
    for steps in reversed(reported):
        fraction = None
        if steps.total:
            fraction = min(1.0, (steps.done + (inner or 0.0) * (steps.done < steps.total)) / steps.total)
        left_s = steps.elapsed_s * (1 - fraction) / fraction if fraction and steps.elapsed_s else None
        total = "" if steps.total is None else f"/{steps.total:,}"
        name = f"{steps.name} " if steps.name else ""
        speed = rate(steps.done / steps.elapsed_s) if steps.elapsed_s > 0 else ""
        loops.append(Loop(f"{name}{steps.done:,}{total}", fraction, speed, left_s))
        inner = fraction
    return loops[::-1]


def bars(lines: Iterable[str]) -> list[Loop]:
    """The loops of the tqdm bars among ``lines``, from the uppermost, which is the outermost."""
    return [loop for line in lines if "[" in line for loop in _read(line[:_MAX_BAR_CHARS].strip())]


def time_left_s(loops: Sequence[Loop]) -> float | None:
    """Seconds until the outermost loop whose end is known has come to it."""
    return next((loop.left_s for loop in loops if loop.left_s is not None), None)


def _read(line: str) -> Iterable[Loop]:
    bar = _BAR.match(line)
    if bar is not None:
        name = f"{bar['name']} " if bar["name"] else ""
        left = bar["left"]
        speed = (bar["rate"] or "").strip()
        yield Loop(
            f"{name}{bar['done']}/{bar['total']}",
            min(1.0, int(bar["percent"]) / 100),
            "" if speed.startswith("?") else speed,
            None if left == "?" else _seconds(left),
        )
        return
    unbounded = _OPEN.match(line)
    if unbounded is not None:
        name = f"{unbounded['name']} " if unbounded["name"] else ""
        speed = unbounded["rate"].strip()
        yield Loop(f"{name}{unbounded['done']}", None, "" if speed.startswith("?") else speed, None)


def _seconds(clock: str) -> float:
    total = 0
    for part in clock.split(":"):
        total = total * 60 + int(part or 0)
    return float(total)
