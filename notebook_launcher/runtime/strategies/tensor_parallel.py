"""Tensor parallel: each rank computes a part of the features of a layer; with FSDP over groups of such ranks.

Ranks of a group train one model on the same batches. Modules that the plan doesn't name every one of them has whole,
and computes alike, so that their gradients are equal. Outputs of a "colwise" module are a rank's part of the features:
dropout between it and its "rowwise" partner draws the same for each part.

Context parallel (``cp_size``, ``sp_size``) is not here: torch's ``context_parallel`` has no kernel of attention for the
CPU, where it could be checked ("scaled_dot_product_flash_attention_for_cpu does not have a sharding strategy").
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.tensor import DTensor

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import clipping, holdings, mesh, models, randomness, shards, tensor_plan, trees
from notebook_launcher.runtime.plugins import ParallelismConfig
from notebook_launcher.runtime.strategies import fsdp, single

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from notebook_launcher.core.world import World
    from notebook_launcher.runtime.plugins import Keywords
    from notebook_launcher.runtime.process import Process


@final
class TensorParallel:
    """Torch's ``parallelize_module``, and its ``fully_shard`` where there are several groups."""

    name = "tp"
    layout = single.Single.layout
    trains_apart = False
    backward = staticmethod(single.backward)
    clip = staticmethod(clipping.clip)
    clip_value = staticmethod(clipping.clip_value)
    step = staticmethod(single.step)
    load = staticmethod(single.load)
    go_on = staticmethod(single.go_on)
    forget = staticmethod(single.forget)

    def __init__(self, process: Process, keywords: Keywords) -> None:
        """Split over the ranks that ``ParallelismConfig`` says; ``ConfigError`` where its product is another number."""
        parallelism = keywords[ParallelismConfig]
        whole = mesh.build(process, parallelism, "tp")
        data = tuple(name for name in whole.mesh_dim_names or () if name in mesh.DATA)
        self._process = process
        self._plan = parallelism.tp_plan
        self._mesh = whole["tp"]
        self._has_replicas = bool(data)
        self._sharded = fsdp.FullySharded(process, keywords, whole[data] if data else self._mesh)
        self._wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.data_process = mesh.data_process(process, whole)
        self.no_sync = self._sharded.no_sync
        self.sync_in_backward = self._sharded.sync_in_backward
        self.pair = self._sharded.pair
        self.full_state = self._sharded.full_state
        self.save = self._sharded.save

    @staticmethod
    def held(model: nn.Module, world: World, keywords: Keywords) -> Iterator[holdings.Held]:
        """A part of what the plan splits, and of that a part where there are several groups."""
        parallelism = keywords[ParallelismConfig]
        sizes = parallelism.sizes(world.world_size, "tp")
        dims = tensor_plan.dims(tensor_plan.splits(model, parallelism.tp_plan, sizes["tp"]))
        for one in model.parameters():
            split = [(dims[id(one)], sizes["tp"])] if id(one) in dims else []
            yield holdings.of(one, *split, (0, sizes["dp_shard"]))

    def place(self, model: nn.Module) -> nn.Module:
        """The model where it is: its parts move when it is split."""
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, split in place, with the values that rank 0 has; the others' may be on "meta"."""
        inner = models.unwrap(model, keep_torch_compile=False)
        if inner in self._wrapped:
            return model
        seen = models.compiled_from(model)
        if isinstance(seen, models.AutocastView) and seen._precision.name == "fp16":  # noqa: SLF001
            raise ConfigError(
                "mixed_precision='fp16' scales losses by what all gradients look like, and with strategy='tp' some are "
                "split and others whole, which torch's GradScaler can't take together: use mixed_precision='bf16'"
            )
        randomness.alike_among(self.data_process.twins, self._process.device)
        if next(inner.parameters(), None) is None:
            return model.to(self._process.device)
        fsdp.refuse_elsewhere(inner, self._process.device)
        chosen = tensor_plan.splits(inner, self._plan, self._mesh.size())
        has_values = fsdp.has_rank0s_values(inner)
        before = dict(inner.named_parameters(remove_duplicate=False))
        tensor_plan.apply(chosen, self._mesh)
        if self._has_replicas:
            inner.register_forward_hook(_own_outputs)
            self._sharded.spread(model, inner, before, has_values=has_values)
        else:
            if not any(one.is_meta for one in inner.parameters()):
                inner.to(self._process.device)
            self._sharded.fill(inner, before, has_values=has_values)
            for parameter in inner.parameters():
                if isinstance(parameter, DTensor):
                    _settle_gradients(parameter)
        self._wrapped.add(inner)
        return model

    def gradients(self, parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """This rank's parts of them."""
        return map(shards.local, self._sharded.gradients(parameters))

    def join(self, models_: Sequence[nn.Module]) -> None:
        """None in one group; raises ``ConfigError`` where there are several, which gather each block together."""
        if self._has_replicas and models_:
            raise ConfigError(
                "join_uneven_inputs can't be with strategy='tp' and several groups of ranks: they gather each block "
                "together, so that one with fewer batches would leave the others waiting. Leave it out; "
                "even_batches=True, the default, fills up the last batch."
            )


def _own_outputs(_: nn.Module, __: Any, outputs: Any) -> Any:
    """What the last split module gives is a view, and changed in place it would lose what FSDP hangs on it."""

    def own(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf._is_view() else leaf  # noqa: SLF001

    return trees.map_leaves(own, outputs)


def _settle_gradients(parameter: Any) -> None:
    """Add up over the ranks what each has found for a parameter that all have, right after backward."""

    def settle(one: Any) -> None:
        if one.grad.placements != one.placements:
            one.grad = one.grad.redistribute(placements=one.placements)

    trains = parameter.requires_grad
    parameter.requires_grad_(True).register_post_accumulate_grad_hook(settle)  # noqa: FBT003 - one may be thawed later
    parameter.requires_grad_(trains)
