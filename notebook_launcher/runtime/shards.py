"""States of which each rank has a part: every rank writes its own, and any part can be read, by however many ranks.

::

    model.rank0.safetensors  model.rank1.safetensors ...   optimizer.rank0.safetensors ...

A file's metadata say where in the whole tensor each of its parts lies, so that no other rank need be asked. What is
saved whole is read by part as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from notebook_launcher.core.errors import CheckpointError
from notebook_launcher.runtime import storage, weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import nn

Place = tuple[slice, ...]
_PARTS = "parts"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing its memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def place(tensor: torch.Tensor) -> Place:
    """Where in the whole tensor this rank's part lies."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of ``tensor`` on the CPU, or where it is if it is whole already. All ranks of its mesh call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded parts are on the CPU, where the group of a GPU's processes can't gather.
    part = local(tensor).to(tensor.device_mesh.device_type)
    moved = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return moved.full_tensor().cpu()


def like(own: torch.Tensor, value: Any) -> Any:
    """``value``, whole, spread as ``own`` is; as it is where it is no tensor of that shape."""
    if not isinstance(own, DTensor) or not isinstance(value, torch.Tensor) or value.shape != own.shape:
        return value
    return _spread(value[place(own)].clone(), own)


def _spread(part: torch.Tensor, own: DTensor) -> torch.Tensor:
    part = part.to(own.to_local().device)
    return DTensor.from_local(
        part, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )


def state_of(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` with the parameters themselves, so that tied ones can be told."""
    return model.state_dict(keep_vars=True)


def full_state(model: nn.Module) -> dict[str, Any]:
    """The whole state of ``model`` on every rank; tied tensors stay tied."""
    found: dict[int, Any] = {}
    state = state_of(model)
    for value in state.values():
        if id(value) not in found:
            found[id(value)] = whole(value).detach() if isinstance(value, torch.Tensor) else value
    return {name: found[id(value)] for name, value in state.items()}


# --- writing ---------------------------------------------------------------------------------------------------------


def write(draft: storage.Draft, name: str, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """This rank's parts of ``tensors``; rank 0 writes what is whole. Replicas leave it to the first of them."""
    own = {key: tensor for key, tensor in tensors.items() if _is_written_by(rank, tensor)}
    parts, aliases = weights.untied({key: local(tensor) for key, tensor in own.items()})
    parts = {key: part for key, part in parts.items() if part.numel() or not isinstance(own[key], DTensor)}
    told = {key: [list(own[key].shape), [one.start for one in place(own[key])]] for key in parts}
    if parts:
        aliases = {key: kept for key, kept in aliases.items() if kept in parts}
        weights.write(draft, f"{name}.rank{rank}.safetensors", parts, {**aliases, _PARTS: json.dumps(told)})


def save_optimizer(draft: storage.Draft, name: str, rank: int, optimizer: torch.optim.Optimizer) -> None:
    """The state in parts, and all that has none as torch saves it."""
    state = optimizer.state_dict()
    parts = {
        f"{number}.{key}": value
        for number, values in state["state"].items()
        for key, value in values.items()
        if isinstance(value, DTensor)
    }
    write(draft, name, rank, parts)
    if draft.writes:
        rest = {
            number: {key: value for key, value in values.items() if not isinstance(value, DTensor)}
            for number, values in state["state"].items()
        }
        draft.objects(f"{name}.bin", {**state, "state": rest})


def _is_written_by(rank: int, tensor: Any) -> bool:
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate() or ()
    pairs = zip(coordinate, tensor.placements, strict=True)
    return all(isinstance(placement, Shard) or index == 0 for index, placement in pairs)


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Saved:
    """A tensor in a checkpoint, in one piece or several, each with where it begins, its shape, and how to read it."""

    name: str
    shape: tuple[int, ...]
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], Callable[[Place], torch.Tensor]]]

    def read(self, wanted: Place, dtype: torch.dtype) -> torch.Tensor:
        """The part ``wanted``; raises ``CheckpointError`` where pieces of it are missing."""
        shape = [one.stop - one.start for one in wanted]
        found, out = 0, torch.empty(shape, dtype=dtype)
        for offset, size, read in self.pieces:
            low = [max(start, one.start) for start, one in zip(offset, wanted, strict=True)]
            high = [min(start + length, one.stop) for start, length, one in zip(offset, size, wanted, strict=True)]
            if any(start >= stop for start, stop in zip(low, high, strict=True)):
                continue
            piece = read(tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True)))
            found += piece.numel()
            if piece.numel() == out.numel():
                return piece.reshape(shape)
            out[tuple(slice(a - o.start, b - o.start) for a, b, o in zip(low, high, wanted, strict=True))] = piece
        if found != math.prod(shape):
            raise CheckpointError(f"{self.name} is saved in parts, and {math.prod(shape) - found} numbers are in none")
        return out


def find(folder: Path, name: str) -> tuple[Path, dict[str, Saved]]:
    """What ``folder`` has under ``name``, in parts or whole, and the first of its files."""
    files = sorted(folder.glob(f"{name}.rank*.safetensors"))
    path = folder / f"{name}.safetensors"
    if not files and not path.exists():
        path = folder / f"pytorch_{name}.bin"
        state = storage.read(path) if path.exists() else {}
        return path, {key: _in_memory(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)}
    found: dict[str, Saved] = {}
    aliases: dict[str, str] = {}
    for each in files or [path]:
        aliases |= _read_places(each, found)
    return (files or [path])[0], {
        old: found[kept] for old, kept in aliases.items() if kept in found and old not in found
    } | found


def fitting(folder: Path, name: str, model: nn.Module, *, strict: bool) -> dict[str, Any]:
    """What was saved of ``model``, each tensor spread as the model's own; ``CheckpointError`` where it doesn't fit."""
    own = state_of(model)
    if not any(isinstance(value, DTensor) for value in own.values()) and not any(folder.glob(f"{name}.rank*")):
        return weights.fitting(folder, name, model, strict=strict)
    path, saved = find(folder, name)
    weights.check(path, saved, own, type(model).__name__, strict=strict)
    return {key: _taken(saved[key], value) for key, value in own.items() if key in saved}


def fitting_optimizer(folder: Path, name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What was saved of ``optimizer``, spread as its parameters; ``CheckpointError`` where it doesn't fit."""
    path = folder / f"{name}.bin"
    state: dict[str, Any] = storage.read(path)
    saved, own = ([len(one["params"]) for one in of] for of in (state["param_groups"], optimizer.param_groups))
    if saved != own:
        raise CheckpointError(
            f"{folder / name}.bin doesn't fit the optimizer, a {type(optimizer).__name__}: its groups have {saved} "
            f"parameters there, and {own} here"
        )
    for key, value in find(folder, name)[1].items():
        number, _, field = key.partition(".")
        state["state"][int(number)][field] = value
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved_ids = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(saved_ids, parameters, strict=True):
        values = state["state"].get(number, {})
        for field, value in values.items():
            if isinstance(value, Saved):
                values[field] = _taken(value, parameter if value.shape == tuple(parameter.shape) else None)
            else:
                values[field] = like(parameter, value)
    return state


def whole_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state, whole, on every rank."""
    state = optimizer.state_dict()
    held = {
        number: {key: whole(value) if isinstance(value, DTensor) else value for key, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": held}


def _taken(saved: Saved, own: Any) -> torch.Tensor:
    """The part that this rank has of ``own``, spread as that is; all where it isn't spread."""
    if not isinstance(own, DTensor):
        return saved.read(tuple(slice(0, size) for size in saved.shape), getattr(own, "dtype", torch.float32))
    return _spread(saved.read(place(own), own.dtype), own)


def _in_memory(name: str, value: torch.Tensor) -> Saved:
    return Saved(name, tuple(value.shape), [((0,) * value.dim(), tuple(value.shape), value.__getitem__)])


def _read_places(path: Path, found: dict[str, Saved]) -> dict[str, str]:
    """Add the tensors of a file to ``found``; return the other names of those that are tied."""
    try:
        opened: Any = safetensors.safe_open(path, framework="pt", device="cpu")
        file = opened.__enter__()  # for as long as somebody may read
        told = dict(file.metadata() or {})
        places = json.loads(told.pop(_PARTS, "{}"))
        told.pop("format", None)
        for key in file.keys():  # noqa: SIM118
            size = tuple(file.get_slice(key).get_shape())
            shape, offset = map(tuple, places.get(key, (size, (0,) * len(size))))
            saved = found.setdefault(key, Saved(f"{key!r} in {path.parent}", shape, []))
            saved.pieces.append((offset, size, _reader(file, key)))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    return told


def _reader(file: Any, key: str) -> Callable[[Place], torch.Tensor]:
    def read(wanted: Place) -> torch.Tensor:
        part: torch.Tensor = file.get_slice(key)[wanted] if wanted else file.get_tensor(key)
        return part

    return read
