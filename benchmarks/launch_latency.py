"""How long from the call to the first line of the function on the last rank: ours, forks of the caller, a spawn.

The ways are interleaved in one run, so that a machine whose speed drifts slows all of them; quote the ratios. "elastic
fork" is torch's elastic launcher with start method "fork", called as Accelerate's notebook launcher calls it for one
machine (Accelerate's own set-up before and after is left out); "plain fork" is ``torch.multiprocessing`` alone, which
elastic ends in; "spawn" starts fresh interpreters with it.

    python benchmarks/launch_latency.py --ranks 1 2 4 8 --rounds 15
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch.multiprocessing
from torch.distributed.launcher import api as elastic

from notebook_launcher import LaunchConfig
from notebook_launcher.launcher import payload, warm
from notebook_launcher.launcher.launch import launch_payload

if TYPE_CHECKING:
    from collections.abc import Callable

BASES = ("elastic fork", "plain fork", "spawn")
SPAWN_ROUNDS = 2  # seconds each
SETTLE_S = 0.3  # between launches, so that workers standing by have been replaced, as between two cells


def first_line() -> int:
    """The function that is launched."""
    return time.monotonic_ns()


def _into(rank: int, times: Any) -> None:
    times[rank] = time.monotonic_ns()


def ours(num_ranks: int, standby: int | None) -> float:
    """Seconds of one launch by this project."""
    began_ns = time.monotonic_ns()
    config = LaunchConfig.make(device="cpu", num_processes=num_ranks, standby=standby)
    run = launch_payload(payload.for_call(first_line), config, wait=True, sink="none")
    return float(max(run.results) - began_ns) / 1e9


def elastic_fork(num_ranks: int) -> float:
    """Seconds of one launch by torch's elastic launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began_ns = time.monotonic_ns()
    config = elastic.LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="none",
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0},
        max_restarts=0,
        start_method="fork",
    )
    times: dict[int, int] = elastic.elastic_launch(config=config, entrypoint=first_line)()
    return (max(times.values()) - began_ns) / 1e9


def multiprocessing(num_ranks: int, method: str) -> float:
    """Seconds of one launch by ``torch.multiprocessing``."""
    times = torch.multiprocessing.get_context(method).Array("q", num_ranks, lock=False)
    began_ns = time.monotonic_ns()
    processes: Any = torch.multiprocessing
    processes.start_processes(_into, args=(times,), nprocs=num_ranks, start_method=method)
    return float(max(times) - began_ns) / 1e9


def measure(num_ranks: int, rounds: int, spawn_rounds: int) -> dict[str, list[float]]:
    """Seconds by way, ``rounds`` each, interleaved."""
    ways: dict[str, Callable[[], float]] = {
        "ours, standing by": lambda: ours(num_ranks, num_ranks),
        "elastic fork": lambda: elastic_fork(num_ranks),
        "ours, standby=0": lambda: ours(num_ranks, 0),
        "plain fork": lambda: multiprocessing(num_ranks, "fork"),
        "spawn": lambda: multiprocessing(num_ranks, "spawn"),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way, once in ways.items():
            if way == "spawn" and number >= spawn_rounds:
                continue
            warm.stand_by(num_ranks if way == "ours, standing by" else 0)
            time.sleep(SETTLE_S)
            taken[way].append(once())
    return taken


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--spawn-rounds", type=int, default=SPAWN_ROUNDS)
    options = parser.parse_args()
    ours(1, 1)  # the fork server is warm from here on
    elastic_fork(1)  # and what the launchers themselves load, is loaded
    bases = " ".join(f"{f'of {base}':>15}" for base in BASES)
    print(f"{'ranks':>5}  {'way':18} {'median ms':>10} {'min':>8} {'max':>8}  {bases}")
    for num_ranks in options.ranks:
        taken = measure(num_ranks, options.rounds, options.spawn_rounds)
        medians = {way: statistics.median(values) for way, values in taken.items()}
        for way, values in taken.items():
            figures = f"{medians[way] * 1e3:10.2f} {min(values) * 1e3:8.2f} {max(values) * 1e3:8.2f}"
            ratios = " ".join(f"{medians[way] / medians[base]:15.4f}" for base in BASES)
            print(f"{num_ranks:5}  {way:18} {figures}  {ratios}")


if __name__ == "__main__":
    main()
