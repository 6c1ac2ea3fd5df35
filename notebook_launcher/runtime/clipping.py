"""Clipping gradients of which each rank has a part, beside others that all have in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from collections.abc import Iterable


def clip(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale gradients, sharded and whole ones, to a norm of at most ``max_norm``; return their norm, 0-d."""
    total = norm(parameters := list(parameters), norm_type)
    scale(parameters, max_norm, total)
    return total


def norm(parameters: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of the whole gradients, 0-d."""
    is_max = norm_type == float("inf")
    norms = []
    for (mesh, placements), holders in _locals(parameters).items():
        found = get_total_norm([one.grad for one in holders], norm_type)
        if mesh is not None:
            found = found.to(mesh.device_type) if is_max else found.to(mesh.device_type) ** norm_type
            for dim, placement in enumerate(placements):
                if not placement.is_replicate():
                    dist.all_reduce(found, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, mesh.get_group(dim))
            found = found if is_max else found ** (1 / norm_type)
        norms.append(found)
    if not norms:
        return torch.tensor(0.0)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms]), norm_type)
    return total


def scale(parameters: Iterable[torch.Tensor], max_norm: float, total: torch.Tensor) -> None:
    """Scale gradients, whose norm is ``total``, to one of at most ``max_norm``."""
    for holders in _locals(parameters).values():
        clip_grads_with_norm_(holders, max_norm, total)


def clip_value(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Bring each element of the gradients into [-limit, limit]."""
    for holders in _locals(parameters).values():
        clip_grad_value_(holders, limit)


def _locals(parameters: Iterable[torch.Tensor]) -> dict[Any, list[Any]]:
    """What holds this rank's part of the gradients, by how they are spread."""
    groups: dict[Any, list[Any]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            groups.setdefault((gradient.device_mesh, gradient.placements), []).append(_Holder(gradient.to_local()))
        elif gradient is not None:
            groups.setdefault((None, ()), []).append(parameter)
    return groups


class _Holder:
    """What torch's functions that clip look at of a parameter."""

    __slots__ = ("grad",)

    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad
