"""A shell with the magics over a launcher that starts no process."""

from __future__ import annotations

import dataclasses

import pytest
from IPython import version_info
from IPython.core.interactiveshell import InteractiveShell

from notebook_launcher.core.errors import PayloadError
from notebook_launcher.core.events import DeviceRow
from notebook_launcher.core.tasks import compile_cell
from notebook_launcher.kernel_ext import completion
from notebook_launcher.kernel_ext.magics import EntryPoints, LauncherMagics


@dataclasses.dataclass
class FakeRun:
    """Runs the payload once a rank, here."""

    payload: dict
    config: object
    wait: bool
    status: str = "finished"
    results: list = dataclasses.field(default_factory=list)
    deaf: bool = False
    num_stops: int = 0

    def stop(self):
        self.num_stops += 1
        self.status = "stopping" if self.deaf and self.num_stops == 1 else "stopped"

    def __repr__(self):
        return f"<{self.payload['name']} {self.status}>"


class FakePanel:
    def _ipython_display_(self):
        print("the panel")  # noqa: T201 - the output of the cell


class FakeLauncher:
    """The launcher's entry points, in process: what they were given, and a result for each rank."""

    def __init__(self):
        self.runs: list[FakeRun] = []
        self.error: Exception | None = None  # what a rank raises
        self.facts = []
        self.has_monitor = False
        self.rows = (
            DeviceRow("cuda", 0, reason="this build of torch has no CUDA"),
            DeviceRow("cpu", 8, ("8 cores",), precisions={"no": "", "bf16": "", "fp16": "a cpu emulates it"}),
        )

    def for_cell(self, source, namespace, filename, *, name):
        if "refuse" in source:
            raise PayloadError("'refuse' can't travel")
        compile_cell(source, filename)
        return {"source": source, "namespace": namespace, "filename": filename, "name": name}

    def launch_payload(self, payload, config, *, wait, monitor=False):
        self.has_monitor = monitor
        run = FakeRun(payload, config, wait, "finished" if wait else "running")
        if self.error is not None:
            self.error.run = run
            raise self.error
        run.results = [f"rank {rank}" for rank in range(config.num_processes or 2)]
        self.runs.append(run)
        return run

    def entry_points(self):
        return EntryPoints(
            self.for_cell,
            self.launch_payload,
            lambda: self.rows,
            lambda: self.runs,
            lambda: self.facts,
            FakePanel,
            lambda: self.finding,
        )


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor" if version_info[0] > 8 else "NoColor"
    config.IPCompleter.use_jedi = False
    InteractiveShell.clear_instance()  # the worker's, where its module was loaded before
    return InteractiveShell.instance(config=config, ipython_dir=str(tmp_path_factory.mktemp("ipython")))


@pytest.fixture
def launcher(shell):
    """A shell with the magics over a fake launcher and a function ``train``."""
    fake = FakeLauncher()
    shell.register_magics(LauncherMagics(shell, fake.entry_points))
    completion.install(shell)
    before = dict(shell.user_ns)
    shell.run_cell("def train(epochs, lr=0.1):\n    return epochs", silent=True)
    yield fake
    completion.uninstall(shell)
    shell.user_ns.clear()
    shell.user_ns.update(before)
