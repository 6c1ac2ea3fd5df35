"""Pipeline parallel: each rank keeps some consecutive stages of the model, and microbatches pass through all of them.

On each rank the model is whole in name only: what other ranks keep is on "meta", where it takes no memory. So names,
and the numbers of an optimizer's parameters, are everywhere those of the whole.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import clipping, models, pipelining, shards, stages
from notebook_launcher.runtime.plugins import ParallelismConfig, PipelineParallelPlugin
from notebook_launcher.runtime.strategies import fsdp, single

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from notebook_launcher.core.world import World
    from notebook_launcher.runtime.plugins import Keywords
    from notebook_launcher.runtime.process import Process
    from notebook_launcher.runtime.shards import Models, Optimizers
    from notebook_launcher.runtime.storage import Draft


@final
class Pipeline:
    """Torch's pipelining, with replicated or fully sharded stages where there is more than one pipeline."""

    name = "pp"
    layout = single.Single.layout
    trains_apart = False
    clip_value = staticmethod(clipping.clip_value)
    gradients = staticmethod(single.gradients)
    step = staticmethod(single.step)
    load = staticmethod(single.load)
    go_on = staticmethod(single.go_on)
    forget = staticmethod(single.forget)
    held = staticmethod(functools.partial(fsdp.held_of, "pp"))

    def __init__(self, process: Process, keywords: Keywords) -> None:
        """Take a place in a pipeline; ``ConfigError`` for sizes, a schedule or an accumulation that can't be."""
        parallelism = keywords[ParallelismConfig]
        if (process.world.gradient_accumulation_steps or 1) > 1:
            raise _no_accumulation()
        self._plugin = keywords[PipelineParallelPlugin]
        self._ranks = stages.Ranks(process, parallelism)
        self.data_process = self._ranks.data
        self._sharded = (
            None if self._ranks.sharding is None else fsdp.FullySharded(process, keywords, self._ranks.sharding)
        )
        self._replaced = fsdp.Replaced()
        self.pair = self._replaced.pair
        self._places: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()

    # --- models ------------------------------------------------------------------------------------------------------

    def place(self, model: nn.Module) -> nn.Module:
        """The model where it is: a rank's stages move when they are cut."""
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model cut into stages, with the values that rank 0 has; what this rank doesn't keep goes to "meta"."""
        if isinstance(models.compiled_from(model), stages.PipelinedModel):
            return model
        inner = models.unwrap(model, keep_torch_compile=False)
        seen = models.compiled_from(model)
        precision = seen._precision if isinstance(seen, models.AutocastView) else None  # noqa: SLF001
        if precision is not None and precision.name == "fp16":
            raise ConfigError(
                "mixed_precision='fp16' scales losses by what all gradients look like, and strategy='pp' has them on "
                "several ranks: use mixed_precision='bf16'"
            )
        ranks, bodies = self._ranks, _cut(inner, self._ranks.size, self._plugin)
        num_stages = len(bodies)
        own = range(ranks.place, num_stages, ranks.size)
        kept = {id(one) for number in own for one in (*bodies[number].parameters(), *bodies[number].buffers())}
        before = dict(inner.named_parameters(remove_duplicate=False))
        self._settle([inner, *bodies], kept, has_values=fsdp.has_rank0s_values(inner))
        blocks = getattr(inner, "_no_split_modules", None)
        mine = {number: stages.Stage(bodies[number], precision, blocks, number, num_stages) for number in own}
        for stage in mine.values():
            if self._sharded is not None:
                whole = dict(stage.named_parameters(remove_duplicate=False))
                self._sharded.spread(model, stage, whole, has_values=True)
            _put_back(stage.body, inner)
        after = dict(inner.named_parameters(remove_duplicate=False))
        self._replaced.note({given: after[name] for name, given in before.items()})
        places = self._places[inner] = {}
        for number, body in enumerate(bodies):
            for name in body.state_dict():
                places.setdefault(name, number % ranks.size)
        return stages.PipelinedModel(model, mine, num_stages, ranks, self._plugin)

    @staticmethod
    def divide(model: nn.Module, world: World, keywords: Keywords) -> list[nn.Module]:
        """What each rank of a pipeline has of ``model``, which may be on "meta" where it need not be traced."""
        size = keywords[ParallelismConfig].sizes(world.world_size, "pp")["pp"]
        bodies = _cut(model, size, keywords[PipelineParallelPlugin])
        return [nn.ModuleList(bodies[place::size]) for place in range(size)]

    def _settle(self, roots: Sequence[nn.Module], kept: set[int], *, has_values: bool) -> None:
        """Rank 0's values in what is ``kept``, by identity, unless they are there; everything else on "meta"."""
        new: dict[int, Any] = {}
        for module in {id(module): module for root in roots for module in root.modules()}.values():
            for held in (module._parameters, module._buffers):  # noqa: SLF001 - no method sets other ones
                for key, given in held.items():
                    if given is None:
                        continue
                    if id(given) not in new:
                        new[id(given)] = given, self._settled(given, id(given) in kept, has_values)
                    held[key] = new[id(given)][1]

    def _settled(self, given: torch.Tensor, is_kept: bool, has_values: bool) -> torch.Tensor:  # noqa: FBT001
        device = self._ranks.device
        value = given.detach()
        if not has_values:
            is_source = self._ranks.rank == 0
            value = value.to(device).contiguous() if is_source else given.new_empty(given.shape, device=device)
            dist.broadcast(value, 0)
        value = value.to(device if is_kept else "meta")
        if is_kept and not given.is_meta:
            given.data = value
            return given
        return nn.Parameter(value, given.requires_grad) if isinstance(given, nn.Parameter) else value

    # --- gradients ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Raise ``ConfigError``: the loss is one stage's."""
        del loss, options
        raise ConfigError(
            "accelerator.backward was called, and with strategy='pp' it is accelerator.pipeline_step(batch, target) "
            "that adds the gradients: leave backward out"
        )

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context that raises ``ConfigError`` when it is entered: gradients are exchanged at each step."""
        del model
        return _NoAccumulation()

    def sync_in_backward(self, model: nn.Module) -> None:
        """None: each step exchanges them."""

    def join(self, models_: Sequence[nn.Module]) -> None:
        """None in one pipeline; raises ``ConfigError`` where there are several, which average together."""
        if self.data_process.num_processes > 1 and models_:
            raise ConfigError(
                "join_uneven_inputs can't be with strategy='pp' and several pipelines: they average each step "
                "together. Leave it out; even_batches=True, the default, fills up the last batch."
            )

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale the gradients of all stages to a norm of at most ``max_norm``; return their norm."""
        parameters = list(parameters)
        norm = clipping.norm(parameters, norm_type).to(self._ranks.device)
        is_max = norm_type == float("inf")
        norm = norm if is_max else norm**norm_type
        dist.all_reduce(norm, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, self._ranks.group)
        norm = norm if is_max else norm ** (1 / norm_type)
        clipping.scale(parameters, max_norm, norm)
        return norm

    # --- states ------------------------------------------------------------------------------------------------------

    def full_state(self, model: nn.Module) -> dict[str, Any]:
        """The whole state, each stage's sent by the rank that keeps it, on every rank."""
        inner = models.unwrap(model, keep_torch_compile=False)
        places = self._places.get(inner)
        if places is None:
            return single.full_state(model)
        found: dict[int, Any] = {}
        device, state = self._ranks.device, shards.state_of(inner)
        for name, value in state.items():
            if id(value) in found or not isinstance(value, torch.Tensor):
                found[id(value)] = found.get(id(value), value)
                continue
            whole = torch.empty_like(value, device=device) if value.is_meta else shards.whole(value).detach()
            whole = whole.to(device).contiguous()
            dist.broadcast(whole, self._ranks.global_rank(places[name]), self._ranks.group)
            found[id(value)] = whole
        return {name: found[id(value)] for name, value in state.items()}

    def save(self, draft: Draft, models_: Models, optimizers: Optimizers, *, safe: bool) -> None:
        """Each rank's stages, and the states of their parameters; models whole where they may not be in safetensors."""
        shards.save(
            draft,
            models_,
            optimizers,
            self._ranks.rank,
            safe=safe,
            sharded=draft.sharded is not False,
            with_whole=self.data_process.rank == 0,
            gathered=self.full_state,
        )


class _NoAccumulation(contextlib.nullcontext[None]):
    """What ``no_sync`` gives: nobody may enter it."""

    def __enter__(self) -> None:
        raise _no_accumulation()


def _no_accumulation() -> ConfigError:
    return ConfigError(
        "strategy='pp' can't be with gradient accumulation over several steps, by accumulate or no_sync: it does so "
        "within a pipeline_step, over PipelineParallelPlugin(num_microbatches=...). Leave gradient_accumulation_steps "
        "at 1, and give larger batches and more microbatches."
    )


def _cut(model: nn.Module, num_ranks: int, plugin: PipelineParallelPlugin) -> list[nn.Module]:
    """The stages of ``model``; raises ``ConfigError`` for options that don't fit it or one another."""
    num_stages = _num_stages(num_ranks, plugin)
    bodies = pipelining.cut(model, num_stages, plugin.split_points, plugin.example)
    _refuse_tied(model, bodies)
    return bodies


def _num_stages(size: int, plugin: PipelineParallelPlugin) -> int:
    is_interleaved, is_1f1b = plugin.schedule == "interleaved1f1b", plugin.schedule == "1f1b"
    given = None if plugin.split_points is None else len(plugin.split_points) + 1
    num_stages = given if is_interleaved and given else size * (2 if is_interleaved else 1)
    if num_stages % size or (is_interleaved and num_stages < 2 * size):
        raise ConfigError(
            f"split_points={list(plugin.split_points or ())} make {num_stages} stages, and "
            f"schedule='interleaved1f1b' on {size} ranks takes 2 or more for each: {2 * size}, {3 * size} ..."
        )
    count = plugin.num_microbatches or num_stages
    if (is_1f1b and count < num_stages) or not stages.is_valid(plugin.schedule, count, size):
        way = "at least as many as stages" if is_1f1b else "a multiple of the ranks, or fewer"
        raise ConfigError(
            f"num_microbatches={count} does not go with schedule={plugin.schedule!r} and {num_stages} stages on "
            f"{size} ranks: it takes {way}"
        )
    return num_stages


def _put_back(body: nn.Module, model: nn.Module) -> None:
    """Have ``model`` hold what its stage holds, where tracing has made modules of their own of its modules."""
    for of in ("_parameters", "_buffers"):
        for path, module in body.named_modules():
            for key, one in getattr(module, of).items():
                with contextlib.suppress(AttributeError):  # a constant, which tracing has made a buffer
                    held = getattr(model.get_submodule(path), of)
                    held[key] = one if key in held else held[key]


def _refuse_tied(model: nn.Module, bodies: Sequence[nn.Module]) -> None:
    """Raise ``ConfigError`` for a parameter that two stages share, which would become two that differ."""
    found: dict[int, tuple[int, str]] = {}
    for number, body in enumerate(bodies):
        for name, one in body.named_parameters(remove_duplicate=False):
            stage, other = found.setdefault(id(one), (number, name))
            if stage != number:
                raise ConfigError(
                    f"{other!r} and {name!r} of the {type(model).__name__} are one parameter, and they lie in stages "
                    f"{stage} and {number}: choose split_points that put both into one stage, or untie them"
                )
