"""A monitor's parts as static HTML: how the run stands, a row a rank, curves, each rank's output, the error.

The final form, which the notebook keeps, is all of them in one: ``<details>`` for the ranks' output and ``<img>`` for
the curves, since untrusted notebooks and GitHub strip scripts, ``<style>`` and inline SVG.
"""

from __future__ import annotations

import html
import itertools
from pathlib import PurePath
from typing import TYPE_CHECKING
from urllib.parse import quote

from notebook_launcher.widgets.ansi import on_any_theme, to_html
from notebook_launcher.widgets.curve_svg import as_image, draw
from notebook_launcher.widgets.rendering import (
    BARS,
    DIM,
    FRAME,
    LINES,
    MAX_CHARS,
    MAX_LINE_CHARS,
    MONOSPACE,
    RULE,
    SCROLL,
    STDERR,
    rank_colour,
    render_text,
    shortened,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from notebook_launcher.launcher.output import Line, OutputLog
    from notebook_launcher.launcher.sinks import RunView
    from notebook_launcher.widgets.curve_data import Plot
    from notebook_launcher.widgets.view_model import RankRow, State, View

LAST_LINES = 1000  # of each rank
_DETAIL_CHARS = 70  # of what became of a rank: the whole of it is in the summary
_TONES = {"good": "#26873d", "bad": "#c62f2f", "warning": "#b5560b"}
_CELL = "padding:2px 8px;text-align:left;vertical-align:baseline;border:none;background:transparent;font-size:12px"
_ONE_LINE = f"{_CELL};white-space:nowrap"
# A cell of a table takes what room is left, and no more, only where it has no width of its own.
_LAST = f"{_ONE_LINE};width:99%;max-width:0;overflow:hidden;text-overflow:ellipsis;{MONOSPACE}"
_SUMMARY = "cursor:pointer;font-size:12px;padding:2px 0"
_ERROR = f"{LINES};border-left:3px solid #c62f2f;padding:4px 8px;margin-top:4px;max-height:360px;overflow:auto"


def final(view: View, record: RunView, *, embedded: Sequence[str] = (), log_scale: bool = False) -> str:
    """The whole monitor in the form that stays: no scripts, no styles but inline ones, everything escaped."""
    parts = [head(view), clock(view), error(view), table(view.rows), images(view.plots, log_scale=log_scale)]
    parts += outputs(view.rows, record.output)
    parts += embedded
    if view.summary:
        parts.append(
            f'<div style="margin-top:4px;padding-top:4px;{RULE}">{_toned(view.state, to_html(view.summary))}</div>'
        )
    return f'<div style="{FRAME}">{"".join(parts)}</div>'


def text(view: View, record: RunView) -> str:
    """The same as plain text, for consoles and for search."""
    rows = [("rank", "state", "step", "rate", "memory", "device memory")]
    rows += [(str(r.rank), _words(r.state), r.step, r.rate, r.memory, r.device_memory) for r in view.rows]
    used = [number for number, column in enumerate(zip(*rows, strict=True)) if any(column[1:])]
    widths = {number: max(len(row[number]) for row in rows) for number in used}
    lines = ["  ".join(row[number].ljust(widths[number]) for number in used).rstrip() for row in rows]
    values = [
        f"{plot.title}: " + ", ".join(f"{one.name} {one.points[-1].y:.4g}".strip() for one in plot.series if one.points)
        for plot in view.plots
    ]
    return "\n".join([*lines, *values, render_text(record)])


# --- parts ------------------------------------------------------------------------------------------------------------


def head(view: View) -> str:
    """What the run is and how it stands."""
    notes = "".join(f'<div style="{DIM}">{html.escape(note)}</div>' for note in view.notes)
    return f'<div role="status">{state_html(view.state)} · {html.escape(view.headline)}</div>{notes}'


def clock(view: View) -> str:
    """Elapsed and remaining time, and a bar where it is known how much is done."""
    words = [view.elapsed]
    bar = ""
    if view.fraction is not None:
        percent = int(100 * view.fraction)
        words.insert(0, f"{percent} % done")
        bar = f'<progress value="{percent}" max="100" style="width:160px;vertical-align:middle"></progress> '
    if view.remaining:
        words.append(f"about {view.remaining} left")
    return f'<div style="{DIM};margin-top:2px">{bar}{" · ".join(html.escape(word) for word in words)}</div>'


def table(rows: Sequence[RankRow]) -> str:
    """A row a rank; columns of which nothing is known are left out."""
    columns = [
        (title, cells)
        for title, cells in (
            ("step", [row.step for row in rows]),
            ("rate", [row.rate for row in rows]),
            ("memory", [row.memory for row in rows]),
            ("device", [row.device_memory for row in rows]),
        )
        if any(cells)
    ]
    titles = ["rank", "state", *(title for title, _ in columns), "last line"]
    head_cells = "".join(f'<th scope="col" style="{_ONE_LINE};font-weight:bold">{title}</th>' for title in titles)
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f'<td style="{_ONE_LINE}">{html.escape(column[number])}</td>' for _, column in columns)
        process = "" if row.pid is None else f' title="process {row.pid}"'
        last = (
            f'<span style="{STDERR}">{_plain(row.last_line)}</span>'
            if row.last_stream == "stderr"
            else _plain(row.last_line)
        )
        lines.append(
            f'<tr style="background:transparent">'
            f'<th scope="row" style="{_ONE_LINE};font-weight:bold;{rank_colour(row.rank)}"{process}>{row.rank}</th>'
            f'<td style="{_ONE_LINE}">{state_html(row.state)}</td>{cells}'
            f'<td style="{_LAST}">{last}</td></tr>'
        )
    return (
        f'<table style="width:100%;border-collapse:collapse;margin:4px 0;table-layout:auto;{RULE}">'
        f'<thead><tr style="background:transparent">{head_cells}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    )


def error(view: View) -> str:
    """The error of a failed run, by the notebook's own lines."""
    return f'<pre tabindex="0" style="{_ERROR}">{to_html(view.error)}</pre>' if view.error else ""


def drawings(plots: Sequence[Plot], *, log_scale: bool = False) -> str:
    """The curves as inline SVG, whose values show when they are pointed at: for a live page."""
    return _charts(plots, (draw(p.title, p.series, log_scale=log_scale, hover=True) for p in plots))


def images(plots: Sequence[Plot], *, log_scale: bool = False) -> str:
    """The curves as images, whose alternative texts say the last values."""
    return _charts(plots, (as_image(draw(p.title, p.series, log_scale=log_scale)) for p in plots))


def _charts(plots: Sequence[Plot], drawn: Iterable[str]) -> str:
    if not plots:
        return ""
    told = [
        f"{plot.title}: {what}"
        for plot in plots
        for number, what in (
            (plot.num_left_out, f"{plot.num_left_out} more series are not drawn"),
            (plot.num_not_finite, f"{plot.num_not_finite:,} values are not finite"),
        )
        if number
    ]
    notes = "".join(f'<div style="{DIM}">{html.escape(note)}</div>' for note in told)
    cards = "".join(
        f'<div style="display:inline-block;vertical-align:top;margin:2px 6px 2px 0">{one}</div>' for one in drawn
    )
    return f'<div style="margin:4px 0">{cards}</div>{notes}'


def outputs(rows: Sequence[RankRow], log: OutputLog) -> Iterable[str]:
    """Each rank's output, folded; that of the rank that failed, else the first one's, is open."""
    opened = next((row.rank for row in rows if row.state.tone == "bad"), rows[0].rank if rows else 0)
    room = MAX_CHARS // max(1, len(rows))
    for row in rows:
        detail = row.detail if len(row.detail) <= _DETAIL_CHARS else f"{row.detail[:_DETAIL_CHARS]}…"
        lines = f"{row.num_lines:,} line{'s' * (row.num_lines != 1)}"
        about = f"rank {row.rank}: {lines}" + (f", {detail}" if detail else "")
        opening = f'<details{" open" if row.rank == opened else ""} style="{RULE}">'
        written = output(row, log, max_chars=room, linked=True)
        body = f'<summary style="{_SUMMARY}">{html.escape(about)}</summary>{written}'
        yield f"{opening}{body}</details>"


def output(
    row: RankRow, log: OutputLog, *, last: int = LAST_LINES, max_chars: int = MAX_CHARS, linked: bool = False
) -> str:
    """What a rank has written: its last lines, its bars below them; stderr has a mark at its left.

    ``linked``: the log is a link where its path is relative, for an output of the notebook, which knows its folder.
    """
    lines = _that_fit(log.lines(row.rank, last=last), max_chars)
    num_more = row.num_lines - len(lines)
    notes = []
    if num_more > 0:
        notes.append(
            f"… {num_more:,} earlier lines not shown"
            + ("" if row.log_path or last < LAST_LINES else "; log_dir keeps all")
        )
    if row.log_path:
        notes.append(f"log: {row.log_path}")
    notes += filter(None, [log.problem(row.rank)])
    told = html.escape(" · ".join(notes))
    if linked and row.log_path and not PurePath(row.log_path).is_absolute():
        path = html.escape(row.log_path)
        link = f'<a href="{html.escape(quote(PurePath(row.log_path).as_posix()))}" target="_blank">{path}</a>'
        told = told.replace(f"log: {path}", f"log: {link}", 1)
    parts = [f'<div style="{DIM}">{told}</div>'] if told else []
    if lines:
        parts.append(f'<div tabindex="0" style="{SCROLL}"><pre style="{LINES}">{_block(lines)}</pre></div>')
    live = log.live(row.rank)
    if live:
        parts.append(f'<pre style="{BARS}">{_block(live)}</pre>')
    return "".join(parts) or f'<div style="{DIM}">nothing written yet</div>'


# --- inside -----------------------------------------------------------------------------------------------------------


def _block(lines: Iterable[Line]) -> str:
    """Lines of one rank: those of one stream that follow each other are escaped in one go."""
    parts = []
    for stream, group in itertools.groupby(lines, key=lambda line: line.stream):
        texts = [line.text if len(line.text) <= MAX_LINE_CHARS else shortened(line.text) for line in group]
        joined = "\n".join(texts)
        # Colours end with their line: what one leaves on must not run through those that follow.
        body = to_html(joined) if "\x1b" not in joined else "\n".join(map(to_html, texts))
        parts.append(f'<span style="display:block;{STDERR}">{body}\n</span>' if stream == "stderr" else f"{body}\n")
    return "".join(parts)


def _that_fit(lines: list[Line], max_chars: int) -> list[Line]:
    room, start = max_chars, len(lines)
    while start > 0 and room > 0:
        start -= 1
        room -= min(len(lines[start].text), MAX_LINE_CHARS)
    return lines[start:]


def _plain(line: str) -> str:
    return to_html(line) or "&nbsp;"


def state_html(state: State) -> str:
    """A state's symbol and word, in its colour."""
    return _toned(state, f"<b>{html.escape(_words(state))}</b>")


def _toned(state: State, body: str) -> str:
    colour = _TONES.get(state.tone)
    return f'<span style="{on_any_theme(colour)}">{body}</span>' if colour else f"<span>{body}</span>"


def _words(state: State) -> str:
    return f"{state.symbol} {state.word}"
