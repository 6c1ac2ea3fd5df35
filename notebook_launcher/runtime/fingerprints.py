"""Numbers that stand for the values of tensors: to see that ranks have the same costs no more than to read them once.

They are sums over 2 kB, weighted by place: another seed, another checkpoint, exchanged rows give others; an exchange of
numbers within 2 kB does not show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_ROW = 256  # words of 8 bytes
_SMALL_BYTES = 1 << 18  # below it, joining tensors is cheaper than looking at each


def of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Integers that are equal for equal bytes in the same order, whatever the device; none may be on "meta"."""
    small: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    for tensor in tensors:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if data.numel() < _SMALL_BYTES:
            small.append(data)
        else:
            found += _sums(data)
    for device in dict.fromkeys(one.device for one in small):
        found += _sums(torch.cat([one for one in small if one.device == device]))
    numbers: list[int] = torch.stack([one.cpu() for one in found]).tolist() if found else []
    return numbers


def _sums(data: torch.Tensor) -> list[torch.Tensor]:
    """Of its words, row by row, and of the bytes that are left, each weighted by its place, modulo 2**64."""
    if data.storage_offset() % 8:
        data = data.clone()  # words of 8 bytes begin at such places only
    end = data.numel() // (8 * _ROW) * 8 * _ROW
    rows = data[:end].view(torch.int64).view(-1, _ROW).sum(1)
    return [(one * _weights(one)).sum() for one in (rows, data[end:].long())]


def _weights(one: torch.Tensor) -> torch.Tensor:
    """Odd numbers without a pattern, by place."""
    places = torch.arange(1, one.numel() + 1, device=one.device)
    return (places * places * 0x9E3779B97F4A7C1 ^ places) | 1
