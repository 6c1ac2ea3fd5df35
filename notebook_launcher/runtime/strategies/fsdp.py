"""Fully sharded data parallel: each rank keeps a part of every parameter, its gradient and its optimizer state.

Torch's ``fully_shard`` turns a module's parameters into ``DTensor``s, in place; a block's are gathered when it runs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint_activation  # unlike the wrapper, it leaves names as they are
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.registry import unknown_name
from notebook_launcher.runtime import blocks, clipping, fsdp_options, gather, models, shards, weights
from notebook_launcher.runtime.fsdp_options import FullyShardedDataParallelPlugin
from notebook_launcher.runtime.plugins import ParallelismConfig
from notebook_launcher.runtime.strategies import single

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from notebook_launcher.runtime.fsdp_options import Settings
    from notebook_launcher.runtime.plugins import Keywords
    from notebook_launcher.runtime.process import Process
    from notebook_launcher.runtime.storage import Draft


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


@final
class FullySharded:
    """Torch's ``fully_shard``."""

    name = "fsdp"
    layout = single.Single.layout
    pairs_optimizers = False
    backward = staticmethod(single.backward)
    clip = staticmethod(clipping.clip)
    clip_value = staticmethod(clipping.clip_value)
    step = staticmethod(single.step)
    load = staticmethod(single.load)

    def __init__(self, process: Process, keywords: Keywords) -> None:
        """Shard as the plugin, the launch and ``ParallelismConfig`` say; raises ``ConfigError`` where they can't be."""
        self._process = process
        self._settings = fsdp_options.settings(keywords[FullyShardedDataParallelPlugin], process.world.strategy_config)
        self._mesh = _mesh(process, keywords[ParallelismConfig], self._settings)
        self._replaced: Any = WeakTensorKeyDictionary()  # what parameters became
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
        on_meta = [name for name, one in inner.named_parameters() if one.is_meta]
        if gather.all_objects(on_meta)[0]:
            raise ConfigError(
                f"the {type(inner).__name__} on rank 0 has parameters on the device 'meta', such as {on_meta[:1]}, and "
                "it is from rank 0 that all ranks take their values. Make it there with its weights; on the others it "
                "may be without."
            )
        ignored = {one for part in self._settings.ignored for one in part.to(self._process.device).parameters()}
        chosen = blocks.choose(inner, self._settings)
        for block in chosen if self._settings.checkpoint_activations else ():
            checkpoint_activation.checkpoint(block)
        before = self._shard([*chosen, inner], ignored, _policy(model, self._settings.policy))
        if on_meta:
            inner.to_empty(device="cpu" if self._settings.offload else self._process.device)
        self._take_from_rank0(inner, before)
        for module in inner.modules():
            for one in _fsdp_parameters(module):
                self._fsdp[one.sharded_param] = weakref.ref(one)
        inner.register_forward_hook(_reshard_after_evaluation)
        return model

    def _shard(
        self, modules: list[nn.Module], ignored: set[nn.Parameter], policy: MixedPrecisionPolicy
    ) -> dict[str, nn.Parameter]:
        """Shard ``modules``, the model last; return its parameters as they were, by name."""
        before = dict(modules[-1].named_parameters(remove_duplicate=False))
        options: dict[str, Any] = {"mesh": self._mesh, "mp_policy": policy, "offload_policy": _offload(self._settings)}
        if self._settings.reshard_after_forward is not None:
            options["reshard_after_forward"] = self._settings.reshard_after_forward
        if ignored:
            options["ignored_params"] = ignored
        for module in modules:
            values = [(one, one.detach()) for one in module.parameters() if not isinstance(one, DTensor)]
            name = type(module).__name__
            fully_shard(module, **options)
            type(module).__name__ = name  # libraries go by it, and people read it
            for given, value in values:
                if given not in ignored:
                    given.data = value  # where it was: torch has moved the whole to the device
        return before

    def _take_from_rank0(self, model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
        device = self._process.device
        new: dict[int, nn.Parameter] = {}
        for name, given in before.items():
            owner, _, key = name.rpartition(".")
            module = model.get_submodule(owner)
            if id(given) in new:  # tied; torch may have made another of it
                setattr(module, key, new[id(given)])
                continue
            own = new[id(given)] = getattr(module, key)
            value = given.detach().to(device) if self._process.rank == 0 else torch.empty_like(given, device=device)
            dist.broadcast(value, 0)
            with torch.no_grad():
                shards.local(own).copy_(value[shards.place(own)])
            if own is not given:
                self._replaced[given] = own
        for buffer in model.buffers():
            value = buffer.to(device)
            dist.broadcast(value, 0)
            buffer.copy_(value)

    def pair(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer that was made before its model was sharded hold what its parameters became, and states."""
        for group in optimizer.param_groups:
            for number, given in enumerate(group["params"]):
                new = self._replaced.get(given)
                if new is None:
                    continue
                group["params"][number] = new
                if given in optimizer.state:
                    values = optimizer.state.pop(given)
                    optimizer.state[new] = {key: shards.like(new, value) for key, value in values.items()}

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
        """The parameters' own, and those collected under ``no_sync``: whole ones, which torch keeps elsewhere."""
        for parameter in parameters:
            reference = self._fsdp.get(parameter)
            one = None if reference is None else reference()
            unsharded = getattr(one, "_unsharded_param", None)
            kept = (parameter.grad, getattr(one, "unsharded_accumulated_grad", None), getattr(unsharded, "grad", None))
            yield from (gradient for gradient in kept if gradient is not None)

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

    def save(
        self,
        draft: Draft,
        models_: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        safe: bool,
    ) -> None:
        """Each rank's parts; or, as the plugin says, and where models may not be in safetensors, all of it whole."""
        rank = self._process.rank
        for name, model in models_.items():
            inner = models.unwrap(model, keep_torch_compile=False)
            if safe and not self._settings.saves_whole:
                shards.write(draft, name, rank, shards.state_of(inner))
                continue
            state = shards.full_state(inner)
            if draft.writes:
                weights.save(draft, name, state, safe=safe)
        for name, optimizer in optimizers.items():
            if not self._settings.saves_whole:
                shards.save_optimizer(draft, name, rank, optimizer)
                continue
            state = shards.whole_optimizer(optimizer)
            if draft.writes:
                draft.objects(f"{name}.bin", state)


def _mesh(process: Process, parallelism: ParallelismConfig, chosen: Settings) -> DeviceMesh:
    """All ranks in one dim, or in two where parameters are sharded within replicas."""
    size = process.num_processes
    replicas = parallelism.dp_replicate_size
    if chosen.replicates_machines and replicas == 1:
        replicas = process.world.num_machines
    parts = parallelism.dp_shard_size or size // replicas
    if replicas * parts != size:
        raise ConfigError(
            f"dp_replicate_size={replicas} x dp_shard_size={parts} is {replicas * parts} processes, and this run has "
            f"{size}: make the product {size}, or leave dp_shard_size out"
        )
    kind = process.device.type
    if replicas == 1:
        return init_device_mesh(kind, (size,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(kind, (replicas, parts), mesh_dim_names=("dp_replicate", "dp_shard"))


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


def _reshard_after_evaluation(model: nn.Module, *_: Any) -> None:
    """Torch keeps some parameters whole until backward, which evaluation never comes to."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _fsdp_parameters(module: nn.Module) -> list[Any]:
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()  # noqa: SLF001 - nothing public leads to gradients that are not exchanged yet
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [one for group in groups if group is not None for one in group.fsdp_params]
