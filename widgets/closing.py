"""Closing widgets for good: ipywidgets keeps every widget of a kernel until somebody does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ipywidgets as widgets  # type: ignore[import-untyped]


def close_all(widget: widgets.Widget) -> None:
    """Close a widget and all that lies in it, each with its layout and style, which would stay otherwise."""
    for child in getattr(widget, "children", ()):
        close_all(child)
    for part in (widget, getattr(widget, "layout", None), getattr(widget, "style", None)):
        if part is not None:
            part.close()
