"""``launch`` from this very process, with real workers; what needs a notebook is in tests/kernel."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types

import pytest
from real_rank import WITHOUT_TORCH

from notebook_launcher.core.config import LaunchConfig, field_rows
from notebook_launcher.core.errors import ConfigError, EngineError, PayloadError, WorkerError
from notebook_launcher.core.tasks import Cell
from notebook_launcher.launcher import launch as launching
from notebook_launcher.launcher import warm
from notebook_launcher.launcher.launch import launch

LIMIT_S = 60


def cell(source):
    """A function that runs ``source`` in the worker's ``__main__``, and needs nothing of this file there."""
    return Cell(textwrap.dedent(source), "<test>").__call__


def cpu(fn, *args, **options):
    return launch(fn, args, **{"device": "cpu", **options})


@pytest.fixture
def nothing_starts(monkeypatch):
    """Fails the test if a launch gets as far as to ask for workers."""
    monkeypatch.setattr(launching.ENGINES.load("local"), "start", lambda *_: pytest.fail("something was started"))


@pytest.fixture
def new_kernel(monkeypatch):
    """Keeps nothing warm yet, loads only what a worker needs, and keeps nothing of it afterwards."""
    monkeypatch.setattr(warm, "_warm", warm._Warm())
    monkeypatch.setattr(warm, "_PRELOAD", WITHOUT_TORCH)
    yield
    warm.shutdown()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module where a server will find it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)

    return write


def test_its_signature_names_the_options_of_which_tab_and_help_tell():
    parameters = inspect.signature(launch).parameters
    assert list(parameters)[:3] == ["fn", "args", "kwargs"]
    options = [*(row.name for row in field_rows()), "config", "monitor", "wait"]
    assert sorted(list(parameters)[3:]) == sorted(options)
    assert {parameters[name].kind for name in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert parameters["stop_grace_s"].default == LaunchConfig().stop_grace_s


def test_the_warning_of_a_large_object_points_at_the_callers_line():
    with pytest.warns(UserWarning, match="sends 'big' along, 250 MB") as seen:
        launching._warn_of_large(types.SimpleNamespace(large=[("big", 250_000_000)]))
    assert seen[0].filename == __file__


def test_arguments_options_and_results():
    run = launch(os.path.join, ("a",), {}, config={"num_processes": 1}, num_processes=3, device="cpu")
    assert run.results == ["a", "a", "a"]
    assert run.status == "finished"
    assert run.config.num_processes == 3
    assert run.name == "join"


def test_a_launch_that_does_not_wait_can_be_waited_for():
    run = cpu(cell("import os\nos.environ['RANK']"), num_processes=2, wait=False)
    assert run.wait(LIMIT_S).results == ["0", "1"]


def test_a_config_object_and_keywords(tmp_path):
    path = tmp_path / "options.yaml"
    LaunchConfig(device="cpu", num_processes=1, seed=5).save(path)
    assert launch(cell("import random\nrandom.random()"), config=path).results == [0.6229016948897019]
    assert launch(dict, kwargs={"a": 1}, config=LaunchConfig(device="cpu", num_processes=1)).result == {"a": 1}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "ddpp"}, "Did you mean 'ddp'"),
        ({"engine": "locl"}, "Did you mean 'local'"),
        ({"num_procceses": 2}, "Did you mean 'num_processes'"),
        ({"num_processes": 0}, "num_processes=0"),
        ({"num_processes": 1000}, "too many"),
        ({"mixed_precision": "fp16", "device": "cpu"}, "fp16"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(nothing_starts, options, text):
    with pytest.raises(ConfigError, match=text):
        launch(os.getpid, **{"device": "cpu", **options})


def test_a_call_with_wrong_arguments_is_refused_before_anything_starts(nothing_starts):
    with pytest.raises(PayloadError, match=r"can't be called with \(1\)"):
        cpu(lambda: None, 1)


def test_a_launch_from_a_rank_is_refused():
    nested = "from notebook_launcher import launch\nimport os\nlaunch(os.getpid, device='cpu')"
    with pytest.raises(ConfigError, match=r"launch was called on rank \d of a run") as caught:
        cpu(cell(nested), num_processes=2)
    assert "[rank" in caught.value.__notes__[0]


def test_a_rank_killed_for_memory_is_told_with_the_machines_use():
    with pytest.raises(WorkerError, match=r"SIGKILL.*GiB in use just before") as caught:
        cpu(cell("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"), num_processes=1)
    assert caught.value.kind == "SIGKILL"


def test_a_rank_that_waits_in_a_collective_is_named_with_its_line():
    source = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            raise LookupError("shard 7")
        def reduce():
            dist.all_reduce(torch.ones(1))
        reduce()
    """
    with pytest.raises(LookupError, match="shard 7") as caught:
        cpu(cell(source), num_processes=2)
    (fate,) = caught.value.__cause__.others
    assert fate.startswith("rank 0: was in all_reduce (line 8 of reduce")


def test_what_a_rank_leaves_writing_for_ever_does_not_hold_the_run():
    began_s = time.monotonic()
    run = cpu(cell("import subprocess\nsubprocess.Popen(['yes'])\n'done'"), num_processes=1)
    assert run.result == "done"
    assert time.monotonic() - began_s < 10


def test_a_rank_whose_display_cannot_be_sent_fails_and_the_run_ends():
    source = "from IPython.display import publish_display_data\npublish_display_data({'x': (i for i in ())})"
    with pytest.raises(TypeError, match="generator"):
        cpu(cell(source), num_processes=1)


# --- servers that don't start -----------------------------------------------------------------------------------------


def test_a_preload_that_raises_is_a_note_of_the_run(new_kernel, module):
    module("no_licence", "raise RuntimeError('no licence')")
    run = cpu(cell("1"), num_processes=1, preload=["no_licence"])
    assert run.result == 1
    assert [note for note in run._record.notes if note.startswith("preload=no_licence: RuntimeError: no licence")]


def test_a_preload_that_ends_the_server_ends_the_launch_with_its_last_words(new_kernel, module):
    module("deadly", "import os, sys\nsys.stderr.write('the driver is too old\\n')\nos._exit(7)")
    with pytest.raises(EngineError) as caught:
        cpu(cell("1"), num_processes=2, preload=["deadly"])
    text = str(caught.value)
    assert "of 2 was never started: the fork server ended before it had made the process: exit code 7" in text
    assert "while it loaded 'deadly' (preload)" in text
    assert "the driver is too old" in text
    assert cpu(cell("1"), num_processes=1).result == 1


def test_a_preload_is_loaded_before_the_ranks(new_kernel, module):
    module("costly", "import os\nMADE_BY = os.getpid()")
    run = cpu(cell("import os, costly\ncostly.MADE_BY == os.getppid()"), num_processes=1, preload=["costly"])
    assert run.result is True
    assert not [note for note in run._record.notes if note.startswith("preload=")]


def test_an_interpreter_that_is_not_there(new_kernel, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EngineError, match="/no/such/python"):
        cpu(cell("1"))


def test_a_server_killed_between_two_launches_is_replaced(new_kernel):
    assert cpu(cell("1"), num_processes=1).result == 1
    first = warm._warm.server
    os.kill(first.pid, signal.SIGKILL)
    assert first.ended(LIMIT_S)
    assert cpu(cell("2"), num_processes=2).results == [2, 2]
    assert warm._warm.server is not first


def test_a_server_that_hangs_under_a_launch_is_replaced(new_kernel, module, tmp_path):
    module(
        "hangs_once",
        f"import os, pathlib, time\nfirst = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "if not first.exists():\n    first.touch()\n    os.register_at_fork(before=lambda: time.sleep(600))",
    )
    run = cpu(cell("2"), num_processes=2, preload=["hangs_once"])
    assert run.results == [2, 2]
    (note,) = [note for note in run._record.notes if note.startswith("started again")]
    assert "never started: the fork server ended before it had made the process: it did not answer for" in note


# --- start methods ----------------------------------------------------------------------------------------------------


def test_a_forked_kernels_descriptors_are_closed_in_the_ranks():
    """A kernel's sockets above all: it could not be restarted while a rank holds its ports."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        source = f"""
            import os
            def is_open(number):
                try:
                    os.fstat(number)
                except OSError:
                    return False
                return True
            is_open({listening.fileno()}), is_open(1)
        """
        assert cpu(cell(source), num_processes=2, start_method="fork").results == [(False, True)] * 2


def test_a_forked_worker_that_cannot_begin_is_never_a_second_kernel(monkeypatch):
    monkeypatch.setattr("notebook_launcher.launcher.engines.local._close_all_but", lambda _: 1 / 0)
    with pytest.raises(WorkerError, match="exit code 1"):
        cpu(cell("1"), num_processes=1, start_method="fork")


def test_a_fork_that_the_system_refuses(monkeypatch):
    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("notebook_launcher.launcher.engines.local.os.fork", refuse)
    with pytest.raises(EngineError, match=r"the kernel can't be forked.*Resource temporarily unavailable"):
        cpu(cell("1"), num_processes=1, start_method="fork")


def test_standby_says_how_many_wait_for_the_next_launch(new_kernel):
    def settled(number):
        deadline_s = time.monotonic() + LIMIT_S
        while len(warm._warm.standing_by) != number and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return len(warm._warm.standing_by)

    cpu(cell("1"), num_processes=2)
    assert settled(2) == 2
    cpu(cell("1"), num_processes=1, standby=3)
    assert settled(3) == 3
    cpu(cell("1"), num_processes=1, standby=0)
    assert settled(0) == 0


# --- several machines -------------------------------------------------------------------------------------------------

MACHINE = """
import os, sys
from notebook_launcher import launch

def train():
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return [int(os.environ[name]) for name in names], total.item()

run = launch(train, num_processes=2, device="cpu", num_machines=2, machine_rank=int(sys.argv[1]),
             main_process_ip="127.0.0.1", main_process_port=int(sys.argv[2]))
print("results", run.results)
"""


@pytest.mark.slow
def test_two_machines_meet(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(MACHINE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    machines = [
        subprocess.Popen([sys.executable, str(script), rank, str(port)], stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    try:
        outputs = [machine.communicate(timeout=LIMIT_S)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.communicate()
    assert "4 processes · CPU (gloo) · fp32 · DDP · machine 0 of 2" in outputs[0]
    assert "results [([0, 0, 4, 2, 0], 1111.0), ([1, 1, 4, 2, 0], 1111.0)]" in outputs[0]
    assert "results [([2, 0, 4, 2, 1], 1111.0), ([3, 1, 4, 2, 1], 1111.0)]" in outputs[1]
