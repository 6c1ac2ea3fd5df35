"""Who this thread is."""

from __future__ import annotations

import os

import torch_xla


def _num_devices():
    return int(os.environ.get("CPU_NUM_DEVICES", "1")) if os.environ.get("PJRT_DEVICE") == "CPU" else 1


def _has_replicas():
    return "PJRT_LOCAL_PROCESS_RANK" in os.environ


def world_size():
    told = os.environ.get("FAKE_WORLD_SIZE")
    if told:
        return int(told)
    if not _has_replicas():
        return 1
    processes = 1 if os.environ.get("PJRT_DEVICE") == "CPU" else int(os.environ["PJRT_LOCAL_PROCESS_COUNT"])
    return processes * _num_devices()


def global_ordinal():
    return int(os.environ.get("PJRT_LOCAL_PROCESS_RANK", "0")) * _num_devices() + getattr(torch_xla.local, "ordinal", 0)


local_ordinal = global_ordinal


def addressable_device_count():
    return _num_devices()


def global_runtime_device_count():
    return _num_devices()


def use_spmd():
    torch_xla.calls.append("use_spmd")
    torch_xla.state.spmd = True


def is_spmd():
    return torch_xla.state.spmd
