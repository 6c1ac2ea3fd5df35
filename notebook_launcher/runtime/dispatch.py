"""Batches of data shared out: each process reads all and keeps its own, or one reads and sends the others theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_launcher.runtime import sharding

if TYPE_CHECKING:
    from collections.abc import Iterator

Received = tuple[Any, sharding.Round[Any]]


def own(rounds: Iterator[sharding.Round[Any]], rank: int) -> Iterator[Received]:
    """This rank's batch of each round that it reads itself, as all the others do."""
    for round_ in rounds:
        if rank < len(round_.parts):
            yield round_.parts[rank], round_


def received(rounds: Iterator[sharding.Round[Any]], rank: int) -> Iterator[Received]:
    """This rank's batch of each round that rank 0 reads, and the round without the others' batches.

    Whole batches travel, so the ranks' may differ in shape. An error while reading is raised on rank 0, and tells the
    others to stop.
    """
    while True:
        sent = _messages(rounds) if rank == 0 else None
        box: list[Any] = [None]
        dist.scatter_object_list(box, sent, src=0)
        message = box[0]
        if message is None:
            return
        batch, is_there, round_ = message
        if is_there:
            yield batch, round_


def _messages(rounds: Iterator[sharding.Round[Any]]) -> list[Any]:
    """For each rank: its batch, whether it has one, and what is to be known of the round; Nones at the end."""
    num_ranks = dist.get_world_size()
    try:
        round_ = next(rounds, None)
    except BaseException:
        dist.scatter_object_list([None], [None] * num_ranks, src=0)
        raise
    if round_ is None:
        return [None] * num_ranks
    bare: sharding.Round[Any] = sharding.Round([], round_.sizes, round_.counts, round_.is_last)
    num_parts = len(round_.parts)
    return [(round_.parts[rank], True, bare) if rank < num_parts else (None, False, bare) for rank in range(num_ranks)]
