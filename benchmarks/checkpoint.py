"""How long ``save_state`` keeps a training loop waiting: in the background, and until all is on the disk.

    python benchmarks/checkpoint.py                       # 400 MB: a model and AdamW's two moments, one process
    python benchmarks/checkpoint.py --ranks 2 --mb 800    # the same under FSDP, each rank with its part

Both ways save the same in turn, so that a machine whose speed drifts slows both; quote the median of the ratios. What
the loop waits for a save in the background is the call, and, when the next forward and backward have ended, the copy of
the optimizer's state. That copying and writing take a core from forward and backward is shown beside it. A save in the
background has ended before the next round. One round before warms up: its copy needs new memory.
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


def rounds(
    folder: str, mega_bytes: int, num_rounds: int, batch_size: int, *, is_sharded: bool
) -> list[tuple[float, ...]]:
    """Seconds, by round.

    Of ``save_state`` until all is written; of the call in the background, and of what the next step then waits; of
    forward and backward after the one, and after the other.
    """
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin() if is_sharded else None)
    num_layers = max(1, round(mega_bytes * 1e6 / (WIDTH * WIDTH * 4 * COPIES)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    batch = torch.randn(batch_size, WIDTH)

    def compute() -> None:
        optimizer.zero_grad()
        accelerator.backward(model(batch).sum())

    compute()
    optimizer.step()
    taken = []
    for _ in range(num_rounds + 1):
        accelerator.wait_for_everyone()
        full_s = taken_s(lambda: accelerator.save_state(Path(folder) / "sync"))
        alone_s = taken_s(compute)
        optimizer.step()
        accelerator.wait_for_everyone()
        call_s = taken_s(lambda: accelerator.save_state(Path(folder) / "async", async_=True))
        beside_s = taken_s(compute)
        wait_s = taken_s(lambda: optimizer.state)  # waits as a step does
        optimizer.step()
        accelerator.wait_for_save()
        taken.append((full_s, call_s, wait_s, alone_s, beside_s))
    return taken[1:]


def main() -> None:
    """Measure and print each round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=400, help="of all ranks together")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch-size", type=int, default=32, help="of forward and backward")
    parser.add_argument("--folder", help="on the disk to measure; the system's for temporary files")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="notebook-launcher-checkpoint-", dir=options.folder)
    try:
        arguments = (folder, options.mb, options.rounds, options.batch_size)
        if options.ranks == 1:
            taken = rounds(*arguments, is_sharded=False)
        else:
            run = launch(rounds, arguments, {"is_sharded": True}, num_processes=options.ranks, device="cpu")
            taken = run.results[0]
    finally:
        shutil.rmtree(folder)
    for full, call, wait, alone, beside in taken:
        print(
            f"until written {full * 1e3:6.0f} ms   in the background {call * 1e3:5.0f} + {wait * 1e3:4.0f} ms   "
            f"forward and backward {alone * 1e3:5.0f} ms, beside the save {beside * 1e3:5.0f} ms"
        )
    show("ratio", [(call + wait) / full for full, call, wait, *_ in taken])
    show(
        "with what forward and backward take longer",
        [(call + wait + beside - alone) / full for full, call, wait, alone, beside in taken],
    )


def show(name: str, ratios: list[float]) -> None:
    """Print the median and the quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{name} {middle:.3f} (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
