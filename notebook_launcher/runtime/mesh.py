"""The run's processes as a mesh: which of them hold parts of one model, and which train it on other data."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from notebook_launcher.runtime.plugins import MESH_DIMS

if TYPE_CHECKING:
    from notebook_launcher.runtime.plugins import ParallelismConfig
    from notebook_launcher.runtime.process import Process

DATA = ("dp_replicate", "dp_shard")  # the dims whose ranks get other data


def build(process: Process, parallelism: ParallelismConfig, own: str) -> DeviceMesh:
    """All ranks, in the dims of ``MESH_DIMS`` that are larger than 1, and ``own``, the dim that the strategy is about.

    ``dp_replicate`` never comes without ``dp_shard``. Raises ``ConfigError`` where the product of the sizes is not the
    number of processes.
    """
    sizes = parallelism.sizes(process.num_processes, own)
    kept = {name for name, size in sizes.items() if size > 1} | {own}
    kept |= {"dp_shard"} if "dp_replicate" in kept else set()
    names = tuple(name for name in MESH_DIMS if name in kept)
    return init_device_mesh(process.device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)


def data_process(process: Process, mesh: DeviceMesh) -> Process:
    """``process`` as one of those that share the data: ranks in one place of the dims ``DATA`` get the same.

    All ranks call it: it makes process groups, unless each rank gets data of its own.
    """
    names = mesh.mesh_dim_names or ()
    if all(name in DATA or size == 1 for name, size in zip(names, mesh.shape, strict=True)):
        return process
    order = sorted(range(len(names)), key=lambda dim: names[dim] in DATA)
    num_shares = math.prod(size for name, size in zip(names, mesh.shape, strict=True) if name in DATA)
    table = mesh.mesh.permute(order).reshape(-1, num_shares)  # a row has one rank of each share
    group, _ = dist.new_subgroups_by_enumeration(table.tolist())  # type: ignore[no-untyped-call]
    twins, _ = dist.new_subgroups_by_enumeration(table.T.tolist())  # type: ignore[no-untyped-call]
    shares = torch.empty(mesh.size(), dtype=torch.int64)
    shares[table] = torch.arange(num_shares).expand_as(table)
    return dataclasses.replace(process, shares=tuple(shares.tolist()), group=group, twins=twins)
