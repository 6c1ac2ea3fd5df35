"""The panel's widgets: the form, the buttons, what they answer, the code, the run's monitor. From top to bottom."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any, Protocol

import ipywidgets as widgets  # type: ignore[import-untyped]

from notebook_launcher.widgets.ansi import on_any_theme
from notebook_launcher.widgets.check import CHECKING
from notebook_launcher.widgets.closing import close_all
from notebook_launcher.widgets.form import Form, tip
from notebook_launcher.widgets.panel_html import GOING_ON, STORED_CLASS

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.widgets.controls import Held
    from notebook_launcher.widgets.form_model import FormModel

_CLASS = "notebook-launcher-panel"
# The arrow of a choice is an image that nobody sees on a dark page; code is read in a font of its own.
_STYLE = f"""<style>
.{_CLASS} select {{background-image: none; appearance: auto; -webkit-appearance: auto}}
[data-jp-theme-light="false"] .{_CLASS} select, .vscode-dark .{_CLASS} select {{color-scheme: dark}}
.{_CLASS} textarea {{font-family: var(--jp-code-font-family, monospace); font-size: 12px; line-height: 1.4}}
.jp-OutputArea-child:has(.{_CLASS}) + .jp-OutputArea-child:has(.{STORED_CLASS}) {{display: none}}
.{_CLASS} :is(button, input, select, textarea):focus-visible {{outline: 2px solid currentColor; outline-offset: 1px}}
</style>"""
_BAD = on_any_theme("#c62f2f")
_FILE = "config.yaml"
_COPY = "Copy it, or run %launcher code in a cell, which puts it into a new cell."


class Actions(Protocol):
    """What the buttons do."""

    def set(self, name: str, held: Held) -> None:
        """A control was changed."""

    def launch(self) -> None:
        """Launch what the form says."""

    def check(self) -> None:
        """Try out the processes, without the function."""

    def stop(self) -> None:
        """Stop the run or the check; the second time, kill it."""

    def code(self) -> tuple[str, str]:
        """The code that does the same, in two forms."""

    def save(self, path: str) -> None:
        """Write the options into a file."""

    def load(self, path: str) -> list[str]:
        """Show the options of a file; what is to be said of it."""


class PanelView:
    """The widgets. ``box`` holds them all."""

    def __init__(self, model: FormModel, actions: Actions, guarded: Callable[[Callable[[], None]], None]) -> None:
        """Make them; every callback goes through ``guarded``."""
        self._actions = actions
        self._guarded = guarded
        self._num_stops = 0
        self.form = Form(model, lambda name, held: guarded(lambda: actions.set(name, held)))
        self.launch_button = self._button("Launch", "Run the function on every process", self._launch, "primary")
        self.stop_button = self._button("Stop", "", self._stop)
        self.check_button = self._button(
            "Check", "Try out processes, precisions and the exchange, without the function", self._check
        )
        self.code_button = self._button("Copy as code", "Show the Python that does the same", self._code)
        self.save_button = self._button("Save config", "Write the options into this YAML file", self._save)
        self.load_button = self._button("Load config", "Take the options from this YAML file", self._load)
        self.path = widgets.Text(
            value=_FILE,
            description="Config file",
            continuous_update=False,
            style={"description_width": "initial"},
            layout=widgets.Layout(width="auto", flex="1 1 14em", min_width="10em"),
            **tip(widgets.Text, "YAML file with options, Accelerate's too"),
        )
        self._hint = widgets.HTML(layout=widgets.Layout(width="100%", display="none"))
        self.message = widgets.HTML(layout=widgets.Layout(width="100%"))
        self.code_texts = [_code_area(name) for name in ("One call", "By a LaunchConfig")]
        self._code_box = widgets.VBox(
            [*self.code_texts, widgets.HTML(_dim(_COPY))], layout=widgets.Layout(width="100%")
        )
        self._code_box.layout.display = "none"
        self.run_box = widgets.VBox([], layout=widgets.Layout(width="100%"))
        self.box = widgets.VBox(
            [
                widgets.HTML(_STYLE, layout=widgets.Layout(display="none")),
                self.form.box,
                _row(self.launch_button, self.stop_button, self.check_button, self.code_button),
                _row(self.path, self.save_button, self.load_button),
                self._hint,
                self.message,
                self._code_box,
                self.run_box,
            ],
            layout=widgets.Layout(width="100%"),
        )
        self.box.add_class(_CLASS)
        self.show_state("")

    def show(self) -> None:
        """Bring the form up to date."""
        self.form.show()

    def show_run(self, widget: Any) -> None:
        """Show a run's monitor below, in place of the last one."""
        self.run_box.children = (widget,)

    def show_state(self, status: str) -> None:
        """Offer what can be done while the run is ``status``, or a check goes on; "" before the first."""
        going_on = status in (*GOING_ON, CHECKING)
        if not going_on:
            self._num_stops = 0
        self.launch_button.disabled = self.check_button.disabled = going_on
        self.stop_button.disabled = not going_on
        again = self._num_stops > 0
        self.stop_button.description = "Stop at once" if again else "Stop"
        self.stop_button.tooltip = "Kill every rank now" if again else "Interrupt every rank; a second time, kill them"

    def say(self, text: str, *, bad: bool = False) -> None:
        """Answer a button; "" takes the last answer away."""
        style = f"white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.4{f';{_BAD}' if bad else ''}"
        role = "alert" if bad else "status"
        mark = "✗ " if bad else ""
        self.message.value = f'<div role="{role}" style="{style}">{mark}{html.escape(text)}</div>' if text else ""

    def hint(self, text: str) -> None:
        """Say what a person should know while they wait; "" takes it away."""
        self._hint.value = f'<div role="status">{_dim(text)}</div>' if text else ""
        self._hint.layout.display = "" if text else "none"

    def close(self) -> None:
        """Close the widgets, but for the run's monitor."""
        self.run_box.children = ()
        close_all(self.box)

    def _button(self, text: str, tooltip: str, act: Callable[[], None], style: str = "") -> widgets.Button:
        button = widgets.Button(
            description=text, tooltip=tooltip, button_style=style, layout=widgets.Layout(width="auto")
        )
        button.on_click(lambda _: self._guarded(act))
        return button

    def _launch(self) -> None:
        if self.launch_button.disabled:  # the second press of a double click, which was on its way
            return
        self.say("")
        self._actions.launch()

    def _check(self) -> None:
        if not self.check_button.disabled:
            self._actions.check()

    def _stop(self) -> None:
        if self.stop_button.disabled:
            return
        self._num_stops += 1
        self._actions.stop()

    def _code(self) -> None:
        if self._code_box.layout.display == "":
            self._show_code(shown=False)
            return
        for area, text in zip(self.code_texts, self._actions.code(), strict=True):
            area.value, area.rows = text, text.count("\n") + 2
            area.style.description_width = self.form.label_width
        self.say("")
        self._show_code(shown=True)

    def _show_code(self, *, shown: bool) -> None:
        self._code_box.layout.display = "" if shown else "none"
        self.code_button.description = "Hide code" if shown else "Copy as code"

    def _save(self) -> None:
        self._actions.save(self.path.value.strip())
        self.say(f"Saved to {self.path.value.strip()}.")

    def _load(self) -> None:
        told = self._actions.load(self.path.value.strip())
        self.say("\n".join([f"Loaded from {self.path.value.strip()}.", *told]))


def _row(*children: widgets.Widget) -> widgets.HBox:
    return widgets.HBox(children, layout=widgets.Layout(width="100%", max_width="40em", flex_flow="row wrap"))


def _code_area(label: str) -> widgets.Textarea:
    return widgets.Textarea(
        description=label,
        layout=widgets.Layout(width="100%", margin="2px 0"),
        **tip(widgets.Textarea, "Select all of it and copy"),
    )


def _dim(text: str) -> str:
    return f'<div style="font-size:12px;line-height:1.4;opacity:0.8">{html.escape(text)}</div>'
