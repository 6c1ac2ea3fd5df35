"""``Curve``: a metric's points, thinned as they come: a million of them keep their shape in a few hundred buckets.

Pure data, no drawing. Each bucket keeps its first, smallest, largest and last point (as M4 does: Jugel et al., "M4: A
Visualization-Oriented Time Series Data Aggregation", VLDB 2014), so that a spike of one step stays to be seen.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from notebook_launcher.launcher.metric_rows import MetricRows, Stretch

MAX_BUCKETS = 256
MAX_PLOTS = 24  # of a run that logs more metrics, the first ones are drawn
MAX_SERIES = 8  # in one plot
_BUCKETS_SHOWN = 128  # a plot is some 260 points wide
_NOT_METRICS = frozenset({"rank", "step", "time_s"})
_FEW = 8  # points that are taken one by one: looking at them first would cost more
_SLICE = 4096  # points; where one isn't finite, so many are taken one by one


class Point(NamedTuple):
    """A value at a step (or, where no step was given, at the point's number)."""

    x: float
    y: float


@dataclasses.dataclass(slots=True)
class _Bucket:
    first: Point
    low: Point
    high: Point
    last: Point

    def add(self, point: Point) -> None:
        if point.y < self.low.y:
            self.low = point
        if point.y > self.high.y:
            self.high = point
        self.last = point

    def absorb(self, later: _Bucket) -> None:
        self.low = min(self.low, later.low, key=lambda point: point.y)
        self.high = max(self.high, later.high, key=lambda point: point.y)
        self.last = later.last

    def points(self) -> Iterator[Point]:
        before = None
        for point in sorted({self.first, self.low, self.high, self.last}):
            if point != before:
                yield point
            before = point


class Curve:
    """The points of one metric. Adding one costs the same whatever came before, and memory stays bounded.

    Values that aren't finite are counted, not drawn.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        """Keep at most ``max_buckets`` buckets, of up to four points."""
        self.num_points = 0
        self.num_not_finite = 0
        self.last: Point | None = None
        self._max_buckets = max_buckets
        self._per_bucket = 1
        self._in_last = 0
        self._buckets: list[_Bucket] = []

    def add(self, value: float, step: float | None = None) -> None:
        """Take in ``value`` at ``step``; without one, at its number from 0."""
        point = Point(float(self.num_points if step is None else step), float(value))
        self.num_points += 1
        if not (math.isfinite(point.x) and math.isfinite(point.y)):
            self.num_not_finite += 1
            return
        self.last = point
        if len(self._buckets) >= self._max_buckets and self._in_last >= self._per_bucket:
            self._halve()
        if self._buckets and self._in_last < self._per_bucket:
            self._buckets[-1].add(point)
            self._in_last += 1
        else:
            self._buckets.append(_Bucket(point, point, point, point))
            self._in_last = 1

    def extend(self, values: Sequence[float], steps: Sequence[float]) -> None:
        """Take in ``values`` at ``steps``: where a bucket takes many, at a fraction of their cost one by one."""
        for start in range(0, len(values), _SLICE):
            some, at = values[start : start + _SLICE], steps[start : start + _SLICE]
            if len(some) >= _FEW and _all_finite(some, at):
                self._extend_finite(some, at)
            else:
                for value, step in zip(some, at, strict=True):
                    self.add(value, step)

    def _extend_finite(self, values: Sequence[float], steps: Sequence[float]) -> None:
        # What would happen on the way happens first, so that the buckets take many at a time.
        while (len(self._buckets) - 1) * self._per_bucket + self._in_last + len(values) > (
            self._max_buckets * self._per_bucket
        ):
            self._halve()
        start, num_values = 0, len(values)
        while start < num_values:
            is_full = not self._buckets or self._in_last >= self._per_bucket
            stop = min(num_values, start + self._per_bucket - (0 if is_full else self._in_last))
            if stop - start >= _FEW:
                self._add_together(values[start:stop], steps[start:stop], is_full=is_full)
            else:
                for value, step in zip(values[start:stop], steps[start:stop], strict=True):
                    self.add(value, step)
            start = stop

    def _add_together(self, values: Sequence[float], steps: Sequence[float], *, is_full: bool) -> None:
        """Take in what fits into the last bucket, or into a new one where it is full."""
        low, high, last = values.index(min(values)), values.index(max(values)), len(values) - 1
        if is_full:
            self.add(values[0], steps[0])
        bucket = self._buckets[-1]
        for place in sorted({low, high, last}):
            bucket.add(Point(float(steps[place]), float(values[place])))
        num_more = len(values) - is_full
        self._in_last += num_more
        self.num_points += num_more
        self.last = bucket.last

    def points(self) -> list[Point]:
        """What is to be drawn, in the order in which it came; within a bucket by step."""
        return [point for bucket in self._buckets for point in bucket.points()]

    def _halve(self) -> None:
        pairs = zip(self._buckets[::2], self._buckets[1::2], strict=False)
        merged = []
        for earlier, later in pairs:
            earlier.absorb(later)
            merged.append(earlier)
        if len(self._buckets) % 2:
            merged.append(self._buckets[-1])
        elif merged:
            self._in_last += self._per_bucket
        self._buckets = merged
        self._per_bucket *= 2


def _is_plain(stretch: Stretch) -> bool:
    """Whether its columns are nothing but metrics, and these, and the steps, nothing but numbers."""
    columns = stretch.columns
    numbers = all(isinstance(one, array.array) for one in (stretch.steps, *columns.values()))
    return bool(columns) and numbers and not columns.keys() & _NOT_METRICS


def _all_finite(*sequences: Sequence[float]) -> bool:
    """Whether they surely are: what isn't finite makes no finite sum."""
    return all(math.isfinite(sum(one)) for one in sequences)


class Series(NamedTuple):
    """A line: what the legend calls it, and its points in the order in which they came."""

    name: str
    points: list[Point]


@dataclasses.dataclass(frozen=True, eq=False)
class Plot:
    """The lines of one metric; ``num_left_out`` more of them have no room. Two that are equal are the same object."""

    title: str
    make_series: Callable[[], tuple[Series, ...]]
    num_left_out: int = 0
    num_not_finite: int = 0

    @functools.cached_property
    def series(self) -> tuple[Series, ...]:
        """The lines, made when they are first drawn: views come more often than drawings."""
        return self.make_series()


class Curves:
    """The curves of all metrics of some runs, which take only the rows that are new."""

    def __init__(self, names: Sequence[str]) -> None:
        """``names``: what each run is called in a legend."""
        self._names = list(names)
        self._num_taken = [0] * len(self._names)
        self._curves: dict[str, dict[tuple[int, int], Curve]] = {}  # by metric, then by run and rank
        self._drawn: dict[str, tuple[int, Plot]] = {}

    def take(self, run: int, rows: MetricRows) -> None:
        """Take what has been added to the ``rows`` of run number ``run`` since the last call."""
        start, self._num_taken[run] = self._num_taken[run], len(rows)
        for stretch in rows.stretches(start, self._num_taken[run]):
            if _is_plain(stretch):
                for name, values in stretch.columns.items():
                    self._curve(name, run, stretch.rank).extend(values, stretch.steps)
            else:
                for row in stretch.rows():
                    self._take_row(run, row)

    def _take_row(self, run: int, row: dict[str, Any]) -> None:
        # Metrics of these names have taken the places of the launcher's own.
        rank = row["rank"] if isinstance(row["rank"], int) else 0
        step = row["step"] if isinstance(row["step"], int | float) else None
        for name, value in row.items():
            if name not in _NOT_METRICS and isinstance(value, int | float):
                self._curve(name, run, rank).add(value, step)

    def plots(self) -> tuple[Plot, ...]:
        """A plot for each metric, in the order in which they came; what has not changed is the very same object."""
        return tuple(self._plot(name) for name in list(self._curves)[:MAX_PLOTS])

    def _curve(self, name: str, run: int, rank: int) -> Curve:
        curves = self._curves.setdefault(name, {})
        key = (run, rank)
        if key not in curves:
            curves[key] = Curve(_BUCKETS_SHOWN)
        return curves[key]

    def _plot(self, name: str) -> Plot:
        curves = self._curves[name]
        num_points = sum(curve.num_points for curve in curves.values())
        if name not in self._drawn or self._drawn[name][0] != num_points:
            self._drawn[name] = (num_points, self._new_plot(name, curves))
        return self._drawn[name][1]

    def _new_plot(self, name: str, curves: dict[tuple[int, int], Curve]) -> Plot:
        def series() -> tuple[Series, ...]:
            several_ranks = len({rank for _, rank in curves}) > 1
            return tuple(Series(self._legend(key, several_ranks=several_ranks), curves[key].points()) for key in shown)

        shown = sorted(curves)[:MAX_SERIES]
        num_not_finite = sum(curve.num_not_finite for curve in curves.values())
        return Plot(name, series, len(curves) - len(shown), num_not_finite)

    def _legend(self, key: tuple[int, int], *, several_ranks: bool) -> str:
        run, rank = key
        name = self._names[run].removesuffix(" run") if several_ranks else self._names[run]
        return ", ".join(part for part in (name, f"rank {rank}" if several_ranks else "") if part)
