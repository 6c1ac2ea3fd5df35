"""Curves keep their shape, bounded in memory, whatever the number of points."""

import itertools
import math
import random

import pytest

from notebook_launcher.widgets.curve_data import Curve, Point


def filled(values, **options):
    curve = Curve(**options)
    for value in values:
        curve.add(value)
    return curve


def test_few_points_are_kept_as_they_are():
    assert filled([3.0, 1.0, 2.0]).points() == [Point(0, 3), Point(1, 1), Point(2, 2)]


def test_a_million_points_keep_every_extreme_and_little_memory():
    values = [math.sin(index / 5e4) for index in range(1_000_000)]
    values[123_456], values[777_777] = 9.0, -9.0
    curve = filled(values)
    points = curve.points()
    assert Point(123_456, 9.0) in points
    assert Point(777_777, -9.0) in points
    assert len(points) <= 4 * 256
    assert points == sorted(points)
    assert curve.num_points == 1_000_000
    assert curve.last == points[-1] == Point(999_999, values[-1])
    worst = max(abs(y - values[int(x)]) for x, y in points)
    assert worst == 0  # each is a true point, none an average
    gaps = [after.x - before.x for before, after in itertools.pairwise(points)]
    assert max(gaps) <= 8192  # no stretch of the run is missing


@pytest.mark.parametrize("num_at_once", [1, 7, 25, 300, 1000, 20_000])
@pytest.mark.parametrize("max_buckets", [64, 3])
def test_many_at_once_are_as_one_after_another(num_at_once, max_buckets):
    chance = random.Random(0)  # noqa: S311 - not a secret
    values = [chance.random() for _ in range(20_000)]
    values[5_000], values[5_001], values[9_999] = math.nan, math.inf, 7.0
    steps = [index + index % 3 for index in range(20_000)]
    one, other = Curve(max_buckets), Curve(max_buckets)
    for value, step in zip(values, steps, strict=True):
        one.add(value, step)
    for start in range(0, 20_000, num_at_once):
        other.extend(values[start : start + num_at_once], steps[start : start + num_at_once])
    assert other.points() == one.points()
    assert (other.num_points, other.num_not_finite, other.last) == (20_000, 2, one.last)


def test_steps_are_the_user_s_own():
    curve = Curve()
    curve.add(1.0, 10)
    curve.add(2.0, 20)
    assert curve.points() == [Point(10, 1), Point(20, 2)]


def test_values_that_are_not_finite_are_counted():
    curve = filled([1.0, math.nan, math.inf, 2.0])
    assert (curve.num_points, curve.num_not_finite) == (4, 2)
    assert [point.y for point in curve.points()] == [1.0, 2.0]
    assert curve.last == Point(3, 2.0)


def test_no_points():
    assert Curve().points() == []
    assert Curve().last is None


def test_a_small_limit_still_keeps_first_and_last():
    points = filled(map(float, range(101)), max_buckets=2).points()
    assert (points[0], points[-1]) == (Point(0, 0), Point(100, 100))
    assert len(points) <= 8
