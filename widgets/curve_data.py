"""``Curve``: a metric's points, thinned as they come: a million of them keep their shape in a few hundred buckets.

Pure data, no drawing. Each bucket keeps its first, smallest, largest and last point (as M4 does: Jugel et al., "M4: A
Visualization-Oriented Time Series Data Aggregation", VLDB 2014), so that a spike of one step stays to be seen.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BUCKETS = 256


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
        if self._buckets and self._in_last < self._per_bucket:
            self._buckets[-1].add(point)
            self._in_last += 1
            return
        if len(self._buckets) >= self._max_buckets:
            self._halve()
        self._buckets.append(_Bucket(point, point, point, point))
        self._in_last = 1

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
        self._buckets = merged
        self._per_bucket *= 2
