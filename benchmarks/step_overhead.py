"""What a training step costs over the hand-written loop: ours, and Accelerate's and Fabric's where they are installed.

One process, one thread, a model so small that the overhead shows. The ways are interleaved in one run, so that a
machine whose speed drifts slows all of them; the clock is the thread's own, so that other processes don't count. Quote
the differences and the ratios.

    python benchmarks/step_overhead.py --accumulate 1 4 --rounds 101
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH_SIZE = 4
NUM_FEATURES = 8

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


def ours(num_steps: int, accumulate: int) -> Callable[[], None]:
    """The same with this project's ``Accelerator``."""
    return _accelerated(Accelerator(cpu=True, gradient_accumulation_steps=accumulate), num_steps)


def accelerate(num_steps: int, accumulate: int) -> Callable[[], None]:
    """The same with Accelerate's."""
    theirs: Any = importlib.import_module("accelerate")
    return _accelerated(theirs.Accelerator(cpu=True, gradient_accumulation_steps=accumulate), num_steps)


def fabric(num_steps: int, accumulate: int) -> Callable[[], None]:
    """The same with Lightning Fabric, which leaves the accumulation to the loop."""
    lightning: Any = importlib.import_module("lightning.fabric")
    one = lightning.Fabric(accelerator="cpu", devices=1)
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


def measure(num_steps: int, accumulate: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds a step by way, ``rounds`` each, interleaved."""
    ways = {"raw": raw, "ours": ours}
    if importlib.util.find_spec("accelerate"):
        ways["accelerate"] = accelerate
    if importlib.util.find_spec("lightning"):
        ways["fabric"] = fabric
    epochs = {way: make(num_steps, accumulate) for way, make in ways.items()}
    for epoch in epochs.values():
        epoch()
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, epoch in epochs.items():
            began_ns = time.thread_time_ns()
            epoch()
            taken[way].append((time.thread_time_ns() - began_ns) / 1e3 / num_steps)
    return taken


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=101)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'accumulate':>10}  {'way':12} {'median us':>9} {'min':>8}  {'over raw us':>11} {'of raw':>7}")
    for accumulate in options.accumulate:
        taken = measure(options.steps, accumulate, options.rounds)
        for way, values in taken.items():
            # Each round against the raw loop of the same round: both ran at the machine's speed of that moment.
            over = statistics.median(value - base for value, base in zip(values, taken["raw"], strict=True))
            ratio = statistics.median(value / base for value, base in zip(values, taken["raw"], strict=True))
            median = statistics.median(values)
            print(f"{accumulate:10}  {way:12} {median:9.2f} {min(values):8.2f}  {over:11.2f} {ratio:7.3f}")


if __name__ == "__main__":
    main()
