"""What a panel says while a cell runs: its buttons are not heard yet, which would look like a panel that is broken."""

from __future__ import annotations

import importlib.metadata
import re
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_AFTER_S = 1.0  # cells that are shorter let nobody wait
TEXT = (
    "A cell is running: until it has ended, this kernel may not hear the buttons and fields here. "
    "The notebook's own Stop (■) interrupts the cell."
)


class BusyHint:
    """Follows the cells of a shell, and tells when one has run for a second, and "" when it has ended."""

    def __init__(self, shell: Any, tell: Callable[[str], None], *, after_s: float = _AFTER_S) -> None:
        """``tell`` is called on another thread; never where the kernel hears buttons at once."""
        self._shell, self._tell, self._after_s = shell, tell, after_s
        self._timer: threading.Timer | None = None
        self._follows = not hears_at_once(_version_of("ipykernel"))
        if self._follows:
            shell.events.register("pre_run_cell", self._began)
            shell.events.register("post_run_cell", self._ended)

    def close(self) -> None:
        """Follow them no longer."""
        if self._follows:
            self._follows = False
            self._shell.events.unregister("pre_run_cell", self._began)
            self._shell.events.unregister("post_run_cell", self._ended)
            self._ended()

    def _began(self, *_: object) -> None:
        self._ended()
        self._timer = threading.Timer(self._after_s, self._tell, (TEXT,))
        self._timer.daemon = True
        self._timer.start()

    def _ended(self, *_: object) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join()
            self._tell("")


def hears_at_once(ipykernel: str) -> bool:
    """Whether this version hears a button that was made in a cell on a thread of its own (a subshell)."""
    numbers = [int(number) for number in re.findall(r"\d+", ipykernel)[:2]]
    return [7, 0] <= numbers < [7, 4]


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
