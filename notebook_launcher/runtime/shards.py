"""The one layout of all strategies but DeepSpeed's: tensors by name, whole or in parts, read by part by any of them.

::

    model.safetensors            optimizer.safetensors              whole, or, of ranks that have parts,
    model.rank0.safetensors ...  optimizer.rank0.safetensors ...    each rank's own
    optimizer.bin                the groups' options, and what else the state of an optimizer holds

A file's metadata say where in the whole tensor each of its parts lies, so that no other rank need be asked. A tensor of
an optimizer's state has the name of its parameter and of the field, "model.0.weight.exp_avg".
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import safetensors
import torch

from notebook_launcher.core.errors import CheckpointError, ConfigError
from notebook_launcher.runtime import gather, models, storage, weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import nn
    from torch.distributed.tensor import DTensor

    Models = Mapping[str, nn.Module]  # by the names of their files
    Optimizers = Mapping[str, torch.optim.Optimizer]

Place = tuple[slice, ...]
_PARTS = "parts"


def is_spread(value: object) -> TypeGuard[DTensor]:
    """Whether ranks have parts of it. Torch's module takes a second to load: who has spread a tensor has done so."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(value, loaded.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing its memory."""
    return (tensor.to_local() if is_spread(tensor) else tensor).detach()


def place(tensor: torch.Tensor) -> Place:
    """Where in the whole tensor this rank's part lies."""
    if not is_spread(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of ``tensor`` on the CPU, or where it is if it is whole already. All ranks of its mesh call it."""
    if not is_spread(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    # Offloaded parts are on the CPU, where the group of a GPU's processes can't gather.
    moved = _spread(local(tensor), tensor, tensor.device_mesh.device_type)
    for dim in range(moved.device_mesh.ndim):  # at once, torch warns where "tp" has split what another dim splits too
        kept = moved.placements[dim + 1 :]
        moved = moved.redistribute(placements=[*[Replicate()] * (dim + 1), *kept])
    return moved.to_local().cpu()


def is_elsewhere(value: Any) -> bool:
    """Whether another rank keeps all of it, and this one only its shape."""
    return isinstance(value, torch.Tensor) and value.is_meta


def like(own: torch.Tensor, value: Any) -> Any:
    """``value``, whole, spread as ``own`` is; as it is where it is no tensor of that shape."""
    if not is_spread(own) or not isinstance(value, torch.Tensor) or value.shape != own.shape:
        return value
    return _spread(value[place(own)].clone(), own)


def _spread(part: torch.Tensor, own: DTensor, device: str | None = None) -> DTensor:
    from torch.distributed.tensor import DTensor

    part = part.to(device or own.to_local().device)
    return DTensor.from_local(
        part, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )


def state_of(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` with the parameters themselves, so that tied ones can be told."""
    return model.state_dict(keep_vars=True)


def full_state(
    model: nn.Module, to_whole: Callable[[torch.Tensor], torch.Tensor] = whole, *, keep: bool = True
) -> dict[str, Any]:
    """The whole state of ``model`` on every rank that will ``keep`` it; tied tensors stay tied. All ranks call it."""
    found: dict[int, Any] = {}
    state = state_of(model)
    for value in state.values():
        if id(value) not in found:
            gathered = to_whole(value).detach() if isinstance(value, torch.Tensor) else value
            found[id(value)] = gathered if keep else None
    return {name: found[id(value)] for name, value in state.items()}


def unwrapped(models_: Models) -> dict[str, nn.Module]:
    """The modules that ``prepare`` was given, by the names of their files."""
    return {name: models.unwrap(model, keep_torch_compile=False) for name, model in models_.items()}


def names(optimizer: torch.optim.Optimizer, modules: Models) -> list[list[str]]:
    """By group, what its parameters are called: as in their module, "model.0.weight", or by their number among all."""
    known: dict[int, str] = {}
    for model, module in modules.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            known.setdefault(id(parameter), f"{model}.{name}")
    numbers = itertools.count()
    return [[known.get(id(one), str(next(numbers))) for one in group["params"]] for group in optimizer.param_groups]


# --- writing ---------------------------------------------------------------------------------------------------------


def save(
    draft: storage.Draft,
    models_: Models,
    optimizers: Optimizers,
    rank: int,
    *,
    safe: bool,
    sharded: bool,
    with_whole: bool | None = None,
    gathered: Callable[[nn.Module], dict[str, Any]] | None = None,
) -> None:
    """Write states under their names, ``sharded`` or whole; every rank calls it.

    ``with_whole``: of ranks that hold different parameters, a pipeline's, whether this one writes those it has whole;
    None: all have the same. ``gathered`` gives the whole state of a model, where it isn't ``full_state``.
    """
    if draft.sharded and not safe:
        raise ConfigError(
            "save_state(sharded=True, safe_serialization=False) can't be: parts are in safetensors; leave one out"
        )
    modules = unwrapped(models_)
    has_stages = with_whole is not None  # the same on every rank: which parameters are here is not
    with_whole = draft.writes if with_whole is None else with_whole
    for name, module in modules.items():
        if sharded and safe:
            write(draft, name, rank, state_of(module), with_whole=with_whole)
            continue
        state = gathered(module) if gathered else full_state(module, keep=draft.writes)
        if draft.writes and safe:
            weights.write(draft, f"{name}.safetensors", *weights.untied(state))
        elif draft.writes:
            draft.objects(f"pytorch_{name}.bin", dict(state))
    for name, optimizer in optimizers.items():
        tensors, rest = _divided(optimizer, names(optimizer, modules), has_stages=has_stages)
        if sharded or has_stages:
            write(draft, name, rank, tensors, with_whole=with_whole)
        else:
            gathering = ((key, whole(tensor)) for key, tensor in tensors.items())
            held = {key: value for key, value in gathering if draft.writes}
            if held:
                weights.write(draft, f"{name}.safetensors", *weights.untied(held))
        if draft.writes:
            draft.objects(f"{name}.bin", rest)


def write(draft: storage.Draft, name: str, rank: int, tensors: Mapping[str, torch.Tensor], *, with_whole: bool) -> None:
    """This rank's parts of ``tensors``, and ``with_whole`` those that are whole; replicas leave it to the first."""
    own = {key: tensor for key, tensor in tensors.items() if _is_written(tensor, with_whole=with_whole)}
    parts, aliases = weights.untied({key: local(tensor) for key, tensor in own.items()})
    parts = {key: part for key, part in parts.items() if part.numel() or not is_spread(own[key])}
    told = {key: [list(own[key].shape), [one.start for one in place(own[key])]] for key in parts}
    if parts:
        aliases = {key: kept for key, kept in aliases.items() if kept in parts}
        weights.write(draft, f"{name}.rank{rank}.safetensors", parts, {**aliases, _PARTS: json.dumps(told)})


def _divided(
    optimizer: torch.optim.Optimizer, named: list[list[str]], *, has_stages: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state's tensors, by name; and, with names for numbers, all that can't be in a safetensors file."""
    state = optimizer.state_dict()
    groups = [{**group, "params": own} for group, own in zip(state["param_groups"], named, strict=True)]
    known = dict(zip(_flat(state["param_groups"]), _flat(groups), strict=True))
    tensors: dict[str, Any] = {}
    rest: dict[Any, Any] = {}
    for number, values in state["state"].items():
        if number not in known:
            rest[number] = values
            continue
        for field, value in values.items():
            if weights.is_plain(value) and "." not in field:
                tensors[f"{known[number]}.{field}"] = value
            else:
                rest.setdefault(known[number], {})[field] = value
    if has_stages:
        rest = {key: value for one in reversed(gather.all_objects(rest)) for key, value in one.items()}
    return tensors, {**state, "state": rest, "param_groups": groups}


def _flat(groups: list[dict[str, Any]]) -> list[Any]:
    return [one for group in groups for one in group["params"]]


def _is_written(tensor: Any, *, with_whole: bool) -> bool:
    if not is_spread(tensor):
        return with_whole and not is_elsewhere(tensor)
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    root = mesh._get_root_mesh()  # noqa: SLF001 - ranks of the dim "tp" have copies of what isn't spread over it
    if "tp" in (root.mesh_dim_names or ()) and "tp" not in names and root.get_local_rank("tp"):
        return False
    pairs = zip(mesh.get_coordinate() or (), tensor.placements, strict=True)
    return all(index == 0 or not placement.is_replicate() for index, placement in pairs)


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Saved:
    """A tensor in a checkpoint, in one piece or several, each with where it begins, its shape, and how to read it."""

    name: str
    shape: tuple[int, ...]
    pieces: dict[tuple[tuple[int, ...], tuple[int, ...]], Callable[[Place], torch.Tensor]]

    def read(self, wanted: Place | None = None) -> torch.Tensor:
        """The part ``wanted``, or all of it; raises ``CheckpointError`` where pieces of it are missing."""
        if wanted is None:
            wanted = tuple(slice(0, size) for size in self.shape)
        shape = [one.stop - one.start for one in wanted]
        found, out = 0, torch.empty(0)
        for (offset, size), read in self.pieces.items():
            low = [max(start, one.start) for start, one in zip(offset, wanted, strict=True)]
            high = [min(start + length, one.stop) for start, length, one in zip(offset, size, wanted, strict=True)]
            if any(start >= stop for start, stop in zip(low, high, strict=True)):
                continue
            piece = read(tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True)))
            if piece.numel() == math.prod(shape):
                return piece.reshape(shape)
            out = out if found else torch.empty(shape, dtype=piece.dtype)
            found += piece.numel()
            out[tuple(slice(a - o.start, b - o.start) for a, b, o in zip(low, high, wanted, strict=True))] = piece
        if found != math.prod(shape):
            raise CheckpointError(f"{self.name} is saved in parts, and {math.prod(shape) - found} numbers are in none")
        return out.reshape(shape)


def find(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """What the checkpoint ``folder`` has under ``name``, and the first of its files.

    Each is ``Saved``; or a value itself, of those that torch has saved.
    """
    listed = storage.manifest(folder)["files"]  # what else is in the folder may have such a name
    kind = re.compile(rf"{re.escape(name)}(\.rank\d+)?\.safetensors")
    files = [folder / one for one in sorted(listed) if kind.fullmatch(one)]
    if not files:
        path = folder / f"pytorch_{name}.bin"
        return path, storage.read(path) if path.name in listed else {}
    found: dict[str, Saved] = {}
    aliases: dict[str, str] = {}
    for each in files:
        aliases |= _read_places(each, found)
    return files[0], found | {old: found[kept] for old, kept in aliases.items() if kept in found and old not in found}


def load(folder: Path, models_: Models, optimizers: Optimizers, *, strict: bool) -> Callable[[], None]:
    """Read this rank's part of what ``save`` wrote, by any strategy; the function returned takes it up.

    Raises ``CheckpointError`` for what doesn't fit.
    """
    modules = unwrapped(models_)
    states = {name: fitting(folder, name, module, strict=strict) for name, module in modules.items()}
    of_optimizers = {name: fitting_optimizer(folder, name, one, modules) for name, one in optimizers.items()}

    def take_up() -> None:
        for name, module in modules.items():
            module.load_state_dict(states[name], strict=strict and not any(map(is_elsewhere, module.parameters())))
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(of_optimizers[name])

    return take_up


def fitting(folder: Path, name: str, model: nn.Module, *, strict: bool) -> dict[str, Any]:
    """What was saved of ``model``, each tensor spread as the model's own; ``CheckpointError`` where it doesn't fit.

    Nothing for those on "meta", which other ranks keep.
    """
    own = state_of(model)
    path, saved = find(folder, name)
    weights.check(path, saved, own, type(model).__name__, strict=strict)
    return {key: _taken(saved[key], own.get(key)) for key in saved if not is_elsewhere(own.get(key))}


def fitting_optimizer(folder: Path, name: str, optimizer: torch.optim.Optimizer, modules: Models) -> dict[str, Any]:
    """What was saved of ``optimizer``, spread as its parameters, which ``modules`` name; else ``CheckpointError``."""
    told: dict[str, Any] = storage.read(folder / f"{name}.bin")
    groups, own = told["param_groups"], names(optimizer, modules)
    if [set(group["params"]) for group in groups] != [set(group) for group in own]:
        was, now = ([len(group) for group in each] for each in ((group["params"] for group in groups), own))
        if was != now:
            raise CheckpointError(
                f"{folder / name}.bin doesn't fit the optimizer, a {type(optimizer).__name__}: its groups have {was} "
                f"parameters there, and {now} here"
            )
        own = [group["params"] for group in groups]  # other names, in the same order
    tensors: dict[str, dict[str, Saved]] = {}
    for key, saved in find(folder, name)[1].items():
        parameter, _, field = key.rpartition(".")
        tensors.setdefault(parameter, {})[field] = saved
    state = {key: values for key, values in told["state"].items() if key not in set(itertools.chain(*own))}
    for number, (key, parameter) in enumerate(zip(itertools.chain(*own), _flat(optimizer.param_groups), strict=True)):
        values = {field: like(parameter, value) for field, value in told["state"].get(key, {}).items()}
        for field, saved in tensors.get(key, {}).items():
            values[field] = _taken(saved, parameter if saved.shape == tuple(parameter.shape) else None)
        if values and not is_elsewhere(parameter):
            state[number] = values
    numbers = itertools.count()
    groups = [{**group, "params": [next(numbers) for _ in named]} for group, named in zip(groups, own, strict=True)]
    return {**told, "state": state, "param_groups": groups}


def _taken(saved: Any, own: Any) -> Any:
    """The part that this rank has of ``own``, spread as that is; all where it isn't spread."""
    if not isinstance(saved, Saved):
        return like(own, saved)
    return _spread(saved.read(place(own)), own) if is_spread(own) else saved.read()


def _read_places(path: Path, found: dict[str, Saved]) -> dict[str, str]:
    """Add the tensors of a file to ``found``; return the other names of those that are tied."""
    try:
        file: Any = safetensors.safe_open(path, framework="pt", device="cpu")  # open as long as somebody may read
        told = dict(file.metadata() or {})
        places = json.loads(told.pop(_PARTS, "{}"))
        told.pop("format", None)
        for key in file.keys():  # noqa: SIM118
            size = tuple(file.get_slice(key).get_shape())
            shape, offset = map(tuple, places.get(key, (size, (0,) * len(size))))
            saved = found.setdefault(key, Saved(f"{key!r} in {path.parent}", shape, {}))
            saved.pieces[offset, size] = _reader(file, key)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    return told


def _reader(file: Any, key: str) -> Callable[[Place], torch.Tensor]:
    def read(wanted: Place) -> torch.Tensor:
        part: torch.Tensor = file.get_slice(key)[wanted] if wanted else file.get_tensor(key)
        return part

    return read
