"""``Accelerator``: the one object a training function holds. A facade; the work is done by the parts beside it."""

# ruff: noqa: FBT001, FBT002 - positional booleans where Accelerate has them

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_launcher.core import config, events
from notebook_launcher.runtime import (
    data,
    gather,
    memory,
    models,
    optim,
    options,
    plugins,
    precision,
    process,
    states,
    strategies,
    weighting,
)
from notebook_launcher.runtime.accumulation import Accumulation, Progress
from notebook_launcher.runtime.checkpoint import Checkpoints
from notebook_launcher.runtime.groups import Groups
from notebook_launcher.runtime.identity import Identity
from notebook_launcher.runtime.loops import Loops
from notebook_launcher.runtime.pipelining import Pipelining
from notebook_launcher.runtime.saving import Saving
from notebook_launcher.runtime.trackers import Trackers, plain

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.profiler import profile

    from notebook_launcher.runtime.accumulation import Group
    from notebook_launcher.runtime.trackers import GeneralTracker

_logger = logging.getLogger(__name__)
_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")
_D = TypeVar("_D")
_E = TypeVar("_E")
_M = TypeVar("_M", bound=nn.Module)


class Accelerator(Identity, Pipelining, Saving):
    """Makes one training loop run on any number of processes, on any device, in any precision.

    ::

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            loss = loss_fn(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    What is left out is what the launch chose. Works in a launched process, under ``torchrun``, in a Slurm step, and
    alone.
    """

    _trigger = False

    def __init__(  # noqa: PLR0913, PLR0917 - Accelerate's signature
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        rng_types: Any = None,
        log_with: Any = None,
        project_dir: str | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Any = None,
        dynamo_backend: Any = None,
        parallelism_config: Any = None,
        *,
        scheduler_steps_per_process: bool = False,
        pipeline_plugin: Any = None,
    ) -> None:
        """Take this process's place in its run; several of them share one process group.

        ``split_batches``: a loader's batch size is that of all processes together. ``mixed_precision``: "no", "bf16" or
        "fp16". ``scheduler_steps_per_process``: schedulers step once for each process at an optimizer step, as
        Accelerate's do. ``kwargs_handlers``: ``AutocastKwargs``, ``DistributedDataParallelKwargs`` and the like, one of
        a kind. ``rng_types``: random streams that each pass over a loader makes equal on all processes, "torch" or the
        device's type; those of samplers always are. ``dynamo_backend``: compile models with it. ``log_with``: trackers
        that ``init_trackers`` opens, "tensorboard", "wandb", "mlflow", "all", a ``GeneralTracker``, or several.

        Raises ``ConfigError`` for an argument that contradicts the launch or another argument, that the device can't
        do, or that is not supported yet.
        """
        keywords = plugins.Keywords(kwargs_handlers)
        plugin = options.of_type(
            "gradient_accumulation_plugin", gradient_accumulation_plugin, plugins.GradientAccumulationPlugin
        )
        self._data_options = options.loader_options(dataloader_config, split_batches=split_batches)
        self._rng_types = options.rng_types(rng_types)
        self._profiling = keywords[plugins.ProfileKwargs]
        self._dynamo_backend = options.dynamo_backend(dynamo_backend)
        self.project_configuration = options.project(project_config, project_dir)
        given = {"deepspeed_plugin": deepspeed_plugin, "fsdp_plugin": fsdp_plugin, "pipeline_plugin": pipeline_plugin}
        world = options.with_plugins(config.world(), keywords, **given, parallelism_config=parallelism_config)
        precision_name = options.mixed_precision(mixed_precision, world)
        num_steps = options.gradient_accumulation_steps(gradient_accumulation_steps, plugin, world)
        world = dataclasses.replace(world, gradient_accumulation_steps=num_steps)
        place = process.place(world, cpu=cpu)
        self._precision = precision.choose(precision_name, place.backend, place.why_device, keywords)
        self._process = process.join(place, keywords[plugins.InitProcessGroupKwargs])
        self._strategy = strategies.create(world.strategy, self._process, keywords, self._data_options)
        self._pipelining = keywords[plugins.PipelineParallelPlugin]
        self._backward = self._strategy.backward
        self._accumulation = Accumulation(
            num_steps,
            sync_at_end=plugin.sync_with_dataloader,
            sync_each_batch=plugin.sync_each_batch,
            new_scaling=self._precision.new_scaling,
        )
        self._progress = Progress()
        self._loops = Loops()
        self._step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._scheduler_steps_per_process = scheduler_steps_per_process
        self.device_placement = device_placement
        self._trackers = Trackers(log_with, self.logging_dir, is_main=self.is_main_process)
        self._models: list[tuple[nn.Module, nn.Module]] = []  # as given, as prepared
        self._optimizers: list[optim.PreparedOptimizer] = []
        self._schedulers: list[optim.PreparedScheduler] = []
        self._loaders: list[data.PreparedLoader] = []
        self._groups = Groups(self._accumulation, self._progress, self._strategy, self._optimizers, self._models)
        self._checkpoints = Checkpoints(
            self._process,
            self._strategy,
            self._precision.name,
            self.project_configuration,
            self._models,
            self._optimizers,
            self._schedulers,
            self._loaders,
            self._accumulation,
            self._groups,
        )
        states.remember(self)

    # --- facts -------------------------------------------------------------------------------------------------------

    @property
    def _data_process(self) -> process.Process:
        """The process as one of those that share the data."""
        return self._strategy.data_process

    @property
    def mixed_precision(self) -> str:
        """The precision in force: "no", "bf16" or "fp16"."""
        return self._precision.name

    @property
    def state(self) -> states.AcceleratorState:
        """This process's place and precision, as Accelerate's code asks for them."""
        return states.AcceleratorState(_given=self)

    @property
    def gradient_state(self) -> states.GradientState:
        """Where training is in its accumulation group and its data."""
        return states.GradientState(_given=self)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is split among the processes, rather than each getting its own."""
        return self._data_options.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether every process gets the same number of batches."""
        return self._data_options.even_batches

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """The project's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Where the project's logs go."""
        return self.project_configuration.logging_dir

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its group: gradients are exchanged and the optimizer steps."""
        return self._accumulation.current.sync

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a group."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        self._accumulation.set_num_steps(options.checked_num_steps(num_steps))

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a prepared optimizer's last step was skipped because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    # --- reporting ---------------------------------------------------------------------------------------------------

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers with an open run on this rank; those of most kinds are on rank 0 alone."""
        return self._trackers.active

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open a run of ``project_name`` with each tracker of ``log_with``, on rank 0.

        ``config`` has the hyperparameters to record; ``init_kwargs``, by tracker, options of what opens its run.
        """
        self._trackers.start(project_name, config, init_kwargs or {})

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Record ``values`` of ``step``, from rank 0, with the trackers; in a launched run they stream to the notebook.

        Tensors and arrays become numbers, or lists of them. ``log_kwargs``: by tracker, options of its ``log``.
        """
        self._trackers.log(values, step, log_kwargs or {})
        if self.is_main_process:
            events.emit(events.Metric(plain(values), step, time.time()))

    def progress(self, iterable: Iterable[_A], total: int | None = None, description: str = "") -> Iterator[_A]:
        """What ``iterable`` gives, a loader's batches for one; the notebook's monitor shows how far this process is.

        ``total`` is the number of steps where ``iterable`` has no length. Such loops may stand inside one another.
        """
        return self._loops.track(iterable, total, description)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker ``name``, or with ``unwrap`` its library's own object (a ``SummaryWriter``, a ``wandb.Run``).

        On a rank without trackers an object that swallows whatever is called on it. Raises ``ConfigError`` for a name
        that ``log_with`` does not have, or where no run is open.
        """
        return self._trackers.get(name, unwrap=unwrap)

    def end_training(self) -> None:
        """Close the trackers' runs, and wait for a save in the background. A launch does both at its end too.

        The process group stays: other accelerators of this process use it.
        """
        self._trackers.end()
        self._checkpoints.wait()

    # --- preparing ---------------------------------------------------------------------------------------------------

    @overload
    def prepare(self, first: _A, /, *, device_placement: list[bool] | None = None) -> _A: ...
    @overload
    def prepare(self, first: _A, second: _B, /, *, device_placement: list[bool] | None = None) -> tuple[_A, _B]: ...
    @overload
    def prepare(
        self, first: _A, second: _B, third: _C, /, *, device_placement: list[bool] | None = None
    ) -> tuple[_A, _B, _C]: ...
    @overload
    def prepare(
        self, first: _A, second: _B, third: _C, fourth: _D, /, *, device_placement: list[bool] | None = None
    ) -> tuple[_A, _B, _C, _D]: ...
    @overload
    def prepare(
        self, first: _A, second: _B, third: _C, fourth: _D, fifth: _E, /, *, device_placement: list[bool] | None = None
    ) -> tuple[_A, _B, _C, _D, _E]: ...
    @overload
    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any: ...
    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Models, optimizers, loaders and schedulers made ready for this run, in the order given; one comes back bare.

        Models move to ``device`` and are spread as the strategy says; loaders give this process its share; optimizers
        and schedulers act when an accumulation group is complete. What is prepared already, and anything else, comes
        back as it is. ``device_placement`` says for each object whether it moves.

        Raises ``ConfigError`` for an optimizer that was made from another model, a batch size that can't be split, and
        a loader of another accelerator; ``ValueError`` for as many placements as there are not objects.
        """
        placed = device_placement or [self.device_placement] * len(objects)
        if len(placed) != len(objects):
            raise ValueError(
                f"device_placement has {len(placed)} entries for {len(objects)} objects; give one for each"
            )
        ready = [
            self.prepare_model(thing, device_placement=place) if isinstance(thing, nn.Module) else thing
            for thing, place in zip(objects, placed, strict=True)
        ]
        self._groups.check(ready)
        ready = [self._prepare_one(thing, place) for thing, place in zip(ready, placed, strict=True)]
        ready = [self.prepare_scheduler(thing) if optim.is_scheduler(thing) else thing for thing in ready]
        return ready[0] if len(ready) == 1 else tuple(ready)

    def _prepare_one(self, thing: Any, place: bool) -> Any:
        if isinstance(thing, DataLoader):
            return self.prepare_data_loader(thing, device_placement=place)
        if isinstance(thing, torch.optim.Optimizer):
            return self.prepare_optimizer(thing)
        return thing

    def prepare_model(
        self,
        model: _M,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> _M:
        """``model`` on ``device``, in this precision, spread as the strategy says, compiled for ``dynamo_backend``.

        ``evaluation_mode`` keeps it on this process, without gradient exchange. Raises ``ConfigError`` for trainable
        fp16 weights under fp16, whose gradients could not be unscaled.
        """
        prepared: Any
        for given, prepared in self._models:
            if model is given or model is prepared:
                return prepared  # type: ignore[no-any-return]
        self._precision.check(model)
        if self.device_placement if device_placement is None else device_placement:
            model = (self._process.backend.moved if evaluation_mode else self._strategy.place)(model)
        seen = models.autocast_view(model, self._precision)
        prepared = seen if evaluation_mode else self._strategy.wrap(seen)
        if self._dynamo_backend and models.compiled_from(prepared) is prepared:
            prepared = torch.compile(prepared, backend=self._dynamo_backend)
        self._models.append((model, prepared))
        return prepared  # type: ignore[no-any-return]

    def prepare_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool | None = None,
    ) -> optim.PreparedOptimizer:
        """``optimizer``, stepping when an accumulation group is complete."""
        del device_placement  # it has the parameters' place
        for prepared in self._optimizers:
            if optimizer is prepared or optimizer is prepared.optimizer:
                return prepared
        if isinstance(optimizer, optim.PreparedOptimizer):
            optimizer = optimizer.optimizer
        prepared = optim.PreparedOptimizer(optimizer, self._accumulation, self._strategy.step)
        self._strategy.pair(optimizer)
        self._optimizers.append(prepared)
        self._groups.link()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> optim.PreparedScheduler:
        """``scheduler``, stepping once per optimizer step; see ``scheduler_steps_per_process``."""
        for prepared in self._schedulers:
            if scheduler is prepared or scheduler is prepared.scheduler:
                return prepared
        per_process = self._scheduler_steps_per_process and not self.split_batches
        num_repeats = self._data_process.num_processes if per_process else 1
        if not self._schedulers and self.use_distributed and self.is_main_process:
            rule = f"{num_repeats} times, once a process," if per_process else "once, not once a process,"
            _logger.warning("Schedulers step %s at each optimizer step (scheduler_steps_per_process).", rule)
        prepared = optim.PreparedScheduler(
            scheduler,
            self._accumulation,
            optim.owner_of(scheduler, self._optimizers),
            with_optimizer=self._step_scheduler_with_optimizer,
            num_repeats=num_repeats,
        )
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
    ) -> data.PreparedLoader:
        """This process's share of ``data_loader``, its batches on ``device``."""
        place = self.device_placement if device_placement is None else device_placement
        prepared = data.prepare(
            data_loader, self._data_process, self._progress, self._data_options, place=place, rng_types=self._rng_types
        )
        if not any(prepared.is_twin_of(other) for other in self._loaders):
            self._loaders.append(prepared)
        return prepared

    def unwrap_model(
        self,
        model: _M,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> _M:
        """The very module that was given to ``prepare``.

        ``keep_torch_compile`` False also undoes ``torch.compile``. ``keep_fp32_wrapper`` makes no difference:
        precision is never put into the module itself.
        """
        del keep_fp32_wrapper
        inner: Any = models.compiled_from(model)
        if any(inner is (one if one is given else models.compiled_from(one)) for given, one in self._models):
            model = inner  # compiled in prepare, or after it
        return models.unwrap(model, keep_torch_compile=keep_torch_compile)  # type: ignore[return-value]

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of all that was prepared, and give back its memory; return a None for each of ``objects``.

        ``model, optimizer = accelerator.free_memory(model, optimizer)`` drops the caller's references too.
        """
        self._schedulers.clear()
        self._loaders.clear()
        self._groups.forget()
        self._strategy.forget()
        self._checkpoints.forget()
        memory.release(self.device)
        return [None] * len(objects)

    clear = free_memory

    # --- stepping ----------------------------------------------------------------------------------------------------

    def accumulate(self, *accumulated: nn.Module) -> Group:
        """A context for one micro-batch of ``accumulated`` models; gradients are exchanged when the group is complete.

        A group has ``gradient_accumulation_steps`` micro-batches, and ends with the loader that drives the loop. In the
        context ``backward`` divides by the micro-batches that the group holds, the last, short group's too. Each set of
        models has groups of its own, and the optimizers of their parameters step when those are complete.
        """
        return self._groups[accumulated]

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context in which backward keeps ``model``'s gradients on this process."""
        context = self._strategy.no_sync(model)
        return contextlib.nullcontext() if context is None else context

    def trigger_sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose one backward exchanges ``model``'s gradients, though its forwards ran under ``no_sync``."""
        return self._strategy.sync_in_backward(model) or contextlib.nullcontext()

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Sequence[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        """A context in which processes may train ``joinables``, prepared models, on fewer batches than others.

        ``even_batches`` is in force for passes over loaders that begin inside; None leaves it as it is.
        """
        with data.evenness(self._loaders, even_batches), self._strategy.join(joinables) or contextlib.nullcontext():
            yield

    def backward(self, loss: torch.Tensor, *, num_items: float | torch.Tensor | None = None, **keywords: Any) -> None:
        """Add the gradients of ``loss`` (0-d), divided by the micro-batches of its accumulation group.

        With ``num_items``, ``loss`` is a sum over so many (tokens, boxes ...) on this process, and the group's gradient
        becomes that of the mean over the items of all its micro-batches on all processes, however they differ::

            with accelerator.accumulate(model):
                loss_sum = cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="sum")
                accelerator.backward(loss_sum, num_items=(labels != -100).sum())

        Every process then calls it as often. Other keywords are those of ``torch.Tensor.backward``.
        """
        window = self._accumulation.current
        if not window.sync and not self._accumulation.entered:
            self._accumulation.end_if_left()
        if num_items is not None or window.items is not None:
            loss = weighting.weigh(loss, num_items, self._accumulation, self._data_process)
        elif window.divisor != 1:
            loss = loss / window.divisor
        window.is_pending = window.has_run = True
        if window.scaling is not None:
            loss = window.scaling.scale(loss)
        if keywords:
            self._backward(loss, **keywords)
        else:
            self._backward(loss)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring gradients that fp16 has scaled to their true size: those of ``optimizer`` (or several), else of all.

        ``clip_grad_norm_`` and the optimizer's step do it by themselves. Within an unfinished group nothing is done.
        """
        if optimizer is None:
            optimizer = self._optimizers
        for one in map(self.prepare_optimizer, optimizer if isinstance(optimizer, list | tuple) else [optimizer]):
            window = one.current_window()
            if window.scaling is not None and window.sync:
                window.scaling.unscale(one.optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale the gradients to a norm of at most ``max_norm``; return their norm before, 0-d.

        Within an unfinished accumulation group nothing is scaled.
        """
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        window = self._accumulation.current
        limit = max_norm if window.sync else float("inf")
        if window.scaling is None:
            return self._strategy.clip(parameters, limit, norm_type)
        parameters = list(parameters)
        if window.sync:
            self.unscale_gradients(optim.holders_of(parameters, self._optimizers))
            return self._strategy.clip(parameters, limit, norm_type)
        return window.scaling.true_size(self._strategy.clip(parameters, limit, norm_type))

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Bring each gradient into [-clip_value, clip_value]; within an unfinished accumulation group do nothing."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self._accumulation.current.sync:
            self.unscale_gradients(optim.holders_of(parameters, self._optimizers))
            self._strategy.clip_value(parameters, clip_value)

    def autocast(
        self, autocast_handler: plugins.AutocastKwargs | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """A context in which torch computes in this precision; ``autocast_handler`` replaces the accelerator's own."""
        return self._precision.autocast(autocast_handler)

    def profile(
        self, profile_handler: plugins.ProfileKwargs | None = None
    ) -> contextlib.AbstractContextManager[profile]:
        """A context that gives a ``torch.profiler.profile`` of what runs inside.

        Each process writes a Chrome trace ``profile_<rank>.json`` into ``output_trace_dir``, where that is set.
        """
        return plugins.profiling(profile_handler or self._profiling, self.process_index)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context that would split sequences among processes; none of the strategies does, so it changes nothing."""
        del buffers, buffer_seq_dims, no_restore_buffers
        return contextlib.nullcontext()

    # --- collectives -------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes joined along dim 0, in rank order, in any nesting; a 0-d one becomes (processes,).

        They keep dtype and device. Raises ``ValueError`` where processes differ in shape or dtype.
        """
        return gather.gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Every tensor's "sum", "mean", "max", "min" or "prod" over the processes, times ``scale``, in any nesting.

        Shapes stay, and dtypes but for integers and bools: their sums and products are int64, their means fp32. "none"
        leaves all as it is. Raises ``ValueError`` where processes differ in shape or dtype, ``ConfigError`` for another
        reduction, ``TypeError`` for numbers and arrays.
        """
        return gather.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Every tensor as long in ``dim`` as the longest of all processes, filled with ``pad_index``, in any nesting.

        ``pad_first`` fills at the start. Tensors without that dim are left as they are.
        """
        return gather.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Have the next ``check_trigger`` say True on every process."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process has called ``set_trigger`` since the last check; every process calls this."""
        is_set, self._trigger = gather.any_is_set(self._trigger), False
        return is_set

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What was computed for the current batches of all processes: each sample once, in the data set's order.

        Tensors have samples along dim 0; lists of plain values are gathered too, and lists of containers one element a
        sample. ``use_gather_object`` takes every list as one of samples. Raises ``ValueError`` for tensors that differ
        in another dim.
        """
        return gather.gather_samples(
            input_data, self._progress.latest, self._data_process, as_objects=use_gather_object
        )
