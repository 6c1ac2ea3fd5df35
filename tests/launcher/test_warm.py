"""What a kernel keeps warm: real servers and workers, which load no torch unless a test looks at devices."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
from fake_rank import FakeRank
from real_rank import LIMIT_S, WITHOUT_TORCH, RealRank, exit_code, pid_of

from notebook_launcher.core.errors import EngineError
from notebook_launcher.core.events import DeviceRow
from notebook_launcher.launcher import forkserver, warm
from notebook_launcher.launcher.plan import DEFAULT_ON_CPU


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    """A kernel that keeps nothing warm yet, and whose servers load only what a worker needs."""
    monkeypatch.setattr(warm, "_warm", warm._Warm())
    monkeypatch.setattr(warm, "_PRELOAD", WITHOUT_TORCH)
    yield warm._warm
    warm.shutdown()


def release(*workers):
    for worker in workers:
        worker.channel.close()
        exit_code(worker)


def until(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def kill_server(state):
    os.kill(state.server.pid, signal.SIGKILL)
    assert state.server.ended(LIMIT_S)


def test_workers_are_forked_from_one_server(kernel):
    one = warm.take(2)
    server = kernel.server
    two = warm.take(1)
    assert kernel.server is server
    assert RealRank(two[0], "import os\nos.getppid()").result() == server.pid
    release(*one, *two)


def test_those_standing_by_are_taken_first_and_used_once(kernel):
    release(*warm.take(1))
    warm.stand_by(2)
    waiting = list(kernel.standing_by)
    taken = warm.take(3)
    assert taken[:2] == waiting
    assert kernel.standing_by == []
    release(*taken)


def test_those_that_are_missing_are_forked_ahead_and_are_the_ones_taken(kernel):
    release(*warm.take(1))
    warm.stand_by(1)
    (waiting,) = kernel.standing_by
    warm.prepare(3)
    prepared = list(kernel.standing_by)
    assert len(prepared) == 3
    assert prepared[0] is waiting
    warm.prepare(2)
    assert kernel.standing_by == prepared
    assert warm.take(3) == prepared
    release(*prepared)


def test_to_prepare_raises_nothing_where_no_server_can_be_started(kernel, monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    warm.prepare(1)
    assert kernel.standing_by == []
    with pytest.raises(EngineError, match="/nowhere/python"):
        warm.take(1)


def test_what_is_not_taken_goes_on_standing_by(kernel):
    release(*warm.take(1))
    warm.stand_by(3)
    (last,) = kernel.standing_by[1:2]
    taken = warm.take(1)
    assert len(kernel.standing_by) == 2
    assert kernel.standing_by[0] is last
    warm.stand_by(1)  # a smaller launch has come: one is enough
    assert len(kernel.standing_by) == 1
    warm.stand_by(0)
    assert kernel.standing_by == []
    release(*taken)


def test_a_fresh_worker_is_none_of_those_standing_by(kernel):
    release(*warm.take(1))
    warm.stand_by(1)
    waiting = list(kernel.standing_by)
    fresh = warm.take(1, fresh=True)
    assert kernel.standing_by == waiting
    assert fresh[0] not in waiting
    release(*fresh)


def test_a_worker_that_died_standing_by_is_not_taken(kernel):
    release(*warm.take(1))
    warm.stand_by(1)
    (dead,) = kernel.standing_by
    until(lambda: dead.read_status() or dead.pid is not None)
    os.kill(dead.pid, signal.SIGKILL)
    until(dead.read_status)
    (worker,) = warm.take(1)
    assert worker is not dead
    assert RealRank(worker, "1 + 1").result() == 2
    release(worker)


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def test_a_worker_that_was_stopped_standing_by_goes_on_when_it_is_taken(kernel):
    release(*warm.take(1))
    warm.stand_by(1)
    stop(pid_of(kernel.standing_by[0]))
    (worker,) = warm.take(1)
    assert RealRank(worker, "1 + 1").result() == 2
    release(worker)


def test_a_worker_that_died_standing_by_is_not_taken_though_the_server_has_told_nothing(kernel):
    release(*warm.take(1))
    warm.stand_by(1)
    (dead,) = kernel.standing_by
    server = psutil.Process(kernel.server.pid)
    until(lambda: any(child.status() == psutil.STATUS_SLEEPING for child in server.children()))
    (process,) = server.children()
    stop(server.pid)
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    (worker,) = warm.take(1)
    assert worker is not dead
    until(lambda: worker.read_status() or worker.pid or worker.see_to(hung_up=False))
    assert RealRank(worker, "1 + 1").result() == 2
    release(worker)


def test_nobody_stands_by_without_a_server(kernel):
    warm.stand_by(2)
    assert kernel.server is None
    assert kernel.standing_by == []


def test_a_killed_server_is_replaced(kernel):
    release(*warm.take(1))
    warm.stand_by(1)
    first = kernel.server
    kill_server(kernel)
    warm.stand_by(2)  # harmless: there is none to fork from
    (worker,) = warm.take(1)
    assert kernel.server is not first
    assert RealRank(worker, "1 + 1").result() == 2
    release(worker)


def test_what_libraries_read_while_they_load_needs_another_server(kernel, monkeypatch):
    release(*warm.take(1))
    first = kernel.server
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    release(*warm.take(1))
    assert kernel.server is first
    monkeypatch.setenv("MKL_DEBUG_CPU_TYPE", "5")
    release(*warm.take(1))
    assert kernel.server is not first
    assert not first.alive


def test_a_server_whose_run_goes_on_is_closed_later(kernel, monkeypatch):
    busy = warm.take(1)
    first = kernel.server
    monkeypatch.setenv("KMP_BLOCKTIME", "0")
    release(*warm.take(1))
    assert first.alive
    assert kernel.retired == [first]
    assert RealRank(busy[0], "'still there'").result() == "still there"
    release(*busy)
    monkeypatch.setenv("KMP_BLOCKTIME", "1")
    release(*warm.take(1))
    assert not first.alive
    assert kernel.retired == []


def test_another_preload_needs_another_server_and_a_look_at_devices_does_not(kernel):
    release(*warm.take(1, preload=["json"]))
    first = kernel.server
    assert first.wanted == ("json",)
    warm._server(None)
    assert kernel.server is first
    release(*warm.take(1))  # what needs nothing is content with more
    assert kernel.server is first
    release(*warm.take(1, preload=["csv"]))
    assert kernel.server is not first


def test_when_one_of_several_workers_cannot_be_had_none_is_kept(kernel, monkeypatch):
    made = []
    fork = warm.ForkServer.fork

    def fork_once(server, *, fresh):
        if made:
            raise EngineError("no descriptors left")
        made.append(fork(server, fresh=fresh))
        return made[0]

    monkeypatch.setattr(warm.ForkServer, "fork", fork_once)
    with pytest.raises(EngineError, match="no descriptors"):
        warm.take(2)
    assert made[0].closed


def test_shutdown_leaves_nothing(kernel):
    busy = warm.take(1)
    warm.stand_by(2)
    processes = [psutil.Process(kernel.server.pid), *psutil.Process(kernel.server.pid).children()]
    warm.shutdown()
    _, alive = psutil.wait_procs(processes, LIMIT_S)
    assert not alive
    assert kernel.server is None
    warm.shutdown()  # harmless
    busy[0].close()


def test_a_process_forked_from_the_kernel_knows_of_no_server(kernel):
    release(*warm.take(1))
    warm.stand_by(1)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if warm._warm.server is None and not warm._warm.standing_by else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(kernel.standing_by) == 1
    (worker,) = warm.take(1)
    assert RealRank(worker, "1").result() == 1
    release(worker)


# --- devices ----------------------------------------------------------------------------------------------------------


def test_devices_are_looked_at_in_a_worker_once(kernel):
    rows = warm.devices()
    assert {row.kind for row in rows} >= {"cpu", "cuda", "mps"}
    (cpu,) = [row for row in rows if row.kind == "cpu"]
    assert cpu.num_devices >= 1
    assert warm.devices() is rows


def test_another_setting_of_what_hides_devices_is_another_look(monkeypatch):
    looks = []

    def probe(environment):
        looks.append(environment.get("CUDA_VISIBLE_DEVICES"))
        return (DeviceRow("cuda", len(looks)),)

    monkeypatch.setattr(warm, "_probe", probe)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert warm.devices()[0].num_devices == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert warm.devices()[0].num_devices == 2
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert warm.devices()[0].num_devices == 1
    assert looks == [None, "3"]


def test_a_look_that_fails_tells_what_the_worker_wrote(kernel, monkeypatch):
    rank = FakeRank()
    rank.writes(b"RuntimeError: CUDA driver initialization failed\n", "stderr")
    rank.exits(1)
    monkeypatch.setattr(warm, "_take", lambda *_, **__: [rank.worker])
    with pytest.raises(EngineError, match=r"look at this machine's devices: .*CUDA driver initialization failed"):
        warm.devices()
    assert kernel.devices == {}  # the next launch looks again


def test_a_look_from_a_server_that_hangs_is_made_from_another(kernel, tmp_path, monkeypatch):
    (tmp_path / "hangs_once.py").write_text(
        "import os, pathlib, time\n"
        f"first = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "if not first.exists():\n"
        "    first.touch()\n"
        "    os.register_at_fork(before=lambda: time.sleep(600))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(warm, "_PRELOAD", [*WITHOUT_TORCH, "hangs_once"])
    monkeypatch.setattr(warm, "_LOOK_S", 0.01)
    monkeypatch.setattr(forkserver, "_ANSWER_S", 0.05)
    first = warm._server(None)
    assert {row.kind for row in warm.devices()} >= {"cpu"}
    assert kernel.server is not first
    assert not first.alive


def test_a_look_that_gets_no_answer(monkeypatch):
    rank = FakeRank()
    monkeypatch.setattr(warm, "_take", lambda *_, **__: [rank.worker])
    monkeypatch.setattr(warm, "_PROBE_TIMEOUT_S", 0.01)
    with pytest.raises(EngineError, match=r"there was no answer for 0\.01 s"):
        warm.devices()
    rank.exits()


def test_a_look_from_a_server_that_dies_while_it_loads(tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("import os; os._exit(9)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(warm, "_PRELOAD", ("deadly",))
    with pytest.raises(EngineError, match="exit code 9 while it loaded 'deadly'"):
        warm.devices()


def test_a_launch_on_the_cpu_does_not_wait_for_a_look(monkeypatch):
    looking, go_on = threading.Event(), threading.Event()

    def probe(_):
        looking.set()
        assert go_on.wait(LIMIT_S)
        return ()

    monkeypatch.setattr(warm, "_probe", probe)
    thread = threading.Thread(target=warm.devices)
    thread.start()
    assert looking.wait(LIMIT_S)
    workers = warm.take(1)
    go_on.set()
    thread.join(LIMIT_S)
    release(*workers)


# --- getting ready ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_gpus", "expected"), [(0, DEFAULT_ON_CPU), (3, 3)])
def test_getting_ready_leaves_a_worker_a_device_standing_by(kernel, monkeypatch, num_gpus, expected):
    monkeypatch.setattr(warm, "devices", lambda: (DeviceRow("cuda", num_gpus), DeviceRow("cpu", 16)))
    warm.get_ready()
    until(lambda: len(kernel.standing_by) == expected)


def test_getting_ready_says_nothing_when_it_fails(kernel, monkeypatch):
    called = threading.Event()

    def look():
        called.set()
        raise EngineError("no worker could look")

    monkeypatch.setattr(warm, "devices", look)
    warm.get_ready()
    assert called.wait(LIMIT_S)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "notebook-launcher-warm-up"])
    assert kernel.standing_by == []


@pytest.mark.parametrize(("platform", "fresh"), [("linux", False), ("darwin", True)])
def test_on_a_mac_a_new_interpreter_looks(monkeypatch, platform, fresh):
    asked = []

    def take(_server, _num_workers, *, fresh):
        asked.append(fresh)
        raise EngineError("enough is known")

    monkeypatch.setattr(warm, "_take", take)
    monkeypatch.setattr(warm, "_server", lambda _: None)
    monkeypatch.setattr(warm.sys, "platform", platform)
    with pytest.raises(EngineError, match="enough is known"):
        warm.devices({"CUDA_VISIBLE_DEVICES": "of no other test"})
    assert asked == [fresh]
