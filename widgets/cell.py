"""``Cell``: the place in a notebook where a run is shown, which any thread may publish to."""

from __future__ import annotations

import threading
from typing import Any

from notebook_launcher.core.config import snapshot
from notebook_launcher.core.errors import ConfigError


class Cell:
    """A place to publish to: the cell that is running on this thread, now and after it has ended."""

    def __init__(self) -> None:
        """Take hold of the running cell."""
        from IPython.core.getipython import get_ipython

        shell: Any = get_ipython()
        if shell is None:
            msg = "sink 'cell' needs a notebook: this process has no IPython shell. Use 'terminal'"
            raise ConfigError(msg)
        self.shell = shell
        self._publisher: Any = shell.display_pub
        self._session: Any = getattr(self._publisher, "session", None)
        self._parent: dict[str, Any] = dict(getattr(self._publisher, "parent_header", None) or {})
        request: Any = (shell.get_parent() if hasattr(shell, "get_parent") else None) or {}
        self.cell_id = request.get("metadata", {}).get("cellId")  # None where the front end doesn't say
        self.message_id = request.get("header", {}).get("msg_id")
        self._events: Any = shell.events
        self._over = threading.Event()
        self._events.register("post_run_cell", self._ended)

    @property
    def live(self) -> bool:
        """Whether a front end shows what is published, at once; ``%%capture`` only keeps it."""
        return self._session is not None

    @property
    def running(self) -> bool:
        """Whether the cell is still the one that runs, so that front ends take new displays for it."""
        return not self._over.is_set()

    def is_run_again_by(self, other: Cell) -> bool:
        """Whether ``other`` is the same cell of the notebook, run once more, so that its outputs have gone."""
        return self.cell_id is not None and self.cell_id == other.cell_id and self.message_id != other.message_id

    def display(self, data: dict[str, Any], metadata: dict[str, Any] | None = None, *, name: str = "") -> None:
        """Add an output to the cell; ``name`` is its display id, for updates."""
        self._send("display_data", data, metadata, name, self._parent)

    def update(self, data: dict[str, Any], metadata: dict[str, Any] | None = None, *, name: str) -> None:
        """Replace the output that has this display id."""
        # The cell that runs now is the parent: nbclient drops everything that names another one.
        parent = self._publisher.parent_header if self.live else {}
        self._send("update_display_data", data, metadata, name, parent)

    def close(self) -> None:
        """Let the shell forget this."""
        if not self._over.is_set():
            self._over.set()
            self._events.unregister("post_run_cell", self._ended)

    def _ended(self, *_: object) -> None:
        self.close()

    def _send(
        self, kind: str, data: dict[str, Any], metadata: dict[str, Any] | None, name: str, parent: dict[str, Any]
    ) -> None:
        transient = {"display_id": name} if name else {}
        if self._session is None:
            update = kind == "update_display_data"
            self._publisher.publish(data, metadata or {}, transient=transient, update=update)
            return
        content = {"data": data, "metadata": metadata or {}, "transient": transient}
        self._session.send(self._publisher.pub_socket, kind, content, parent=parent, ident=self._publisher.topic)


def has_front_end(shell: Any) -> bool:
    """Whether somebody may press a button: a kernel that can ask for input has a page in front of it, or Voila's."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return False
    return bool(getattr(kernel, "_allow_stdin", True)) or any(name.startswith("VOILA_") for name in snapshot())
