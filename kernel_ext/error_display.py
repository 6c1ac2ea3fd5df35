"""How IPython draws the errors of a run: as the run has put them into words, whatever their type.

An error may bring its own drawing along (``_render_traceback_``), and a run's errors do: the rank's frames, not the
launcher's. IPython does not ask for it where a ``SyntaxError`` or an exception group is involved; so a shell asks here
first.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.excerpts import excerpt

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MAX_CHARS = 4000  # of an error's text are sent to a front end beside its drawing


def install(shell: InteractiveShell) -> None:
    """Make ``shell`` draw every error that brings its own drawing along by that; harmless when repeated."""
    ip: Any = shell
    usual = ip.showtraceback
    if getattr(usual, "of_notebook_launcher", False):
        return

    @functools.wraps(usual)
    def showtraceback(exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        if not _show(ip, exc_tuple):
            usual(exc_tuple, *args, **options)

    marked: Any = showtraceback
    marked.of_notebook_launcher, marked.usual = True, usual
    ip.showtraceback = showtraceback


def uninstall(shell: InteractiveShell) -> None:
    """Let ``shell`` draw errors as before."""
    ip: Any = shell
    if getattr(ip.showtraceback, "of_notebook_launcher", False):
        ip.showtraceback = ip.showtraceback.usual


def _show(ip: Any, exc_tuple: Any) -> bool:
    """Draw an error that brings its drawing along, and tell whether it does."""
    try:
        kind, error, _ = ip._get_exc_info(exc_tuple)  # noqa: SLF001 - sets sys.last_value, as every way of showing one
    except ValueError:  # there is none
        return False
    try:
        lines, text = error._render_traceback_(), str(error)
    except Exception:  # noqa: BLE001 - none that can be used: IPython says so
        return False
    ip._showtraceback(kind, error if len(text) <= _MAX_CHARS else excerpt(text, _MAX_CHARS), lines)  # noqa: SLF001
    if ip.call_pdb:
        ip.debugger(force=True)
    return True
