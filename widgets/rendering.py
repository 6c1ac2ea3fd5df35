"""The one renderer: a run's view as static HTML, which live views repaint and finished cells keep, and as plain text.

Untrusted notebooks strip ``<style>``, scripts and classes, so everything is styled inline, and colours that need CSS
variables come second after a fixed one. Where even those are stripped the text still reads.
"""

from __future__ import annotations

import base64
import collections
import html
import itertools
from typing import TYPE_CHECKING

from notebook_launcher.launcher.sgr import without_colours
from notebook_launcher.widgets.ansi import on_any_theme, to_html
from notebook_launcher.widgets.containment import contained
from notebook_launcher.widgets.quantities import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from notebook_launcher.core.events import Display
    from notebook_launcher.launcher.output import Line, OutputLog
    from notebook_launcher.launcher.sinks import RunView

MAX_LINE_CHARS = 5_000  # of a line are shown
MAX_CHARS = 2_000_000  # of all lines together: beyond it a notebook page gets slow

_RANK_COLOURS = ("#2f6fd0", "#b5560b", "#26873d", "#b03a8c", "#0f808f", "#7c55cf", "#8a7208", "#c0392b")
STATUS_COLOURS = {"finished": "#26873d", "failed": "#c62f2f", "stopped": "#b5560b", "stopping": "#b5560b"}

MONOSPACE = "font-family:monospace;font-family:var(--jp-code-font-family,monospace);font-size:12px;line-height:1.4"
FRAME = (
    "border:1px solid #9e9e9e;border:1px solid var(--jp-border-color1,rgba(128,128,128,0.5));border-radius:4px;"
    "padding:6px 10px;font-size:13px"
)
DIM = "opacity:0.75;font-size:12px"
RULE = "border-top:1px solid #9e9e9e;border-top:1px solid var(--jp-border-color2,rgba(128,128,128,0.35))"
# Turned round, the block shows its end first and stays there; its one child is in the usual order. The child must
# neither shrink nor scroll, as JupyterLab's own style would have it, or it would show its beginning.
SCROLL = f"display:flex;flex-direction:column-reverse;max-height:360px;overflow:auto;margin-top:4px;{RULE}"
PRE = (
    f"margin:0;padding:4px 0;background:transparent;color:inherit;border:none;width:100%;"
    f"white-space:pre-wrap;word-wrap:break-word;{MONOSPACE}"
)
LINES = f"{PRE};flex-shrink:0;overflow:visible"
BARS = f"{PRE};white-space:pre;overflow:auto;{RULE}"
STDERR = "border-left:3px solid #c98a1b;padding-left:5px"


def render(view: RunView, *, last: int | None = None, embedded: Sequence[str] = ()) -> str:
    """The run as HTML: headline, notes, lines with their ranks, bars, summary.

    ``last`` limits the lines (all ranks together) for live views; ``embedded`` is HTML of displays, from
    ``render_display``. Everything that a worker printed is escaped.
    """
    lines, missing = _shown_lines(view.output, last)
    width = _label_width(view.output)
    parts = [_headline(view), *(f'<div style="{DIM}">{html.escape(note)}</div>' for note in view.notes)]
    parts += (f'<div style="{DIM}">{html.escape(note)}</div>' for note in _missing_notes(view.output, missing, last))
    if lines:
        block = "".join(f"{_line(line, width)}\n" for line in lines)
        parts.append(f'<div tabindex="0" style="{SCROLL}"><pre style="{LINES}">{block}</pre></div>')
    live = view.output.live()
    if live:
        rows = "".join(f"{_line(line, width)}\n" for line in live)
        parts.append(f'<pre style="{BARS}">{rows}</pre>')
    parts += embedded
    if view.summary:
        parts.append(f'<div style="margin-top:4px;padding-top:4px;{RULE}">{_summary(view)}</div>')
    return f'<div style="{FRAME}">{"".join(parts)}</div>'


def render_text(view: RunView, *, last: int | None = None) -> str:
    """The same as plain text, for consoles, ``nbconvert`` and search."""
    lines, missing = _shown_lines(view.output, last)
    texts = [view.headline, *view.notes, *_missing_notes(view.output, missing, last)]
    texts += (
        f"[{line.rank}] {shortened(without_colours(line.text))}" for line in itertools.chain(lines, view.output.live())
    )
    texts.append(view.summary or f"{view.status}, {duration(view.elapsed_s)}")
    return "\n".join(text for text in texts if text)


def render_display(rank: int, display: Display) -> str:
    """What a rank displayed, as HTML under a heading with its rank: the richest of its forms that HTML can hold."""
    return f'<div style="margin-top:4px;padding-top:4px;{RULE}">{rank_heading(rank)}{_display_body(display)}</div>'


def rank_heading(rank: int) -> str:
    """A small heading, "rank 1", in the rank's colour."""
    return f'<div style="font-size:12px;font-weight:bold;{rank_colour(rank)}">rank {rank}</div>'


def _display_body(display: Display) -> str:
    data = display.data
    if "text/html" in data:
        return contained(str(data["text/html"]))
    if "image/svg+xml" in data:
        return _image("image/svg+xml", str(data["image/svg+xml"]).encode())
    for kind in ("image/png", "image/jpeg", "image/gif"):
        if kind in data:
            return _image(kind, data[kind])
    text = str(data.get("text/plain", ", ".join(data)))
    return f'<pre style="{PRE}">{to_html(text)}</pre>'


def _image(kind: str, content: bytes | str) -> str:
    """An image as a data address; ``content`` that is text is in base64 already, as in Jupyter's messages."""
    encoded = content if isinstance(content, str) else base64.b64encode(content).decode("ascii")
    return f'<img alt="" style="max-width:100%" src="data:{kind};base64,{html.escape("".join(encoded.split()))}">'


def _headline(view: RunView) -> str:
    when = "" if view.summary else f' <span style="{DIM}">{duration(view.elapsed_s)}</span>'
    return f"<div>{_status(view)} · {html.escape(view.headline)}{when}</div>"


def _status(view: RunView) -> str:
    colour = STATUS_COLOURS.get(view.status)
    css = f"font-weight:bold;{on_any_theme(colour)}" if colour else "font-weight:bold"
    return f'<span style="{css}">{html.escape(view.status)}</span>'


def _summary(view: RunView) -> str:
    colour = STATUS_COLOURS.get(view.status)
    style = f' style="{on_any_theme(colour)}"' if colour and view.status != "finished" else ""
    return f"<span{style}>{to_html(view.summary)}</span>"


def _line(line: Line, width: int) -> str:
    label = f'<span style="{rank_colour(line.rank)}">{f"[{line.rank}]".ljust(width)}</span> '
    text = to_html(shortened(line.text))
    return f'{label}<span style="{STDERR}">{text}</span>' if line.stream == "stderr" else label + text


def rank_colour(rank: int) -> str:
    """The CSS of text in the rank's colour."""
    return on_any_theme(_RANK_COLOURS[rank % len(_RANK_COLOURS)])


def _label_width(log: OutputLog) -> int:
    return len(f"[{max(log.ranks, default=0)}]")


def shortened(text: str) -> str:
    """A line, cut to what is shown of it."""
    num_more = len(text) - MAX_LINE_CHARS
    return (
        text if num_more <= 0 else f"{text[:MAX_LINE_CHARS]} ... [{num_more:,} more characters of this line not shown]"
    )


def _shown_lines(log: OutputLog, last: int | None) -> tuple[list[Line], dict[int, int]]:
    """The lines to show, the latest that fit, and how many earlier ones of each rank are not among them."""
    lines = log.lines(last=last)
    totals = {rank: log.num_lines(rank) for rank in log.ranks}
    room = MAX_CHARS
    start = len(lines)
    while start > 0 and room > 0:
        start -= 1
        room -= min(len(lines[start].text), MAX_LINE_CHARS)
    lines = lines[start:]
    shown = collections.Counter(line.rank for line in lines)
    return lines, {rank: total - shown[rank] for rank, total in totals.items() if total > shown[rank]}


def _missing_notes(log: OutputLog, missing: dict[int, int], last: int | None) -> Iterable[str]:
    if last is not None:
        if missing:
            yield f"... {sum(missing.values()):,} earlier lines not shown"
        return
    for rank, num_missing in missing.items():
        path = log.path(rank)
        where = f"; all of them: {path}" if path else ""
        yield f"... {num_missing:,} earlier lines of rank {rank} not shown{where}"
    yield from filter(None, map(log.problem, log.ranks))
