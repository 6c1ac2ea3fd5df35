"""Curves drawn as SVG: axes with round numbers, a line a series, linear or logarithmic. Pure text, no widgets.

A drawing stands on a white card of its own: inside an ``<img>``, which is the form that untrusted notebooks keep, it
can't know the page's theme.
"""

from __future__ import annotations

import base64
import bisect
import dataclasses
import html
import math
from typing import TYPE_CHECKING

from notebook_launcher.widgets.curve_data import Series

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from notebook_launcher.widgets.curve_data import Point

WIDTH, HEIGHT = 320, 190  # without the lines of a legend
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 36, 24
_LEGEND_ROW = 13
_INK, _FAINT = "#3b3b3b", "#dddddd"
# Told apart without colour too: by their dashes.
_STYLES = (
    *(("#1f5fbf", ""), ("#b5560b", "6 3"), ("#26733a", "2 3"), ("#9a2f7a", "8 3 2 3")),
    *(("#0b6f7d", "10 4"), ("#7a5a00", "4 2"), ("#6440b8", "1 2"), ("#a8322a", "6 2 1 2 1 2")),
)
_NUM_TICKS, _NUM_TICKS_UP = 4, 6
_NUM_STRIPS = 32  # places where pointing shows the values
_HOVER_STYLE = (
    "<style>.nl-hover>*:not(rect){visibility:hidden}.nl-hover:hover>*{visibility:visible}"
    ".nl-hover{pointer-events:all}</style>"
)


@dataclasses.dataclass(frozen=True)
class _Scale:
    """From values to places in the drawing, linear in the value or in its logarithm."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        return round(self.places([value])[0], 1)

    def places(self, values: Sequence[float]) -> list[float]:
        """Where the values are, not rounded."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, values = math.log10(low), math.log10(high), [math.log10(value) for value in values]
        if high == low:
            return [(self.start + self.end) / 2] * len(values)
        start, factor = self.start, (self.end - self.start) / (high - low)
        return [start + (value - low) * factor for value in values]


def draw(title: str, series: Sequence[Series], *, log_scale: bool = False, hover: bool = False) -> str:
    """An ``<svg>`` of ``series`` under ``title``; points that a logarithm doesn't have are left out.

    Each line's last value stands in the legend. With ``hover``, for a page that shows SVG inline, pointing at a place
    shows the values there.
    """
    shown = [Series(one.name, [p for p in one.points if p.y > 0 or not log_scale]) for one in series]
    shown = [one for one in shown if one.points]
    legend = _legend(shown)
    height = HEIGHT + _LEGEND_ROW * ((len(shown) + 1) // 2 if len(shown) > 1 else 0)
    size = f'width="{WIDTH}" height="{height}"'
    about = f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(_spoken(title, shown))}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {about} font-family="sans-serif" font-size="11">',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="4" fill="#ffffff" stroke="{_FAINT}"/>',
        f'<text x="10" y="18" font-size="13" font-weight="bold" fill="{_INK}">{html.escape(_cut(title, 28))}</text>',
    ]
    if not shown:
        parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle" fill="{_INK}">no values yet</text>')
        return "".join(parts) + "</svg>"
    across, up = _scales(shown, height, log_scale=log_scale)
    parts += _axes(across, up, height)
    for index, one in enumerate(shown):
        parts += _line(one, across, up, index)
    parts += legend
    if hover:
        parts.append(_HOVER_STYLE)
        parts += _strips(shown, across, up)
    return "".join(parts) + "</svg>"


def as_image(svg: str) -> str:
    """The drawing as an ``<img>`` that carries it, which untrusted notebooks and GitHub keep."""
    label = svg.partition('aria-label="')[2].partition('"')[0]
    encoded = base64.b64encode(svg.encode()).decode("ascii")
    return f'<img alt="{label}" style="max-width:100%" src="data:image/svg+xml;base64,{encoded}">'


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
    if len(powers) > 2:  # noqa: PLR2004 - fewer than three say too little
        return powers
    start = math.floor(math.log10(low))
    between = [10.0**exponent * factor for exponent in range(start, start + 4) for factor in (1, 2, 5)]
    found = [value for value in between if low <= value <= high]
    return found if len(found) > 1 else sorted({low, *found, high})


def _scales(shown: Sequence[Series], height: int, *, log_scale: bool) -> tuple[_Scale, _Scale]:
    xs = [point.x for one in shown for point in one.points]
    ys = [point.y for one in shown for point in one.points]
    low, high = min(ys), max(ys)
    if low == high and not log_scale:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    top = _TOP + height - HEIGHT
    across = _Scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    return across, _Scale(low, high, height - _BOTTOM, top, log_scale)


def _axes(across: _Scale, up: _Scale, height: int) -> Iterable[str]:
    for value in _log_ticks(up.low, up.high) if up.is_log else ticks(up.low, up.high, _NUM_TICKS_UP):
        y = up.place(value)
        yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="{_FAINT}"/>'
        yield f'<text x="{_LEFT - 5}" y="{y + 4}" text-anchor="end" fill="{_INK}">{number(value)}</text>'
    for value in ticks(across.low, across.high):
        x = across.place(value)
        yield f'<text x="{x}" y="{height - _BOTTOM + 16}" text-anchor="middle" fill="{_INK}">{number(value)}</text>'


def _line(one: Series, across: _Scale, up: _Scale, index: int) -> Iterable[str]:
    colour, dashes = _STYLES[index % len(_STYLES)]
    xs, ys = across.places([point.x for point in one.points]), up.places([point.y for point in one.points])
    hint = f"<title>{html.escape(one.name)}: {number(one.points[-1].y)} at {number(one.points[-1].x)}</title>"
    if len(xs) == 1:
        yield f'<circle cx="{xs[0]:.1f}" cy="{ys[0]:.1f}" r="2.5" fill="{colour}">{hint}</circle>'
        return
    path = " ".join([f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True)])
    yield (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-linejoin="round" '
        f'stroke-dasharray="{dashes or "none"}">{hint}</polyline>'
    )


def _legend(shown: Sequence[Series]) -> list[str]:
    """Beside the title, the last value of a line that is alone; below it, the names and last values of several."""
    if len(shown) == 1:
        text = number(shown[0].points[-1].y)
        return [f'<text x="{WIDTH - _RIGHT}" y="18" text-anchor="end" fill="{_STYLES[0][0]}">{text}</text>']
    parts = []
    for index, one in enumerate(shown):
        colour, dashes = _STYLES[index % len(_STYLES)]
        x, y = 10 + (WIDTH // 2 - 5) * (index % 2), 33 + _LEGEND_ROW * (index // 2)
        text = html.escape(f"{_cut(one.name, 16)} {number(one.points[-1].y)}")
        stroke = f'stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dashes or "none"}"'
        parts += [
            f'<line x1="{x}" x2="{x + 20}" y1="{y - 4}" y2="{y - 4}" {stroke}/>',
            f'<text x="{x + 25}" y="{y}" fill="{colour}">{text}</text>',
        ]
    return parts


def _strips(shown: Sequence[Series], across: _Scale, up: _Scale) -> Iterable[str]:
    """Over each part of the plot, what shows when it is pointed at: a line, the step, and each series' value there."""
    ordered = [sorted(one.points) for one in shown]
    width = (across.end - across.start) / _NUM_STRIPS
    for index in range(_NUM_STRIPS):
        left = across.start + index * width
        wanted = across.low + (index + 0.5) / _NUM_STRIPS * (across.high - across.low)
        nearest = [_nearest(points, wanted) for points in ordered]
        texts = [number(point.y) for point in nearest]
        x = across.place(nearest[0].x)
        side = "start" if index < _NUM_STRIPS // 2 else "end"
        text = html.escape(f"at {number(nearest[0].x)}: {' | '.join(texts)}")
        yield (
            f'<g class="nl-hover"><rect x="{left:.1f}" y="{up.end}" width="{width:.1f}" height="{up.start - up.end}" '
            f'fill="transparent"/><path d="M{x} {up.end}V{up.start}" stroke="{_INK}" stroke-width="0.7"/>'
            f'<text x="{x + (4 if side == "start" else -4)}" y="{up.end + 8}" text-anchor="{side}" fill="{_INK}" '
            f'stroke="#ffffff" stroke-width="3" paint-order="stroke">{text}</text></g>'
        )


def _nearest(points: list[Point], x: float) -> Point:
    place = bisect.bisect_left(points, (x, -math.inf))
    return min(points[max(0, place - 1) : place + 1], key=lambda point: abs(point.x - x))


def _spoken(title: str, shown: Sequence[Series]) -> str:
    said = [
        f"{f'{one.name}: ' if one.name else ''}{number(one.points[-1].y)} at step {number(one.points[-1].x)}"
        for one in shown
    ]
    return f"{title}; {'; '.join(said)}" if said else f"{title}: no values yet"


def _cut(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else f"{text[: num_chars - 1]}…"
