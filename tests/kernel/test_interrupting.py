"""The notebook's Stop: the cell is back within two seconds, whatever the ranks were doing."""

from __future__ import annotations

import time

import psutil
import pytest

LIMIT_S = 2.0

SLEEPING = "time.sleep(600)"
COMPUTING = "x = torch.randn(200, 200)\n    while True: x = (x @ x).tanh()"
WAITING = (
    "dist.init_process_group('gloo')\n    t = torch.ones(1)\n    dist.all_reduce(t)\n"
    "    print('ready', flush=True)\n    if rank() == 0: time.sleep(600)\n    dist.all_reduce(t)"
)


def start(kernel, body):
    """Launch a function that says "ready" and goes on with ``body``; returns the ranks' process ids."""
    kernel.start(
        f"def work():\n    print('ready', os.getpid(), flush=True)\n    {body}\nrun = launch(work, num_processes=2)"
    )
    kernel.wait_for("[0] ready")
    kernel.wait_for("[1] ready")


def stop(kernel):
    began = time.monotonic()
    kernel.interrupt()
    cell = kernel.wait(30)
    return cell, time.monotonic() - began


def pids(cell):
    return [
        int(line.split()[2])
        for line in cell.shown.splitlines()
        if line.startswith("[") and "ready" in line and len(line.split()) > 2
    ]


@pytest.mark.parametrize("body", [SLEEPING, COMPUTING, WAITING], ids=["sleeping", "computing", "waiting"])
def test_the_cell_is_back_within_two_seconds_with_one_short_line(shared_kernel, body):
    start(shared_kernel, body)
    cell, took_s = stop(shared_kernel)
    assert took_s <= LIMIT_S
    assert cell.error == "RunInterrupted"
    assert "stopped after" in cell.traceback
    assert len(cell.traceback.splitlines()) == 1
    assert not any(psutil.pid_exists(pid) for pid in pids(cell))
    assert "[0, 1]" in shared_kernel.ok("print(launch(rank, num_processes=2).results)").stdout


def test_the_function_may_catch_it_and_return_what_it_has(shared_kernel):
    start(
        shared_kernel,
        "done = 0\n    try:\n        while True: done += 1; time.sleep(0.01)\n"
        "    except KeyboardInterrupt:\n        return done > 0",
    )
    cell, took_s = stop(shared_kernel)
    assert took_s <= LIMIT_S
    assert not cell.error
    assert "[True, True] stopped" in shared_kernel.ok("print(run.results, run.status)").stdout


def test_a_second_interrupt_is_immediate(shared_kernel):
    body = "try: time.sleep(600)\n    except KeyboardInterrupt: time.sleep(600)"
    start(shared_kernel, body)
    shared_kernel.interrupt()
    time.sleep(0.4)  # as a person presses twice
    cell, took_s = stop(shared_kernel)
    assert took_s <= 1.0
    assert cell.error == "RunInterrupted"


def test_many_interrupts_do_not_break_the_clean_up(shared_kernel):
    start(shared_kernel, "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)")
    for _ in range(5):
        shared_kernel.interrupt()
        time.sleep(0.1)  # as a person presses again and again
    cell = shared_kernel.wait(30)
    assert not any(psutil.pid_exists(pid) for pid in pids(cell))
    assert "alive" in shared_kernel.run("print('alive')").stdout


def test_stop_of_a_background_run_names_what_each_rank_was_doing(shared_kernel):
    shared_kernel.ok(
        "def nap():\n    print('up', flush=True); time.sleep(600)\nrun = launch(nap, num_processes=2, wait=False)"
    )
    shared_kernel.ok("while not (run.logs(0) and run.logs(1)): time.sleep(0.01)")
    cell = shared_kernel.ok("run.stop(); print(run.wait().status); print(run)")
    assert "stopped" in cell.stdout
    assert "nap" in cell.stdout


HANGING_CHECK = """
import threading
from notebook_launcher.launcher import preflight
from notebook_launcher.launcher.run import history
task, preflight._TASK = preflight._TASK, "signal:pause"
def tell():
    while not any(run.name == "preflight" and run.status == "running" for run in history()): time.sleep(0.05)
    print("ready", flush=True)
threading.Thread(target=tell).start()
%launcher check
"""


def test_a_preflight_that_hangs_is_interrupted_and_the_next_one_works(shared_kernel):
    shared_kernel.start(HANGING_CHECK)
    shared_kernel.wait_for("ready")
    cell, took_s = stop(shared_kernel)
    assert took_s <= LIMIT_S
    assert cell.error == "RunInterrupted"
    assert "stopped after" in cell.traceback
    assert "preflight: all is well" in shared_kernel.ok("preflight._TASK = task\n%launcher check").shown
