"""Nothing outlives its kernel, and a rank that dies is named with its likely reason."""

from __future__ import annotations

import os
import sys
import time

import psutil
import pytest

LIMIT_S = 5.0


def gone(processes, limit_s=LIMIT_S):
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def busy(kernel):
    """Start a run whose ranks sleep and whose payload is a mapping; returns the kernel's descendants."""
    kernel.start(
        "import numpy\nbig = numpy.zeros(2**20)\n"
        "def work():\n    print('ready', big.sum(), flush=True); time.sleep(600)\n"
        "launch(work, num_processes=2, device='cpu')"
    )
    kernel.wait_for("[0] ready")
    kernel.wait_for("[1] ready")
    children = kernel.children()
    assert len(children) >= 3, "the fork server and two ranks"
    return children


@pytest.mark.parametrize("end", ["restart", "restart now", "shutdown", "kill"])
def test_every_process_is_gone_with_its_kernel(own_kernel, end):
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208, S108 - names are compared
    children = busy(own_kernel)
    if end == "restart":
        own_kernel.restart()
    elif end == "restart now":
        own_kernel.restart(now=True)
    elif end == "shutdown":
        own_kernel.shut_down()
    else:
        own_kernel.kill()
    assert gone(children) == []
    assert set(os.listdir("/dev/shm")) <= before  # noqa: PTH208, S108


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a rank must be able to hear of it")
def test_ranks_in_native_code_are_gone_when_kernel_and_fork_server_are_killed_at_once(own_kernel):
    """``PyDLL`` keeps the interpreter's lock: no thread of the ranks learns anything."""
    own_kernel.start(
        "import ctypes\ndef work():\n    print('ready', flush=True); ctypes.PyDLL(None).sleep(600)\n"
        "launch(work, num_processes=2, device='cpu')"
    )
    own_kernel.wait_for("[0] ready")
    own_kernel.wait_for("[1] ready")
    children = own_kernel.children()
    (server,) = psutil.Process(own_kernel.pid).children()
    server.kill()
    own_kernel.kill()
    assert gone(children) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a stopped server stays")
def test_a_stopped_fork_server_is_gone_with_its_kernel_and_so_are_daemons_of_ranks(own_kernel):
    own_kernel.start("""
import subprocess
def work():
    print("daemon", subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    time.sleep(600)
launch(work, num_processes=2, device='cpu')""")
    own_kernel.wait_for("[0] daemon")
    own_kernel.wait_for("[1] daemon")
    children = own_kernel.children()
    assert sum(child.name() == "sleep" for child in children) == 2
    (server,) = psutil.Process(own_kernel.pid).children()
    server.suspend()
    own_kernel.kill()
    assert gone(children) == []


@pytest.mark.parametrize("when", ["before a launch", "during a run"])
def test_a_stopped_fork_server_keeps_nobody_waiting(shared_kernel, when):
    cell = shared_kernel.ok(f"""
from notebook_launcher.launcher import warm
launch(rank, num_processes=2, standby=0)
def work():
    if {when == "during a run"!r}: os.kill(os.getppid(), signal.SIGSTOP)
    return rank()
if {when == "before a launch"!r}: os.kill(warm._warm.server.pid, signal.SIGSTOP)
print(launch(work, num_processes=2, standby=0).results)
print(launch(rank, num_processes=2).results)
""")
    assert "[0, 1]\n[0, 1]\n" in cell.stdout


def test_stopped_and_killed_workers_standing_by_keep_nobody_waiting(shared_kernel):
    cell = shared_kernel.ok("""
from notebook_launcher.launcher import warm
import psutil
launch(rank, num_processes=2)
while [bool(one.read_status() or one.pid) for one in warm._warm.standing_by] != [True, True]: time.sleep(0.001)
stopped, killed = (psutil.Process(worker.pid) for worker in warm._warm.standing_by)
stopped.suspend()
killed.kill()
psutil.wait_procs([killed], 10)
print(launch(rank, num_processes=2).results)
""")
    assert cell.stdout.endswith("[0, 1]\n")


def test_what_a_rank_started_in_a_session_of_its_own_ends_with_it(shared_kernel):
    cell = shared_kernel.ok("""
import subprocess
def work(): return subprocess.Popen(["sleep", "600"], start_new_session=True).pid
print(*launch(work, num_processes=2).results)
""")
    pids = [int(pid) for pid in cell.stdout.splitlines()[-1].split()]
    assert len(pids) == 2
    assert gone([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]) == []


def test_a_killed_fork_server_is_replaced_and_its_run_ends_well(shared_kernel):
    cell = shared_kernel.ok("""
from notebook_launcher.launcher import warm
import psutil
def slow():
    print("ready", flush=True)
    while not os.path.exists("on"): time.sleep(0.01)
    return rank()
run = launch(slow, num_processes=2, wait=False)
while not (run.logs(0) and run.logs(1)): time.sleep(0.01)
os.kill(warm._warm.server.pid, signal.SIGKILL)
open("on", "w").close()
print(run.wait(20).results, launch(rank, num_processes=2).results)
""")
    assert "[0, 1] [0, 1]" in cell.stdout


CASES = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", ["SIGKILL", "memory"]),
    "SIGSEGV": ("import ctypes; ctypes.string_at(0)", ["SIGSEGV", "string_at"]),
    "os._exit": ("os._exit(3)", ["exit code 3"]),
    "sys.exit": ("sys.exit(0)", ["sys.exit(0)"]),
}


@pytest.mark.parametrize("how", CASES)
def test_a_rank_that_dies_is_named_and_the_others_end(shared_kernel, how):
    code, words = CASES[how]
    began = time.monotonic()
    cell = shared_kernel.run(
        f"def work():\n    if rank() == 1: {code}\n    time.sleep(600)\nlaunch(work, num_processes=2)"
    )
    assert time.monotonic() - began < LIMIT_S
    assert cell.error == "WorkerError"
    for word in ["rank 1", *words]:
        assert word in cell.traceback
    assert "rank 0: was in work" in cell.traceback
    assert "[0, 1]" in shared_kernel.ok("print(launch(rank, num_processes=2).results)").stdout


def test_what_a_rank_started_ends_with_it(shared_kernel):
    cell = shared_kernel.ok("""
import subprocess
def work(): return subprocess.Popen(["sleep", "600"]).pid
print(*launch(work, num_processes=2).results)
""")
    started = [psutil.Process(int(pid)) for pid in cell.stdout.split() if psutil.pid_exists(int(pid))]
    assert gone(started) == []


def test_a_process_forked_by_the_notebook_does_not_keep_workers_alive(own_kernel):
    children = busy_beside_a_fork(own_kernel)
    own_kernel.kill()
    try:
        assert gone(children[1:]) == []
    finally:
        children[0].kill()


def busy_beside_a_fork(kernel):
    """As ``busy``, from a kernel that has forked a process which lives on; that one comes first."""
    cell = kernel.ok("""
from notebook_launcher.launcher import warm
warm._warm.server.warm.wait()
pid = os.fork()
if pid == 0:
    time.sleep(600); os._exit(0)
print(pid)
""")
    forked = int(cell.stdout)
    return [psutil.Process(forked), *(child for child in busy(kernel) if child.pid != forked)]
