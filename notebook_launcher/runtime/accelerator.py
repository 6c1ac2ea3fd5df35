"""``Accelerator``: the one object a training function holds. A facade; the work is done by the parts beside it."""

# ruff: noqa: FBT001, FBT002 - positional booleans where Accelerate has them

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_launcher.core import config, events
from notebook_launcher.runtime import data, gather, models, optim, options, precision, process, strategies
from notebook_launcher.runtime.accumulation import Accumulation, Progress
from notebook_launcher.runtime.groups import Groups
from notebook_launcher.runtime.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from notebook_launcher.runtime.accumulation import Group

_logger = logging.getLogger(__name__)
_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")
_D = TypeVar("_D")
_E = TypeVar("_E")


class Accelerator(Identity):
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
    ) -> None:
        """Take this process's place in its run; several of them share one process group.

        ``split_batches``: a loader's batch size is that of all processes together. ``mixed_precision``: "no", "bf16" or
        "fp16". ``scheduler_steps_per_process``: schedulers step once for each process at an optimizer step, as
        Accelerate's do. Raises ``ConfigError`` for an argument that contradicts the launch, that the device can't do,
        or that is not supported yet.
        """
        options.refuse_unsupported(
            dataloader_config=dataloader_config,
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            rng_types=rng_types,
            log_with=log_with,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            kwargs_handlers=kwargs_handlers,
            dynamo_backend=dynamo_backend,
            parallelism_config=parallelism_config,
        )
        world = config.world()
        precision_name = options.mixed_precision(mixed_precision, world)
        num_steps = options.gradient_accumulation_steps(gradient_accumulation_steps, world)
        place = process.place(world, cpu=cpu)
        self._precision = precision.choose(precision_name, place.backend, place.why_device)
        self._process = process.join(place)
        self._strategy = strategies.create(world.strategy, self._process)
        self._backward = self._strategy.backward
        self._accumulation = Accumulation(num_steps, new_scaling=self._precision.new_scaling)
        self._progress = Progress()
        self._data_options = data.DataOptions(split_batches=split_batches)
        self._step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._scheduler_steps_per_process = scheduler_steps_per_process
        self.device_placement = device_placement
        self.project_dir = project_dir
        self._models: list[tuple[nn.Module, nn.Module]] = []  # as given, as prepared
        self._optimizers: list[optim.PreparedOptimizer] = []
        self._schedulers: list[optim.PreparedScheduler] = []
        self._loaders: list[data.PreparedLoader] = []
        self._groups = Groups(self._accumulation, self._progress, self._strategy, self._optimizers, self._models)

    # --- facts -------------------------------------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """The precision in force: "no", "bf16" or "fp16"."""
        return self._precision.name

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is split among the processes, rather than each getting its own."""
        return self._data_options.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether every process gets the same number of batches."""
        return self._data_options.even_batches

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

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Report ``values`` of ``step`` from the main process; in a launched run they stream to the notebook.

        Tensors and arrays become numbers, or lists of them.
        """
        del log_kwargs  # for trackers, by name; there are none yet
        if self.is_main_process:
            plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
            events.emit(events.Metric(plain, step, time.time()))

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
        """
        placed = device_placement or [self.device_placement] * len(objects)
        if len(placed) != len(objects):
            raise ValueError(
                f"device_placement has {len(placed)} entries for {len(objects)} objects; give one for each"
            )
        ready = [self._prepare_one(thing, place) for thing, place in zip(objects, placed, strict=True)]
        ready = [self.prepare_scheduler(thing) if optim.is_scheduler(thing) else thing for thing in ready]
        return ready[0] if len(ready) == 1 else tuple(ready)

    def _prepare_one(self, thing: Any, place: bool) -> Any:
        if isinstance(thing, nn.Module):
            return self.prepare_model(thing, device_placement=place)
        if isinstance(thing, DataLoader):
            return self.prepare_data_loader(thing, device_placement=place)
        if isinstance(thing, torch.optim.Optimizer):
            return self.prepare_optimizer(thing)
        return thing

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """``model`` on ``device``, in this precision, spread as the strategy says.

        ``evaluation_mode`` keeps it on this process, without gradient exchange.
        """
        for given, prepared in self._models:
            if model is given or model is prepared:
                return prepared
        if self.device_placement if device_placement is None else device_placement:
            model = model.to(self.device)
        seen = models.autocast_view(model, self._precision)
        prepared = seen if evaluation_mode else self._strategy.wrap(seen)
        self._models.append((model, prepared))
        return prepared

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
        self._optimizers.append(prepared)
        self._groups.link()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> optim.PreparedScheduler:
        """``scheduler``, stepping once per optimizer step; see ``scheduler_steps_per_process``."""
        for prepared in self._schedulers:
            if scheduler is prepared or scheduler is prepared.scheduler:
                return prepared
        per_process = self._scheduler_steps_per_process and not self.split_batches
        if not self._schedulers and self.use_distributed and self.is_main_process:
            rule = f"{self.num_processes} times, once a process," if per_process else "once, not once a process,"
            _logger.warning("Schedulers step %s at each optimizer step (scheduler_steps_per_process).", rule)
        prepared = optim.PreparedScheduler(
            scheduler,
            self._accumulation,
            optim.owner_of(scheduler, self._optimizers),
            with_optimizer=self._step_scheduler_with_optimizer,
            num_repeats=self.num_processes if per_process else 1,
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
        prepared = data.prepare(data_loader, self._process, self._progress, self._data_options, place=place)
        if prepared not in self._loaders:
            self._loaders.append(prepared)
        return prepared

    def unwrap_model(
        self,
        model: nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> nn.Module:
        """The very module that was given to ``prepare``.

        ``keep_torch_compile`` False also undoes ``torch.compile``. ``keep_fp32_wrapper`` makes no difference:
        precision is never put into the module itself.
        """
        del keep_fp32_wrapper
        inner = models.compiled_from(model)
        if any(inner is prepared for _, prepared in self._models):
            model = inner  # compiled after prepare
        return models.unwrap(model, keep_torch_compile=keep_torch_compile)

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

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        """Add the gradients of ``loss`` (0-d), divided by the micro-batches of its accumulation group."""
        window = self._accumulation.current
        if window.divisor != 1:
            loss = loss / window.divisor
        window.is_pending = window.has_run = True
        if window.scaling is not None:
            loss = window.scaling.scale(loss)
        self._backward(loss, **keywords)

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

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which torch computes in this precision."""
        return self._precision.autocast()

    # --- collectives -------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes joined along dim 0, in rank order, in any nesting; a 0-d one becomes (processes,).

        Every process calls it, with the same shapes.
        """
        return gather.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What was computed for the current batches of all processes: each sample once, in the data set's order.

        Tensors have samples along dim 0; lists of plain values are gathered too, and lists of containers one element a
        sample. ``use_gather_object`` takes every list as one of samples. Raises ``ValueError`` for tensors that differ
        in another dim.
        """
        return gather.gather_samples(
            input_data, self._progress.latest, self._process.rank, as_objects=use_gather_object
        )
