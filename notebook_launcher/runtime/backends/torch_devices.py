"""The devices that torch itself knows: CPU, CUDA and ROCm, MPS, XPU. They differ by a row of facts."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from notebook_launcher.core import apple_chip
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.precisions import DeviceFacts, refusals
from notebook_launcher.runtime.backends import Backend

if TYPE_CHECKING:
    from notebook_launcher.core.world import World


def accelerator_type() -> str | None:
    """The type of the accelerator that torch finds here ("cuda", "mps", "xpu"), None where there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else None


def cpu(world: World) -> Backend:
    """The CPU: every process shares it."""
    del world
    return Backend("cpu", torch.device("cpu"), "gloo", "MULTI_CPU", refusals("cpu"))


def cuda(world: World) -> Backend:
    """One CUDA or ROCm device a process; torch calls both "cuda"."""
    device = _own_device("cuda", world)
    facts = DeviceFacts(
        name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        is_rocm=torch.version.hip is not None,
    )
    return Backend("cuda", device, "cpu:gloo,cuda:nccl", "MULTI_GPU", refusals("cuda", facts))


def mps(world: World) -> Backend:
    """Apple's GPU, for one process: there is one, and no process group carries its tensors."""
    if world.world_size > 1:
        raise ConfigError(
            f"{world.world_size} processes can't train on an Apple GPU ('mps'): a machine has one, and torch can't "
            "exchange its tensors between processes. Launch with num_processes=1, or with device='cpu'."
        )
    if not torch.backends.mps.is_available():
        raise _absent("mps")
    macos, version = (_version(text) for text in (platform.mac_ver()[0], torch.__version__))
    facts = DeviceFacts(name=apple_chip.name(), macos=macos, torch=version)
    return Backend("mps", torch.device("mps"), "gloo", "NO", refusals("mps", facts))


def xpu(world: World) -> Backend:
    """One Intel GPU a process."""
    device = _own_device("xpu", world)
    properties = torch.xpu.get_device_properties(device)
    facts = DeviceFacts(name=properties.name, has_native_bf16=getattr(properties, "has_bfloat16_conversions", None))
    return Backend("xpu", device, "cpu:gloo,xpu:xccl", "MULTI_XPU", refusals("xpu", facts))


def _absent(device_type: str) -> ConfigError:
    return ConfigError(
        f"device {device_type!r} is not here: this torch ({torch.__version__}) sees none, and the command "
        "notebook-launcher devices says why. Use device='cpu', or leave the device open."
    )


def _version(text: str) -> tuple[int, int] | None:
    """Major and minor of a version such as "14.5" or "2.13.0+cpu"; None for "", macOS's version elsewhere."""
    major, *rest = text.split(".")
    return (int(major), int(rest[0]) if rest else 0) if major else None


def _own_device(device_type: str, world: World) -> torch.device:
    module = torch.get_device_module(device_type)
    count = module.device_count()
    if not count:
        raise _absent(device_type)
    if world.local_rank >= count:
        raise ConfigError(
            f"local rank {world.local_rank} has no {device_type} device of its own: {count} can be seen here. Launch "
            f"at most {count} processes on this machine, or check which devices are visible"
        )
    device = torch.device(device_type, world.local_rank)
    module.set_device(device)
    return device
