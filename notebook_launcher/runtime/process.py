"""This process among the others: its rank, its device, and the process group, made on first use and shared by all."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

import torch.distributed as dist

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import backends

if TYPE_CHECKING:
    import torch

    from notebook_launcher.core.world import World
    from notebook_launcher.runtime.backends import Backend


class DistributedType(enum.StrEnum):
    """What a run's processes are, in Accelerate's words."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    XLA = "XLA"


@dataclasses.dataclass(frozen=True)
class Process:
    """Who this process is, where it computes, and why there."""

    world: World
    backend: Backend
    why_device: str

    @property
    def rank(self) -> int:
        """Number among all processes of the run."""
        return self.world.rank

    @property
    def num_processes(self) -> int:
        """Processes in the run."""
        return self.world.world_size

    @property
    def device(self) -> torch.device:
        """Where this process's models and batches go."""
        return self.backend.device

    @property
    def distributed_type(self) -> DistributedType:
        """What the processes of the run are."""
        return DistributedType(self.backend.distributed_type) if self.num_processes > 1 else DistributedType.NO


def place(world: World, *, cpu: bool = False) -> Process:
    """This process with its device chosen; it has not met the others yet."""
    backend, why = backends.select(world, cpu=cpu)
    return Process(world, backend, why)


def join(process: Process) -> Process:
    """Meet the others: make the process group, unless there is one, or nobody to meet.

    Raises ``ConfigError`` where torch can't do it, or where the group that is there is another run's.
    """
    world, backend = process.world, process.backend
    if world.world_size == 1:
        return process
    if not dist.is_available():
        raise ConfigError(
            f"{world.world_size} processes were launched, and this build of torch has no torch.distributed; launch one "
            "process, or install a build that has it"
        )
    if not dist.is_initialized():
        # The numbers spelled out serve a Slurm step too, where the variables of torch's env:// are not set.
        dist.init_process_group(
            backend.process_group,
            init_method=f"tcp://{world.main_address}:{world.main_port}",
            rank=world.rank,
            world_size=world.world_size,
            device_id=None if backend.device.index is None else backend.device,
        )
    if dist.get_world_size() != world.world_size:
        raise ConfigError(
            f"the process group that was made before has {dist.get_world_size()} processes, and this run has "
            f"{world.world_size}; destroy it first (torch.distributed.destroy_process_group())"
        )
    return process
