"""TPUs, through torch_xla, and XLA on the CPU in their place (``PJRT_DEVICE=CPU``). Nothing else loads torch_xla.

XLA records what is computed, and runs it when ``sync`` is called or a value is asked for. A batch that a loader hands
out ends the step before it, as with torch_xla's ``MpDeviceLoader``. That one is not used, since it reads ahead on a
thread, and a loader's place must be that of the batch at hand.

Run on XLA:CPU: one process, and SPMD over several devices. Never run on TPUs.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.precisions import refusals
from notebook_launcher.core.strategies import IN_ONE_PROCESS
from notebook_launcher.runtime import randomness, trees
from notebook_launcher.runtime.backends import Backend

if TYPE_CHECKING:
    from torch import nn

    from notebook_launcher.core.world import World


def tpu(world: World) -> Backend:
    """One device a process, or by SPMD all of them as one, each batch split among them.

    Raises ``ConfigError`` where torch_xla is not here, or sees another number of processes than was launched.
    """
    runtime, pjrt, model = _torch_xla("runtime"), _torch_xla("_internal.pjrt"), _torch_xla("core.xla_model")
    if world.strategy in IN_ONE_PROCESS and not runtime.is_spmd():
        runtime.use_spmd()
    if not world.launched and world.world_size > 1:
        pjrt.initialize_multiprocess(world.local_rank, world.local_world_size)  # torchrun
    device = _torch_xla("torch_xla").device()
    is_spmd = runtime.is_spmd()
    if not is_spmd:
        _check_alone(world, runtime)
    states = model.get_rng_state, model.set_rng_state
    randomness.know("xla", randomness.Stream(*states, seed=model.set_rng_state))
    return Backend(
        "xla",
        device,
        process_group="cpu:gloo",  # gradients go by XLA; what is gathered or told goes through the host
        distributed_type="XLA",
        refusals=refusals("tpu"),
        strategies={"single": "spmd", **{name: name for name in IN_ONE_PROCESS}}
        if is_spmd
        else {"single": "xla", "ddp": "xla", "xla": "xla"},
        move=functools.partial(_move, device=device),
        put=functools.partial(_put_split if is_spmd else _put, device=device),
    )


def _torch_xla(name: str) -> Any:
    try:
        return importlib.import_module("torch_xla" if name == "torch_xla" else f"torch_xla.{name}")
    except ImportError as error:
        raise ConfigError(
            f"device='tpu' needs torch_xla, which can't be loaded here ({error}): pip install "
            "'notebook-launcher[tpu]' installs it with the torch that it needs"
        ) from error


def _check_alone(world: World, runtime: Any) -> None:
    seen = runtime.world_size()
    if seen > 1 and runtime.addressable_device_count() > 1:
        raise ConfigError(
            f"the {seen} ranks are threads of one process here, and XLA on the CPU aborts when they exchange anything. "
            "To train on several devices of one process launch with strategy='spmd'; with num_processes=1 on one device"
        )
    if seen != world.world_size:
        raise ConfigError(
            f"{world.world_size} process{'es were' if world.world_size > 1 else ' was'} launched, and torch_xla sees "
            f"{seen} in this run, so they would not train one model together. Several processes can't share XLA on the "
            "CPU; launch one, with strategy='spmd' for several devices"
        )


def mesh() -> Any:
    """Every device in a row; FSDPv2 wants it to have this name."""
    count = _torch_xla("runtime").global_runtime_device_count()
    return _torch_xla("distributed.spmd").Mesh(list(range(count)), (count,), ("fsdp",))


def _move(model: nn.Module, *, device: torch.device) -> nn.Module:
    """The model on the device, its parameters the same objects: an optimizer knows them, and some may be tied."""
    future = torch.__future__
    before = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        future.set_swap_module_params_on_conversion(before)


def _put(batch: Any, *, device: torch.device) -> Any:
    _torch_xla("torch_xla").sync()
    return trees.move(batch, device)


def _put_split(batch: Any, *, device: torch.device) -> Any:
    """The batch on the device, tensors split along dim 0 where that comes out even; others are on every device."""
    batch = _put(batch, device=device)
    devices = mesh()
    count = devices.size()

    def split(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] and leaf.shape[0] % count == 0:
            _torch_xla("distributed.spmd").mark_sharding(leaf, devices, ("fsdp", *[None] * (leaf.ndim - 1)))
        return leaf

    return trees.map_leaves(split, batch)
