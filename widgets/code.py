"""A launch as the Python that does the same: one ``launch(...)`` call, or a ``LaunchConfig`` and a call."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from notebook_launcher.widgets.argument_controls import literal

if TYPE_CHECKING:
    from collections.abc import Mapping

_WIDTH = 72
_INDENT = "    "


@dataclasses.dataclass(frozen=True)
class CallText:
    """A function's call, each part as Python text. ``args`` and ``kwargs`` may hold ``*more`` and ``**more``."""

    function: str
    args: tuple[str, ...] = ()
    kwargs: tuple[tuple[str, str], ...] = ()  # name and text; the name "**" for further ones

    @property
    def parts(self) -> list[str]:
        """The first arguments of ``launch``."""
        args = [f"args=({', '.join(self.args)}{',' * (len(self.args) == 1)})"] if self.args else []
        pairs = [f"**{text}" if name == "**" else f"{literal(name)}: {text}" for name, text in self.kwargs]
        return [self.function, *args, *([f"kwargs={{{', '.join(pairs)}}}"] if pairs else [])]


def launch_code(call: CallText, options: Mapping[str, Any], *, kept_as: str = "run") -> str:
    """``run = launch(...)`` with every option by name, and its import; ``options`` are those that must be said."""
    unset = [name for name, value in options.items() if value is None]  # an argument that is None would not be heard
    said = [f"{name}={literal(value)}" for name, value in options.items() if value is not None]
    config = [_call("config=LaunchConfig", [f"{name}=None" for name in unset])] if unset else []
    names = "LaunchConfig, launch" if unset else "launch"
    return f"from notebook_launcher import {names}\n\n{_call(_target(kept_as), [*call.parts, *said, *config])}"


def config_code(call: CallText, options: Mapping[str, Any], *, kept_as: str = "run") -> str:
    """The same with the options in a ``LaunchConfig`` of their own."""
    config = _call("config = LaunchConfig", [f"{name}={literal(value)}" for name, value in options.items()])
    run = _call(_target(kept_as), [*call.parts, "config=config"])
    return f"from notebook_launcher import LaunchConfig, launch\n\n{config}\n{run}"


def _target(kept_as: str) -> str:
    return f"{kept_as} = launch" if kept_as else "launch"


def _call(head: str, parts: list[str]) -> str:
    """A call on one line, or where that is long, on one line a part."""
    line = f"{head}({', '.join(parts)})"
    if len(line) <= _WIDTH:
        return line
    return f"{head}(\n" + "".join(f"{_INDENT}{part},\n" for part in parts) + ")"
