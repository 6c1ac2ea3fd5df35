"""Run a notebook's function on every GPU of the machine, or in several CPU processes, and get everything back."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.core.deepspeed_options import DeepSpeedPlugin
    from notebook_launcher.core.errors import (
        CheckpointError,
        ConfigError,
        DeadlockError,
        PayloadError,
        ResultError,
        RunInterrupted,
        RunTimeoutError,
        WorkerError,
    )
    from notebook_launcher.core.fsdp_options import FullyShardedDataParallelPlugin
    from notebook_launcher.launcher.accelerate_style import debug_launcher, notebook_launcher
    from notebook_launcher.launcher.launch import launch
    from notebook_launcher.launcher.run import Run
    from notebook_launcher.runtime.accelerator import Accelerator
    from notebook_launcher.runtime.batch_size import find_executable_batch_size
    from notebook_launcher.runtime.estimate import MemoryEstimate, estimate
    from notebook_launcher.runtime.gather import (
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        pad_across_processes,
        reduce,
    )
    from notebook_launcher.runtime.local_sgd import LocalSGD
    from notebook_launcher.runtime.logs import get_logger, tqdm
    from notebook_launcher.runtime.memory import init_empty_weights
    from notebook_launcher.runtime.merging import merge_checkpoint
    from notebook_launcher.runtime.plugins import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ParallelismConfig,
        PipelineParallelPlugin,
        ProfileKwargs,
        ProjectConfiguration,
    )
    from notebook_launcher.runtime.process import DistributedType
    from notebook_launcher.runtime.randomness import set_seed
    from notebook_launcher.runtime.skipping import skip_first_batches
    from notebook_launcher.runtime.states import AcceleratorState, GradientState, PartialState
    from notebook_launcher.runtime.trackers import GeneralTracker
    from notebook_launcher.widgets.monitor import monitor
    from notebook_launcher.widgets.panel import panel

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "CheckpointError",
    "ConfigError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeadlockError",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "FullyShardedDataParallelPlugin",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "LaunchConfig",
    "LocalSGD",
    "MemoryEstimate",
    "ParallelismConfig",
    "PartialState",
    "PayloadError",
    "PipelineParallelPlugin",
    "ProfileKwargs",
    "ProjectConfiguration",
    "ResultError",
    "Run",
    "RunInterrupted",
    "RunTimeoutError",
    "WorkerError",
    "broadcast",
    "broadcast_object_list",
    "debug_launcher",
    "estimate",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_logger",
    "init_empty_weights",
    "launch",
    "merge_checkpoint",
    "monitor",
    "notebook_launcher",
    "pad_across_processes",
    "panel",
    "reduce",
    "set_seed",
    "skip_first_batches",
    "tqdm",
]

# Each name's module is loaded when the name is first used: the import itself costs a kernel nothing, and no torch.
_HOMES = {
    "Accelerator": "runtime.accelerator",
    "AcceleratorState": "runtime.states",
    "AutocastKwargs": "runtime.plugins",
    "CheckpointError": "core.errors",
    "ConfigError": "core.errors",
    "DeadlockError": "core.errors",
    "DDPCommunicationHookType": "runtime.plugins",
    "DataLoaderConfiguration": "runtime.plugins",
    "DeepSpeedPlugin": "core.deepspeed_options",
    "DistributedDataParallelKwargs": "runtime.plugins",
    "DistributedType": "runtime.process",
    "DummyOptim": "runtime.stand_ins",
    "DummyScheduler": "runtime.stand_ins",
    "FullyShardedDataParallelPlugin": "runtime.plugins",
    "GeneralTracker": "runtime.trackers",
    "GradScalerKwargs": "runtime.plugins",
    "GradientAccumulationPlugin": "runtime.plugins",
    "GradientState": "runtime.states",
    "InitProcessGroupKwargs": "runtime.plugins",
    "LaunchConfig": "core.config",
    "LocalSGD": "runtime.local_sgd",
    "MemoryEstimate": "runtime.estimate",
    "ParallelismConfig": "runtime.plugins",
    "PartialState": "runtime.states",
    "PayloadError": "core.errors",
    "PipelineParallelPlugin": "runtime.plugins",
    "ProfileKwargs": "runtime.plugins",
    "ProjectConfiguration": "runtime.plugins",
    "ResultError": "core.errors",
    "Run": "launcher.run",
    "RunInterrupted": "core.errors",
    "RunTimeoutError": "core.errors",
    "WorkerError": "core.errors",
    "broadcast": "runtime.gather",
    "broadcast_object_list": "runtime.gather",
    "debug_launcher": "launcher.accelerate_style",
    "estimate": "runtime.estimate",
    "find_executable_batch_size": "runtime.batch_size",
    "gather": "runtime.gather",
    "gather_object": "runtime.gather",
    "get_logger": "runtime.logs",
    "init_empty_weights": "runtime.memory",
    "launch": "launcher.launch",
    "merge_checkpoint": "runtime.merging",
    "monitor": "widgets.monitor",
    "notebook_launcher": "launcher.accelerate_style",
    "pad_across_processes": "runtime.gather",
    "panel": "widgets.panel",
    "reduce": "runtime.gather",
    "set_seed": "runtime.randomness",
    "skip_first_batches": "runtime.skipping",
    "tqdm": "runtime.logs",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'notebook_launcher' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"notebook_launcher.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext notebook_launcher``: register the magics, and start the fork server in the background."""
    from notebook_launcher import kernel_ext

    kernel_ext.load_ipython_extension(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """``%unload_ext notebook_launcher``: take the magics away."""
    from notebook_launcher import kernel_ext

    kernel_ext.unload_ipython_extension(ipython)
