"""The devices that torch itself knows: CPU, CUDA and ROCm, MPS, XPU. They differ by a row of facts."""

from __future__ import annotations

import torch

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime.backends import Backend


def accelerator_type() -> str | None:
    """The type of the accelerator that torch finds here ("cuda", "mps", "xpu"), None where there is none."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else None


def cpu(local_rank: int) -> Backend:
    """The CPU: every process shares it."""
    del local_rank
    return Backend(
        "cpu",
        torch.device("cpu"),
        process_group="gloo",
        distributed_type="MULTI_CPU",
        refusals={"fp16": "CPUs compute fp16 slower than fp32, and bf16 needs no loss scaling"},
    )


def cuda(local_rank: int) -> Backend:
    """One CUDA or ROCm device a process; torch calls both "cuda"."""
    device = _own_device("cuda", local_rank)
    refusals = {} if torch.cuda.is_bf16_supported() else {"bf16": f"{torch.cuda.get_device_name(device)} has no bf16"}
    return Backend(
        "cuda",
        device,
        process_group="cpu:gloo,cuda:nccl",
        distributed_type="MULTI_GPU",
        refusals=refusals | {"fp16": _NO_SCALER},
    )


def mps(local_rank: int) -> Backend:
    """Apple's GPU: there is one, so every process shares it."""
    del local_rank
    return Backend(
        "mps",
        torch.device("mps"),
        process_group="gloo",
        distributed_type="MPS",
        refusals={"fp16": _NO_SCALER},
    )


def xpu(local_rank: int) -> Backend:
    """One Intel GPU a process."""
    device = _own_device("xpu", local_rank)
    return Backend(
        "xpu",
        device,
        process_group="cpu:gloo,xpu:xccl",
        distributed_type="MULTI_XPU",
        refusals={"fp16": _NO_SCALER},
    )


_NO_SCALER = "the loss scaling that fp16 needs is not there yet in this version"


def _own_device(device_type: str, local_rank: int) -> torch.device:
    module = torch.get_device_module(device_type)
    count = module.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no {device_type} device of its own: {count} can be seen here. Launch at most "
            f"{count} processes on this machine, or check which devices are visible"
        )
    device = torch.device(device_type, local_rank)
    module.set_device(device)
    return device
