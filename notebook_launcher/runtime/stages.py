"""A model's stages as torch's schedules run them: which stage computes which microbatch when is theirs to say.

What they move are activations and their gradients. The batch is on every rank of a pipeline, so that the first stage
and the loss take their microbatches of it by number, in any nesting; shapes are found out by a forward that leaves no
trace, once for each shape of a microbatch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import agreement, mesh, models, pipelining, trees

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from notebook_launcher.runtime.plugins import ParallelismConfig, PipelineParallelPlugin
    from notebook_launcher.runtime.process import Process

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
}
_MAX_KINDS = 8  # of microbatches, by shape


class Ranks:
    """The ranks of one pipeline, this among them, and those of others that hold the same stages."""

    def __init__(self, process: Process, parallelism: ParallelismConfig) -> None:
        """Raise ``ConfigError`` where the sizes don't go with the number of processes."""
        whole = mesh.build(process, parallelism, "pp")
        self.rank, self.device = process.rank, process.device
        self.data = mesh.data_process(process, whole)
        self.group = whole.get_group("pp")
        self.size, self.place = whole["pp"].size(), whole.get_local_rank("pp")
        names = tuple(name for name in whole.mesh_dim_names or () if name != "pp")
        is_sharded = "dp_shard" in names and whole["dp_shard"].size() > 1
        self.sharding = whole[names] if is_sharded else None  # the mesh that a stage is sharded over

    def global_rank(self, place: int) -> int:
        """Of the rank in this ``place`` of the pipeline."""
        return dist.get_global_rank(self.group, place % self.size)

    def from_owner(self, thing: Any, stage: int) -> Any:
        """The object that the rank of ``stage`` has, on all ranks of the pipeline."""
        box = [thing]
        dist.broadcast_object_list(box, self.global_rank(stage), self.group)
        return box[0]

    def from_last(self, tree: Any) -> Any:
        """The last stage's tree, its tensors one by one, on all ranks of the pipeline."""
        hollow = trees.map_leaves(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, tree)
        hollow = self.from_owner(hollow, -1)
        has_it = self.place == self.size - 1
        leaves = []
        for own, leaf in itertools.zip_longest(trees.leaves(tree) if has_it else (), trees.leaves(hollow)):
            value = leaf
            if isinstance(leaf, torch.Tensor):
                value = own.contiguous() if has_it else torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)
                dist.broadcast(value, self.global_rank(-1), self.group)
            leaves.append(value)
        return _filled(hollow, leaves)

    def same_batch(self, inputs: Any, target: Any) -> int:
        """Samples in the batch; ``ConfigError``, on all ranks that take the step together, where theirs differ."""
        size = trees.num_samples(inputs) or 0
        outline = zlib.crc32(str(trees.outline((inputs, target))).encode())
        told = torch.tensor([size, -size, outline, -outline], device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX, self.group)
        if self.sharding is not None:
            dist.all_reduce(told[:2], dist.ReduceOp.MAX)
        most, least, *outlines = told.tolist()
        if most != -least or not most:
            raise ConfigError(
                f"a pipeline step was begun with batches of {-least} and of {most} samples: ranks of one pipeline need "
                "the same batch, which a loader from accelerator.prepare gives them, and those of one sharded stage as "
                "many samples (even_batches=True)"
            )
        if sum(outlines):
            raise ConfigError(
                "a pipeline step was begun with batches that differ in shape or dtype; here: "
                f"{trees.outline((inputs, target))}. Ranks of one pipeline need the same batch, which a loader from "
                "accelerator.prepare gives them."
            )
        return size

    def any_is_set(self, flag: bool) -> bool:  # noqa: FBT001
        """Whether it is, on any of the ranks that share a sharded stage; those of one pipeline agree by themselves."""
        if self.sharding is None:
            return flag
        return agreement.largest(flag) == [1]

    def average(self, stages: Iterable[nn.Module]) -> None:
        """Make gradients those of all pipelines' batches; sharded ones are already."""
        if self.sharding is not None or self.data.num_processes == 1:
            return
        parameters = [one for stage in stages for one in stage.parameters() if one.requires_grad]
        if not parameters:
            return
        has_grad = torch.tensor([one.grad is not None for one in parameters], dtype=torch.uint8, device=self.device)
        dist.all_reduce(has_grad, dist.ReduceOp.MAX, self.data.group)
        on_the_way = []
        for parameter, is_used in zip(parameters, has_grad.tolist(), strict=True):
            if is_used:
                value = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = value.contiguous()
                on_the_way.append(
                    (dist.all_reduce(parameter.grad, group=self.data.group, async_op=True), parameter.grad)
                )
        for work, gradient in on_the_way:
            work.wait()
            gradient.div_(self.data.num_processes)


@dataclasses.dataclass
class _Work:
    """A batch on its way through a model's stages."""

    inputs: list[tuple[Any, ...]]  # by microbatch, as all lists here
    targets: list[Any]
    sizes: list[int]  # samples, without those that only fill up
    needs_outputs: bool
    first: int = 0  # microbatch of the schedule that runs now
    outputs: list[Any] = dataclasses.field(default_factory=list)
    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Kind:
    """What is known of microbatches of one shape."""

    shapes: list[Any]  # by stage: of the tensors that it gives
    schedules: dict[int, Any] = dataclasses.field(default_factory=dict)  # by the number of microbatches


class Stage(nn.Module):
    """Consecutive modules of a model, as torch's schedules call them: tensors come, a tuple of tensors leaves."""

    def __init__(
        self, body: nn.Module, precision: Any, blocks: Iterable[str] | None, number: int, num_stages: int
    ) -> None:
        """``blocks`` are the classes of modules that it is sharded by; None: those of the modules that follow here."""
        super().__init__()
        self.body = body
        self._no_split_modules = tuple(blocks or {type(module).__name__ for module in body.children()})
        self.is_first, self.is_last = number == 0, number == num_stages - 1
        self.autocast = contextlib.nullcontext() if precision is None else precision.autocast()
        self.takes: Any = None  # how the tensors that come make an input
        self.gives: Any = None
        self.work: _Work
        self.latest: Any = None  # the last stage's outputs, which need be no tensors

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The output's tensors, for those of the input; the first stage is given the microbatch's number."""
        if self.is_first:
            inputs = self.work.inputs[self.work.first + int(tensors[0])]
        else:
            inputs = (_filled(self.takes, tensors),) if isinstance(self.body, nn.Sequential) else tensors
        with self.autocast:
            outputs = self.body(*inputs)
        if self.is_last:
            self.latest = outputs = trees.to_float32(outputs)
            return tuple(leaf for leaf in trees.leaves(outputs) if isinstance(leaf, torch.Tensor))
        leaves, self.gives = list(trees.leaves(outputs)), trees.map_leaves(lambda _: None, outputs)
        wrong = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        if wrong:
            end = type([*self.body.children()][-1]).__name__
            raise ConfigError(
                f"a stage ends with a {end}, whose output has {wrong[0]!r} in it, and only tensors go from one stage "
                "to the next: end it after another module, by split_points"
            )
        return tuple(leaf.contiguous() for leaf in leaves)


class PipelinedModel(pipelining.Pipelined):
    """A model whose stages are on several ranks."""

    def __init__(
        self, module: nn.Module, own: dict[int, Stage], num_stages: int, ranks: Ranks, plugin: PipelineParallelPlugin
    ) -> None:
        """``own`` are this rank's stages, by their number."""
        super().__init__(module)
        self.__dict__["stages"] = own  # their modules are in the model already
        self.num_stages = num_stages
        self._ranks = ranks
        self._plugin = plugin
        self._known: dict[Any, _Kind] = {}

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise ``ConfigError``: there is no rank that could call the model."""
        raise ConfigError(
            f"the {type(models.unwrap(self)).__name__} was called, and strategy='pp' has cut it into stages on "
            "several ranks: use accelerator.pipeline_step(batch, target), or pipeline_forward(batch) for its outputs"
        )

    def run(self, inputs: tuple[Any, ...], target: Any, *, training: bool, needs_outputs: bool) -> Any:
        """The loss of a batch, or its outputs, on all ranks of the pipeline."""
        ranks = self._ranks
        num_samples = ranks.same_batch(inputs, target)
        fixed = 0 if self._plugin.example is None else trees.num_samples(self._plugin.example) or 0
        count = -(-num_samples // fixed) if fixed else (self._plugin.num_microbatches or self.num_stages)
        pieces = pipelining.runs(count * fixed or num_samples, count, self._is_valid)
        ends = itertools.accumulate(size for count, size in pieces for _ in range(count))
        bounds = list(itertools.pairwise([0, *(min(end, num_samples) for end in ends)]))
        work = _Work(
            [_filled_up(_part(inputs, num_samples, *bound), fixed) for bound in bounds],
            [] if needs_outputs else [_part(target, num_samples, *bound) for bound in bounds],
            [stop - start for start, stop in bounds],
            needs_outputs=needs_outputs,
        )
        for stage in self.stages.values():
            stage.work = work
        with torch.set_grad_enabled(training):
            kinds = self._kinds(work, pieces, training=training)
            for (count, _), kind in zip(pieces, kinds, strict=True):
                self._pass(count, kind, training=training)
                work.first += count
        if training:
            ranks.average(self.stages.values())
        if needs_outputs:
            given = work.outputs
            return ranks.from_last(
                trees.concatenate(given, trees.row_depth(given[0], work.sizes[0])) if given else None
            )
        loss = torch.stack(work.losses).sum() if work.losses else torch.zeros((), device=ranks.device)
        dist.broadcast(loss, ranks.global_rank(-1), ranks.group)
        return loss

    def _is_valid(self, count: int) -> bool:
        return is_valid(self._plugin.schedule, count, self._ranks.size)

    def _kinds(self, work: _Work, pieces: Sequence[tuple[int, int]], *, training: bool) -> list[_Kind]:
        """By piece, what is known of microbatches as those; all ranks find it out where one doesn't know it.

        Few are kept, since a schedule has memory for what its ranks receive.
        """
        firsts = [sum(count for count, _ in pieces[:number]) for number in range(len(pieces))]
        keys = [(str(trees.outline(work.inputs[first])), training) for first in firsts]
        if self._ranks.any_is_set(any(key not in self._known for key in keys)):
            for key, first in dict(zip(keys, firsts, strict=True)).items():
                work.first = first
                shapes = self._probe(training=training)
                self._known.setdefault(key, _Kind(shapes))
            work.first = 0
        found = [self._known[key] for key in keys]
        for key in list(self._known)[:-_MAX_KINDS]:
            del self._known[key]
        return found

    def _probe(self, *, training: bool) -> list[Any]:
        """By stage, the shapes that it gives for a microbatch as the present one; buffers and random numbers stay."""
        ranks, told = self._ranks, list[Any]()
        device = ranks.device
        for number in range(self.num_stages):
            stage, own = self.stages.get(number), None
            if stage is not None:
                before, stage.takes = told[-1] if told else ([], None)
                inputs = [torch.zeros(shape, dtype=dtype, device=device) for shape, _, dtype, _ in before]
                kept = [(buffer, buffer.clone()) for buffer in stage.buffers()]
                devices = [] if device.type == "cpu" else [device]
                with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
                    given = stage(*inputs if number else [torch.zeros(1, dtype=torch.int64)])
                    for buffer, value in kept:
                        buffer.copy_(value)
                needs_grad = any(one[3] for one in before) or any(one.requires_grad for one in stage.parameters())
                needs_grad &= training
                own = [(one.shape, one.stride(), one.dtype, needs_grad and one.is_floating_point()) for one in given]
            told.append(ranks.from_owner((own, stage and stage.gives), number))
        return [shapes for shapes, _ in told]

    def _pass(self, count: int, kind: _Kind, *, training: bool) -> None:
        """Have ``count`` microbatches pass through all stages."""
        if count not in kind.schedules:
            kind.schedules[count] = self._new_schedule(count, kind.shapes)
        schedule, numbers = kind.schedules[count], torch.arange(count)
        call = schedule.step if training else schedule.eval
        try:
            call(*(numbers,) if 0 in self.stages else (), target=numbers, losses=[], return_outputs=False)
        except RuntimeError as error:
            cause = error.__cause__
            if isinstance(cause, Exception) and "failed to run" in str(error).lower():
                raise cause from None  # torch puts what the model raised behind a list of its inputs
            raise
        finally:
            for stage in self.stages.values():
                stage.latest = None

    def _new_schedule(self, count: int, shapes: list[Any]) -> Any:
        ranks = self._ranks
        stages = [
            PipelineStage(
                stage,
                number,
                self.num_stages,
                ranks.device,
                input_args=_examples(shapes[number - 1]) if number else torch.zeros(1, dtype=torch.int64),
                output_args=_examples(shapes[number]),
                group=ranks.group,
            )
            for number, stage in self.stages.items()
        ]
        kind = SCHEDULES[self._plugin.schedule]
        if kind is Schedule1F1B and count < self.num_stages:
            kind = ScheduleGPipe
        own = stages if kind is ScheduleInterleaved1F1B else stages[0]
        return kind(own, count, self._judge, scale_grads=False)

    def _judge(self, _: Any, number: torch.Tensor) -> torch.Tensor:
        """What a microbatch adds to the batch's loss, when the last stage has computed it."""
        last = self.stages[self.num_stages - 1]
        work, outputs, last.latest = last.work, last.latest, None
        at = work.first + int(number)
        if self._plugin.example is not None:
            outputs = _part(outputs, trees.num_samples(outputs) or 0, 0, work.sizes[at])
        if work.needs_outputs:
            work.outputs.append(outputs)
            return torch.zeros(())
        loss = pipelining.loss_of(self._plugin)(outputs, work.targets[at])
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise ConfigError(f"loss_fn gave {what}, and it must give a 0-d tensor, the mean over the samples")
        share: torch.Tensor = loss.float() * (work.sizes[at] / sum(work.sizes))
        work.losses.append(share.detach())
        return share


def is_valid(schedule: str, count: int, num_ranks: int) -> bool:
    """Whether ``schedule`` can be of ``count`` microbatches."""
    return SCHEDULES[schedule] is not ScheduleInterleaved1F1B or count % max(1, count // num_ranks) == 0


def _filled(hollow: Any, leaves: Iterable[Any]) -> Any:
    """A tree like ``hollow``, with these leaves."""
    values = iter(leaves)
    return trees.map_leaves(lambda _: next(values), hollow)


def _part(tree: Any, num_samples: int, start: int, stop: int) -> Any:
    return trees.part(tree, start, stop, trees.row_depth(tree, num_samples))


def _filled_up(tree: Any, num_samples: int) -> Any:
    """The tree with as many samples, the present ones again, for a model that was traced with so many."""
    size = trees.num_samples(tree) or 0
    if num_samples <= size:
        return tree
    return trees.map_leaves(lambda leaf: leaf[torch.arange(num_samples, device=leaf.device) % size], tree)


def _examples(shapes: Any) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=needs_grad)
        for shape, stride, dtype, needs_grad in shapes
    )
