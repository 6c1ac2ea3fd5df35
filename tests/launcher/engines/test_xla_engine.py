"""Launching on XLA, with real processes and threads and a torch_xla that is a fake; tests/xla has the real one."""

from __future__ import annotations

import signal
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from notebook_launcher.core.config import LaunchConfig
from notebook_launcher.core.errors import ConfigError, WorkerError
from notebook_launcher.core.events import DeviceRow
from notebook_launcher.core.precisions import refusals
from notebook_launcher.core.tasks import Cell
from notebook_launcher.launcher import launch as launching
from notebook_launcher.launcher import warm
from notebook_launcher.launcher.engines.xla import ThreadRank, XlaEngine
from notebook_launcher.launcher.launch import launch

FAKES = str(Path(__file__).resolve().parent.parent.parent / "fakes")
LIMIT_S = 60


def cell(source):
    """A function that runs ``source`` in the worker, whose last expression is its result."""
    return Cell(textwrap.dedent(source), "<test>").__call__


@pytest.fixture(scope="module")
def _fake_torch_xla():
    """One kernel for these tests, whose server has the fake on its path."""
    before, path, warm._warm = warm._warm, list(sys.path), warm._Warm()
    sys.path.insert(0, FAKES)
    yield
    warm.shutdown()
    warm._warm = before
    sys.path[:] = path


@pytest.fixture
def on_xla(_fake_torch_xla):
    def run(function, num_devices=2, *, environment=None, **options):
        given = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_devices), **(environment or {})}
        return launch(function, device="tpu", env=given, **options)

    return run


@pytest.fixture
def chips(_fake_torch_xla, monkeypatch):
    """A machine with two TPU chips."""
    row = DeviceRow("tpu", 2, ("TPU v5",) * 2, precisions=refusals("tpu"))
    monkeypatch.setattr(warm, "devices", lambda _added=None: (row, DeviceRow("cpu", 1, precisions=refusals("cpu"))))


def test_a_machine_without_says_so_before_anything_starts(monkeypatch):
    monkeypatch.setattr(launching.ENGINES.load("xla"), "start", lambda *_: pytest.fail("something was started"))
    with pytest.raises(ConfigError, match=r"device 'tpu' is not here: torch_xla is not installed; pip install"):
        launch(abs, (1,), device="tpu")


# --- one device, and threads for several -----------------------------------------------------------------------------


def test_one_device_is_one_ordinary_process(on_xla):
    source = """
        import os, torch_xla
        os.environ["RANK"], torch_xla.calls, torch_xla.state.seed
    """
    rank, calls, seed = on_xla(cell(source), 1, seed=7).result
    assert rank == "0"
    assert calls == ["flags", "singleprocess"]
    assert seed == 7


def test_devices_of_one_process_have_a_rank_a_thread_with_lines_of_its_own(on_xla):
    def who():
        import os
        import sys

        import torch_xla.runtime as xr

        from notebook_launcher.core import events

        me = xr.global_ordinal()
        sys.stdout.write(f"out of {me}\n")
        sys.stderr.write(f"err of {me}\n")
        events.emit(events.Metric({"loss": float(me)}, me, 0.0))
        return me, xr.world_size(), os.environ.get("RANK"), os.environ["WORLD_SIZE"], os.getpid()

    run = on_xla(who, 3)
    assert [result[:4] for result in run.results] == [(rank, 3, None, "3") for rank in range(3)]
    assert len({result[4] for result in run.results}) == 1
    for rank in range(3):
        assert sorted(run.logs(rank).splitlines()) == [f"err of {rank}", f"out of {rank}"]
    assert sorted((row["rank"], row["loss"]) for row in run.metrics) == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_an_error_names_its_rank_and_stops_the_others(on_xla):
    def fails():
        import time

        import torch_xla.runtime as xr

        if xr.global_ordinal() == 1:
            raise ValueError("only here")
        while True:
            time.sleep(0.01)

    with pytest.raises(ValueError, match="only here") as caught:
        on_xla(fails)
    assert "rank 1 of 2" in str(caught.value.__cause__)
    assert "rank 0: was in fails" in str(caught.value.__cause__)


def test_a_stop_is_a_keyboard_interrupt_in_every_thread(on_xla, tmp_path):
    def waits(folder):
        import pathlib
        import time

        import torch_xla.runtime as xr

        pathlib.Path(folder, str(xr.global_ordinal())).touch()
        try:
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            return "stopped"

    run = on_xla(waits, args=(str(tmp_path),), wait=False)
    deadline_s = time.monotonic() + LIMIT_S
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline_s:
        assert run.status in {"starting", "running"}
    run.stop()
    assert run.returned == {0: "stopped", 1: "stopped"}


def test_the_end_of_the_process_is_that_of_all_its_ranks(on_xla):
    def dies():
        import os
        import signal

        import torch_xla.runtime as xr

        if xr.global_ordinal() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            pass

    with pytest.raises(WorkerError, match="SIGKILL"):
        on_xla(dies)


def test_what_keeps_xla_from_starting_is_told(on_xla):
    with pytest.raises(RuntimeError, match="the chips are taken"):
        on_xla(abs, args=(1,), environment={"FAKE_PROBLEM": "the chips are taken"})


def test_another_number_of_processes_than_was_launched_is_refused_with_both(on_xla):
    with pytest.raises(ConfigError, match="the launch has 2 processes, and torch_xla sees 1 in this run"):
        on_xla(abs, args=(1,), environment={"FAKE_WORLD_SIZE": "1"})


def test_spmd_is_one_process(on_xla):
    calls = on_xla(cell("import torch_xla\ntorch_xla.calls"), 4, strategy="spmd").results
    assert calls == [["flags", "use_spmd"]]


def test_several_launches_in_a_row(on_xla):
    for number in (1, 2, 3):
        assert on_xla(abs, args=(-number,)).results == [number, number]


@pytest.mark.slow
def test_a_launch_on_the_cpu_after_one_on_xla_has_torch_as_it_is(on_xla):
    loaded = cell("import sys\n'torch_xla' in sys.modules")
    assert on_xla(loaded, 1).result
    assert not launch(loaded, device="cpu", num_processes=1).result
    assert on_xla(loaded, 1).result


def test_an_accelerator_on_one_of_several_threads_is_refused(on_xla):
    def prepare():
        from notebook_launcher import Accelerator

        Accelerator()

    with pytest.raises(ConfigError, match="the 2 ranks are threads of one process here"):
        on_xla(prepare)


def test_an_accelerator_on_one_device(on_xla):
    source = """
        from notebook_launcher import Accelerator
        one = Accelerator(mixed_precision="bf16")
        str(one.device), one.num_processes, one._strategy.name
    """
    assert on_xla(cell(source), 1).result == ("xla:0", 1, "xla")
    assert on_xla(cell(source), 4, strategy="spmd").result == ("xla:0", 1, "spmd")


# --- a process a chip ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("chips")
def test_each_chip_has_a_process_that_torch_xla_knows_by_its_number():
    source = """
        import os, torch_xla.runtime as xr
        os.environ["RANK"], xr.global_ordinal(), xr.world_size(), os.environ["PJRT_DEVICE"], os.getpid()
    """
    run = launch(cell(source), device="tpu")
    assert [result[:4] for result in run.results] == [("0", 0, 2, "TPU"), ("1", 1, 2, "TPU")]
    assert len({result[4] for result in run.results}) == 2


@pytest.mark.usefixtures("chips")
def test_processes_that_each_believe_to_be_alone_are_refused():
    with pytest.raises(ConfigError, match="the launch has 2 processes, and torch_xla sees 1 in this run"):
        launch(abs, (1,), device="tpu", env={"FAKE_WORLD_SIZE": "1"})


# --- the notebook's own process ---------------------------------------------------------------------------------------


@pytest.fixture
def used(monkeypatch):
    """A notebook that has used an XLA device."""
    module = types.SimpleNamespace(_XLAC=types.SimpleNamespace(_xla_runtime_is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch_xla", module)
    return module


def test_a_notebook_that_has_used_the_tpu_can_not_launch(used, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    with pytest.raises(ConfigError, match=r"has used the TPU itself .* Restart the notebook's kernel"):
        XlaEngine().check(LaunchConfig(device="tpu"))


def test_a_notebook_that_has_used_xla_on_the_cpu_can(used):
    config = LaunchConfig(device="tpu", env={"PJRT_DEVICE": "CPU"})
    assert XlaEngine().check(config) == ("the notebook has used XLA itself; the ranks have a runtime of their own",)


def test_but_not_by_a_fork_of_itself(used):
    with pytest.raises(ConfigError, match="start_method='fork' would hand its runtime on"):
        XlaEngine().check(LaunchConfig(device="tpu", start_method="fork", env={"PJRT_DEVICE": "CPU"}))


def test_a_notebook_that_has_only_imported_it_is_nothing_to_mention(used):
    used._XLAC._xla_runtime_is_initialized = lambda: False
    assert XlaEngine().check(LaunchConfig(device="tpu")) == ()


def test_an_interrupt_goes_by_the_channel_and_other_signals_to_the_process():
    sent = []
    host = types.SimpleNamespace(signal=sent.append, channel=None, streams={})
    one = ThreadRank(host, host)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        one.signal(number)
    assert sent == [signal.SIGTERM, signal.SIGKILL]
