"""A real Jupyter kernel for tests: run code in it, read what came back, interrupt, restart and kill it."""

from __future__ import annotations

import dataclasses
import os
import queue
import re
import signal
import time

import psutil
import zmq
from jupyter_client.manager import KernelManager

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_START_TIMEOUT_S = 60


@dataclasses.dataclass
class Cell:
    """What one execution sent back."""

    text: str = ""  # stdout and stderr, as they came
    stdout: str = ""
    stderr: str = ""
    error: str = ""  # the exception's type name, "" for none
    message: str = ""  # the exception's text
    traceback: str = ""  # without colours
    displays: list[dict] = dataclasses.field(default_factory=list)  # MIME bundles, updates applied
    result: dict = dataclasses.field(default_factory=dict)  # MIME bundle of the last expression
    num_updates: int = 0
    _places: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def shown(self) -> str:
        """Everything a person would read: streams, displays and the result as text, the traceback."""
        bundles = [*self.displays, self.result]
        return "\n".join([self.text, *(bundle.get("text/plain", "") for bundle in bundles), self.traceback])

    @property
    def html(self) -> str:
        """The HTML of all displays."""
        return "\n".join(bundle.get("text/html", "") for bundle in self.displays)

    def take(self, kind: str, content: dict) -> None:
        """Add one message of the kernel's."""
        if kind == "stream":
            self.text += content["text"]
            setattr(self, content["name"], getattr(self, content["name"]) + content["text"])
        elif kind == "error":
            self.error, self.message = content["ename"], content["evalue"]
            self.traceback = _COLOUR.sub("", "\n".join(content["traceback"]))
        elif kind == "execute_result":
            self.result = content["data"]
        elif kind in ("display_data", "update_display_data"):
            name = content.get("transient", {}).get("display_id")
            if kind == "update_display_data":
                self.num_updates += 1
            if name in self._places:
                self.displays[self._places[name]] = content["data"]
            elif kind == "display_data":
                if name is not None:
                    self._places[name] = len(self.displays)
                self.displays.append(content["data"])


class Kernel:
    """A kernel process and a client. Code runs as a notebook's cells do."""

    def __init__(self, directory: str | None = None) -> None:
        """Start it in ``directory`` and wait until it answers."""
        self._context = zmq.Context()
        self.manager = KernelManager(kernel_name="python3", context=self._context)
        self.manager.start_kernel(cwd=directory, extra_arguments=["--HistoryManager.enabled=False"])
        self._connect()

    def _connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=_START_TIMEOUT_S)
        self._message = ""
        self._cell = Cell()

    @property
    def pid(self) -> int:
        """The kernel's process id."""
        return self.manager.provisioner.pid

    @property
    def alive(self) -> bool:
        """Whether the kernel's process runs."""
        return self.manager.is_alive()

    def start(self, code: str) -> None:
        """Send a cell and return; ``wait`` gives what it sent back."""
        self._cell = Cell()
        self._message = self.client.execute(code)

    def wait(self, timeout_s: float = 60) -> Cell:
        """The cell that ``start`` sent, once the kernel is idle; ``TimeoutError`` if it is not in time."""
        self._read(timeout_s, lambda kind, content: kind == "status" and content["execution_state"] == "idle")
        return self._cell

    def wait_for(self, text: str, timeout_s: float = 60) -> Cell:
        """The cell that ``start`` sent, as soon as ``text`` is in what a person sees of it."""
        if text not in self._cell.shown:
            self._read(timeout_s, lambda *_: text in self._cell.shown or text in self._cell.html)
        return self._cell

    def run(self, code: str, timeout_s: float = 60) -> Cell:
        """Run a cell to its end."""
        self.start(code)
        return self.wait(timeout_s)

    def ok(self, code: str, timeout_s: float = 60) -> Cell:
        """Run a cell that must not raise."""
        cell = self.run(code, timeout_s)
        assert not cell.error, cell.shown
        return cell

    def run_as_cell(self, code: str, cell_id: str) -> Cell:
        """Run code as JupyterLab does, which says which cell of the notebook it is."""
        self._cell = Cell()
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": True, "stop_on_error": True}
        request = self.client.session.msg("execute_request", content, metadata={"cellId": cell_id})
        self._message = request["header"]["msg_id"]
        self.client.shell_channel.send(request)
        return self.wait()

    def complete(self, code: str) -> list[str]:
        """What tab completion offers at the end of ``code``."""
        return self.client.complete(code, len(code), reply=True, timeout=30)["content"]["matches"]

    def interrupt(self) -> None:
        """The notebook's Stop."""
        self.manager.interrupt_kernel()

    def restart(self, *, now: bool = False) -> None:
        """The notebook's Restart; ``now`` kills without asking."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=now)
        self._connect()

    def kill(self) -> None:
        """``kill -9``, as the system does when memory runs out."""
        process = psutil.Process(self.pid)
        os.kill(self.pid, signal.SIGKILL)
        process.wait(10)

    def shut_down(self, *, now: bool = False) -> None:
        """End the kernel and close the client; harmless when repeated."""
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=now)
        self.manager.cleanup_resources()
        self._context.destroy(linger=0)

    def children(self) -> list[psutil.Process]:
        """The kernel's living descendants."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def _read(self, timeout_s: float, done) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"the cell is still running after {timeout_s} s; so far: {self._cell.shown}")
            try:
                message = self.client.get_iopub_msg(timeout=min(1, left_s))
            except queue.Empty:
                if not self.alive:
                    raise RuntimeError(f"the kernel has died; so far: {self._cell.shown}") from None
                continue
            if message["parent_header"].get("msg_id") == self._message:
                self._cell.take(message["msg_type"], message["content"])
                if done(message["msg_type"], message["content"]):
                    return
