"""The fork server, from the kernel's side: real servers, that load no torch where their workers run nothing."""

from __future__ import annotations

import errno
import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest
from real_rank import LIMIT_S, WITHOUT_TORCH, RealRank, exit_code, pid_of, read

from notebook_launcher.core.errors import EngineError
from notebook_launcher.launcher import forkserver, warm
from notebook_launcher.launcher.forkserver import ForkServer


@pytest.fixture(scope="module")
def shared_server():
    server = ForkServer(warm._PRELOAD)
    yield server
    server.close()


@pytest.fixture
def start():
    """Starts servers that end with the test."""
    servers = []

    def make(*preload, wanted=()):
        servers.append(ForkServer(preload, wanted))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module where a server will find it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))

    return write


def test_a_worker_is_a_process_of_its_own_and_leaves_when_its_channel_is_closed(shared_server):
    worker = shared_server.fork()
    rank = RealRank(worker, "import os\n(os.getpid(), os.getppid(), os.getpgrp())")
    pid, parent, group = rank.result()
    assert parent == shared_server.pid
    assert group == pid
    assert rank.leave() == 0
    assert worker.pid == pid
    assert worker.closed
    assert not shared_server.busy


def test_a_worker_that_nobody_needs_leaves(shared_server):
    worker = shared_server.fork()
    worker.channel.close()
    assert exit_code(worker) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_worker(shared_server, number):
    rank = RealRank(shared_server.fork(), "print('up')\nimport time; time.sleep(600)")
    rank.read()
    assert pid_of(rank.worker)
    rank.worker.signal(number)
    assert exit_code(rank.worker) == -number


def test_a_kill_ends_what_the_worker_started_too(shared_server):
    source = "import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid)\nimport time; time.sleep(600)"
    rank = RealRank(shared_server.fork(), source)
    started = psutil.Process(int(rank.read()))
    assert pid_of(rank.worker)
    rank.worker.signal(signal.SIGKILL)
    assert exit_code(rank.worker) == -signal.SIGKILL
    started.wait(LIMIT_S)


def test_a_signal_after_the_end_or_before_the_beginning_is_harmless(shared_server):
    worker = shared_server.fork()
    worker.signal(signal.SIGKILL)  # its pid is not known yet, or is: either way nothing is raised
    worker.channel.close()
    exit_code(worker)
    worker.signal(signal.SIGKILL)
    worker.close()


def test_a_fresh_worker_is_a_new_interpreter(shared_server):
    rank = RealRank(shared_server.fork(fresh=True), "import os, sys\n(os.getppid(), len(sys.argv))")
    assert rank.result()[0] == shared_server.pid
    assert rank.leave() == 0


def test_closing_a_server_ends_its_workers(start):
    server = start(*WITHOUT_TORCH)
    rank = RealRank(server.fork(), "print('up')\nimport time; time.sleep(600)")
    rank.read()
    process = psutil.Process(server.pid)
    worker = psutil.Process(rank.until(object).pid)
    server.close()
    assert not process.is_running()
    worker.wait(LIMIT_S)
    rank.worker.close()


def test_two_servers_know_nothing_of_each_other(start):
    one, two = start(*WITHOUT_TORCH), start(*WITHOUT_TORCH)
    ranks = [RealRank(server.fork(), "import os\nos.getppid()") for server in (one, two)]
    one_rank, two_rank = ranks
    assert two_rank.result() == two.pid
    assert one_rank.result() == one.pid
    one_rank.worker.close()
    one.close()
    assert two_rank.leave() == 0


def test_a_killed_servers_worker_is_orphaned_and_goes_on(start):
    server = start(*WITHOUT_TORCH)
    rank = RealRank(server.fork(), "import sys\nprint('up')\n5")
    rank.read()
    os.kill(server.pid, signal.SIGKILL)
    assert rank.result() == 5
    assert exit_code(rank.worker) is None
    assert rank.worker.orphaned
    with pytest.raises(EngineError, match=r"can't be asked for a worker: signal 9 \(Killed\)"):
        server.fork()


# --- loading ----------------------------------------------------------------------------------------------------------


def test_a_server_gets_warm(start):
    server = start()
    assert server.warm.wait(LIMIT_S)
    assert server.problems == ()
    assert server.notes == []
    assert server.alive


def test_a_preload_that_raises_is_a_note_and_the_server_goes_on(start, module):
    module("raises", "raise RuntimeError('no licence')")
    server = start(*WITHOUT_TORCH, "no_such_module", wanted=["raises", "json"])
    assert server.warm.wait(LIMIT_S)
    assert [text.partition(":")[0] for text in server.problems] == ["no_such_module", "raises"]
    (note,) = server.notes  # of what the user asked for, not of what the launcher would like
    assert note.startswith("preload=raises: RuntimeError: no licence")
    worker = server.fork()
    assert worker.notes == [note]
    worker.channel.close()
    assert exit_code(worker) == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import os, sys; sys.stderr.write('licence server is down\\n'); os._exit(7)",
            ["exit code 7", "licence server"],
        ),
        ("import ctypes; ctypes.string_at(0)", ["signal 11 (Segmentation fault)", "Fatal Python error"]),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ["signal 9 (Killed)"]),
    ],
    ids=["exit", "crash", "kill"],
)
def test_a_server_that_dies_while_it_loads_tells_what_it_was_loading(start, module, code, words):
    module("deadly", code)
    server = start(*WITHOUT_TORCH, wanted=["deadly"])
    worker = server.fork()
    assert exit_code(worker) is None
    assert worker.pid is None
    text = worker.why_never_made()
    assert text.startswith("the fork server ended before it had made the process: ")
    for word in [*words, "while it loaded 'deadly' (preload)"]:
        assert word in text
    assert server.warm.is_set()  # who waits for it is not left waiting


def test_a_temporary_folder_of_what_it_loads_goes_with_it_and_not_with_a_worker(start, module, tmp_path):
    (tmp_path / "folders").mkdir()
    module("holds", f"import tempfile\nheld = tempfile.TemporaryDirectory(dir={str(tmp_path / 'folders')!r})")
    server = start(*WITHOUT_TORCH, "holds")
    worker = server.fork()
    worker.channel.close()
    assert exit_code(worker) == 0
    worker.close()
    assert len(list((tmp_path / "folders").iterdir())) == 1
    server.close()
    assert not list((tmp_path / "folders").iterdir())


def test_an_interpreter_that_is_not_there(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EngineError, match="can't be started with '/no/such/python'"):
        ForkServer([])


def test_an_interpreter_that_is_none(start, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    server = start()
    assert server.ended(LIMIT_S)
    with pytest.raises(EngineError, match="can't be asked for a worker: exit code 1"):
        server.fork()


def test_a_module_beside_the_notebook_does_not_shadow_the_standard_library(start, tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong random')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    server = start("random", *WITHOUT_TORCH)
    assert server.warm.wait(LIMIT_S)
    assert server.problems == ()


def test_a_system_without_descriptors_is_a_clear_error(shared_server, monkeypatch):
    real, opened = os.pipe, []

    def pipe():
        if opened:
            raise OSError(errno.EMFILE, "Too many open files")
        opened.append(real())
        return opened[0]

    monkeypatch.setattr(forkserver.os, "pipe", pipe)
    with pytest.raises(EngineError, match=r"Too many open files.*ulimit -n"):
        shared_server.fork()


def test_output_of_c_code_and_of_the_dying_arrives(shared_server):
    worker = shared_server.fork()
    RealRank(worker, "import os\nos.write(1, b'from C\\n')\nimport ctypes; ctypes.string_at(0)")
    assert read(worker, "stdout") == "from C\n"
    assert "Segmentation fault" in read(worker, "stderr")
    assert exit_code(worker) == -signal.SIGSEGV


# --- servers that do not answer ---------------------------------------------------------------------------------------


def stop(server):
    """Stop it, as ``kill -STOP`` does."""
    assert server.warm.wait(LIMIT_S)
    os.kill(server.pid, signal.SIGSTOP)
    until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED)


def until(condition, do=lambda: None):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        do()
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def look(worker):
    worker.read_status()
    worker.see_to(hung_up=False)


def test_a_server_that_was_stopped_goes_on_when_it_is_asked(start):
    server = start(*WITHOUT_TORCH)
    stop(server)
    worker = server.fork()
    until(lambda: worker.pid, lambda: look(worker))
    rank = RealRank(worker, "5")
    assert rank.result() == 5
    assert rank.leave() == 0


def test_a_server_that_was_stopped_tells_how_a_rank_ended(start):
    server = start(*WITHOUT_TORCH)
    rank = RealRank(server.fork(), "import os\nos._exit(3)")
    pid_of(rank.worker)
    stop(server)
    until(lambda: rank.worker.exit_code is not None, lambda: look(rank.worker))
    assert exit_code(rank.worker) == 3


def test_a_server_that_hangs_is_ended_and_says_so(start, module, monkeypatch):
    monkeypatch.setattr(forkserver, "_ANSWER_S", 0.05)
    module("hangs", "import os, time\nos.register_at_fork(before=lambda: time.sleep(600))")
    server = start(*WITHOUT_TORCH, "hangs")
    assert server.warm.wait(LIMIT_S)
    worker = server.fork()
    until(lambda: not server.alive, lambda: look(worker))
    assert exit_code(worker) is None
    assert worker.why_never_made().startswith("the fork server ended before it had made the process: it did not answer")
    assert "(sleeping), and was ended" in worker.why_never_made()


def test_a_server_that_works_is_given_longer(start, module, monkeypatch):
    monkeypatch.setattr(forkserver, "_ANSWER_S", 0.05)
    module(
        "slow",
        """
        import os, time
        def work():
            end = time.monotonic() + 0.5
            while time.monotonic() < end: pass
        os.register_at_fork(before=work)
    """,
    )
    server = start(*WITHOUT_TORCH, "slow")
    assert server.warm.wait(LIMIT_S)
    worker = server.fork()
    until(lambda: worker.pid, lambda: look(worker))
    worker.channel.close()
    assert exit_code(worker) == 0


def test_a_server_that_sleeps_because_it_has_answered_is_left_alone(start, monkeypatch):
    monkeypatch.setattr(forkserver, "_ANSWER_S", 0.0)
    server = start(*WITHOUT_TORCH)
    assert server.warm.wait(LIMIT_S)
    worker = server.fork()
    assert select.select([worker.status], [], [], LIMIT_S)[0]  # answered, and not yet read
    until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_SLEEPING)
    worker.see_to(hung_up=False)
    worker.channel.close()
    assert exit_code(worker) == 0
    assert server.alive


def test_what_a_server_loads_takes_as_long_as_it_takes(start, module, monkeypatch):
    monkeypatch.setattr(forkserver, "_ANSWER_S", 0.0)
    module("takes_time", "import time\ntime.sleep(0.2)")
    server = start(*WITHOUT_TORCH, "takes_time")
    worker = server.fork()
    until(server.warm.is_set, lambda: look(worker))
    assert server.alive
    server.close()
    worker.close()


def test_a_stopped_server_is_closed_without_a_wait(start):
    server = start(*WITHOUT_TORCH)
    worker = server.fork()
    process = psutil.Process(pid_of(worker))
    stop(server)
    began_s = time.monotonic()
    server.close()
    assert time.monotonic() - began_s < 4
    process.wait(LIMIT_S)
    worker.close()


def test_closing_a_dead_server_ends_its_ranks_too(start):
    server = start(*WITHOUT_TORCH)
    rank = RealRank(server.fork(), "print('up')\nimport time; time.sleep(600)")
    rank.read()
    process = psutil.Process(pid_of(rank.worker))
    os.kill(server.pid, signal.SIGKILL)
    assert server.ended(LIMIT_S)
    server.close()
    process.wait(LIMIT_S)
    rank.worker.close()


KERNEL = """
import os, sys, time
from notebook_launcher.launcher.forkserver import ForkServer
server = ForkServer(sys.argv[1:])
if "hangs" not in sys.argv:
    server.warm.wait()
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["stopped", "loading"])
def test_no_server_outlives_its_kernel(module, tmp_path, how):
    loading = tmp_path / "loading"
    module("hangs", f"import time\nopen({str(loading)!r}, 'w').close()\ntime.sleep(600)")
    command = [sys.executable, "-c", KERNEL, *WITHOUT_TORCH, *(["hangs"] if how == "loading" else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as kernel:
        server = psutil.Process(int(kernel.stdout.readline()))
        if how == "stopped":
            server.suspend()
        else:
            until(loading.exists)
        kernel.kill()
    server.wait(LIMIT_S)


# --- what ranks leave behind ------------------------------------------------------------------------------------------

DAEMONS = """
import os, subprocess, time
own_session = subprocess.Popen(["sleep", "600"], start_new_session=True)
shell = "setsid sleep 601 >/dev/null & echo $!"
reader, writer = os.pipe()
first = os.fork()
if first == 0:
    os.setsid()
    second = os.fork()
    if second:
        os.write(writer, str(second).encode())
        os._exit(0)
    time.sleep(600)
    os._exit(0)
os.waitpid(first, 0)
print(own_session.pid, os.read(reader, 20).decode(), subprocess.check_output(shell, shell=True, text=True).strip())
"""


def daemons_of(rank):
    """The processes with sessions of their own that a rank has started by ``DAEMONS``."""
    found = [psutil.Process(int(pid)) for pid in rank.read().split()]
    assert len(found) == 3
    assert all(process.is_running() for process in found)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the system knows no adoption")
@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_what_a_rank_started_in_sessions_of_its_own_ends_with_it_and_nobody_elses(start, end):
    server = start(*WITHOUT_TORCH)
    one = RealRank(server.fork(), DAEMONS + ("time.sleep(600)" if end == "is killed" else ""))
    other = RealRank(server.fork(), DAEMONS + "time.sleep(600)")
    ending, staying = daemons_of(one), daemons_of(other)
    if end == "is killed":
        assert pid_of(one.worker)
        one.worker.signal(signal.SIGKILL)
        assert exit_code(one.worker) == -signal.SIGKILL
    else:
        assert one.leave() == 0
    _, alive = psutil.wait_procs(ending, LIMIT_S)
    assert not alive
    assert all(process.status() != psutil.STATUS_ZOMBIE for process in staying)
    server.close()
    _, alive = psutil.wait_procs(staying, LIMIT_S)
    assert not alive
    other.worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the system knows no adoption")
def test_what_the_server_itself_has_started_goes_on(start, module):
    module("starts_one", "import subprocess\nprocess = subprocess.Popen(['sleep', '600'])")
    server = start(*WITHOUT_TORCH, "starts_one")
    assert server.warm.wait(LIMIT_S)
    (process,) = psutil.Process(server.pid).children()
    worker = server.fork()
    worker.channel.close()
    assert exit_code(worker) == 0
    assert process.is_running()
    assert process.status() != psutil.STATUS_ZOMBIE
    process.kill()


# --- without torch ----------------------------------------------------------------------------------------------------


def test_neither_a_server_nor_a_rank_loads_torch_for_a_function_that_does_not(start):
    rank = RealRank(start(*WITHOUT_TORCH).fork(), "import sys\n'torch' in sys.modules")
    assert rank.result() is False
    rank.leave()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_function_that_loads_torch_itself_has_its_runs_seed_and_meets_where_it_does(start, fresh):
    source = """
    import random
    import numpy
    import torch.distributed as dist
    from torch.distributed.rendezvous import _rendezvous_handlers as handlers
    dist.init_process_group("gloo")
    draws = [random.random(), numpy.random.rand(), dist.distributed_c10d.torch.rand(1).item()]
    (type(handlers["env"]).__name__, dist.get_world_size(), draws)
    """
    rank = RealRank(start(*WITHOUT_TORCH).fork(fresh=fresh), textwrap.dedent(source), seed=5)
    draws = [random.Random(5).random(), np.random.RandomState(5).rand(), 0.8302518725395203]  # noqa: S311
    assert rank.result() == ("Meeting", 1, draws)
    rank.leave()
