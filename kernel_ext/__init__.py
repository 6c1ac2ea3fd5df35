"""The notebook's side of the package: ``%load_ext``, the magics, output in the cell.

Loads in milliseconds: what a magic needs is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(ip: InteractiveShell) -> None:
    """Register the magics, their completion and the drawing of errors, and start the fork server in the background."""
    from notebook_launcher.kernel_ext import completion, error_display, magics
    from notebook_launcher.launcher import warm

    ip.register_magics(magics.LauncherMagics(ip))
    completion.install(ip)
    error_display.install(ip)
    warm.get_ready()


def unload_ipython_extension(ip: InteractiveShell) -> None:
    """Take all that away. Runs, and the server, go on until they are done or the kernel ends."""
    from notebook_launcher.kernel_ext import completion, error_display, magics

    for kind, names in magics.LauncherMagics.magics.items():
        for name in names:
            ip.magics_manager.magics[kind].pop(name, None)
    completion.uninstall(ip)
    error_display.uninstall(ip)
