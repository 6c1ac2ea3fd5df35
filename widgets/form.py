"""The form as ipywidgets: a control a value, what is wrong with it beside it, what will happen in a line below.

Works with ipywidgets 7.7.1 and 8. It follows the model: whatever changes, ``show`` brings every control up to date.
"""

from __future__ import annotations

import functools
import html
import threading
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets  # type: ignore[import-untyped]

from notebook_launcher.widgets.ansi import on_any_theme
from notebook_launcher.widgets.closing import close_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.widgets.controls import Control, Held
    from notebook_launcher.widgets.form_model import FormModel

MAX_WIDTH = "40em"
_CHAR_EM = 0.55  # the width of a letter in the labels' font, about
_MIN_LABEL_EM, _MAX_LABEL_EM = 9.5, 22.0
_NOTE = "font-size:12px;line-height:1.35"
_BAD = on_any_theme("#c62f2f")
_MORE, _LESS = "More options ▸", "Fewer options ▾"


def tip(kind: type[Any], text: str) -> dict[str, str]:
    """The tooltip as this version of ipywidgets takes it. Without one, browsers would show "null" over the label."""
    return {"tooltip" if "tooltip" in kind.class_trait_names() else "description_tooltip": text}


def full_width() -> widgets.Layout:
    """As wide as the output, up to what one can read across."""
    return widgets.Layout(width="100%", max_width=MAX_WIDTH, margin="2px 0")


def note_html(text: str, *, bad: bool) -> str:
    """A line below a control; what is wrong is announced, and marked not by its colour alone."""
    if not text:
        return ""
    if bad:
        return f'<div role="alert" style="{_NOTE};{_BAD}">✗ {html.escape(text)}</div>'
    return f'<div style="{_NOTE};opacity:0.8">{html.escape(text)}</div>'


class Field:
    """One control: its widget, and the note below it."""

    def __init__(self, control: Control, held: Held, label_width: str, changed: Callable[[Held], None]) -> None:
        """Make the widgets; ``changed`` is called with what a person chose or typed."""
        self.control = control
        self.widget = _made(control, held, label_width)
        self.note = widgets.HTML(layout=widgets.Layout(margin=f"0 0 2px calc({label_width} + 8px)", max_width="28em"))
        self.box = widgets.VBox([self.widget, self.note], layout=full_width())
        self._changed = changed
        self._following = 0  # the thread that brings the widget up to date, if one does
        self.widget.observe(self._observed, "value")

    def show(self, control: Control, held: Held, error: str) -> None:
        """Bring the widgets up to date, without taking that for a person's choice."""
        self._following = threading.get_ident()
        try:
            if control.choices != self.control.choices:
                self.widget.options = _options(control)
            if self.widget.value != held:
                self.widget.value = held
            if control.placeholder != self.control.placeholder:
                self.widget.placeholder = control.placeholder
        finally:
            self._following = 0
        self.control = control
        self._say(error)

    def _say(self, error: str) -> None:
        refused = "; ".join(self.control.refusals.values()) if not error and self.control.name != "device" else ""
        text = note_html(error or refused, bad=bool(error))
        if self.note.value != text:
            self.note.value = text
        display = "" if text else "none"
        if (self.note.layout.display or "") != display:
            self.note.layout.display = display

    def _observed(self, change: dict[str, Any]) -> None:
        if self._following != threading.get_ident():
            self._changed(change["new"])


class Form:
    """The form's widgets over a model. ``box`` holds them all."""

    def __init__(self, model: FormModel, changed: Callable[[str, Held], None]) -> None:
        """Make them. ``changed`` is called with a control's name and what it holds now; it leads to ``show``."""
        self._model = model
        self._changed = changed
        self._fields: dict[str, Field] = {}
        self.label_width = ""
        self._function, self._arguments, self._main, self._rarer = (
            widgets.VBox([], layout=widgets.Layout(width="100%")) for _ in range(4)
        )
        self._rarer.layout.display = "none"
        self.more = widgets.Button(
            description=_MORE,
            tooltip="Show the options that few launches need",
            layout=widgets.Layout(width="auto", align_self="flex-start"),
        )
        self.more.on_click(lambda _: self.unfold(folded=self._rarer.layout.display != "none"))
        self._sentence = widgets.HTML(layout=widgets.Layout(width="100%", max_width=MAX_WIDTH))
        parts = [self._function, self._arguments, self._main, self.more, self._rarer, self._sentence]
        self.box = widgets.VBox(parts, layout=widgets.Layout(width="100%"))
        self.show()

    def __getitem__(self, name: str) -> Field:
        """The control of this name."""
        return self._fields[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the controls that there are now, in the order of the form."""
        return tuple(self._fields)

    def unfold(self, *, folded: bool) -> None:
        """Show the rarer options, or fold them away."""
        self._rarer.layout.display = "none" if folded else ""
        self.more.description = _MORE if folded else _LESS
        self.more.tooltip = f"{'Show' if folded else 'Hide'} the options that few launches need"

    def show(self) -> None:
        """Bring every control, the errors and the sentence up to date with the model."""
        controls = self._model.controls()
        errors = self._model.errors()
        self._make_fields(controls)
        for control in controls:
            error = errors.get(control.name, "")
            self._fields[control.name].show(control, self._model.held(control), error)
            if error and control.group == "rarer":
                self.unfold(folded=False)
        notice = self._model.notice
        if notice and "function" not in errors:
            self._fields["function"].show(controls[0], self._model.held(controls[0]), notice)
        self._sentence.value = self._sentence_html(errors)

    def _make_fields(self, controls: tuple[Control, ...]) -> None:
        """Make the widgets of controls that are new or of another kind; keep the others, and their focus."""
        width = _label_width(controls)
        before, self._fields = self._fields, {}
        usable = before if width == self.label_width else {}  # one width for the whole form
        self.label_width = width
        for control in controls:
            field = usable.get(control.name)
            if field is None or not _fits(field, control):
                field = Field(control, self._model.held(control), width, functools.partial(self._changed, control.name))
            self._fields[control.name] = field
        for box, group in (
            (self._function, "function"),
            (self._arguments, "argument"),
            (self._main, "main"),
            (self._rarer, "rarer"),
        ):
            children = tuple(self._fields[one.name].box for one in controls if one.group == group)
            if box.children != children:
                box.children = children
        for field in {*before.values()} - {*self._fields.values()}:
            close_all(field.box)

    def _sentence_html(self, errors: dict[str, str]) -> str:
        text = self._model.sentence()
        if "" in errors:
            return note_html(errors[""], bad=True)
        if errors:
            fields = "1 field above needs" if len(errors) == 1 else f"{len(errors)} fields above need"
            told = f"{fields} a change before anything can be launched."
            return f'<div style="{_NOTE};{_BAD}">✗ {told}</div>'
        return f'<div role="status" style="line-height:1.4"><b>{html.escape(text)}</b></div>'


def _made(control: Control, held: Held, label_width: str) -> widgets.Widget:
    common = {"description": control.label, "style": {"description_width": label_width}, "layout": full_width()}
    if control.kind == "choice":
        return widgets.Dropdown(options=_options(control), value=held, **common, **tip(widgets.Dropdown, control.help))
    if control.kind == "flag":
        return widgets.Checkbox(value=held, indent=True, **common, **tip(widgets.Checkbox, control.help))
    return widgets.Text(
        value=held,
        placeholder=control.placeholder,
        continuous_update=False,
        **common,
        **tip(widgets.Text, control.help),
    )


def _options(control: Control) -> list[tuple[str, str]]:
    return [(choice.label, choice.value) for choice in control.choices]


def _fits(field: Field, control: Control) -> bool:
    known = field.control
    return (known.kind, known.label, known.help, known.group) == (
        control.kind,
        control.label,
        control.help,
        control.group,
    )


def _label_width(controls: tuple[Control, ...]) -> str:
    longest = max(len(control.label) for control in controls)
    return f"{min(max(longest * _CHAR_EM + 1, _MIN_LABEL_EM), _MAX_LABEL_EM):.1f}em"
