"""A kernel's runs as a table: HTML and text."""

from __future__ import annotations

import html
import time
from typing import TYPE_CHECKING

from notebook_launcher.widgets.curve_svg import number
from notebook_launcher.widgets.monitor_html import state_html
from notebook_launcher.widgets.quantities import duration
from notebook_launcher.widgets.rendering import DIM, RULE
from notebook_launcher.widgets.view_model import state_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.launcher.past_runs import RunFacts

_TITLES = ("run", "function", "status", "began", "took", "options", "last metrics")
_CELL = "padding:2px 8px;text-align:left;vertical-align:top;border:none;background:transparent;font-size:12px"
_LONG = {"function", "options", "last metrics"}  # are broken anywhere, where the page is narrow; the others nowhere
_TABLE = f"width:100%;border-collapse:collapse;table-layout:auto;{RULE}"
_NONE = "no run yet in this kernel"


def run_table(runs: Sequence[RunFacts]) -> str:
    """The runs as HTML, the latest at the top."""
    if not runs:
        return f'<div style="{DIM}">{_NONE}</div>'
    head = "".join(
        f'<th scope="col" style="{_CELL};font-weight:bold;white-space:nowrap">{title}</th>' for title in _TITLES
    )
    lines = []
    for run in reversed(runs):
        cells = [html.escape(text) for text in _texts(run)]
        cells[2] = state_html(state_of(run.status))
        if run.status == "failed":
            cells[5] += f'<div style="{DIM}">{html.escape(run.summary)}</div>'
        row = "".join(
            f'<td style="{_CELL};{"overflow-wrap:anywhere" if title in _LONG else "white-space:nowrap"}">{cell}</td>'
            for title, cell in zip(_TITLES, cells, strict=True)
        )
        lines.append(f'<tr style="background:transparent">{row}</tr>')
    return (
        f'<table style="{_TABLE}"><thead><tr style="background:transparent">{head}'
        f"</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def run_text(runs: Sequence[RunFacts]) -> str:
    """The same as text."""
    if not runs:
        return _NONE
    rows = [_TITLES, *(_texts(run) for run in reversed(runs))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _texts(run: RunFacts) -> tuple[str, ...]:
    return (
        str(run.number),
        run.name,
        run.status,
        time.strftime("%H:%M:%S", time.localtime(run.began_s)),
        duration(run.elapsed_s),
        ", ".join([run.headline, *run.options]),
        ", ".join(f"{name} {number(value)}" for name, value in run.last_values.items()),
    )
