"""One training function, whoever starts it: alone, this project, torchrun, Slurm. The weights are the same."""

import contextlib
import functools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import training_script

SCRIPT = Path(training_script.__file__)
LIMIT_S = 60
# Slurm gives no port: it is made from the job's number, from here on.
FIRST_SLURM_PORT = 15000


@functools.cache
def expected():
    """The weights of a process that is alone."""
    return training_script.train()["weights"]


def assert_trained(found, num_processes, kind):
    assert [one["place"] for one in found] == [(rank, rank, num_processes) for rank in range(num_processes)]
    assert [one["type"] for one in found] == [kind] * num_processes
    for one in found:
        assert torch.allclose(one["weights"], expected(), rtol=0, atol=1e-6)


def environment(**variables):
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def wait_for(processes):
    """Wait until all have ended well; they, and all that they started, are gone afterwards."""
    deadline_s = time.monotonic() + LIMIT_S
    try:
        outputs = [process.communicate(timeout=deadline_s - time.monotonic())[0] for process in processes]
    finally:
        for process in processes:
            end(process)
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)


def end(process):
    process.terminate()  # on which torchrun ends its ranks, which are in groups of their own
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def started(*command, **variables):
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def saved(folder, num_processes):
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(num_processes)]


@contextlib.contextmanager
def held_port(first, last):
    """A port that stays free for a listener that reuses addresses, as torch's does, and for nobody else."""
    for port in random.sample(range(first, last), 100):
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind(("127.0.0.1", port))
            except OSError:
                continue
            yield port
            return
    raise RuntimeError(f"no free port found from {first} to {last}")


@pytest.mark.slow
def test_a_script_that_nobody_launched(tmp_path):
    wait_for([started(SCRIPT, tmp_path)])
    assert_trained(saved(tmp_path, 1), 1, "NO")


def test_a_cell_that_nobody_launched(kernel, tmp_path):
    cell = kernel.run(
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import torch, training_script\n"
        f"torch.save(training_script.train(), {str(tmp_path / '0.pt')!r})"
    )
    assert not cell.error, cell.shown
    assert_trained(saved(tmp_path, 1), 1, "NO")


def test_launched_by_this_project(on_ranks):
    assert_trained(on_ranks(training_script.train), 2, "MULTI_CPU")


@pytest.mark.slow
def test_torchrun(tmp_path):
    # Standalone: torchrun takes a free port, where its default is one that another test may use.
    options = ("--standalone", "--nproc-per-node", 2, "--log-dir", tmp_path)
    wait_for([started("-m", "torch.distributed.run", *options, SCRIPT, tmp_path)])
    assert_trained(saved(tmp_path, 2), 2, "MULTI_CPU")


@pytest.mark.slow
def test_slurm_step(tmp_path):
    with held_port(FIRST_SLURM_PORT, 2 * FIRST_SLURM_PORT) as port:
        step = {
            "SLURM_JOB_ID": str(port - FIRST_SLURM_PORT),
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "localhost",
        }
        ranks = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
        wait_for([started(SCRIPT, tmp_path, **step, **rank) for rank in ranks])
    assert_trained(saved(tmp_path, 2), 2, "MULTI_CPU")
