"""What a captured gigabyte costs: memory of the ranks together, time of the launch; and what an empty worker weighs.

Figures are proportional set sizes (PSS), in which a page that several processes map counts in parts, and unique set
sizes (USS), read of all ranks while each of them has read the whole object and holds it. "fork" is
``torch.multiprocessing`` forking the calling process, as Accelerate's notebook launcher ends in doing. The ways are
interleaved; medians are shown.

The calling process has built an optimizer, as a notebook has that trained in one process first: torch loads
``torch._dynamo`` for a process's first optimizer, some 30 MB, and the fork server has it loaded for its workers. A
calling process without it forks lighter, and then each rank loads its own at its first optimizer, in unshared memory
and in its own time.

    python benchmarks/memory.py --ranks 2 4 --rounds 5
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import statistics
import tempfile
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch.multiprocessing

import notebook_launcher.runtime.accelerator  # noqa: F401 - a notebook that trains has loaded it before it forks
from notebook_launcher import LaunchConfig
from notebook_launcher.launcher import payload, warm
from notebook_launcher.launcher.launch import launch_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from notebook_launcher.launcher.run import Run

MB = 1e6
POLL_S = 0.002
LIMIT_S = 120.0
SETTLE_S = 0.3  # between launches, so that workers standing by have been replaced, as between two cells


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one process, or of several together."""

    pss: float
    uss: float

    @classmethod
    def of(cls, pids: Sequence[int]) -> Memory:
        """Of all processes of ``pids`` together, as they are now."""
        found = {"Pss": 0, "Private_Clean": 0, "Private_Dirty": 0}
        for pid in pids:
            for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
                name, _, rest = line.partition(":")
                if name in found:
                    found[name] += int(rest.split()[0]) * 1024
        return cls(found["Pss"], found["Private_Clean"] + found["Private_Dirty"])


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when ``condition`` holds."""
    limit_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > limit_s:
            raise SystemExit("a rank did not get ready, or did not end")
        time.sleep(POLL_S)


def holding(folder: str, tensor: Any = None) -> Callable[[], None]:
    """The function that is launched: reads all of ``tensor``, says so, and holds it until it is let go."""

    def hold() -> None:
        if tensor is not None:
            tensor.max()
        with open(f"{folder}/{os.getpid()}.ready", "w"):  # noqa: PTH123 - as little as possible is loaded here
            pass
        while not os.path.exists(f"{folder}/release"):  # noqa: PTH110 - likewise
            time.sleep(POLL_S)

    return hold


def ours(function: Callable[[], Any], num_ranks: int, *, wait: bool = False) -> Run:
    """One launch by this project."""
    config = LaunchConfig.make(device="cpu", num_processes=num_ranks)
    return launch_payload(payload.for_call(function), config, wait=wait, sink="none")


def theirs(function: Callable[[], Any], num_ranks: int) -> Any:
    """One launch by ``torch.multiprocessing``."""
    multiprocessing: Any = torch.multiprocessing
    return multiprocessing.start_processes(_call, args=(function,), nprocs=num_ranks, start_method="fork", join=False)


def _call(_rank: int, function: Callable[[], Any]) -> None:
    function()


@contextlib.contextmanager
def held(way: Callable[[Callable[[], Any], int], Any], num_ranks: int, tensor: Any = None) -> Iterator[list[int]]:
    """Launch a function that is ``holding``; give the ranks' process ids once all are ready; then let them go."""
    settle(num_ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        run = way(holding(name, tensor), num_ranks)
        wait_until(lambda: len(list(folder.glob("*.ready"))) == num_ranks)
        pids = [int(path.stem) for path in folder.glob("*.ready")]
        yield pids
        (folder / "release").touch()
        wait_until(lambda: run.status != "running" if way is ours else run.join(0))


def settle(num_ranks: int) -> None:
    """Wait as between two cells, with workers standing by."""
    warm.stand_by(num_ranks)
    time.sleep(SETTLE_S)


# --- what is measured -------------------------------------------------------------------------------------------------


def empty_memory(num_ranks: int) -> dict[str, Memory]:
    """Of one worker that runs an empty function, by way."""
    found = {}
    for name, way in (("ours", ours), ("fork", theirs)):
        with held(way, num_ranks) as pids:
            together = Memory.of(pids)
        found[name] = Memory(together.pss / num_ranks, together.uss / num_ranks)
    return found


def extra_memory(tensor: Any, num_ranks: int) -> dict[str, float]:
    """Bytes (PSS) that a run takes for ``tensor``, beyond those of an empty run: its ranks, and with the kernel."""
    ranks, kernel = {}, {}
    own = [os.getpid()]
    for what, captured in (("nothing", None), ("tensor", tensor)):
        settle(num_ranks)
        before = Memory.of(own).pss
        with held(ours, num_ranks, captured) as pids:
            ranks[what] = Memory.of(pids).pss
            kernel[what] = Memory.of(own).pss - before
    extra = ranks["tensor"] - ranks["nothing"]
    return {"the ranks": extra, "and the kernel": extra + kernel["tensor"] - kernel["nothing"]}


def copied(tensor: Any) -> float:
    """Seconds of one copy of ``tensor`` into fresh memory."""
    began_s = time.perf_counter()
    fresh = torch.empty_like(tensor).copy_(tensor)
    took_s = time.perf_counter() - began_s
    del fresh
    return took_s


def launched(tensor: Any, num_ranks: int) -> dict[str, float]:
    """Seconds of a launch that captures ``tensor``: to the function's first line on the last rank, and to the end."""
    settle(num_ranks)

    def first_line() -> int:
        now_ns = time.monotonic_ns()
        return now_ns if tensor is None else now_ns + 0 * tensor.dim()

    began_ns = time.monotonic_ns()
    run = ours(first_line, num_ranks, wait=True)
    return {
        "the first line": (max(run.results) - began_ns) / 1e9,
        "the end": (time.monotonic_ns() - began_ns) / 1e9,
    }


# --- the table --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure, and what it is compared with."""

    what: str
    value: float
    unit: str
    base: float
    base_name: str
    limit: float | None

    def __str__(self) -> str:
        """One line of the table."""
        ratio = self.value / self.base
        verdict = "" if self.limit is None else f"{'ok' if ratio <= self.limit else 'OVER':>4} <= {self.limit:g}"
        base = f"{self.base_name} ({self.base:,.1f} {self.unit})"
        return f"  {self.what:44}{self.value:9,.1f} {self.unit}{ratio:7.2f} of {base:34}{verdict}"


def empty_rows(num_ranks: int, rounds: int) -> Iterator[Row]:
    """Worker memory of an empty function."""
    found = [empty_memory(num_ranks) for _ in range(rounds)]
    for what in ("pss", "uss"):
        value, base = (statistics.median(getattr(each[way], what) for each in found) for way in ("ours", "fork"))
        # Unshared pages are few either way, and a worker that rehearses while it stands by copies some ahead.
        limit = 1.2 if what == "pss" else None
        yield Row(f"{what.upper()} of a worker, empty function", value / MB, "MB", base / MB, "a fork's", limit)


def captured_rows(tensor: Any, num_ranks: int, rounds: int) -> Iterator[Row]:
    """Memory and time of a launch that captures ``tensor``."""
    memory, copies, times = [], [], []
    for _ in range(rounds):
        memory.append(extra_memory(tensor, num_ranks))
        copies.append(copied(tensor))
        times.append((launched(None, num_ranks), launched(tensor, num_ranks)))
    for who in memory[0]:
        value = statistics.median(each[who] for each in memory)
        yield Row(f"PSS for the tensor, {who}", value / MB, "MB", tensor.nbytes / MB, "one copy", 1.1)
    copy_s = statistics.median(copies)
    for until in times[0][0]:
        value = statistics.median(large[until] - small[until] for small, large in times)
        yield Row(f"time for the tensor, to {until}", value * 1e3, "ms", copy_s * 1e3, "a copy of it", 2)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size-mb", type=int, default=1000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # that a large object travels is what this is about
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # see above
    warm.get_ready()
    ours(int, 1, wait=True)  # the server is warm from here on
    rows = {num_ranks: list(empty_rows(num_ranks, options.rounds)) for num_ranks in options.ranks}
    tensor = torch.ones(int(options.size_mb * MB) // 4)  # from now on a fork's share of the kernel holds it, too
    for num_ranks in options.ranks:
        rows[num_ranks] += captured_rows(tensor, num_ranks, options.rounds)
        print(f"{num_ranks} ranks", *rows[num_ranks], sep="\n")


if __name__ == "__main__":
    main()
