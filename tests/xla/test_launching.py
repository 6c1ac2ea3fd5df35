"""Launching on XLA: one device, several whose ranks are threads, again and again, and after the notebook has used one.

Nothing here has several devices exchange anything: XLA on the CPU aborts when they do, but for SPMD.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import training
from jupyter_kernel import Kernel

from notebook_launcher import launch
from notebook_launcher.core.errors import ConfigError, WorkerError

LIMIT_S = 300
QUICKSTART = Path(__file__).resolve().parent.parent.parent / "notebooks" / "01_quickstart.ipynb"
ENVIRONMENT = '{"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}'


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    kernel = Kernel(directory=str(tmp_path_factory.mktemp("notebook")))
    yield kernel
    kernel.shut_down(now=True)


def quickstart_cells():
    """The quickstart's code up to and with its function ``train``."""
    cells = ["".join(cell["source"]) for cell in json.loads(QUICKSTART.read_text())["cells"]]
    last = next(number for number, text in enumerate(cells) if text.startswith("def train("))
    kinds = [cell["cell_type"] for cell in json.loads(QUICKSTART.read_text())["cells"]]
    return [text for text, kind in zip(cells[: last + 1], kinds, strict=False) if kind == "code"]


@pytest.mark.timeout(2 * LIMIT_S)
def test_the_whole_quickstart_on_one_device_gives_what_the_cpu_gives(notebook):
    for source in quickstart_cells():
        notebook.ok(source)
    notebook.ok("cpu = launch(train, num_processes=1, device='cpu')", LIMIT_S)
    shown = notebook.ok(f"xla = launch(train, device='tpu', env={ENVIRONMENT})", LIMIT_S).shown
    assert "process 0 of 1 on xla:0" in shown
    assert "1 process · TPU (XLA) · fp32 · single" in shown
    notebook.ok("truth = test_set.tensors[1]\nassert (xla.result == truth).float().mean() >= 0.95")
    notebook.ok("import numpy as np\nlosses = lambda run: np.array([row['loss'] for row in run.metrics])")
    notebook.ok("assert len(losses(xla)) == len(losses(cpu)) > 100")
    notebook.ok("assert np.allclose(losses(xla)[:20], losses(cpu)[:20], atol=1e-5)")
    notebook.ok("import sys; assert 'torch_xla' not in sys.modules")


@pytest.mark.timeout(LIMIT_S)
def test_three_launches_in_a_row_in_one_notebook(notebook):
    notebook.ok("from notebook_launcher import launch")
    notebook.ok(
        "def whole(number):\n"
        "    import torch, torch_xla\n"
        "    return (torch.ones(3, device=torch_xla.device()) * number).sum().item()"
    )
    for number in (1, 2, 3):
        took = f"print(launch(whole, ({number},), device='tpu', env={ENVIRONMENT}).results)"
        assert f"[{3.0 * number}]" in notebook.ok(took, LIMIT_S).shown


@pytest.mark.timeout(LIMIT_S)
def test_an_error_shows_the_notebooks_line(notebook):
    notebook.ok("from notebook_launcher import launch")
    notebook.ok("def fails():\n    import torch_xla\n    torch_xla.device()\n    raise KeyError('from the rank')")
    cell = notebook.run(f"launch(fails, device='tpu', env={ENVIRONMENT})", LIMIT_S)
    assert cell.error == "KeyError"
    assert "raise KeyError('from the rank')" in cell.traceback


@pytest.mark.timeout(LIMIT_S)
def test_a_notebook_that_has_used_a_device_can_launch_on_the_cpu_only(tmp_path):
    script = tmp_path / "used.py"
    script.write_text(
        "import torch_xla\n"
        "torch_xla.device()\n"
        "from notebook_launcher import launch\n"
        "print(launch(abs, (-3,), device='tpu').results)\n"
        "try:\n"
        "    launch(abs, (-3,), device='tpu', start_method='fork')\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    variables = {**os.environ, "PJRT_DEVICE": "CPU"}
    done = subprocess.run(
        [sys.executable, script], env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the notebook has used XLA itself; the ranks have a runtime of their own" in done.stdout
    assert "[3]" in done.stdout
    assert "start_method='fork' would hand its runtime on" in done.stdout


# --- two devices, whose ranks are threads ----------------------------------------------------------------------------


def who(number):
    import sys

    import torch
    import torch_xla
    import torch_xla.runtime as xr

    sys.stdout.write(f"out of {xr.global_ordinal()}\n")
    sys.stderr.write(f"err of {xr.global_ordinal()}\n")
    device = torch_xla.device()
    return xr.global_ordinal(), xr.world_size(), str(device), torch.full((2,), float(number), device=device)


def test_ranks_world_size_results_and_output_of_two_devices(on_xla):
    run = on_xla(who, 7, num_devices=2)
    assert [result[:3] for result in run.results] == [(0, 2, "xla:0"), (1, 2, "xla:1")]
    assert all(result[3].device.type == "cpu" and result[3].tolist() == [7.0, 7.0] for result in run.results)
    for rank in (0, 1):
        assert sorted(run.logs(rank).split("\n")[:2]) == [f"err of {rank}", f"out of {rank}"]
    assert len(set(run.pids)) == 1


def test_an_error_on_one_of_two_devices_names_its_rank(on_xla):
    def fails():
        import time

        import torch_xla.runtime as xr

        if xr.global_ordinal() == 1:
            raise ValueError("only here")
        while True:
            time.sleep(0.01)

    with pytest.raises(ValueError, match="only here") as caught:
        on_xla(fails, num_devices=2)
    assert isinstance(caught.value.__cause__, WorkerError)
    assert "rank 1 of 2" in str(caught.value.__cause__)
    assert "rank 0: was in fails" in str(caught.value.__cause__)


def test_a_stop_reaches_both_of_two_devices(on_xla, tmp_path):
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

    run = on_xla(waits, str(tmp_path), num_devices=2, wait=False)
    deadline_s = time.monotonic() + LIMIT_S
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline_s:
        run.view  # noqa: B018 - the run goes on meanwhile
    run.stop()
    assert run.returned == {0: "stopped", 1: "stopped"}


def test_an_accelerator_on_one_of_several_threads_is_refused(on_xla):
    def prepare():
        from notebook_launcher import Accelerator

        Accelerator()

    with pytest.raises(ConfigError, match="the 2 ranks are threads of one process") as caught:
        on_xla(prepare, num_devices=2)
    assert "strategy='spmd'" in str(caught.value)


def test_a_device_of_several_may_be_used_alone(on_xla):
    results = on_xla(who, 1, num_devices=2, num_processes=1).results
    assert [result[:3] for result in results] == [(0, 1, "xla:0")]


def test_a_fresh_interpreter_loads_it_itself(on_xla):
    assert on_xla(who, 1, start_method="spawn").results[0][:3] == (0, 1, "xla:0")


def test_a_launch_on_the_cpu_in_between_has_torch_as_it_is(on_xla):
    def is_patched():
        import sys

        import torch

        return "torch_xla" in sys.modules, torch.nn.utils.clip_grad_norm_.__module__

    assert on_xla(is_patched).result[0]
    assert launch(is_patched, device="cpu", num_processes=1).result == (False, "torch.nn.utils.clip_grad")


def test_several_processes_on_the_cpu_are_refused_with_both_numbers(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from notebook_launcher import Accelerator\nAccelerator()\n")
    variables = {**os.environ, "PJRT_DEVICE": "CPU", "NOTEBOOK_LAUNCHER_DEVICE": "tpu"}
    variables |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # as torchrun does
    done = subprocess.run(
        [sys.executable, script], env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert "2 processes were launched, and torch_xla sees 1 in this run" in done.stderr


# --- one device trains -----------------------------------------------------------------------------------------------


def train(precision=None):
    import training

    from notebook_launcher import Accelerator

    accelerator = Accelerator(mixed_precision=precision)
    objects = training.prepared(accelerator)
    return training.steps(accelerator, *objects), accelerator.get_state_dict(objects[0])


@pytest.mark.parametrize(("precision", "limit"), [("no", 1e-6), ("bf16", 1e-2)])
def test_one_device_trains_as_plain_torch(on_xla, precision, limit):
    losses, state = on_xla(train, precision).result
    plain_losses, plain_state = training.plain()
    assert losses == pytest.approx(plain_losses, abs=limit)
    assert training.difference(state, plain_state) <= (limit if precision == "no" else 0.1)
