"""Which modules are split over the ranks, and how: a plan, by patterns of names, made torch's ``ParallelStyle``."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from notebook_launcher.core import notices
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.registry import unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.distributed.device_mesh import DeviceMesh

_TRANSFORMERS = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "rowwise",
    "sequence_parallel": "sequence",
}
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads")


class Split(NamedTuple):
    """A module of the plan."""

    name: str
    module: nn.Module
    style: ParallelStyle


class _Sequence(ParallelStyle):
    """Each rank computes its part of the sequence, of whole inputs, which are whole again afterwards."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, one in list(part.named_parameters(recurse=False)):
                whole = DTensor.from_local(one.detach(), mesh, [Replicate()], run_check=False)
                part.register_parameter(name, nn.Parameter(whole, one.requires_grad))

        def split(part: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            if not inputs:
                raise ConfigError(
                    f"tp_plan has 'sequence' for a {type(part).__name__}, which was called with keywords only: it "
                    "splits the first argument given by position; give it so"
                )
            first = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
            return (first.redistribute(placements=[Shard(1)]), *inputs[1:])

        def join(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:  # noqa: ARG001 - torch's
            return outputs.redistribute(placements=[Replicate()]).to_local()

        return distribute_module(module, device_mesh, replicate, split, join)


def splits(model: nn.Module, given: Mapping[str, Any] | None, size: int) -> list[Split]:
    """What the plan ``given``, or else the model's own, says of ``model``; and what is tied to that.

    Raises ``ConfigError`` where there is no plan, where it has an unknown word or matches nothing, and for features or
    heads that ``size`` does not divide.
    """
    plan = given or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise ConfigError(
            f"tp_size={size} splits the {type(model).__name__} by a plan, and it has none of its own (tp_plan or "
            "_tp_plan): give ParallelismConfig(tp_plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'})"
        )
    found: dict[str, Split] = {}
    idle = []
    for pattern, how in plan.items():
        matching = [(name, one) for name, one in model.named_modules() if name and _matches(name, pattern)]
        if not matching:
            idle.append(pattern)
        for name, module in matching:
            style = _style(how, name, module)
            if style is not None:
                found[name] = Split(name, module, style)
    if idle and (given or not found):
        names = [name for name, _ in model.named_modules() if name]
        raise ConfigError(
            f"tp_plan has {idle[0]!r}, which is the name of no module of the {type(model).__name__}: it has "
            f"{', '.join(names[:5])} ...; a * stands for one part of a name"
        )
    if idle:
        notices.warn(f"of its own tp_plan, {', '.join(idle)} is the name of no module of the {type(model).__name__}.")
    for one in found.values():
        _refuse_uneven(model, one, size)
    return [*found.values(), *_tied_to(model, found)]


def apply(chosen: Iterable[Split], mesh: DeviceMesh) -> None:
    """Split modules in place, of the values that this rank has; parts have memory of their own."""
    for one in chosen:
        trains = {name: parameter.requires_grad for name, parameter in one.module.named_parameters()}
        parallelize_module(one.module, mesh, one.style, src_data_rank=None)
        for name, parameter in one.module.named_parameters():
            parameter.requires_grad_(trains[name])
            if isinstance(parameter, DTensor) and not parameter.is_meta:
                parameter._local_tensor = parameter._local_tensor.clone()  # noqa: SLF001 - nothing public sets it


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.removesuffix(".weight").split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


_STYLES: dict[str, Callable[[nn.Module], Any]] = {
    # outputs are split: what follows works on a rank's part of the features
    "colwise": lambda _: ColwiseParallel(),
    # inputs are split already; outputs are whole
    "rowwise": lambda module: RowwiseParallel(input_layouts=Replicate() if isinstance(module, nn.Embedding) else None),
    # inputs and outputs are whole, and each rank computes a part of the sequence, dim 1
    "sequence": lambda _: _Sequence(),
    # as colwise, with whole outputs
    "colwise_gather_output": lambda _: ColwiseParallel(output_layouts=Replicate()),
    # as rowwise, of whole inputs
    "rowwise_split_input": lambda _: RowwiseParallel(input_layouts=Replicate()),
    # left whole
    "replicate": lambda _: None,
}


def _style(how: Any, name: str, module: nn.Module) -> ParallelStyle | None:
    style = how
    if isinstance(how, str):
        word = _TRANSFORMERS.get(how, how)
        if word not in _STYLES:
            raise unknown_name("tp_plan's style", how, [*_STYLES, *_TRANSFORMERS])
        style = _STYLES[word](module)
    if style is not None and not isinstance(style, ParallelStyle):
        raise ConfigError(
            f"tp_plan has {how!r} for {name!r}: it takes one of {', '.join(_STYLES)}, or a ParallelStyle of torch's"
        )
    if isinstance(style, ColwiseParallel | RowwiseParallel) and not isinstance(module, nn.Linear | nn.Embedding):
        raise ConfigError(
            f"tp_plan has {how!r} for {name!r}, a {type(module).__name__}: it splits nn.Linear and nn.Embedding; name "
            "those inside it, or give a ParallelStyle that can split it"
        )
    return style


def _dim(split: Split) -> int | None:
    """Of the weight, None where that is not split: of a Linear (outputs, inputs), else (embeddings, features)."""
    if isinstance(split.style, ColwiseParallel):
        return int(isinstance(split.module, nn.Embedding))
    if isinstance(split.style, RowwiseParallel):
        return int(isinstance(split.module, nn.Linear))
    return None


def dims(chosen: Iterable[Split]) -> dict[int, int]:
    """By identity, the dim in which a parameter is split."""
    found: dict[int, int] = {}
    for one in chosen:
        dim = _dim(one)
        if dim is not None:
            found[id(one.module.weight)] = dim
            if dim == 0 and isinstance(getattr(one.module, "bias", None), nn.Parameter):
                found[id(one.module.bias)] = 0
    return found


def _refuse_uneven(model: nn.Module, split: Split, size: int) -> None:
    dim = _dim(split)
    if dim is None:
        return
    length = split.module.weight.shape[dim]  # type: ignore[index]
    what = (("outputs", "inputs") if isinstance(split.module, nn.Linear) else ("embeddings", "features"))[dim]
    if length % size:
        raise ConfigError(
            f"{split.name!r}, a {type(split.module).__name__}, has {length} {what}, which tp_size={size} does not "
            "divide: choose a tp_size that does, or leave it out of tp_plan"
        )
    owner = split.name.rpartition(".")[0]
    parent = model.get_submodule(owner)
    config = getattr(parent, "config", None) if hasattr(parent, "head_dim") else None
    for holder in (parent, config):
        for key in _HEADS:
            number = getattr(holder, key, None)
            if type(number) is int and number % size:
                raise ConfigError(
                    f"{owner!r}, a {type(parent).__name__}, has {key}={number}, which tp_size={size} does not divide: "
                    "choose a tp_size that does, or leave it out of tp_plan"
                )


def _tied_to(model: nn.Module, found: Mapping[str, Split]) -> list[Split]:
    """Modules whose weight is that of one in ``found``: split as it is, with whole inputs and outputs."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            owners.setdefault(id(weight), []).append((name, module))
    tied = []
    for one in found.values():
        dim = _dim(one)
        for name, module in owners.get(id(getattr(one.module, "weight", None)), ()) if dim is not None else ():
            if name in found and _dim(found[name]) == dim:
                continue
            if name in found or not isinstance(module, nn.Linear | nn.Embedding):
                raise ConfigError(
                    f"{one.name!r} and {name!r} of the {type(model).__name__} have one weight, and tp_plan splits it "
                    "for the one and not so for the other: split both by the same dim of the weight"
                )
            is_colwise = isinstance(module, nn.Linear) == (dim == 0)
            style = _STYLES["colwise_gather_output" if is_colwise else "rowwise_split_input"](module)
            tied.append(Split(name, module, style))
    return tied
