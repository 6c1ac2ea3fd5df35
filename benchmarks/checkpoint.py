"""How long ``save_state`` keeps a training loop waiting: in the background, and until all is on the disk.

    python benchmarks/checkpoint.py                       # 400 MB: a model and AdamW's two moments, one process
    python benchmarks/checkpoint.py --ranks 2 --mb 800    # the same under FSDP, each rank with its part

Both ways save the same in turn, so that a machine whose speed drifts slows both; quote the median of the ratios. A
save in the background has ended before the next round. One round before warms up: its copy needs new memory.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from notebook_launcher import Accelerator, FullyShardedDataParallelPlugin, launch

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 2048
COPIES = 3  # weights and two moments


def taken_s(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def rounds(folder: str, mega_bytes: int, num_rounds: int, *, is_sharded: bool) -> list[tuple[float, float]]:
    """Seconds of ``save_state`` until all is written, and in the background, by round."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin() if is_sharded else None)
    num_layers = max(1, round(mega_bytes * 1e6 / (WIDTH * WIDTH * 4 * COPIES)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(2, WIDTH)).sum())
    optimizer.step()
    taken = []
    for _ in range(num_rounds + 1):
        accelerator.wait_for_everyone()
        full_s = taken_s(lambda: accelerator.save_state(Path(folder) / "sync"))
        part_s = taken_s(lambda: accelerator.save_state(Path(folder) / "async", async_=True))
        accelerator.wait_for_save()
        taken.append((full_s, part_s))
    return taken[1:]


def main() -> None:
    """Measure and print each round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=400, help="of all ranks together")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--folder", help="on the disk to measure; the system's for temporary files")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="notebook-launcher-checkpoint-", dir=options.folder)
    try:
        arguments = (folder, options.mb, options.rounds)
        if options.ranks == 1:
            taken = rounds(*arguments, is_sharded=False)
        else:
            run = launch(rounds, arguments, {"is_sharded": True}, num_processes=options.ranks, device="cpu")
            taken = run.results[0]
    finally:
        shutil.rmtree(folder)
    for full_s, part_s in taken:
        print(f"until written {full_s * 1e3:8.0f} ms   in the background {part_s * 1e3:8.0f} ms")
    ratios = [part_s / full_s for full_s, part_s in taken]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"ratio {middle:.3f} (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
