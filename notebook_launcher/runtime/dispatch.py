"""Batches of data shared out: each process reads all and keeps its own, or one reads and sends the others theirs."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.core.errors import PeerError
from notebook_launcher.runtime import agreement, sharding, trees

if TYPE_CHECKING:
    from collections.abc import Iterator

    from notebook_launcher.runtime.process import Process

Received = tuple[Any, sharding.Round[Any]]
_END, _FAILED = 0, -1  # in place of a message's length


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
    while (message := _receive()) is not None:
        batch, is_there, round_ = message
        if is_there:
            yield batch, round_


def _sent(rounds: Iterator[sharding.Round[Any]], process: Process) -> Iterator[sharding.Round[Any]]:
    """The rounds, once the other ranks have their batches; at the end, or at an error, they are told."""
    others = list(enumerate(process.shares or range(process.num_processes)))[1:]
    last: int | None = _FAILED
    try:
        for round_ in rounds:
            bare: sharding.Round[Any] = sharding.Round([], round_.sizes, round_.counts, round_.is_last)
            parts = dict(enumerate(round_.parts))
            _wait([w for to, share in others for w in _send((parts.get(share), share in parts, bare), to)])
            yield round_
        last = _END
    except GeneratorExit:
        last = None  # the loop was left, and so it was on the other ranks
        raise
    finally:
        if last is not None:
            word = torch.tensor([last], device=agreement.carrier())
            _wait([(word, dist.isend(word, to)) for to, _ in others])


def _send(message: Any, to: int) -> list[tuple[torch.Tensor, Any]]:
    """Begin to send: the length of a pickle, the pickle, and the tensors that it leaves out, as they lie in memory."""
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
    header = torch.frombuffer(bytearray(pickled), dtype=torch.uint8).to(device)
    length = torch.tensor([len(pickled)], device=device)
    return [(one, dist.isend(one, to)) for one in (length, header, *tensors) if one.numel()]


def _receive() -> tuple[Any, bool, sharding.Round[Any]] | None:
    """What rank 0 sent; None at the end."""
    device = agreement.carrier()
    length = torch.empty(1, dtype=torch.int64, device=device)
    dist.recv(length, 0)
    if length.item() == _FAILED:
        raise PeerError("rank 0, which reads the data of this loader for all ranks, failed at it: see its own error.")
    if length.item() == _END:
        return None
    header = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
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


def _wait(pending: list[tuple[torch.Tensor, Any]]) -> None:
    for _, work in pending:
        work.wait()
