"""Batches of data shared out: each process reads all and keeps its own, or one reads and sends the others theirs."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from notebook_launcher.core.errors import PeerError
from notebook_launcher.runtime import agreement, sharding, trees

if TYPE_CHECKING:
    from collections.abc import Iterator

    from notebook_launcher.runtime.process import Process

Received = tuple[Any, sharding.Round[Any]]
_END, _FAILED, _NOTHING = 0, -1, -2  # in place of a message's length
_num_passes = 0


def own(rounds: Iterator[sharding.Round[Any]], rank: int) -> Iterator[Received]:
    """This rank's batch of each round that it reads itself, as all the others do."""
    for round_ in rounds:
        if rank < len(round_.parts):
            yield round_.parts[rank], round_


def received(rounds: Iterator[sharding.Round[Any]], process: Process) -> Iterator[Received]:
    """This rank's batch of each round that rank 0 reads, and the round without the others' batches.

    ``process`` is one of those that share the data. Whole batches travel, so the ranks' may differ in shape. An error
    while reading is raised on rank 0, and a ``PeerError`` on the others.
    """
    if process.world.rank == 0:
        yield from own(_sent(rounds, process), 0)
        return
    number = _next_pass()
    while (length := _meet(number, {})[process.world.rank]) != _END:
        if length == _FAILED:
            raise PeerError("rank 0, which reads this loader's data for all ranks, failed at it: see its own error.")
        batch, is_there, round_ = _receive(length)
        if is_there:
            yield batch, round_


def _sent(rounds: Iterator[sharding.Round[Any]], process: Process) -> Iterator[sharding.Round[Any]]:
    """The rounds, once the other ranks have their batches; at the end, or at an error, they are told."""
    others = dict(enumerate(process.shares or range(process.num_processes)))
    del others[0]
    number = _next_pass()
    last: int | None = _FAILED
    try:
        for round_ in rounds:
            bare: sharding.Round[Any] = sharding.Round([], round_.sizes, round_.counts, round_.is_last)
            read = dict(enumerate(round_.parts))
            messages = {to: _packed((read.get(share), share in read, bare)) for to, share in others.items()}
            last = None  # who fails from here on is not alone in it; and a loop that is left is so on all ranks
            _meet(number, {to: message[0].numel() for to, message in messages.items()})
            for work in [dist.isend(part, to) for to, parts in messages.items() for part in parts if part.numel()]:
                cast("dist.Work", work).wait()
            yield round_
            last = _FAILED
        last = _END
    finally:
        if last is not None:
            _meet(number, dict.fromkeys(others, last))


def _next_pass() -> int:
    global _num_passes  # noqa: PLW0603 - the process's: all ranks begin the same passes in the same order
    _num_passes += 1
    return _num_passes


def _meet(number: int, lengths: dict[int, int]) -> list[int]:
    """By rank, the length of the message that it gets next; every rank comes here, so that one that doesn't is found.

    Raises ``RuntimeError`` where the ranks are in different passes.
    """
    told = [lengths.get(rank, _NOTHING) for rank in range(dist.get_world_size())]
    highest, lowest, *found = agreement.largest(number, -number, *told)
    if highest != -lowest:
        raise RuntimeError(
            f"this rank asks for a batch of pass {number} over data that rank 0 reads for all, and others are in pass "
            f"{highest if number != highest else -lowest}: ranks have left a loop after different batches. Have all "
            "leave it together (accelerator.set_trigger() and check_trigger()), or let each rank read its own data, "
            "with DataLoaderConfiguration(dispatch_batches=False)."
        )
    return found


def _packed(message: Any) -> list[torch.Tensor]:
    """What is sent: a pickle, and the tensors that it leaves out, as they lie in memory."""
    device = agreement.carrier()
    tensors: list[torch.Tensor] = []

    def left_out(leaf: Any) -> Any:
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
            return leaf
        tensors.append(leaf.detach().to(device).contiguous())
        return _Place(len(tensors) - 1)

    tree = trees.map_leaves(left_out, message[0])
    kinds = [(one.shape, one.dtype) for one in tensors]
    pickled = trees.pickled(
        (tree, kinds, *message[1:]),
        "a batch that rank 0 read",
        "; or let each rank read its own, with DataLoaderConfiguration(dispatch_batches=False)",
    )
    return [torch.frombuffer(bytearray(pickled), dtype=torch.uint8).to(device), *tensors]


def _receive(length: int) -> tuple[Any, bool, sharding.Round[Any]]:
    """What rank 0 sent: a pickle of ``length`` bytes, and its tensors."""
    device = agreement.carrier()
    header = torch.empty(length, dtype=torch.uint8, device=device)
    dist.recv(header, 0)
    tree, kinds, is_there, round_ = pickle.loads(header.cpu().numpy().tobytes())
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]
    for tensor in tensors:
        if tensor.numel():
            dist.recv(tensor, 0)
    return trees.map_leaves(lambda leaf: tensors[leaf] if type(leaf) is _Place else leaf, tree), is_there, round_


class _Place(int):
    """Where a tensor stood: its number among those of the message."""

    __slots__ = ()
