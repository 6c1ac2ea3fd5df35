"""What FSDP and ZeRO cost over the same by hand: a step of about 20 ms, and ``prepare``, on two processes.

By hand is ``fully_shard`` on each block and the model, and ``deepspeed.initialize`` (skipped where it isn't installed).
The ways are interleaved in one run, so that a machine whose speed drifts slows all of them, and each is compared with
the plain one of the same round: the wall's clock, and what the thread itself computed more, of the plain way's time.
The first waits for the other process, and for whatever else the machine does; the second doesn't.

    python benchmarks/sharding_overhead.py                                # some minutes
    python benchmarks/sharding_overhead.py --what step --rounds 41

``prepare`` is compared twice. ``fully_shard`` alone takes for granted that the ranks' weights are equal; ``prepare``
makes sure of it (the weights are read once, one small exchange; they travel only where they differ). What does as much
by hand loads rank 0's weights on all ranks with ``set_model_state_dict``: that is the fair comparison where nobody has
seeded the ranks alike ("other seeds").
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from notebook_launcher import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, launch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NUM_PROCESSES = 2
NUM_STEPS = 5  # of a round
BATCH_SIZE, WIDTH, NUM_BLOCKS = 64, 192, 2  # a step takes about 20 ms
PREPARED_WIDTH, PREPARED_BLOCKS = 256, 12  # 6 million parameters in 76 tensors
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None

Times = dict[str, list[tuple[float, float]]]  # by way, ms of the wall and of the thread, one a round


class Block(nn.Module):
    """A block of a transformer, but for its attention."""

    def __init__(self, width: int) -> None:
        """Its input and output have ``width`` features."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) to the same."""
        return x + self.outer(self.inner(self.norm(x)).relu())


class Net(nn.Module):
    """Blocks between two layers."""

    _no_split_modules = ("Block",)

    def __init__(self, width: int, num_blocks: int) -> None:
        """Of ``num_blocks`` blocks."""
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) to the same."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def new(width: int = WIDTH, num_blocks: int = NUM_BLOCKS, seed: int = 0) -> Net:
    """A model, the same for the same seed."""
    torch.manual_seed(seed)
    return Net(width, num_blocks)


def shard(model: Net) -> Net:
    """FSDP as it is written by hand."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


# --- steps -----------------------------------------------------------------------------------------------------------


def by_hand_fsdp(max_norm: float | None) -> Callable[[torch.Tensor], None]:
    """A step of hand-written FSDP."""
    model = shard(new())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(x: torch.Tensor) -> None:
        nn.functional.mse_loss(model(x), x).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand_zero(max_norm: float | None, stage: int) -> Callable[[torch.Tensor], None]:
    """A step of an engine, of which no more is asked than a loop without accumulation needs."""
    deepspeed: Any = importlib.import_module("deepspeed")
    model = new()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    zero = {"stage": stage, "reduce_bucket_size": sum(p.numel() for p in model.parameters()), "overlap_comm": False}
    config = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "zero_optimization": zero,
        "gradient_clipping": max_norm or 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(x: torch.Tensor) -> None:
        engine.backward(nn.functional.mse_loss(engine(x), x))
        engine.step()

    return step


def prepared(accelerator: Accelerator, max_norm: float | None) -> Callable[[torch.Tensor], None]:
    """The same step with ``Accelerator``."""
    model = new()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def step(x: torch.Tensor) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), x))
            if max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()

    return step


def steps(rounds: int, stage: int | None, max_norm: float | None) -> Times:
    """On each rank: ms a step, by hand and with ``Accelerator``; ``stage`` of ZeRO, None for FSDP."""
    chosen = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if stage is None else {}
    if stage is not None:
        chosen["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=stage)
    accelerator = Accelerator(cpu=True, **chosen)
    ours = prepared(accelerator, max_norm)  # first, so that DeepSpeed is imported as it should be
    ways = {"by hand": by_hand_fsdp(max_norm) if stage is None else by_hand_zero(max_norm, stage), "Accelerator": ours}
    x = torch.randn(BATCH_SIZE, WIDTH)

    def several(step: Callable[[torch.Tensor], None]) -> Callable[[], tuple[float, float]]:
        def run() -> tuple[float, float]:
            began = clocks()
            for _ in range(NUM_STEPS):
                step(x)
            return since(began, NUM_STEPS)

        return run

    return interleaved({name: several(step) for name, step in ways.items()}, rounds)


# --- prepare ---------------------------------------------------------------------------------------------------------


def preparing(rounds: int) -> Times:
    """On each rank: ms that a model takes until its first step can come."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())

    def timed(way: Callable[[Net], object], *, seeds_differ: bool) -> Callable[[], tuple[float, float]]:
        def run() -> tuple[float, float]:
            model = new(PREPARED_WIDTH, PREPARED_BLOCKS, seed=accelerator.process_index * seeds_differ)
            dist.barrier()
            began = clocks()
            way(model)
            dist.barrier()
            taken = since(began, 1)
            accelerator.free_memory()
            return taken

        return run

    def broadcast(model: Net) -> None:
        whole = {name: value.detach() for name, value in model.state_dict().items()}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(shard(model), whole if accelerator.is_main_process else {}, options=options)

    ways = {
        "fully_shard": timed(shard, seeds_differ=False),
        "Accelerator": timed(accelerator.prepare, seeds_differ=False),
        "fully_shard, rank 0's": timed(broadcast, seeds_differ=True),
        "Accel., other seeds": timed(accelerator.prepare, seeds_differ=True),
    }
    return interleaved(ways, rounds)


# --- measuring -------------------------------------------------------------------------------------------------------


def clocks() -> tuple[int, int]:
    """The wall's and this thread's, ns."""
    return time.perf_counter_ns(), time.thread_time_ns()


def since(began: tuple[int, int], per: int) -> tuple[float, float]:
    """Ms since then by each of the clocks, divided by ``per``."""
    wall, thread = ((now - then) / 1e6 / per for now, then in zip(clocks(), began, strict=True))
    return wall, thread


def interleaved(ways: Mapping[str, Callable[[], tuple[float, float]]], rounds: int) -> Times:
    """What each way says it took, ``rounds`` times in turn; twice more before, to warm up."""
    taken: Times = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, way in list(ways.items())[:: 1 if number % 2 else -1]:  # being the first of a round is no merit
            dist.barrier()
            taken[name].append(way())
    return {name: values[2:] for name, values in taken.items()}


def show(title: str, taken: Times, plain: str) -> None:
    """Print a line for each way: its times, and what it is to ``plain`` of the same round."""
    whole = statistics.median(wall for wall, _ in taken[plain])
    for name, values in taken.items():
        pairs = list(zip(values, taken[plain], strict=True))
        low, middle, high = quartiles([one[0] / base[0] for one, base in pairs])
        less, over, more = quartiles([(one[1] - base[1]) / whole * 100 for one, base in pairs])
        print(
            f"{title:15} {name:22} {statistics.median(wall for wall, _ in values):9.2f} {min(values)[0]:9.2f}  "
            f"{middle:6.3f} ({low:.3f}-{high:.3f})  {over:6.1f} % ({less:.1f} to {more:.1f})"
        )


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def step(rounds: int, max_norm: float | None = None) -> None:
    """FSDP and every stage of ZeRO."""
    for stage in (None, 0, 1, 2, 3) if HAS_DEEPSPEED else (None,):
        run = launch(steps, (rounds, stage, max_norm), num_processes=NUM_PROCESSES, device="cpu")
        title = "FSDP" if stage is None else f"ZeRO {stage}"
        show(title if max_norm is None else f"{title}, clipped", run.results[0], "by hand")


def clip(rounds: int) -> None:
    """The same, with gradients clipped."""
    step(rounds, 1.0)


def prepare(rounds: int) -> None:
    """FSDP's ``prepare``."""
    run = launch(preparing, (rounds,), num_processes=NUM_PROCESSES, device="cpu")
    names = list(run.results[0])
    for pair in (names[:2], names[2:]):
        show("prepare", {name: run.results[0][name] for name in pair}, pair[0])


SECTIONS = {"step": step, "clip": clip, "prepare": prepare}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=61)
    options = parser.parse_args()
    print(f"{'':15} {'way':22} {'median ms':>9} {'min':>9}  ratio (quartiles)      thread's own, more")
    for name in options.what:
        SECTIONS[name](options.rounds)


if __name__ == "__main__":
    main()
