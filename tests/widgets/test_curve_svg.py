"""Drawings of curves: right places, round numbers, nothing of the user's unescaped."""

import re
import xml.etree.ElementTree as ET

import pytest

from notebook_launcher.widgets.curve_data import Point
from notebook_launcher.widgets.curve_svg import HEIGHT, WIDTH, Series, as_image, draw, number, ticks

LINE = Series("run 1", [Point(0, 2.0), Point(5, 1.0), Point(10, 0.5)])


def polylines(svg):
    root = ET.fromstring(svg)  # noqa: S314 - our own
    found = root.iter("{http://www.w3.org/2000/svg}polyline")
    return [[tuple(map(float, pair.split(","))) for pair in one.get("points").split()] for one in found]


def test_a_line_falls_as_the_values_do_within_the_drawing():
    (line,) = polylines(draw("loss", [LINE]))
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted(y for _, y in line)  # y grows downwards
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in line)
    assert line[1][1] - line[0][1] == pytest.approx(2 * (line[2][1] - line[1][1]), abs=0.3)


def test_on_a_logarithmic_scale_halving_takes_equal_steps():
    (line,) = polylines(draw("loss", [LINE], log_scale=True))
    assert line[1][1] - line[0][1] == pytest.approx(line[2][1] - line[1][1], abs=0.3)


def test_what_has_no_logarithm_is_left_out():
    series = Series("a", [Point(0, -1.0), Point(1, 0.0), Point(2, 3.0), Point(3, 4.0)])
    assert [len(line) for line in polylines(draw("loss", [series], log_scale=True))] == [2]
    assert "no values yet" in draw("loss", [Series("a", [Point(0, -1.0)])], log_scale=True)


def test_two_runs_share_the_axes_and_are_told_apart_without_colour():
    svg = draw("loss", [LINE, Series("run 2", [Point(0, 4.0), Point(20, 0.1)])])
    first, second = polylines(svg)
    assert max(x for x, _ in first) < max(x for x, _ in second)
    assert min(y for _, y in first) > min(y for _, y in second)
    assert len(set(re.findall(r'stroke-linejoin="round" stroke-dasharray="([^"]*)"', svg))) == 2
    assert "run 1 0.5" in svg
    assert "run 2 0.1" in svg


def test_constant_and_single_values_are_drawn():
    assert polylines(draw("a", [Series("a", [Point(0, 1.0), Point(1, 1.0)])]))
    assert polylines(draw("a", [Series("a", [Point(0, 1.0), Point(1, 1.0)])], log_scale=True))
    assert "<circle" in draw("a", [Series("a", [Point(0, 0.0)])])
    assert "no values yet" in draw("a", [])


def test_names_are_escaped_and_cut():
    svg = draw('<script>"&' + "x" * 100, [Series("<img onerror=1>", LINE.points), LINE])
    ET.fromstring(svg)  # noqa: S314 - our own
    assert "<script" not in svg
    assert "<img" not in svg
    assert "x" * 101 not in svg


def test_an_image_says_in_words_what_it_shows():
    image = as_image(draw("loss", [LINE]))
    assert 'alt="loss; run 1: 0.5 at step 10"' in image
    assert 'src="data:image/svg+xml;base64,' in image


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 5, 10]), (0, 1, [0, 0.5, 1]), (0.0, 0.8, [0, 0.2, 0.4, 0.6, 0.8]), (3, 3, [3]), (-7, 7, [-5, 0, 5])],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.01234"), (4200.0, "4200"), (120000, "120,000"), (1.5e-7, "1.5e-07"), (2.5e9, "2.5e+09")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text
