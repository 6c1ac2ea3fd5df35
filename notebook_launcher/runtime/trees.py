"""Nested containers: apply a function to every leaf, and put lists of trees together. Pure; knows no process.

A container is a list, tuple, namedtuple, dictionary (any ``MutableMapping``) or dataclass instance; everything else is
a leaf. What is rebuilt keeps its type.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

_CONTAINERS = (dict, list, tuple, MutableMapping)  # the ABC last: asking it is slow


def is_dataclass_instance(tree: object) -> bool:
    """Whether ``tree`` is an instance, not the class, of a dataclass."""
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def is_namedtuple(tree: object) -> TypeGuard[Any]:
    """Whether ``tree`` is a tuple with field names, which is rebuilt from positional arguments."""
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def pickled(tree: Any, what: str, instead: str = "") -> bytes:
    """``tree`` as bytes that another process reads; ``TypeError``, in which it is ``what``, where that can't be."""
    try:
        return pickle.dumps(tree)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{what} can't be sent to another process: {error}. Define classes outside of functions, and leave out "
            f"what belongs to one process: open files, locks, generators, lambdas{instead}."
        ) from error


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same shape whose leaves are ``function(leaf)``; ``tree`` itself is not changed."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, _CONTAINERS) or is_dataclass_instance(tree):
        return rebuild(tree, [map_leaves(function, child) for _, child in children(tree)])
    return function(tree)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same where ``function`` is for tensors; other leaves stay as they are."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def children(tree: Any) -> list[tuple[Any, Any]]:
    """The (key, child) pairs of a container, in order; empty for a leaf. Keys: indices, mapping keys or field names."""
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    if isinstance(tree, (dict, MutableMapping)):
        return list(tree.items())
    if is_dataclass_instance(tree):
        names = [field.name for field in dataclasses.fields(tree)]
        return [(name, getattr(tree, name)) for name in names if hasattr(tree, name)]
    return []


def rebuild(tree: Any, values: Sequence[Any]) -> Any:
    """A container like ``tree`` with ``values`` in the places of its children, in the order of ``children``."""
    kind = type(tree)
    if kind is dict:
        return dict(zip(tree, values, strict=True))
    if isinstance(tree, MutableMapping):
        # A shallow copy keeps what a subclass holds beside its items: a default factory, attributes, encodings.
        twin = copy.copy(tree)
        for key, value in zip(list(tree), values, strict=True):
            twin[key] = value
        return twin
    if is_namedtuple(tree):
        return kind(*values)
    if isinstance(tree, (list, tuple)):
        return kind(values)
    twin = copy.copy(tree)
    for (name, _), value in zip(children(tree), values, strict=True):
        object.__setattr__(twin, name, value)  # frozen dataclasses too
    return twin


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf, depth first."""
    branches = children(tree)
    if not branches and not isinstance(tree, _CONTAINERS):
        yield tree
    for _, child in branches:
        yield from leaves(child)


def outline(tree: Any) -> Any:
    """The tree's shape as nested tuples that compare equal for trees that match leaf by leaf.

    A tensor shows as its dtype and shape, another leaf as its type's name.
    """
    if isinstance(tree, torch.Tensor):
        return (str(tree.dtype), tuple(tree.shape))
    branches = children(tree)
    if branches or isinstance(tree, _CONTAINERS):
        return (type(tree).__name__, tuple((key, outline(child)) for key, child in branches))
    return type(tree).__name__


def move(tree: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The tree with every leaf that has ``.to`` on ``device``; strings, numbers and None are left as they are."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device, non_blocking=non_blocking)
    if hasattr(tree, "to") and not is_dataclass_instance(tree):
        return tree.to(device)
    branches = children(tree)
    if not branches:
        return tree
    return rebuild(tree, [move(child, device, non_blocking=non_blocking) for _, child in branches])


def to_float32(tree: Any) -> Any:
    """The tree with half-precision tensors (fp16, bf16) as fp32."""
    if isinstance(tree, torch.Tensor):
        return tree.float() if tree.dtype in (torch.bfloat16, torch.float16) else tree
    branches = children(tree)
    if not branches:
        return tree
    return rebuild(tree, [to_float32(child) for _, child in branches])


def is_text_tuple(tree: object) -> bool:
    """Whether ``tree`` is a tuple of strings, which torch makes of a batch of them."""
    return isinstance(tree, tuple) and not is_namedtuple(tree) and all(isinstance(item, (str, bytes)) for item in tree)


def is_array(leaf: object) -> bool:
    """Whether ``leaf`` is a tensor or a numpy array."""
    return isinstance(leaf, (torch.Tensor, np.ndarray))


def row_depth(tree: Any, length: int | None) -> int:
    """How deep in a batch of ``length`` samples its lists (or tuples) of one element a sample lie.

    -1 where there are none: arrays have the samples along dim 0, or nobody can tell.
    """
    sizes = [leaf.shape[0] for leaf in leaves(tree) if is_array(leaf) and leaf.ndim]
    if length is None or (sizes and all(size == length for size in sizes)):
        return -1
    level, depth = [tree], 0
    while level:
        for node in level:
            if _is_row_list(node, length):
                # of lists that were zipped: (images, targets)
                return depth + all(_is_row_list(item, length) for item in node)
        level = [child for node in level for _, child in children(node)]
        depth += 1
    return -1


def _is_row_list(tree: Any, length: int) -> bool:
    is_list = isinstance(tree, (list, tuple)) and not is_namedtuple(tree)
    return is_list and len(tree) == length and len({type(item) for item in tree}) == 1


def _holds_samples(tree: Any, depth: int) -> bool:
    """Whether a list, ``depth`` above those that ``row_depth`` found, has one element a sample."""
    if depth == 0 and isinstance(tree, (list, tuple)) and not is_namedtuple(tree):
        return True
    if isinstance(tree, list):
        return not any(is_array(child) or children(child) for child in tree)
    return is_text_tuple(tree)


def num_samples(tree: Any, depth: int = -1) -> int | None:
    """Length of the first dim of the first array that has one, else of the first list; None where there is neither.

    ``depth``, here and below, is what ``row_depth`` says.
    """
    if is_array(tree):
        return int(tree.shape[0]) if tree.ndim else None
    if depth == 0 and _holds_samples(tree, depth):
        return len(tree)
    sizes = (num_samples(child, depth - 1) for _, child in children(tree))
    found = next((size for size in sizes if size is not None), None)
    if found is None and isinstance(tree, list):
        return len(tree)
    return found


def concatenate(trees: Sequence[Any], depth: int = -1) -> Any:
    """One batch from several: arrays joined along dim 0, lists of samples end to end.

    Raises ``ValueError`` for arrays that differ in another dim, or for trees of different shape.
    """
    first = trees[0]
    if is_array(first):
        if len({(tree.dtype, tuple(tree.shape[1:])) for tree in trees}) > 1 or first.ndim == 0:
            raise ValueError(f"can't join tensors of the shapes {[tuple(tree.shape) for tree in trees]} along dim 0")
        return torch.cat(list(trees)) if isinstance(first, torch.Tensor) else np.concatenate(trees)
    if _holds_samples(first, depth):
        return type(first)(value for tree in trees for value in tree)
    branches = children(first)
    if not branches:
        return first
    if any(type(tree) is not type(first) or len(children(tree)) != len(branches) for tree in trees):
        raise ValueError(f"can't join batches of different structure: {[type(tree).__name__ for tree in trees]}")
    columns = zip(*([child for _, child in children(tree)] for tree in trees), strict=True)
    return rebuild(first, [concatenate(column, depth - 1) for column in columns])


def part(tree: Any, start: int, stop: int, depth: int = -1) -> Any:
    """Samples ``start`` to ``stop`` of a batch: the slice along dim 0 of every array and list of samples."""
    if is_array(tree):
        return tree[start:stop] if tree.ndim else tree
    if _holds_samples(tree, depth):
        return tree[start:stop]
    branches = children(tree)
    if not branches:
        return tree
    return rebuild(tree, [part(child, start, stop, depth - 1) for _, child in branches])
