"""What a training step, and what is around it, costs over hand-written torch: ours, and others' where installed.

Accelerate and Lightning Fabric are timed too where they can be imported. The ways are interleaved in one run, so that a
machine whose speed drifts slows all of them, and each is compared with the plain one of the same round. Models are so
small that the overhead shows, and torch has one thread. Quote the differences and the ratios.

    python benchmarks/step_overhead.py                       # all of it, some minutes
    python benchmarks/step_overhead.py --what step clip --rounds 301

``step`` and ``clip`` have the thread's own clock, ``import`` (fresh interpreters) the process's, so that others on the
machine don't count; ``loader`` (two workers), ``gather`` (two processes) and ``save`` (500 MB) the wall's.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator, launch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BATCH_SIZE = 4
NUM_FEATURES = 8
NUM_STEPS = 200  # of a round
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
HAS_FABRIC = importlib.util.find_spec("lightning") is not None

Times = dict[str, list[float]]  # by way, one a round; the first way is the plain one
Pieces = tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]


def pieces(num_steps: int) -> Pieces:
    """A model, its optimizer, and a loader of ``num_steps`` batches."""
    torch.manual_seed(0)
    model = nn.Linear(NUM_FEATURES, 1)
    x = torch.randn(num_steps * BATCH_SIZE, NUM_FEATURES)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH_SIZE)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), loader


def raw(num_steps: int, accumulate: int) -> Callable[[], None]:
    """The loop as it is written by hand."""
    model, optimizer, loader = pieces(num_steps)

    def epoch() -> None:
        for index, (x, y) in enumerate(loader):
            loss: Any = nn.functional.mse_loss(model(x), y)
            (loss if accumulate == 1 else loss / accumulate).backward()
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def _accelerated(accelerator: Any, num_steps: int) -> Callable[[], None]:
    model, optimizer, loader = accelerator.prepare(*pieces(num_steps))

    def epoch() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def accelerators(**options: Any) -> dict[str, Any]:
    """By way: this project's ``Accelerator``, and Accelerate's."""
    found: dict[str, Any] = {"ours": Accelerator(cpu=True, **options)}
    if HAS_ACCELERATE:
        theirs: Any = importlib.import_module("accelerate")
        theirs.state.AcceleratorState._reset_state(reset_partial_state=False)  # noqa: SLF001 - another accumulation
        theirs.state.GradientState._reset_state()  # noqa: SLF001
        found["accelerate"] = theirs.Accelerator(cpu=True, **options)
    return found


def new_fabric() -> Any:
    """Lightning's ``Fabric`` on one CPU process."""
    lightning: Any = importlib.import_module("lightning.fabric")
    return lightning.Fabric(accelerator="cpu", devices=1)


def fabric(num_steps: int, accumulate: int) -> Callable[[], None]:
    """The same with Lightning Fabric, which leaves the accumulation to the loop."""
    one = new_fabric()
    model, optimizer, loader = pieces(num_steps)
    model, optimizer = one.setup(model, optimizer)
    loader = one.setup_dataloaders(loader)

    def epoch() -> None:
        for index, (x, y) in enumerate(loader):
            is_last = (index + 1) % accumulate == 0
            with one.no_backward_sync(model, enabled=not is_last):
                loss = nn.functional.mse_loss(model(x), y)
                one.backward(loss if accumulate == 1 else loss / accumulate)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

    return epoch


# --- measuring -------------------------------------------------------------------------------------------------------


def interleaved(ways: Mapping[str, Callable[[], None]], rounds: int, clock: Callable[[], int], per: int) -> Times:
    """Microseconds each way took, ``rounds`` times in turn, divided by ``per``; once more before, to warm up."""
    for way in ways.values():
        way()
    taken: Times = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began_ns = clock()
            way()
            taken[name].append((clock() - began_ns) / 1e3 / per)
    return taken


def show(title: str, taken: Times) -> None:
    """Print a line for each way: its times, and what it is to the plain way of the same round."""
    plain = next(iter(taken.values()))
    for name, values in taken.items():
        over = statistics.median(value - base for value, base in zip(values, plain, strict=True))
        ratios = sorted(value / base for value, base in zip(values, plain, strict=True))
        low, middle, high = (ratios[round(share * (len(ratios) - 1))] for share in (0.25, 0.5, 0.75))
        print(
            f"{title:20} {name:18} {statistics.median(values):12.1f} {min(values):12.1f} {over:12.2f} "
            f"{min(values) - min(plain):12.2f}  {middle:6.3f} ({low:.3f}-{high:.3f})"
        )


def step(rounds: int) -> None:
    """The whole loop, with one and four micro-batches a group."""
    for accumulate in (1, 4):
        ways = {"raw": raw(NUM_STEPS, accumulate)}
        for name, accelerator in accelerators(gradient_accumulation_steps=accumulate).items():
            ways[name] = _accelerated(accelerator, NUM_STEPS)
        if HAS_FABRIC:
            ways["fabric"] = fabric(NUM_STEPS, accumulate)
        show(f"step, groups of {accumulate}", interleaved(ways, rounds, time.thread_time_ns, NUM_STEPS))


def loader(rounds: int) -> None:
    """Reading with two workers that stay."""

    def new() -> DataLoader[Any]:
        x = torch.randn(NUM_STEPS * BATCH_SIZE, NUM_FEATURES)
        return DataLoader(TensorDataset(x), batch_size=BATCH_SIZE, num_workers=2, persistent_workers=True)

    def read(batches: Any) -> Callable[[], None]:
        def epoch() -> None:
            for _ in batches:
                pass

        return epoch

    ways = {"raw": read(new())}
    for name, accelerator in accelerators().items():
        ways[name] = read(accelerator.prepare(new()))
    if HAS_FABRIC:
        ways["fabric"] = read(new_fabric().setup_dataloaders(new()))
    show("loader, 2 workers", interleaved(ways, rounds // 4 + 1, time.perf_counter_ns, NUM_STEPS))


def clip(rounds: int) -> None:
    """``clip_grad_norm_`` of a small model."""

    def repeated(function: Callable[..., Any], model: nn.Module) -> Callable[[], None]:
        def calls() -> None:
            for _ in range(NUM_STEPS):
                function(model.parameters(), 1.0)

        return calls

    model, _, _ = pieces(1)
    loss: Any = nn.functional.mse_loss(model(torch.randn(BATCH_SIZE, NUM_FEATURES)), torch.randn(BATCH_SIZE, 1))
    loss.backward()
    ways = {"raw": repeated(nn.utils.clip_grad_norm_, model)}
    for name, accelerator in accelerators().items():
        ways[name] = repeated(accelerator.clip_grad_norm_, accelerator.prepare(model))
    show("clip_grad_norm_", interleaved(ways, rounds // 2 + 1, time.thread_time_ns, NUM_STEPS))


def gathering(rounds: int, num_calls: int) -> Times:
    """On each of two processes: predictions and targets of a batch, gathered."""
    predictions, targets = torch.randn(32, 10), torch.randint(10, (32,))

    def by_hand() -> None:
        for _ in range(num_calls):
            for tensor in (predictions, targets):
                parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, tensor)
                torch.cat(parts)

    def repeated(gather: Callable[[Any], Any]) -> Callable[[], None]:
        def calls() -> None:
            for _ in range(num_calls):
                gather((predictions, targets))

        return calls

    ways = {"raw": by_hand}
    for name, accelerator in accelerators().items():
        ways[name] = repeated(accelerator.gather_for_metrics)
    return interleaved(ways, rounds, time.perf_counter_ns, num_calls)


def gather(rounds: int) -> None:
    """``gather_for_metrics`` against ``all_gather``, on two processes."""
    run = launch(gathering, (rounds // 4 + 1, 50), num_processes=2, device="cpu")
    show("gather_for_metrics", run.results[0])


def save(rounds: int) -> None:
    """``save_state`` of a model of 500 MB; as ours waits until it is on the disk, so does one of the plain ways."""
    model = nn.Sequential(*(nn.Linear(2500, 2500) for _ in range(20)))
    folder = Path(tempfile.mkdtemp(prefix="notebook-launcher-save-"))

    def plain(name: str, *, synced: bool) -> Callable[[], None]:
        def write() -> None:
            with (folder / name).open("wb") as file:
                torch.save(model.state_dict(), file)
                if synced:
                    file.flush()
                    os.fsync(file.fileno())

        return write

    ways = {"torch.save, synced": plain("synced.pt", synced=True), "torch.save": plain("plain.pt", synced=False)}
    for name, accelerator in accelerators().items():
        accelerator.prepare(model)
        ways[name] = functools.partial(accelerator.save_state, str(folder / name))
    try:
        show("save_state, 500 MB", interleaved(ways, max(5, rounds // 20), time.perf_counter_ns, 1))
    finally:
        shutil.rmtree(folder)


def imports(rounds: int) -> None:
    """``from ... import Accelerator`` after ``import torch``, over the time that torch takes."""
    statements = {
        "ours": "from notebook_launcher import Accelerator",
        **({"accelerate": "from accelerate import Accelerator"} if HAS_ACCELERATE else {}),
        **({"fabric": "from lightning.fabric import Fabric"} if HAS_FABRIC else {}),
    }
    taken: Times = {"torch": [], **{name: [] for name in statements}}
    for _ in range(rounds // 10 + 1):
        for name, statement in statements.items():
            program = (
                f"import time; a = time.process_time(); import torch; b = time.process_time(); {statement}\n"
                "print((b - a) * 1e6, (time.process_time() - b) * 1e6)"
            )
            done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
            of_torch, after = map(float, done.stdout.split())
            taken[name].append(of_torch + after)
            if name == "ours":
                taken["torch"].append(of_torch)
    show("import", taken)


SECTIONS = {"step": step, "loader": loader, "clip": clip, "gather": gather, "save": save, "import": imports}


def main() -> None:
    """Measure and print a table, in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=101, help="of step; the others take a part of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':20} {'way':18} {'median us':>12} {'min':>12} {'over plain':>12} {'of minima':>12}  ratio (quartiles)")
    for name in options.what:
        SECTIONS[name](options.rounds)


if __name__ == "__main__":
    main()
