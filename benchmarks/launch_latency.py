"""How long from the call to the first line of the function on the last rank: ours, a plain fork, a spawn.

The ways are interleaved in one run, so that a machine whose speed drifts slows all of them; quote the ratios. "fork" is
``torch.multiprocessing`` forking the calling process, which is what Accelerate's notebook launcher does; "spawn" starts
fresh interpreters.

    python benchmarks/launch_latency.py --ranks 1 2 4 8 --rounds 15
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch.multiprocessing

from notebook_launcher import LaunchConfig
from notebook_launcher.launcher import payload, warm
from notebook_launcher.launcher.launch import launch_payload

if TYPE_CHECKING:
    from collections.abc import Callable

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
    return (max(run.results) - began_ns) / 1e9


def theirs(num_ranks: int, method: str) -> float:
    """Seconds of one launch by ``torch.multiprocessing``."""
    times = torch.multiprocessing.get_context(method).Array("q", num_ranks, lock=False)
    began_ns = time.monotonic_ns()
    torch.multiprocessing.start_processes(_into, args=(times,), nprocs=num_ranks, start_method=method)
    return (max(times) - began_ns) / 1e9


def measure(num_ranks: int, rounds: int, spawn_rounds: int) -> dict[str, list[float]]:
    """Seconds by way, ``rounds`` each, interleaved."""
    ways: dict[str, Callable[[], float]] = {
        "ours, standing by": lambda: ours(num_ranks, num_ranks),
        "fork": lambda: theirs(num_ranks, "fork"),
        "ours, standby=0": lambda: ours(num_ranks, 0),
        "spawn": lambda: theirs(num_ranks, "spawn"),
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
    print(f"{'ranks':>5}  {'way':18} {'median ms':>10} {'min':>8} {'max':>8}  {'of fork':>7} {'of spawn':>8}")
    for num_ranks in options.ranks:
        taken = measure(num_ranks, options.rounds, options.spawn_rounds)
        medians = {way: statistics.median(values) for way, values in taken.items()}
        for way, values in taken.items():
            print(
                f"{num_ranks:5}  {way:18} {medians[way] * 1e3:10.2f} {min(values) * 1e3:8.2f} {max(values) * 1e3:8.2f}"
                f"  {medians[way] / medians['fork']:7.2f} {medians[way] / medians['spawn']:8.4f}"
            )


if __name__ == "__main__":
    main()
