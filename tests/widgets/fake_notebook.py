"""A notebook without a kernel: cells that define functions, a machine, and a launcher that starts nothing."""

from __future__ import annotations

import types

import ipywidgets

from notebook_launcher.core.events import DeviceRow

CPU = DeviceRow("cpu", 8, ("8 cores",), precisions={"no": "", "bf16": "", "fp16": "a CPU emulates it"})
CUDA = DeviceRow("cuda", 4, ("H",) * 4, precisions={"no": "", "bf16": "", "fp16": ""})
NO_CUDA = DeviceRow("cuda", 0, reason="this build of torch has no CUDA")
ON_CPU = (NO_CUDA, CPU)
ON_GPUS = (CUDA, CPU)


def num_widgets():
    """How many widgets ipywidgets keeps in this process."""
    known = getattr(ipywidgets.widgets.widget, "_instances", None)
    return len(known if known is not None else ipywidgets.Widget.widgets)


class Notebook:
    """Runs cells in a namespace of its own, as a kernel would."""

    def __init__(self, *cells: str) -> None:
        self.namespace: dict = {"__name__": "__main__"}
        self.numbers: dict[str, int] = {}
        for cell in cells:
            self.run(cell)

    def run(self, cell: str) -> None:
        number = len(self.numbers) + 1
        file = f"<cell {number}>"
        self.numbers[file] = number
        exec(compile(cell, file, "exec", dont_inherit=True), self.namespace)  # noqa: S102 - as a kernel does


class FakeEvents:
    """A shell's events."""

    def __init__(self):
        self.callbacks = {"pre_run_cell": [], "post_run_cell": []}

    @property
    def after_cell(self):
        return self.callbacks["post_run_cell"]

    def register(self, name, callback):
        self.callbacks[name].append(callback)

    def unregister(self, name, callback):
        self.callbacks[name].remove(callback)

    def tell(self, name):
        for callback in list(self.callbacks[name]):
            callback(None)


class FakeShell:
    """As much of an IPython shell as a panel uses."""

    def __init__(self, *cells: str) -> None:
        self.notebook = Notebook(*cells)
        self.user_ns = self.notebook.namespace
        self.events = FakeEvents()
        self.compile = types.SimpleNamespace(_filename_map=self.notebook.numbers)
        self.kernel = types.SimpleNamespace(_allow_stdin=True)

    def run(self, cell: str) -> None:
        """A cell, and what the shell tells of its beginning and end."""
        self.events.tell("pre_run_cell")
        self.notebook.run(cell)
        self.events.tell("post_run_cell")
