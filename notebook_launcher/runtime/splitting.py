"""One process's piece of a list, a tensor, a data set, or of several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from notebook_launcher.runtime import trees


def piece(inputs: Any, rank: int, num_ranks: int, *, pad: bool = False) -> Any:
    """``rank``'s piece of ``inputs``; of N items the first N % ``num_ranks`` ranks get one more.

    ``pad`` repeats a piece's last item (the last of all, in a piece without any) until all are equally long. Raises
    ``ValueError`` for a dictionary of unequal lengths, ``TypeError`` for what has no items.
    """
    lengths = dict(_lengths(inputs, ""))
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise ValueError(f"what is split between processes must be equally long, and has the lengths {told}")
    length = next(iter(lengths.values()), 0)
    size, num_larger = divmod(length, num_ranks)
    start = rank * size + min(rank, num_larger)
    indices = list(range(start, start + size + (rank < num_larger)))
    num_missing = size + (num_larger > 0) - len(indices)
    if pad and num_missing and length:
        indices += [indices[-1] if indices else length - 1] * num_missing
    return _take(inputs, indices)


def _lengths(inputs: Any, name: str) -> list[tuple[str, int]]:
    if isinstance(inputs, Mapping):
        return [pair for key, child in inputs.items() for pair in _lengths(child, f"{name}[{key!r}]")]
    if isinstance(inputs, str) or not hasattr(inputs, "__len__"):
        raise TypeError(f"{inputs!r:.40} ({type(inputs).__name__}) can't be split between processes; give a list")
    return [(name, len(inputs))]


def _take(inputs: Any, indices: Sequence[int]) -> Any:
    if isinstance(inputs, Mapping):
        return trees.rebuild(inputs, [_take(child, indices) for child in inputs.values()])
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):  # datasets.Dataset
        return inputs.select(indices)
    if hasattr(inputs, "ndim"):  # tensors and arrays
        return inputs[indices]
    items = [inputs[index] for index in indices]
    return tuple(items) if isinstance(inputs, tuple) else items
