"""Fully sharded data parallel: each rank keeps a part of every parameter, its gradient and its optimizer state.

Torch's ``fully_shard`` turns a module's parameters into ``DTensor``s, in place; a block's are gathered when it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint_activation  # unlike the wrapper, it leaves names as they are
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from notebook_launcher.core import fsdp_options
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.fsdp_options import FullyShardedDataParallelPlugin
from notebook_launcher.core.registry import unknown_name
from notebook_launcher.runtime import (
    agreement,
    blocks,
    clipping,
    fingerprints,
    gather,
    holdings,
    mesh,
    models,
    shards,
)
from notebook_launcher.runtime.plugins import ParallelismConfig
from notebook_launcher.runtime.strategies import single

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from notebook_launcher.core.fsdp_options import Settings
    from notebook_launcher.core.world import World
    from notebook_launcher.runtime.plugins import Keywords
    from notebook_launcher.runtime.process import Process
    from notebook_launcher.runtime.shards import Models, Optimizers
    from notebook_launcher.runtime.storage import Draft

_TRAVELLING_BYTES = 1 << 26  # of values on their way at a time


def held_of(own: str, model: nn.Module, world: World, keywords: Keywords) -> Iterator[holdings.Held]:
    """A part of every parameter but those that are ignored, of a strategy that is about the dim ``own`` of the mesh."""
    num_parts = keywords[ParallelismConfig].sizes(world.world_size, own)["dp_shard"]
    chosen = fsdp_options.settings(keywords[FullyShardedDataParallelPlugin], world.strategy_config)
    ignored = {id(one) for part in chosen.ignored for one in part.parameters()}
    for one in model.parameters():
        yield holdings.of(one, *([] if id(one) in ignored else [(0, num_parts)]))


class _Syncing:
    """Whether backward exchanges a model's gradients, for as long as the context lasts; made once, entered often."""

    __slots__ = ("_before", "_is_on", "_modules", "_now")

    def __init__(self, model: nn.Module, now: dict[str, bool], *, is_on: bool) -> None:
        """``now``, shared by the contexts of ``model``, has what is in force: torch doesn't tell."""
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._now = now
        self._is_on = is_on
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(self._now["sync"])
        self._set(self._is_on)

    def __exit__(self, *exception: object) -> None:
        self._set(self._before.pop())

    def _set(self, is_on: bool) -> None:  # noqa: FBT001
        self._now["sync"] = is_on
        for module in self._modules:
            module.set_requires_gradient_sync(is_on, recurse=False)


class Replaced:
    """What parameters became when their model was spread, for the optimizers that have those which were given."""

    def __init__(self) -> None:
        self._new: Any = WeakTensorKeyDictionary()
        self._heard_of: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def note(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Take note of what parameters, by those that were given, are now."""
        self._new.update({given: own for given, own in new.items() if own is not given})
        for optimizer in list(self._heard_of):
            self.pair(optimizer)

    def pair(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer that was made before its model was spread hold what its parameters became, and states."""
        self._heard_of.add(optimizer)  # its model may be spread later
        for group in optimizer.param_groups:
            for number, given in enumerate(group["params"]):
                new = self._new.get(given)
                if new is None:
                    continue
                group["params"][number] = new
                values = optimizer.state.pop(given, None)
                if values is not None and not new.is_meta:  # else another rank keeps it
                    optimizer.state[new] = {key: shards.like(new, value) for key, value in values.items()}


@final
class FullySharded:
    """Torch's ``fully_shard``."""

    name = "fsdp"
    layout = single.Single.layout
    trains_apart = False
    backward = staticmethod(single.backward)
    clip = staticmethod(clipping.clip)
    clip_value = staticmethod(clipping.clip_value)
    step = staticmethod(single.step)
    load = staticmethod(single.load)
    go_on = staticmethod(single.go_on)
    forget = staticmethod(single.forget)
    held = staticmethod(functools.partial(held_of, "dp_shard"))

    def __init__(self, process: Process, keywords: Keywords, part: DeviceMesh | None = None) -> None:
        """Shard as the plugin, the launch and ``ParallelismConfig`` say; raises ``ConfigError`` where they can't be.

        ``part``: the dims of a larger mesh to shard over.
        """
        self._process = self.data_process = process
        self.plugin = keywords[FullyShardedDataParallelPlugin]
        self._settings = fsdp_options.settings(self.plugin, process.world.strategy_config)
        parallelism = keywords[ParallelismConfig]
        if self._settings.replicates_machines and parallelism.dp_replicate_size == 1:
            parallelism = dataclasses.replace(parallelism, dp_replicate_size=process.world.num_machines)
        self._mesh = mesh.build(process, parallelism, "dp_shard") if part is None else part
        self._replaced = Replaced()
        self.pair = self._replaced.pair
        self._fsdp: Any = WeakTensorKeyDictionary()  # what torch keeps for a parameter
        self._syncs: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()

    # --- models ------------------------------------------------------------------------------------------------------

    def place(self, model: nn.Module) -> nn.Module:
        """The model where it is: its blocks move one by one, each when it is sharded."""
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, its parameters sharded in place, with the values that rank 0 has; the others' may be on "meta"."""
        inner = models.unwrap(model, keep_torch_compile=False)
        if isinstance(inner, FSDPModule):
            return model
        if next(inner.parameters(), None) is None:
            return model.to(self._process.device)
        refuse_elsewhere(inner, self._process.device)
        before = dict(inner.named_parameters(remove_duplicate=False))
        self.spread(model, inner, before, has_values=has_rank0s_values(inner))
        inner.register_forward_pre_hook(_check_all_are_here, prepend=True)  # before torch gathers
        return model

    def spread(
        self, model: nn.Module, inner: nn.Module, before: Mapping[str, nn.Parameter], *, has_values: bool
    ) -> None:
        """Shard ``inner``, which is in ``model``, in place; ``before`` has its parameters as they were given."""
        ignored = {one for part in self._settings.ignored for one in part.to(self._process.device).parameters()}
        chosen = blocks.choose(inner, self._settings)
        for block in chosen if self._settings.checkpoint_activations else ():
            checkpoint_activation.checkpoint(block)
        self._shard([*chosen, inner], ignored, _policy(model, self._settings.policy))
        self.fill(inner, before, has_values=has_values)
        for module in inner.modules():
            if isinstance(module, FSDPModule):
                for one in _fsdp_parameters(module):
                    self._fsdp[one.sharded_param] = weakref.ref(one)
                module.register_forward_pre_hook(_gather_for_inference, prepend=True)
        inner.register_forward_hook(_reshard_after_evaluation)

    def fill(self, inner: nn.Module, before: Mapping[str, nn.Parameter], *, has_values: bool) -> None:
        """Give ``inner``, which is spread, rank 0's values, unless it has them; note what became of ``before``."""
        if any(one.is_meta for one in inner.parameters()):
            inner.to_empty(device="cpu" if self._settings.offload else self._process.device)
        new = self._tied(inner, before)
        self._replaced.note(new)
        if not has_values:
            self._take_from_rank0(inner, new)

    def _shard(self, modules: list[nn.Module], ignored: set[nn.Parameter], policy: MixedPrecisionPolicy) -> None:
        """Shard ``modules``, the model last."""
        options: dict[str, Any] = {"mesh": self._mesh, "mp_policy": policy, "offload_policy": _offload(self._settings)}
        if self._settings.reshard_after_forward is not None:
            options["reshard_after_forward"] = self._settings.reshard_after_forward
        if ignored:
            options["ignored_params"] = ignored
        device = self._process.device.type
        for module in modules:
            elsewhere = [
                (one, one.detach())
                for one in module.parameters()
                if one.device.type != device and not isinstance(one, DTensor)
            ]
            name = type(module).__name__
            fully_shard(module, **options)
            type(module).__name__ = name  # libraries go by it, and people read it
            for given, value in elsewhere:
                if given not in ignored:
                    given.data = value  # where it was: torch has moved the whole to the device

    def _tied(self, model: nn.Module, before: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        """Tie again what was tied, of which torch may have made several; return what became of each parameter."""
        new: dict[nn.Parameter, nn.Parameter] = {}
        for name, given in before.items():
            owner, _, key = name.rpartition(".")
            module = model.get_submodule(owner)
            if given in new:
                setattr(module, key, new[given])
            else:
                new[given] = getattr(module, key)
        return new

    def _take_from_rank0(self, model: nn.Module, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Have the values of rank 0 travel, several on their way at a time."""
        device = self._process.device
        on_the_way: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

        def arrive() -> None:
            for work, value, own in on_the_way:
                work.wait()
                with torch.no_grad():
                    shards.local(own).copy_(value[shards.place(own)])
            on_the_way.clear()

        for given, own in [*new.items(), *((one, one) for one in model.buffers())]:
            value = given.detach().to(device) if self._process.rank == 0 else torch.empty_like(given, device=device)
            on_the_way.append((dist.broadcast(value, 0, async_op=True), value, own))
            if sum(one.nbytes for _, one, _ in on_the_way) > _TRAVELLING_BYTES:
                arrive()
        arrive()

    # --- gradients ---------------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> _Syncing | None:
        """A context without gradient exchange; None for a model that is not sharded."""
        return self._syncing(model, is_on=False)

    def sync_in_backward(self, model: nn.Module) -> _Syncing | None:
        """A context with gradient exchange; None for a model that is not sharded."""
        return self._syncing(model, is_on=True)

    def _syncing(self, model: nn.Module, *, is_on: bool) -> _Syncing | None:
        inner = models.unwrap(model, keep_torch_compile=False)
        if not isinstance(inner, FSDPModule):
            return None
        return _Syncing(inner, self._syncs.setdefault(inner, {"sync": True}), is_on=is_on)

    def gradients(self, parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The parameters' own, and those collected under ``no_sync``: whole ones, which torch keeps elsewhere.

        Each once, though between forward and backward a model has other parameters than its optimizer.
        """
        found: dict[int, torch.Tensor] = {}
        for parameter in parameters:
            reference = self._fsdp.get(parameter)
            one = None if reference is None else reference()
            unsharded = getattr(one, "_unsharded_param", None)
            kept = (parameter.grad, getattr(one, "unsharded_accumulated_grad", None), getattr(unsharded, "grad", None))
            found |= {id(gradient): gradient for gradient in kept if gradient is not None}
        yield from found.values()

    def join(self, models_: Sequence[nn.Module]) -> None:
        """None where nothing is sharded; raises ``ConfigError`` for what is, since each rank needs as many batches."""
        if any(isinstance(models.unwrap(one, keep_torch_compile=False), FSDPModule) for one in models_):
            raise ConfigError(
                "join_uneven_inputs can't be with strategy='fsdp': ranks gather each block together, so that one with "
                "fewer batches would leave the others waiting. Leave it out; even_batches=True, the default, fills up "
                "the last batch."
            )

    # --- states ------------------------------------------------------------------------------------------------------

    def full_state(self, model: nn.Module) -> dict[str, Any]:
        """The whole state, gathered on every rank."""
        return shards.full_state(models.unwrap(model, keep_torch_compile=False))

    def save(self, draft: Draft, models_: Models, optimizers: Optimizers, *, safe: bool) -> None:
        """Each rank's parts; or, as it was asked for, and where models may not be in safetensors, all of it whole."""
        sharded = not self._settings.saves_whole if draft.sharded is None else draft.sharded
        shards.save(draft, models_, optimizers, self._process.rank, safe=safe, sharded=sharded)


def refuse_elsewhere(model: nn.Module, device: torch.device) -> None:
    """Raise ``ConfigError`` for a parameter on another device than the CPU, "meta" and ``device``, that of the rank."""
    for name, one in model.named_parameters():
        if one.device != device and one.device.type not in {"cpu", "meta"}:
            raise ConfigError(
                f"the {type(model).__name__} that is to be sharded has {name} on the device '{one.device}', and this "
                f"rank's device is '{device}': make it on the CPU or on accelerator.device"
            )


def has_rank0s_values(model: nn.Module) -> bool:
    """Whether every rank has them already; ``ConfigError`` where rank 0 has none, or ranks have other parameters."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = [(name, tuple(one.shape), one.dtype) for name, one in tensors.items()]
    on_meta = [name for name, one in tensors.items() if one.is_meta]
    if agreement.alike((shapes, on_meta or fingerprints.of(tensors.values()))) and not on_meta:
        return True
    found = gather.all_objects((shapes, on_meta))
    kind = type(model).__name__
    if found[0][1]:
        raise ConfigError(
            f"the {kind} on rank 0 has parameters on the device 'meta', such as {found[0][1][:1]}, and it is from rank "
            "0 that all ranks take their values. Make it there with its weights; on the others it may be without."
        )
    for rank, (theirs, _) in enumerate(found):
        for own, other in itertools.zip_longest(found[0][0], theirs):
            if own != other:
                raise ConfigError(
                    f"the {kind} on rank {rank} is another model than that on rank 0: it has {_described(other)}, and "
                    f"there it is {_described(own)}. Make the same one on every rank."
                )
    return False


def _described(found: tuple[str, tuple[int, ...], torch.dtype] | None) -> str:
    return "no further parameter" if found is None else f"{found[0]} of shape {found[1]} in {found[2]}"


def _policy(model: nn.Module, given: Any) -> MixedPrecisionPolicy:
    """Of the plugin, or of the precision that ``model`` is seen in: its type for computing, fp32 for exchanging."""
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if given is not None and not isinstance(given, str | dict):  # the first FSDP's
        given = {name: getattr(given, name, None) for name in ("param_dtype", "reduce_dtype")}
    if isinstance(given, str):
        given = {"param_dtype": given, "reduce_dtype": given, "output_dtype": given}
    if given is not None:
        return MixedPrecisionPolicy(**{name: _dtype(value) for name, value in given.items()})
    seen = models.compiled_from(model)
    if isinstance(seen, models.AutocastView):
        return MixedPrecisionPolicy(param_dtype=seen._precision.dtype, reduce_dtype=torch.float32)  # noqa: SLF001
    return MixedPrecisionPolicy()


def _dtype(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "no": torch.float32}
    name = value.removeprefix("torch.").lower()
    found = names.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise unknown_name("mixed_precision_policy", value, names)
    return found


def _offload(chosen: Settings) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if chosen.offload else OffloadPolicy()


def _gather_for_inference(module: Any, _: Any) -> None:
    """Torch keeps what it gathers first for all later times, and training can't write to what inference mode made."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False), torch.no_grad():
            cast("Any", models.unwrap(module)).unshard()  # in another precision it is a view that is called


def _check_all_are_here(*_: Any) -> None:
    agreement.check("the forward of a sharded model")


def _reshard_after_evaluation(model: nn.Module, *_: Any) -> None:
    """Torch keeps some parameters whole until backward, which evaluation never comes to."""
    if not torch.is_grad_enabled():
        for module in models.unwrap(model).modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _fsdp_parameters(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()  # noqa: SLF001 - nothing public leads to gradients that are not exchanged yet
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [one for group in groups if group is not None for one in group.fsdp_params]
