"""``Accelerator``: the one object a training function holds. A facade; the work is done by the parts beside it."""

# ruff: noqa: FBT001, FBT002 - positional booleans where Accelerate has them

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_launcher.core import config, notices
from notebook_launcher.runtime import (
    checks,
    data,
    models,
    optim,
    options,
    plugins,
    precision,
    process,
    states,
    strategies,
)
from notebook_launcher.runtime.accumulation import Accumulation, Progress
from notebook_launcher.runtime.checkpoint import Checkpoints
from notebook_launcher.runtime.exchanging import Exchanging
from notebook_launcher.runtime.groups import Groups
from notebook_launcher.runtime.loops import Loops
from notebook_launcher.runtime.memory import release
from notebook_launcher.runtime.pipelining import Pipelining
from notebook_launcher.runtime.reporting import Reporting
from notebook_launcher.runtime.saving import Saving
from notebook_launcher.runtime.stepping import Stepping
from notebook_launcher.runtime.trackers import Trackers

if TYPE_CHECKING:
    import os


_logger = logging.getLogger(__name__)
_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")
_D = TypeVar("_D")
_E = TypeVar("_E")
_M = TypeVar("_M", bound=nn.Module)
_TAKEN = (nn.Module, torch.optim.Optimizer, DataLoader)
_PREPARED = (optim.PreparedOptimizer, data.PreparedLoader)


class Accelerator(Reporting, Stepping, Exchanging, Pipelining, Saving):
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
        kind = plugins.GradientAccumulationPlugin
        accumulation = options.of_type("gradient_accumulation_plugin", gradient_accumulation_plugin, kind)
        checks.flags(
            device_placement=device_placement,
            split_batches=split_batches,
            cpu=cpu,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            scheduler_steps_per_process=scheduler_steps_per_process,
        )
        self.device_placement = device_placement
        self._data_options = options.loader_options(dataloader_config, split_batches=split_batches)
        self._rng_types = options.rng_types(rng_types)
        self._profiling = keywords[plugins.ProfileKwargs]
        self._dynamo_backend = options.dynamo_backend(dynamo_backend)
        self._step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._scheduler_steps_per_process = scheduler_steps_per_process
        self.project_configuration = options.project(project_config, project_dir)
        given = {"deepspeed_plugin": deepspeed_plugin, "fsdp_plugin": fsdp_plugin, "pipeline_plugin": pipeline_plugin}
        world = options.with_plugins(config.world(), keywords, **given, parallelism_config=parallelism_config)
        precision_name = options.mixed_precision(mixed_precision, world)
        num_steps = options.gradient_accumulation_steps(gradient_accumulation_steps, accumulation, world)
        world = dataclasses.replace(world, gradient_accumulation_steps=num_steps)
        self._take_place(process.place(world, cpu=cpu), world.strategy, precision_name, keywords)
        self._make_parts(num_steps, accumulation)
        self._trackers = Trackers(log_with, self.logging_dir, is_main=self.is_main_process)
        states.remember(self)

    def _take_place(
        self, place: process.Process, strategy: str | None, precision_name: str, keywords: plugins.Keywords
    ) -> None:
        """Meet the other processes, once it is known that the device can do what is asked of it."""
        self._precision = precision.choose(precision_name, place.backend, place.why_device, keywords)
        self._process = process.join(place, keywords[plugins.InitProcessGroupKwargs])
        self._strategy = strategies.create(strategy, self._process, keywords, self._data_options)
        self._pipelining = keywords[plugins.PipelineParallelPlugin]
        self._backward = self._strategy.backward

    def _make_parts(self, num_steps: int, accumulation: plugins.GradientAccumulationPlugin) -> None:
        """The parts that do the work; they share the lists of what is prepared."""
        self._accumulation = Accumulation(
            num_steps,
            sync_at_end=accumulation.sync_with_dataloader,
            sync_each_batch=accumulation.sync_each_batch,
            new_scaling=self._precision.new_scaling,
        )
        self._loops = Loops()
        self._models: list[tuple[nn.Module, nn.Module]] = []  # as given, as prepared
        self._optimizers: list[optim.PreparedOptimizer] = []
        self._progress = Progress(self._optimizers)
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
        back as it is, a list of them with a warning. ``device_placement`` says for each object whether it moves.

        Raises ``ConfigError`` for an optimizer that was made from another model, a batch size that can't be split, and
        a loader of another accelerator; ``ValueError`` for as many placements as there are not objects. The methods
        that prepare one thing raise ``TypeError`` for any other.
        """
        placed = [self.device_placement] * len(objects) if device_placement is None else device_placement
        checks.instance("prepare(device_placement=...)", placed, (list, tuple), "a list of True or False, by object")
        if len(placed) != len(objects):
            raise ValueError(
                f"device_placement has {len(placed)} entries for {len(objects)} objects; give one for each"
            )
        for container in objects:
            inside = container.values() if isinstance(container, dict) else container
            things = inside if isinstance(container, list | tuple | dict) else ()
            left = [one for one in things if isinstance(one, _TAKEN) and not isinstance(one, _PREPARED)]
            if left and self.is_main_process:
                kinds = f"a {type(container).__name__} that holds a {type(left[0]).__name__}"
                notices.warn(f"prepare was given {kinds}, and prepares nothing in it; give each as an argument")
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

    def prepare_model(self, model: _M, device_placement: bool | None = None, evaluation_mode: bool = False) -> _M:
        """``model`` on ``device``, in this precision, spread as the strategy says, compiled for ``dynamo_backend``.

        ``evaluation_mode`` keeps it on this process, without gradient exchange. Raises ``ConfigError`` for trainable
        fp16 weights under fp16, whose gradients could not be unscaled.
        """
        checks.instance("prepare_model", model, nn.Module, "a model")
        checks.flags(evaluation_mode=evaluation_mode)
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
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> optim.PreparedOptimizer:
        """``optimizer``, stepping when an accumulation group is complete."""
        del device_placement  # it has the parameters' place
        checks.instance("prepare_optimizer", optimizer, torch.optim.Optimizer, "an optimizer")
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
        is_other = isinstance(scheduler, type | nn.Module | torch.optim.Optimizer)
        if is_other or not callable(getattr(scheduler, "step", None)):
            raise checks.wrong_type("prepare_scheduler", scheduler, "a learning-rate scheduler")
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
            self._optimizers,
            with_optimizer=self._step_scheduler_with_optimizer,
            num_repeats=num_repeats,
        )
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> data.PreparedLoader:
        """This process's share of ``data_loader``, its batches on ``device``."""
        checks.instance("prepare_data_loader", data_loader, DataLoader, "a DataLoader")
        place = self.device_placement if device_placement is None else device_placement
        prepared = data.prepare(
            data_loader, self._data_process, self._progress, self._data_options, place=place, rng_types=self._rng_types
        )
        if not any(prepared.is_twin_of(other) for other in self._loaders):
            self._loaders.append(prepared)
        return prepared

    def unwrap_model(self, model: _M, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> _M:
        """The very module that was given to ``prepare``.

        ``keep_torch_compile`` False also undoes ``torch.compile``. ``keep_fp32_wrapper`` makes no difference:
        precision is never put into the module itself.
        """
        del keep_fp32_wrapper
        checks.instance("unwrap_model", model, nn.Module, "a model")
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
        release(self.device)
        return [None] * len(objects)

    clear = free_memory
