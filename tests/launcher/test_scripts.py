"""Launching outside a notebook: a plain script without a guard, a REPL, and what a terminal shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import psutil
from real_rank import WITHOUT_TORCH

LIMIT_S = 60
IMPORTS = f"""
from notebook_launcher import launch
from notebook_launcher.launcher import warm
warm._PRELOAD = {WITHOUT_TORCH}
"""

SCRIPT = """
import os, sys
from notebook_launcher import launch

print("script begins", flush=True)

def train(factor):
    print("hello from", os.environ["RANK"], flush=True)
    os.write(2, b"and from C\\n")
    return factor * int(os.environ["RANK"])

run = launch(train, (10,), num_processes=2, device="cpu")
print(run.results, run.status)
"""


def run(arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False, **options
    )


def test_a_plain_script_without_a_main_guard_runs_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run([str(script)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("script begins") == 1
    assert "[0] hello from 0" in done.stdout
    assert "[1] hello from 1" in done.stdout
    assert "[1] and from C" in done.stdout
    assert "[0, 10] finished" in done.stdout


def test_a_repl(tmp_path):
    script = SCRIPT.replace('print("script begins", flush=True)\n', IMPORTS)
    lines = script.strip().replace("\n\nrun", "\n\n\nrun")
    done = run(["-i", "-q"], input=lines + "\n", cwd=tmp_path, env={**os.environ, "PYTHONSTARTUP": ""})
    assert "[0, 10] finished" in done.stdout, done.stderr


def test_a_scripts_error_shows_the_workers_line_and_fails_the_script(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        IMPORTS
        + textwrap.dedent("""
        def train():
            values = {}
            return values["missing"]
        launch(train, num_processes=2, device="cpu")
        """)
    )
    done = run([str(script)])
    assert done.returncode == 1
    assert 'return values["missing"]' in done.stderr
    assert "KeyError: 'missing'" in done.stderr
    assert "rank 0" in done.stderr or "rank 1" in done.stderr


def test_ctrl_c_ends_a_script_and_its_ranks(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text(
        IMPORTS
        + textwrap.dedent("""
        import os, time
        def train():
            print("ready", os.getpid(), flush=True)
            time.sleep(600)
        launch(train, num_processes=2, device="cpu")
        """)
    )
    process = subprocess.Popen(
        [sys.executable, "-u", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        ranks = []
        while len(ranks) < 2:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            if "ready" in line:
                ranks.append(psutil.Process(int(line.split()[-1])))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=10)
        assert process.returncode != 0
        assert "stopped after" in stderr
        _, alive = psutil.wait_procs(ranks, timeout=5)
        assert not alive
    finally:
        process.kill()
        process.communicate()


def test_a_script_that_ends_during_a_run_leaves_nothing(tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text(
        IMPORTS
        + textwrap.dedent("""
        import os, time
        def train():
            time.sleep(600)
        run = launch(train, num_processes=2, device="cpu", wait=False)
        while None in run.pids: time.sleep(0.01)
        print("pids", *run.pids, flush=True)
        """)
    )
    done = run([str(script)])
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("pids")]
    ranks = [psutil.Process(int(pid)) for pid in line.split()[1:] if psutil.pid_exists(int(pid))]
    assert "stopped after" in done.stdout.splitlines()[-1]
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive
    assert done.returncode == 0, done.stderr
