"""Curves drawn as SVG: axes with round numbers, a line a series, linear or logarithmic. Pure text, no widgets.

A drawing stands on a white card of its own: inside an ``<img>``, which is the form that untrusted notebooks keep, it
can't know the page's theme.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from notebook_launcher.widgets.curve_data import Point

WIDTH, HEIGHT = 320, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 24, 24
_INK, _FAINT = "#3b3b3b", "#dddddd"
# Told apart without colour too: by their dashes.
_STYLES = (("#1f5fbf", ""), ("#b5560b", "6 3"), ("#26733a", "2 3"), ("#9a2f7a", "8 3 2 3"))
_NUM_TICKS = 4


@dataclasses.dataclass(frozen=True)
class Series:
    """A line: what the legend calls it, and its points by rising step."""

    name: str
    points: Sequence[Point]


@dataclasses.dataclass(frozen=True)
class _Scale:
    """From values to places in the drawing, linear in the value or in its logarithm."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        inner = math.log10(value) if self.is_log else value
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        share = 0.5 if high == low else (inner - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)


def draw(title: str, series: Sequence[Series], *, log_scale: bool = False) -> str:
    """An ``<svg>`` of ``series`` under ``title``; points that a logarithm doesn't have are left out.

    Each line's last value stands in the legend; where the browser shows SVG inline, pointing at a line shows it too.
    """
    shown = [Series(one.name, [p for p in one.points if p.y > 0 or not log_scale]) for one in series]
    shown = [one for one in shown if one.points]
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    about = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(_spoken(title, shown))}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {about} font-family="sans-serif" font-size="10">',
        f'<rect {size} rx="4" fill="#ffffff" stroke="{_FAINT}"/>',
        f'<text x="8" y="15" font-size="12" font-weight="bold" fill="{_INK}">{html.escape(_cut(title, 30))}</text>',
    ]
    if not shown:
        parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle" fill="{_INK}">no values yet</text>')
        return "".join(parts) + "</svg>"
    across, up = _scales(shown, log_scale=log_scale)
    parts += _axes(across, up)
    for index, one in enumerate(shown):
        parts += _line(one, across, up, index)
    parts += _legend(shown)
    return "".join(parts) + "</svg>"


def as_image(svg: str) -> str:
    """The drawing as an ``<img>`` that carries it, which untrusted notebooks and GitHub keep."""
    label = svg.partition('aria-label="')[2].partition('"')[0]
    encoded = base64.b64encode(svg.encode()).decode("ascii")
    return f'<img alt="{label}" width="{WIDTH}" height="{HEIGHT}" src="data:image/svg+xml;base64,{encoded}">'


def number(value: float) -> str:
    """``value`` short enough for an axis or a legend: 0.0123, 4,200, 1.5e-07."""
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1e4:  # noqa: PLR2004 - beyond them the exponent is the shorter form
        return f"{value:.4g}"
    if size < 1e7 and value == int(value):  # noqa: PLR2004
        return f"{int(value):,}"
    return f"{value:.3g}"


def ticks(low: float, high: float, num_ticks: int = _NUM_TICKS) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within ``low`` and ``high``, about ``num_ticks``."""
    if high <= low:
        return [low]
    raw = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)] or [low]


def _log_ticks(low: float, high: float) -> list[float]:
    exponents = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    every = max(1, math.ceil(len(exponents) / (_NUM_TICKS + 1)))
    powers = [10.0**exponent for exponent in exponents][::every]
    return powers if len(powers) > 1 else sorted({low, *powers, high})


def _scales(shown: Sequence[Series], *, log_scale: bool) -> tuple[_Scale, _Scale]:
    xs = [point.x for one in shown for point in one.points]
    ys = [point.y for one in shown for point in one.points]
    low, high = min(ys), max(ys)
    if low == high and not log_scale:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    across = _Scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    return across, _Scale(low, high, HEIGHT - _BOTTOM, _TOP + 12, log_scale)


def _axes(across: _Scale, up: _Scale) -> Iterable[str]:
    for value in _log_ticks(up.low, up.high) if up.is_log else ticks(up.low, up.high):
        y = up.place(value)
        yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="{_FAINT}"/>'
        yield f'<text x="{_LEFT - 4}" y="{y + 3}" text-anchor="end" fill="{_INK}">{number(value)}</text>'
    for value in ticks(across.low, across.high):
        x = across.place(value)
        yield f'<text x="{x}" y="{HEIGHT - _BOTTOM + 14}" text-anchor="middle" fill="{_INK}">{number(value)}</text>'


def _line(one: Series, across: _Scale, up: _Scale, index: int) -> Iterable[str]:
    colour, dashes = _STYLES[index % len(_STYLES)]
    places = [(across.place(point.x), up.place(point.y)) for point in one.points]
    hint = f"<title>{html.escape(one.name)}: {number(one.points[-1].y)} at {number(one.points[-1].x)}</title>"
    if len(places) == 1:
        yield f'<circle cx="{places[0][0]}" cy="{places[0][1]}" r="2.5" fill="{colour}">{hint}</circle>'
        return
    path = " ".join(f"{x:g},{y:g}" for x, y in places)
    yield (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-linejoin="round" '
        f'stroke-dasharray="{dashes or "none"}">{hint}</polyline>'
    )


def _legend(shown: Sequence[Series]) -> Iterable[str]:
    """The lines' names with their last values, at the right of the title; one line alone needs no name."""
    for index, one in enumerate(shown[: len(_STYLES)]):
        colour, dashes = _STYLES[index]
        y = 15 + 11 * index
        text = number(one.points[-1].y) if len(shown) == 1 else f"{_cut(one.name, 18)} {number(one.points[-1].y)}"
        yield f'<text x="{WIDTH - _RIGHT}" y="{y}" text-anchor="end" fill="{colour}">{html.escape(text)}</text>'
        if dashes:
            x = WIDTH - _RIGHT - 6 * len(text) - 24
            ends = f'x1="{x}" x2="{x + 20}" y1="{y - 3}" y2="{y - 3}"'
            yield f'<line {ends} stroke="{colour}" stroke-dasharray="{dashes}"/>'


def _spoken(title: str, shown: Sequence[Series]) -> str:
    said = [f"{one.name}: {number(one.points[-1].y)} at step {number(one.points[-1].x)}" for one in shown]
    return f"{title}; {'; '.join(said)}" if said else f"{title}: no values yet"


def _cut(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else f"{text[: num_chars - 1]}…"
