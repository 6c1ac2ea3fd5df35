"""What a rank keeps of a parameter, in bytes: each strategy says it of a model, which may be on "meta"."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class Held(NamedTuple):
    """Bytes of one parameter, and what its optimizer steps on."""

    parameter: nn.Parameter
    weights: int
    gradients: int
    stepped: torch.Tensor  # on "meta"; of a row of joined ones, this parameter's share
    masters: int = 0  # copies of weights, for the optimizer
    is_joined: bool = False  # one row with the others of its optimizer's group


def of(parameter: nn.Parameter, *splits: tuple[int, int]) -> Held:
    """With each dim of ``splits`` over so many ranks; the first of them has the most."""
    shape = list(parameter.shape)
    for dim, size in splits:
        shape[dim] = -(-shape[dim] // size)
    part = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return Held(parameter, part.nbytes, part.nbytes if parameter.requires_grad else 0, part)


def whole(model: nn.Module, *_: object) -> Iterator[Held]:
    """Everything, on every rank."""
    return map(of, model.parameters())
