"""What ``Accelerator`` has for a training step: accumulation, backward, clipping, autocast."""

# ruff: noqa: FBT001 - positional booleans where Accelerate has them

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import checks, data, optim, plugins, weighting
from notebook_launcher.runtime.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.profiler import profile

    from notebook_launcher.runtime.accumulation import Accumulation, Group, Progress, Window
    from notebook_launcher.runtime.groups import Groups
    from notebook_launcher.runtime.precision import Precision
    from notebook_launcher.runtime.strategies import Strategy


class Stepping(Identity):
    """What happens between a batch and the optimizer's step. Whoever inherits sets what is named here."""

    prepare_optimizer: Callable[..., optim.PreparedOptimizer]
    _accumulation: Accumulation
    _groups: Groups
    _progress: Progress
    _strategy: Strategy
    _backward: Callable[..., None]
    _precision: Precision
    _profiling: plugins.ProfileKwargs
    _loaders: list[data.PreparedLoader]
    _optimizers: list[optim.PreparedOptimizer]

    def accumulate(self, *accumulated: nn.Module) -> Group:
        """A context for one micro-batch of ``accumulated`` models; gradients are exchanged when the group is complete.

        A group has ``gradient_accumulation_steps`` micro-batches, and ends with the loader that drives the loop. In the
        context ``backward`` divides by the micro-batches that the group holds, the last, short group's too. Each set of
        models has groups of its own, and the optimizers of their parameters step when those are complete.
        """
        try:
            return self._groups[accumulated]
        except TypeError:
            self._groups.refuse_others(accumulated)  # a list has no hash to look it up by
            raise

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context in which backward keeps ``model``'s gradients on this process."""
        checks.instance("no_sync", model, nn.Module, "a prepared model")
        return self._strategy.no_sync(model) or contextlib.nullcontext()

    def trigger_sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose one backward exchanges ``model``'s gradients, though its forwards ran under ``no_sync``."""
        checks.instance("trigger_sync_in_backward", model, nn.Module, "a prepared model")
        return self._strategy.sync_in_backward(model) or contextlib.nullcontext()

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Sequence[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        """A context in which processes may train ``joinables``, prepared models, on fewer batches than others.

        ``even_batches`` is in force for passes over loaders that begin inside; None leaves it as it is.
        """
        checks.flags(even_batches=even_batches)
        with data.evenness(self._loaders, even_batches), self._strategy.join(joinables) or contextlib.nullcontext():
            yield

    def backward(self, loss: torch.Tensor, *, num_items: float | torch.Tensor | None = None, **keywords: Any) -> None:
        """Add the gradients of ``loss`` (0-d), divided by the micro-batches of its accumulation group.

        With ``num_items``, ``loss`` is a sum over so many (tokens, boxes ...) on this process, and the group's gradient
        becomes that of the mean over the items of all its micro-batches on all processes, however they differ::

            with accelerator.accumulate(model):
                loss_sum = cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="sum")
                accelerator.backward(loss_sum, num_items=(labels != -100).sum())

        Every process then calls it as often. Other keywords are those of ``torch.Tensor.backward``. Raises
        ``ValueError`` where only some losses of a group come with ``num_items``, ``ConfigError`` for a negative one.
        """
        checks.instance("backward", loss, torch.Tensor, "a loss as the model gave it, a tensor")
        window = self._accumulation.current
        if not window.sync and not self._accumulation.entered:
            self._accumulation.end_if_left()
        if num_items is not None or window.items is not None:
            loss = weighting.weigh(loss, num_items, self._accumulation, self._data_process)
        elif window.divisor != 1:
            loss = loss / window.divisor
        window.is_pending = window.has_run = True
        self._progress.num_backwards += 1
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
        for given in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            checks.instance("unscale_gradients", given, torch.optim.Optimizer, "an optimizer")
            one = self.prepare_optimizer(given)
            window = one.current_window()
            if window.scaling is not None and window.sync:
                window.scaling.unscale(one.optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale the gradients to a norm of at most ``max_norm``; return their norm before, 0-d.

        Within an unfinished accumulation group nothing is scaled. Raises ``ConfigError`` for a negative ``max_norm``,
        which would turn the gradients around, and for NaN.
        """
        if not float(max_norm) >= 0:
            raise _no_limit("clip_grad_norm_", "max_norm", max_norm)
        parameters, window = self._to_clip(parameters)
        norm = self._strategy.clip(parameters, max_norm if window.sync else float("inf"), norm_type)
        return norm if window.sync or window.scaling is None else window.scaling.true_size(norm)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Bring each gradient into [-clip_value, clip_value]; within an unfinished accumulation group do nothing.

        Raises ``ConfigError`` for a negative ``clip_value``, and for NaN.
        """
        if not float(clip_value) >= 0:
            raise _no_limit("clip_grad_value_", "clip_value", clip_value)
        parameters, window = self._to_clip(parameters)
        if window.sync:
            self._strategy.clip_value(parameters, clip_value)

    def _to_clip(self, parameters: Iterable[torch.Tensor] | torch.Tensor) -> tuple[list[torch.Tensor], Window]:
        """``parameters``, their gradients at their true size if their group is complete; and that group."""
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        window = self._accumulation.current
        if window.scaling is not None or len(self._groups) > 1:
            holders = optim.holders_of(found, self._optimizers)
            windows = [one.current_window() for one in holders]
            window = window if window in windows or not windows else windows[0]
            if window.sync:
                self.unscale_gradients(holders)
        return found, window

    def autocast(
        self, autocast_handler: plugins.AutocastKwargs | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """A context in which torch computes in this precision; ``autocast_handler`` replaces the accelerator's own."""
        if autocast_handler is not None:
            checks.instance("autocast", autocast_handler, plugins.AutocastKwargs, "an AutocastKwargs")
        return self._precision.autocast(autocast_handler)

    def profile(
        self, profile_handler: plugins.ProfileKwargs | None = None
    ) -> contextlib.AbstractContextManager[profile]:
        """A context that gives a ``torch.profiler.profile`` of what runs inside.

        Each process writes a Chrome trace ``profile_<rank>.json`` into ``output_trace_dir``, where that is set.
        """
        handler = self._profiling if profile_handler is None else profile_handler
        checks.instance("profile", handler, plugins.ProfileKwargs, "a ProfileKwargs")
        return plugins.profiling(handler, self.process_index)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context that would split sequences among processes; none of the strategies does, so it changes nothing."""
        del buffers, buffer_seq_dims, no_restore_buffers
        return contextlib.nullcontext()


def _no_limit(call: str, argument: str, given: float) -> ConfigError:
    return ConfigError(
        f"{call}({argument}={given!r}): gradients can't be clipped to that; give 0 or more, float('inf') for no limit"
    )
