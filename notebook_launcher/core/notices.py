"""Warnings that point at the user's own line, however many calls of this package lie between."""

from __future__ import annotations

import sys
import warnings

# IPython calls a magic; decorator, up to IPython 8, calls it for IPython.
_BETWEEN = ("notebook_launcher", "IPython", "decorator")


def warn(text: str) -> None:
    """Warn of ``text``, at the line of whoever called the package."""
    frame = sys._getframe(1)  # noqa: SLF001 - warnings itself counts frames so, but not until which
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", ""), frame.f_code.co_filename):
        frame = frame.f_back
    warnings.warn_explicit(
        text,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__", "__main__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_between(module: str, filename: str) -> bool:
    return module.partition(".")[0] in _BETWEEN or filename.startswith("<decorator-gen")
