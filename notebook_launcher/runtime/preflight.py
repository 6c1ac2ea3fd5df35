"""What a preflight does on each rank: compute and reduce in every precision, check the values, take the time."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.core import config
from notebook_launcher.core.precisions import PRECISIONS
from notebook_launcher.runtime.precision import DTYPES
from notebook_launcher.runtime.process import join, place

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.runtime.process import Process

_NUM_VALUES = 1000
_NUM_SHARES = 7  # ranks give 1, 2, ... 7, 1, 2, ...: their sum is within fp16's range for any number of ranks
_SIDE = 64
_TOLERANCE = {"no": 1e-6, "fp16": 2e-3, "bf16": 2e-2}  # relative; one rounding of the result
_NUM_LATENCIES, _NUM_BANDWIDTHS, _NUM_WARM = 50, 7, 3
_NUM_BYTES, _NUM_BYTES_ON_CPU = 64_000_000, 16_000_000


def measure() -> dict[str, Any]:
    """This rank's findings: when it began, what each precision came to, and the time of an all-reduce.

    ``precisions`` gives, by name, "" where compute and sum were right, else what was wrong; refused ones are left out.
    ``latency_us`` and ``bandwidth_mb_s`` are medians: of one value, and of ``num_bytes`` over the time they took.
    """
    began_s = time.time()
    process = _join()
    device = _way(process)
    found = {
        "began_s": began_s,
        "device": str(process.device),
        "reduced_on": str(device),
        "precisions": {
            name: _try(name, process, device) for name in PRECISIONS if not process.backend.refusals.get(name)
        },
    }
    num_bytes = _NUM_BYTES_ON_CPU if device.type == "cpu" else _NUM_BYTES
    latency_s = _median_s(1, _NUM_LATENCIES, device)
    bulk_s = _median_s(num_bytes // 4, _NUM_BANDWIDTHS, device)
    dist.destroy_process_group()
    return found | {"latency_us": latency_s * 1e6, "bandwidth_mb_s": num_bytes / bulk_s / 1e6, "num_bytes": num_bytes}


def _join() -> Process:
    """This process in a process group, also where it is alone: that the group can be made is part of the test."""
    process = join(place(config.world()))
    if not dist.is_initialized():
        dist.init_process_group(process.backend.process_group, rank=0, world_size=1)
    return process


def _way(process: Process) -> torch.device:
    """Where tensors are reduced: on the device itself, or where the group has no way for it, in host memory."""
    group = process.backend.process_group
    return process.device if f"{process.device.type}:" in group else torch.device("cpu")


def _try(name: str, process: Process, device: torch.device) -> str:
    """What was wrong with computing and reducing in that precision; "" where nothing was."""
    dtype = DTYPES[name]
    ones = torch.ones(_SIDE, _SIDE, dtype=dtype, device=process.device)
    product = (ones @ ones).float().cpu()
    if not torch.allclose(product, torch.full_like(product, _SIDE), rtol=_TOLERANCE[name]):
        return f"a product of matrices of ones has {product.flatten()[0]:g} where {_SIDE} is right"
    shares = [rank % _NUM_SHARES + 1 for rank in range(process.num_processes)]
    value = torch.full((_NUM_VALUES,), shares[process.rank], dtype=dtype, device=device)
    dist.all_reduce(value)
    wrong = (value.float() - sum(shares)).abs() > _TOLERANCE[name] * sum(shares)
    if wrong.any():
        return f"the sum over the ranks came out as {value[wrong][0].item():g} where {sum(shares)} is right"
    return ""


def _median_s(num_values: int, num_times: int, device: torch.device) -> float:
    values = torch.zeros(num_values, device=device)
    wait = _waiting(device)
    times = []
    for number in range(_NUM_WARM + num_times):
        wait()
        start_s = time.perf_counter()
        dist.all_reduce(values)
        wait()
        if number >= _NUM_WARM:
            times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def _waiting(device: torch.device) -> Callable[[], None]:
    """What returns once the device has done all that it was given."""
    return torch.accelerator.synchronize if device.type != "cpu" else lambda: None
