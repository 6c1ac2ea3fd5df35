"""The panel as it stays in a saved notebook, where nothing can be pressed: what was chosen, and what that would do."""

from __future__ import annotations

import html
import time
from typing import TYPE_CHECKING

from notebook_launcher.widgets.controls import one_of

if TYPE_CHECKING:
    from notebook_launcher.widgets.controls import Control, Held
    from notebook_launcher.widgets.form_model import FormModel

_FRAME = "border:1px solid #9e9e9e;border-radius:4px;padding:6px 10px;font-size:13px"
_CELL = "text-align:left;padding:1px 12px 1px 0;border:none;background:transparent;font-size:13px"
_LABEL = f"{_CELL};font-weight:normal"
_DIM = "opacity:0.75;font-size:12px"
GOING_ON = ("starting", "running", "stopping")
STORED_CLASS = "notebook-launcher-stored"
AGAIN = "The panel needs its kernel. To use it again, run this cell."
HOW = "Run this cell in a notebook with a live kernel to use the panel."


def static(model: FormModel) -> str:
    """The form's state."""
    rows = "".join(
        f'<tr style="background:transparent"><th scope="row" style="{_LABEL}">{html.escape(label)}</th>'
        f'<td style="{_CELL}">{html.escape(text)}</td></tr>'
        for label, text in _rows(model)
    )
    said = model.sentence()
    errors = "".join(f"<div>✗ {html.escape(text)}</div>" for text in model.errors().values())
    sentence = f"<div><b>{html.escape(said)}</b></div>" if said and not errors else errors
    form = f'<table style="border:none;margin:4px 0">{rows}</table>{sentence}<div style="{_DIM}">{HOW}</div>'
    return f'<div style="{_FRAME}"><div><b>Launch</b></div>{form}</div>'


def stored(run_html: str) -> str:
    """What stays below the panel, a run, and how to get the panel back; the live panel hides it."""
    return f'<div class="{STORED_CLASS}"><div style="{_DIM}">{AGAIN}</div>{run_html}</div>'


def not_over(sentence: str, now_s: float) -> str:
    """What stands there until the run has ended, should the notebook be saved before that, or the page not hear of it.

    ``now_s`` is Unix time.
    """
    at = time.strftime("%H:%M:%S", time.localtime(now_s))
    text = f"A run was going on when this was stored, at {at}: {sentence}"
    return f'<div style="{_FRAME}">{html.escape(text)}</div>'


def as_text(model: FormModel, run_text: str = "") -> str:
    """The same as plain text."""
    said = model.sentence() or "; ".join(model.errors().values())
    lines = [f"{label}: {text}" for label, text in _rows(model)]
    return "\n".join(["Launch", *lines, said, *([run_text] if run_text else [HOW])])


def _rows(model: FormModel) -> list[tuple[str, str]]:
    """Label and value of what a person should see: all that is always shown, and what was changed of the rest."""
    told = []
    for control in model.controls():
        held = model.held(control)
        if control.group != "rarer" or held != control.default:
            told.append((control.label, _told(control, held)))
    return told


def _told(control: Control, held: Held) -> str:
    if isinstance(held, bool):
        return "yes" if held else "no"
    choice = one_of(control.choices, held)
    return choice.label if choice is not None else held or control.placeholder
