"""Threads for devices, as torch_xla starts them."""

from __future__ import annotations

import concurrent.futures
import os

import torch_xla
from torch_xla import runtime


def initialize_singleprocess():
    torch_xla.calls.append("singleprocess")


def initialize_multiprocess(local_rank, local_world_size):
    if problem := os.environ.get("FAKE_PROBLEM"):
        raise RuntimeError(problem)
    os.environ["PJRT_LOCAL_PROCESS_RANK"] = str(local_rank)
    os.environ["PJRT_LOCAL_PROCESS_COUNT"] = str(local_world_size)


def _run_thread_per_device(local_rank, local_world_size, fn, initializer_fn):
    initializer_fn(local_rank, local_world_size)

    def run(ordinal):
        torch_xla.local.ordinal = ordinal
        return fn()

    count = runtime.addressable_device_count()
    with concurrent.futures.ThreadPoolExecutor(count) as executor:
        return dict(enumerate(executor.map(run, range(count))))
