"""Collectives over nested containers. In a process that is alone, each gives back what it was given."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.runtime import trees

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.runtime.accumulation import Iteration


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def broadcast_object(thing: Any, source: int = 0) -> Any:
    """Rank ``source``'s object, on every rank."""
    if _is_alone():
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def all_objects(thing: Any) -> list[Any]:
    """Every rank's object, in rank order, on every rank."""
    if _is_alone():
        return [thing]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def gather_object(thing: Any) -> list[Any]:
    """Every rank's object in one list, in rank order; where ranks give lists, their elements end to end."""
    if _is_alone():
        return thing if isinstance(thing, list) else [thing]
    found = all_objects(thing)
    return [item for part in found for item in part] if isinstance(thing, list) else found


def gather(tree: Any) -> Any:
    """Every tensor joined over the ranks along dim 0, in rank order; a 0-d tensor becomes one of shape (ranks,).

    Tensors keep dtype and device, and must have the same shape on every rank. Other leaves are left as they are.
    """
    return tree if _is_alone() else trees.map_leaves(_gather_leaf, tree)


def _gather_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.stack(_parts(leaf)) if leaf.ndim == 0 else torch.cat(_parts(leaf))


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    tensor = tensor.detach().contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def gather_samples(tree: Any, iteration: Iteration | None, rank: int, *, as_objects: bool = False) -> Any:
    """Every rank's samples joined in the data set's order, without those that were repeated to fill the last batches.

    ``iteration`` is the pass that the samples come from, None to keep all. Tensors and lists of plain values have
    samples along their first dim. A list as long as the batch that holds containers, or tensors of differing length,
    has one element a sample and stays a list; ``as_objects`` takes every list so. Other values come back as a list,
    one a rank. Raises ``ValueError`` where tensors differ in another dim.
    """
    if _is_alone():
        return tree
    layout = _Layout(iteration.sizes, iteration.counts) if iteration is not None else _Layout((), ())
    # The ranks must take the same path, and only together do they know whether their shapes agree.
    views = all_objects((as_objects or _needs_objects(tree, layout.size(rank)), trees.outline(tree)))
    if not any(needs_objects for needs_objects, _ in views) and all(outline == views[0][1] for _, outline in views):
        return trees.map_leaves(
            lambda leaf: layout.join(_parts(leaf)) if isinstance(leaf, torch.Tensor) else leaf, tree
        )
    device = next((leaf.device for leaf in trees.leaves(tree) if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
    found = all_objects(trees.map_leaves(_to_cpu, tree))
    return trees.move(_join(found, layout, as_objects=as_objects), device)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """By rank: the samples in its batch, and how many of them are real. Empty: nothing is known, all are kept."""

    sizes: Sequence[int]
    counts: Sequence[int]

    def size(self, rank: int) -> int | None:
        return self.sizes[rank] if rank < len(self.sizes) else None

    def kept(self, length: int, rank: int) -> int:
        """How much of ``length`` entries stands for real samples, where there are a whole number of them a sample."""
        size = self.size(rank)
        return length if not size or length % size else length // size * self.counts[rank]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The ranks' tensors joined along dim 0, each without what only fills it; a 0-d one has one entry."""
        if parts[0].ndim == 0:
            return torch.stack(list(parts))
        if len({tuple(part.shape[1:]) for part in parts}) > 1:
            shapes = [tuple(part.shape) for part in parts]
            raise ValueError(
                f"gather_for_metrics can't join tensors of the shapes {shapes}, by rank: they differ in a dim other "
                "than the first; pad them to one length before"
            )
        return torch.cat([part[: self.kept(part.shape[0], rank)] for rank, part in enumerate(parts)])


def _to_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _needs_objects(tree: Any, size: int | None) -> bool:
    """Whether tensor collectives won't do for the tree: other values in it, or lists of samples."""
    if isinstance(tree, torch.Tensor) or tree is None:
        return False
    items = [child for _, child in trees.children(tree)]
    if not items:
        return True
    if isinstance(tree, list) and _is_sample_list(tree, size):
        return True
    return any(_needs_objects(item, size) for item in items)


def _is_sample_list(items: list[Any], size: int | None) -> bool:
    """Whether a list has one element a sample, as against a list of batched tensors."""
    if not any(isinstance(item, torch.Tensor) or trees.children(item) for item in items):
        return True
    if len(items) != size:
        return False
    if all(isinstance(item, torch.Tensor) for item in items):
        return any(item.ndim == 0 or item.shape[0] != size for item in items)
    return any(trees.children(item) for item in items)


def _join(found: Sequence[Any], layout: _Layout, *, as_objects: bool) -> Any:
    """The ranks' trees as one."""
    first = found[0]
    if isinstance(first, torch.Tensor):
        return layout.join(found)
    if isinstance(first, list) and (
        as_objects or any(_is_sample_list(part, layout.size(rank)) for rank, part in enumerate(found))
    ):
        return [item for rank, part in enumerate(found) for item in part[: layout.kept(len(part), rank)]]
    branches = trees.children(first)
    if not branches:
        return None if first is None else list(found)
    columns = zip(*([child for _, child in trees.children(tree)] for tree in found), strict=True)
    return trees.rebuild(first, [_join(column, layout, as_objects=as_objects) for column in columns])
