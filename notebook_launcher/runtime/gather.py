"""Collectives over nested containers. In a process that is alone, each gives back what it was given.

The first of them meets the other ranks, where no ``Accelerator`` or ``PartialState`` has.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from notebook_launcher.core import config
from notebook_launcher.core.registry import unknown_name
from notebook_launcher.runtime import agreement, checks, trees

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.runtime.accumulation import Iteration
    from notebook_launcher.runtime.process import Process


_REDUCTIONS = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}
_num_met: int | None = None  # processes in the group that this one has joined, also when it is gone; None: not yet


def meet(num_processes: int) -> None:
    """Remember that this process is one of ``num_processes``: without their group it isn't alone, but cut off."""
    global _num_met  # noqa: PLW0603 - the process's, of which there is one
    _num_met = num_processes


def _is_alone(group: dist.ProcessGroup | None = None) -> bool:
    _refuse_without_group()
    if _num_met is None and not dist.is_initialized():
        from notebook_launcher.runtime import process  # which makes use of these

        process.join(process.place(config.world()))
    return not dist.is_initialized() or dist.get_world_size(group) == 1


def _refuse_without_group() -> None:
    if (_num_met or 1) > 1 and not dist.is_initialized():
        raise RuntimeError(
            f"this process is one of {_num_met} and can't reach the others: their process group was taken down, by "
            "destroy_process_group(). Take it down after the last gather, reduce, save_state and the like, or make a "
            "new Accelerator, which joins the others again."
        )


def broadcast_object(thing: Any, source: int = 0) -> Any:
    """Rank ``source``'s object, on every rank."""
    if _is_alone():
        return thing
    is_source = dist.get_rank() == source
    box = [_pickled(thing) if is_source else None]
    dist.broadcast_object_list(box, src=source)
    return thing if is_source else pickle.loads(box[0] or b"")


def all_objects(thing: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The object of every rank, of ``group`` if there is one, in rank order, on each of them."""
    if _is_alone(group):
        return [thing]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, _pickled(thing), group)
    return [pickle.loads(one) for one in found]


def _pickled(thing: Any) -> bytes:
    return trees.pickled(thing, f"this {type(thing).__name__}")


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Rank ``from_process``'s list of objects, on every rank: put into ``object_list``, which comes back."""
    _refuse_source("broadcast_object_list", from_process)
    agreement.check("broadcast_object_list")
    object_list[:] = broadcast_object(object_list, from_process)
    return object_list


def _refuse_source(call: str, source: int) -> None:
    checks.rank(call, "from_process", source, 1 if _is_alone() else dist.get_world_size())


def any_is_set(flag: bool) -> bool:  # noqa: FBT001 - a flag is all it takes
    """Whether any rank's flag is True, on every rank."""
    if _is_alone():
        return flag
    agreement.check("check_trigger")
    return agreement.largest(flag) == [1]


def gather_object(object: Any) -> list[Any]:  # noqa: A002 - Accelerate's name
    """Every rank's object in one list, in rank order; where all give lists, their elements end to end."""
    if _is_alone():
        return object if isinstance(object, list) else [object]
    agreement.check("gather_object")
    found = all_objects(object)
    return [item for part in found for item in part] if all(isinstance(part, list) for part in found) else found


def gather(tensor: Any) -> Any:
    """Every tensor joined over the ranks along dim 0, in rank order; a 0-d tensor becomes one of shape (ranks,).

    ``tensor`` may be any nesting of them. They keep dtype and device, and lose their gradient's history. Texts and
    Nones are left as they are. Raises ``ValueError``, with the shapes, where ranks differ in shape or dtype,
    ``TypeError`` for numbers and arrays.
    """
    if _is_alone():
        return tensor
    _refuse_numbers("gather", tensor)
    agreement.check("gather", tensor)
    return trees.map_tensors(lambda leaf: _Layout().join(_parts(leaf)), tensor)


def _parts(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    flat = _bytes(_carried(tensor, group))
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, flat, group)
    return [part.view(tensor.dtype).reshape(tensor.shape).to(tensor.device) for part in parts]


def _carried(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The tensor where the process group can take it: in host memory, if the group has no way for its device."""
    kind, ways = tensor.device.type, dist.get_backend_config(group)
    return tensor if f"{kind}:" in ways or "cpu:" not in ways else tensor.cpu()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as bytes, which travel whatever its dtype; in its own memory where that is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Rank ``from_process``'s tensors, on every rank, in any nesting: put into those given, which come back.

    Raises ``ValueError`` where ranks differ in shape or dtype, ``TypeError`` for numbers and arrays, ``ConfigError``
    where there is no such rank.
    """
    _refuse_source("broadcast", from_process)
    if _is_alone():
        return tensor
    _refuse_numbers("broadcast", tensor)
    agreement.check("broadcast", tensor)
    return trees.map_tensors(lambda leaf: _broadcast_leaf(leaf, from_process), tensor)


def _broadcast_leaf(leaf: torch.Tensor, source: int) -> torch.Tensor:
    flat = _bytes(_carried(leaf))
    dist.broadcast(flat, src=source)
    if flat.device != leaf.device or flat.data_ptr() != leaf.data_ptr():
        leaf.detach().copy_(flat.view(leaf.dtype).reshape(leaf.shape))
    return leaf


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Every tensor's "sum", "mean", "max", "min" or "prod" over the ranks, times ``scale``, in any nesting.

    Shapes stay. Half precision is added up in fp32 and keeps its dtype; sums and products of integers and bools are
    int64, their means fp32. "none" leaves all as it is. Raises ``ConfigError`` for another reduction, ``ValueError``
    where ranks differ in shape or dtype, ``TypeError`` for numbers and arrays.
    """
    if reduction not in {*_REDUCTIONS, "none"}:
        raise unknown_name("reduction", reduction, [*_REDUCTIONS, "none"])
    if reduction == "none" or (_is_alone() and scale == 1):
        return tensor
    _refuse_numbers("reduce", tensor)
    if not _is_alone():
        agreement.check("reduce", tensor)
    return trees.map_tensors(lambda leaf: _reduce_leaf(leaf, reduction, scale), tensor)


def _reduce_leaf(leaf: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
    is_whole = not (leaf.is_floating_point() or leaf.is_complex())
    wide = torch.int64 if is_whole else torch.float32 if leaf.dtype.itemsize < 4 else leaf.dtype  # noqa: PLR2004
    result = leaf.detach().to(wide, copy=True, memory_format=torch.contiguous_format)
    if not _is_alone():
        carried = _carried(result)
        dist.all_reduce(carried, op=getattr(dist.ReduceOp, _REDUCTIONS[reduction]))
        result = carried.to(result.device)
        if reduction == "mean":
            result = result / dist.get_world_size()
    if scale != 1:
        result = result * scale
    keeps_dtype = not is_whole or (reduction in {"max", "min"} and scale == 1)
    return result.to(leaf.dtype) if keeps_dtype else result


def _refuse_numbers(call: str, tree: Any) -> None:
    wrong = next((leaf for leaf in trees.leaves(tree) if not isinstance(leaf, torch.Tensor | str | None)), None)
    if wrong is not None:
        raise TypeError(
            f"{call} takes tensors, and was given {wrong!r}, which would stay different on each rank; make it a tensor "
            "(torch.tensor(x, device=accelerator.device)), or use gather_object or broadcast_object_list"
        )


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:  # noqa: FBT001, FBT002 - Accelerate's signature
    """Every tensor as long in ``dim`` as the longest of all ranks, filled with ``pad_index``, in any nesting.

    ``pad_first`` fills at the start. Tensors without that dim are left as they are. Raises ``ValueError`` where ranks
    have different numbers of tensors.
    """
    checks.flags(pad_first=pad_first)
    if _is_alone():
        return tensor
    agreement.check("pad_across_processes")
    found = [leaf for leaf in trees.leaves(tensor) if isinstance(leaf, torch.Tensor)]
    lengths = all_objects([leaf.shape[dim] if -leaf.ndim <= dim < leaf.ndim else -1 for leaf in found])
    if len({len(row) for row in lengths}) > 1:
        raise ValueError(
            f"pad_across_processes was given {[len(row) for row in lengths]} tensors, by rank; give as many"
        )
    if any(-1 in column and max(column) >= 0 for column in zip(*lengths, strict=True)):
        raise ValueError(f"pad_across_processes was given tensors that have a dim {dim} on some ranks only")
    longest = map(max, zip(*lengths, strict=True))

    def padded(leaf: torch.Tensor) -> torch.Tensor:
        if (length := next(longest)) <= (leaf.shape[dim] if length > 0 else 0):
            return leaf
        shape = list(leaf.shape)
        shape[dim] = length - leaf.shape[dim]
        filling = leaf.new_full(shape, pad_index)
        return torch.cat([filling, leaf] if pad_first else [leaf, filling], dim)

    return trees.map_tensors(padded, tensor)


def gather_samples(tree: Any, iteration: Iteration | None, process: Process, *, as_objects: bool = False) -> Any:
    """Every rank's samples joined in the data set's order, without those that were repeated to fill the last batches.

    ``iteration`` is the pass that the samples come from, None to keep all; ``process`` one of those that share them.
    Tensors, arrays and lists of plain values have samples along their first dim. A list as long as the batch that holds
    containers, or tensors of differing length, has one element a sample and stays a list; ``as_objects`` takes every
    list so. Other values come back as a list, one a rank. Raises ``ValueError`` where tensors differ in another dim.
    """
    if process.num_processes == 1:
        return tree
    _refuse_without_group()
    rank, group = process.rank, process.group
    agreement.check("gather_for_metrics")
    layout = _Layout(iteration.sizes, iteration.counts) if iteration is not None else _Layout()
    # The ranks must take the same path, and only together do they know whether their shapes agree.
    needs_objects = as_objects or _needs_objects(tree, layout.size(rank))
    if agreement.alike((needs_objects, trees.outline(tree)), group) and not needs_objects:
        return trees.map_tensors(lambda leaf: layout.join(_parts(leaf, group)), tree)
    device = next((leaf.device for leaf in trees.leaves(tree) if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
    found = all_objects(trees.map_tensors(lambda leaf: leaf.detach().cpu(), tree), group)
    return trees.move(_join(found, layout, as_objects=as_objects), device)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """By rank: the samples in its batch, and how many of them are real. Empty: nothing is known, all are kept."""

    sizes: Sequence[int] = ()
    counts: Sequence[int] = ()

    def size(self, rank: int) -> int | None:
        return self.sizes[rank] if rank < len(self.sizes) else None

    def kept(self, length: int, rank: int) -> int:
        """How much of ``length`` entries stands for real samples, where there are a whole number of them a sample."""
        size = self.size(rank)
        return length if not size or length % size else length // size * self.counts[rank]

    def join(self, parts: Sequence[Any]) -> Any:
        """The ranks' tensors, or arrays, joined along dim 0, without what only fills them; a 0-d one has one entry."""
        is_tensor = isinstance(parts[0], torch.Tensor)
        if parts[0].ndim == 0:
            return (torch.stack if is_tensor else np.stack)(list(parts))
        if len({tuple(part.shape[1:]) for part in parts}) > 1:
            shapes = [tuple(part.shape) for part in parts]
            raise ValueError(
                f"gather_for_metrics can't join tensors of the shapes {shapes}, by rank: they differ in a dim other "
                "than the first; pad them to one length before"
            )
        kept = [part[: self.kept(part.shape[0], rank)] for rank, part in enumerate(parts)]
        return (torch.cat if is_tensor else np.concatenate)(kept)


def _needs_objects(tree: Any, size: int | None) -> bool:
    """Whether tensor collectives won't do for the tree: other values in it, or lists of samples."""
    if isinstance(tree, torch.Tensor) or tree is None:
        return False
    items = [child for _, child in trees.children(tree)]
    if not items or (isinstance(tree, list) and _is_sample_list(tree, size)):
        return True
    return any(_needs_objects(item, size) for item in items)


def _is_sample_list(items: list[Any], size: int | None) -> bool:
    """Whether a list has one element a sample, as against a list of batched tensors."""
    if not any(trees.is_array(item) or trees.children(item) for item in items):
        return True
    if len(items) != size:
        return False
    if all(map(trees.is_array, items)):
        is_one_kind = len({(item.dtype, item.ndim) for item in items}) == 1  # not a loss beside its logits
        return is_one_kind and any(item.ndim == 0 or item.shape[0] != size for item in items)
    return not any(map(trees.is_array, items))


def _join(found: Sequence[Any], layout: _Layout, *, as_objects: bool) -> Any:
    """The ranks' trees as one."""
    first = found[0]
    if trees.is_array(first):
        return layout.join(found)
    if isinstance(first, list) and (
        as_objects or any(_is_sample_list(part, layout.size(rank)) for rank, part in enumerate(found))
    ):
        return [item for rank, part in enumerate(found) for item in part[: layout.kept(len(part), rank)]]
    if trees.is_text_tuple(first) and first:
        return tuple(item for rank, part in enumerate(found) for item in part[: layout.kept(len(part), rank)])
    branches = trees.children(first)
    if not branches:
        return None if first is None else list(found)
    columns = zip(*([child for _, child in trees.children(tree)] for tree in found), strict=True)
    return trees.rebuild(first, [_join(column, layout, as_objects=as_objects) for column in columns])
