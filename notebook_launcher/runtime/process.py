"""This process among the others: its rank, its device, and the process group, made on first use and shared by all."""

from __future__ import annotations

import dataclasses
import enum
import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from notebook_launcher.core import config
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import agreement, backends, gather
from notebook_launcher.runtime.plugins import changed

if TYPE_CHECKING:
    from notebook_launcher.core.world import World
    from notebook_launcher.runtime.backends import Backend
    from notebook_launcher.runtime.plugins import InitProcessGroupKwargs

_logger = logging.getLogger(__name__)


class DistributedType(enum.StrEnum):
    """What a run's processes are, in Accelerate's words."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    XLA = "XLA"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"


@dataclasses.dataclass(frozen=True)
class Process:
    """Who this process is, where it computes, and why there.

    One that stands for it among those that share the data (``Strategy.data_process``) counts the shares: several
    processes that hold parts of one model get the same.
    """

    world: World
    backend: Backend
    why_device: str
    shares: tuple[int, ...] = ()  # of each process of the run; empty: each has its own
    group: dist.ProcessGroup | None = None  # one process of each share, this among them; None: all
    twins: dist.ProcessGroup | None = None  # the processes that get this one's share; None: it alone

    @property
    def rank(self) -> int:
        """Number among all processes of the run, or of the share."""
        return self.shares[self.world.rank] if self.shares else self.world.rank

    @property
    def num_processes(self) -> int:
        """Processes in the run, or shares."""
        return max(self.shares) + 1 if self.shares else self.world.world_size

    @property
    def device(self) -> torch.device:
        """Where this process's models and batches go."""
        return self.backend.device

    @property
    def distributed_type(self) -> DistributedType:
        """What the processes of the run are."""
        if self.num_processes == 1:
            return DistributedType.NO
        by_strategy = DistributedType.__members__.get((self.world.strategy or "").upper())
        return by_strategy or DistributedType(self.backend.distributed_type)


def place(world: World, *, cpu: bool = False) -> Process:
    """This process with its device chosen; it has not met the others yet.

    A process group that is there already says which rank this is; raises ``ConfigError`` where the launch says another.
    """
    if dist.is_available() and dist.is_initialized():
        world = _world_of_group(world, cpu=cpu)
    backend, why = backends.select(world, cpu=cpu)
    return Process(world, backend, why)


def join(process: Process, options: InitProcessGroupKwargs | None = None) -> Process:
    """Meet the others: make the process group as ``options`` say, unless there is one, or nobody to meet."""
    world, backend = process.world, process.backend
    if world.world_size == 1:
        gather.meet(1)
        return process
    given = changed(options) if options else {}
    if not dist.is_initialized():
        arguments = {"backend": backend.process_group, "init_method": _meeting_point(world)} | given
        dist.init_process_group(
            **arguments,
            rank=world.rank,
            world_size=world.world_size,
            device_id=backend.device if f"{backend.device_type}:" in backend.process_group else None,
        )
    elif given:
        _logger.warning("The process group was made before, so that %r has no effect.", options)
    gather.meet(world.world_size)
    agreement.switch(on=world.debug)
    return process


def _meeting_point(world: World) -> str:
    """Torch's ``env://`` wherever its variables are set: it leads to the store that the launcher or torchrun serves."""
    environment = config.snapshot()
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return "env://"
    return f"tcp://{world.main_address}:{world.main_port}"  # a Slurm step


def _world_of_group(world: World, *, cpu: bool) -> World:
    """``world`` with rank and size of the process group that the user's code made."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) == (world.rank, world.world_size):
        return world
    if world.launched or world.world_size > 1 or world.main_port:
        raise ConfigError(
            f"the process group that was made before says that this is rank {rank} of {size}, and the launch (RANK and "
            f"WORLD_SIZE in the environment) says rank {world.rank} of {world.world_size}. Make the group with "
            "init_process_group() alone, which takes the launch's numbers, or destroy it before this Accelerator "
            "(torch.distributed.destroy_process_group())."
        )
    # Nobody has said how many processes share a machine: as many as it has accelerators, on the CPU all of them.
    here = torch.accelerator.device_count() if torch.accelerator.is_available() and not cpu else size
    told = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    guessed = {"LOCAL_WORLD_SIZE": str(min(size, here)), "MASTER_PORT": "1"}  # the port is that of the group, unused
    return config.world({**guessed, **config.snapshot(), **told})
