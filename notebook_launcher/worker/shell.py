"""An IPython shell for workers, so that ``display``, figures, frames and line magics work in a function as in a cell.

Importing this module makes the shell: the fork server loads it once, and every worker has it.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from notebook_launcher.core.events import Display, emit


class EventPublisher(DisplayPublisher):
    """Sends what is displayed to the launcher."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *_: Any,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **__: Any,
    ) -> None:
        """Report one display; the launcher shows it in the cell, with this rank's label."""
        emit(Display(data, metadata or {}, transient or {}, update))

    def clear_output(self, wait: bool = False) -> None:  # noqa: FBT001, FBT002 - IPython's signature
        """Do nothing: a rank does not own the cell."""


class WorkerShell(InteractiveShell):
    """A shell without a terminal, a history or a prompt."""

    display_pub_class = Type(EventPublisher)
    displayhook_class = Type(DisplayHook)

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: no event loop runs in a worker."""


def install(module: types.ModuleType) -> None:
    """Make ``module`` the namespace of the process's shell, and the shell a worker's, whatever it was before.

    After a fork from the kernel it was the kernel's, whose publisher would write to the kernel's sockets.
    """
    present: Any = InteractiveShell._instance  # noqa: SLF001 - instance() would make one
    if isinstance(present, WorkerShell):
        shell = InteractiveShell.instance()
        shell.user_module, shell.user_ns = module, module.__dict__
        return
    holders: list[Any] = list(type(present).__mro__) if InteractiveShell.initialized() else []
    for cls in holders:
        if "_instance" in cls.__dict__:
            cls._instance = None
    hook, excepthook = sys.displayhook, sys.excepthook
    config = Config()
    config.HistoryManager.enabled = False  # no database, no thread
    config.InteractiveShell.cache_size = 0
    WorkerShell.instance(config=config, user_module=module, user_ns=module.__dict__)
    sys.displayhook, sys.excepthook = hook, excepthook


if not InteractiveShell.initialized():
    install(types.ModuleType("__main__"))  # once, in the fork server: workers only re-point it
