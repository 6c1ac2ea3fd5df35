"""Data parallel: every rank has the whole model and its own batches; gradients are averaged."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import buckets, holdings, models
from notebook_launcher.runtime.plugins import DistributedDataParallelKwargs, changed
from notebook_launcher.runtime.strategies import single
from notebook_launcher.runtime.together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from notebook_launcher.runtime.plugins import Keywords
    from notebook_launcher.runtime.process import Process
    from notebook_launcher.runtime.shards import Models, Optimizers
    from notebook_launcher.runtime.storage import Draft


class _Forward:
    """A model's ``forward`` that shows the signature of the module inside it."""

    __slots__ = ("model",)

    def __init__(self, model: DistributedModel) -> None:
        self.model = model

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.model.is_ready = self.model.require_backward_grad_sync
            self.model.refuse_unfrozen()
        return DistributedDataParallel.forward(self.model, *inputs, **kwargs)  # type: ignore[no-untyped-call]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.model.module.forward  # type: ignore[no-any-return]


class DistributedModel(models.Transparent, DistributedDataParallel):
    """``DistributedDataParallel`` through which the module's own attributes and methods can be reached."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """Wrap ``module``; ``options`` are those of ``DistributedDataParallel``."""
        super().__init__(module, **options)
        self.forward = _Forward(self)  # type: ignore[method-assign]
        self.is_ready = False  # a forward has told DDP to exchange the gradients of the backward that comes
        ignored = self.parameters_to_ignore
        self._frozen = [
            (name, one) for name, one in module.named_parameters() if not (one.requires_grad or name in ignored)
        ]

    def make_ready(self, loss: torch.Tensor) -> None:
        """Have the backward that comes exchange its gradients, though one has since the last forward.

        Theirs are then the averages of before and, on top, each rank's own: their average is right. DDP would leave
        them as they are, different on each rank. The parameters that go unused are those that ``loss`` doesn't reach.
        """
        if self.require_backward_grad_sync:
            if self.find_unused_parameters or not self.is_ready:
                try:
                    self._rebuild()
                except RuntimeError:  # the backward before has left some parameters, which this one may reach
                    return
                self.reducer.prepare_for_backward([loss])
            self.is_ready = False

    def refuse_unfinished(self) -> None:
        """Raise ``RuntimeError`` where backwards have not exchanged all: DDP does at the next forward, after a step."""
        if self._has_rebuilt_buckets:
            self._rebuild()

    def _rebuild(self) -> None:
        """Arrange the buckets, as a forward does: once, in the order of the first backward."""
        reducer: Any = self.reducer
        try:
            self._has_rebuilt_buckets |= reducer._rebuild_buckets()  # noqa: SLF001
        except RuntimeError as error:
            raise RuntimeError(
                "A backward reached only some of the parameters whose gradients DDP exchanges, and waits for the "
                "others: the ranks' gradients differ. Add the losses up and call backward once; or look for what each "
                "reaches, with DistributedDataParallelKwargs(find_unused_parameters=True) and no static_graph."
            ) from error

    def refuse_unfrozen(self) -> None:
        """Raise ``ConfigError`` where a parameter is trained that was frozen when DDP saw it."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when prepare was given its model, and requires gradients now: DDP would not "
                    "exchange them, and the ranks' weights would drift apart. Let all that is ever trained require "
                    "gradients when it is prepared, and freeze it afterwards, with "
                    "DistributedDataParallelKwargs(find_unused_parameters=True); or launch with strategy='fsdp'."
                )


class _NoSync:
    """``DistributedDataParallel.no_sync``, made once and entered many times, also within itself."""

    __slots__ = ("_before", "_model")

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._before: list[bool] = []

    def __enter__(self) -> None:
        model = self._model
        self._before.append(model.require_backward_grad_sync)
        # A static graph is learned in the first two backwards that exchange gradients. To exchange is right in any.
        model.require_backward_grad_sync = model.static_graph and not model._has_rebuilt_buckets  # noqa: SLF001

    def __exit__(self, *exception: object) -> None:
        self._model.require_backward_grad_sync = self._before.pop()


@contextlib.contextmanager
def _syncing(model: DistributedDataParallel) -> Iterator[None]:
    if model.find_unused_parameters:
        raise ConfigError(
            "trigger_sync_in_backward can't be used with find_unused_parameters=True: DDP looks for the unused ones "
            "in a forward that exchanges gradients; let the last forward run outside no_sync"
        )
    before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
    model.reducer.prepare_for_backward([])  # as a forward does that is not under no_sync
    try:
        yield
    finally:
        model.require_backward_grad_sync = before


def _compress(model: DistributedDataParallel, hook: str, wrapper: str, options: dict[str, Any]) -> None:
    """Have ``model`` exchange its gradients through torch's hook of that name, inside that wrapper."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    power = {"power_sgd": powerSGD_hook.powerSGD_hook, "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook}
    plain = {"no": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}
    chosen: Any = (power | plain | {"bf16": default_hooks.bf16_compress_hook})[hook]
    if wrapper != "no":
        wrap = {"fp16": default_hooks.fp16_compress_wrapper, "bf16": default_hooks.bf16_compress_wrapper}[wrapper]
        chosen = wrap(chosen)
    model.register_comm_hook(
        powerSGD_hook.PowerSGDState(model.process_group, **options) if hook in power else None, chosen
    )


def _refuse_hook(chosen: dict[str, Any], device: torch.device) -> None:
    """Raise ``ConfigError`` for a hook that torch would fail with: when DDP is made, or a thousand steps later."""
    for name, others in (("comm_hook", "'fp16', 'power_sgd'"), ("comm_wrapper", "'fp16'")):
        if chosen.get(name) == "bf16" and device.type not in {"cuda", "xpu"}:
            raise ConfigError(
                f"DistributedDataParallelKwargs({name}='bf16') can't be used on {device.type}: torch exchanges bf16 "
                f"only between GPUs, over NCCL or XCCL. Use {others} or 'no' here."
            )
    if chosen.get("comm_hook") == "batched_power_sgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        try:
            powerSGD_hook._orthogonalize(torch.ones(1, 1))  # type: ignore[no-untyped-call]  # noqa: SLF001 - as it does later
        except AssertionError:
            raise ConfigError(
                f"DistributedDataParallelKwargs(comm_hook='batched_power_sgd'): that hook of torch {torch.__version__} "
                "fails as soon as it compresses, after start_powerSGD_iter backwards (1000). Use 'power_sgd'."
            ) from None


@final
class DistributedData:
    """Torch's DDP."""

    name = "ddp"
    layout = single.Single.layout
    trains_apart = True
    clip = staticmethod(single.clip)
    clip_value = staticmethod(single.clip_value)
    gradients = staticmethod(single.gradients)
    pair = staticmethod(single.pair)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Let ``optimizer`` step, once all gradients are exchanged."""
        for model in self._arrivals:
            model.refuse_unfinished()
        return single.step(optimizer, closure)

    full_state = staticmethod(single.full_state)
    forget = staticmethod(single.forget)
    held = staticmethod(holdings.whole)

    def __init__(self, process: Process, keywords: Keywords) -> None:
        """Train on the process's device, in the default process group."""
        self.data_process = process
        self._device = process.device
        self._options = changed(keywords[DistributedDataParallelKwargs])
        _refuse_hook(self._options, self._device)
        self._arrivals: weakref.WeakKeyDictionary[DistributedModel, buckets.Arrivals] = weakref.WeakKeyDictionary()
        self._loaded: list[tuple[buckets.Arrivals, list[str]]] = []  # what ``go_on`` is to replay

    def place(self, model: nn.Module) -> Any:
        """The model on the device."""
        return single.moved(model, self.data_process.backend)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model behind DDP; one without anything to train, or already behind it, as it is."""
        if isinstance(models.compiled_from(model), DistributedDataParallel):
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        device_ids = None if self._device.index is None else [self._device.index]
        options = dict(self._options)
        hook, wrapper = options.pop("comm_hook", "no"), options.pop("comm_wrapper", "no")
        state_options = options.pop("comm_state_option", {})
        wrapped = DistributedModel(model, device_ids=device_ids, **options)
        if (hook, wrapper) != ("no", "no"):
            _compress(wrapped, hook, wrapper, state_options)
        self._arrivals[wrapped] = buckets.Arrivals(wrapped)
        return wrapped

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Add the averages of the gradients, of a second backward through a forward too."""
        for model in self._arrivals:
            model.make_ready(loss)
        single.backward(loss, **options)  # type: ignore[no-untyped-call]

    def no_sync(self, model: nn.Module) -> _NoSync | None:
        """A context without gradient exchange; None for a model that DDP does not hold."""
        inner = models.compiled_from(model)
        return _NoSync(inner) if isinstance(inner, DistributedDataParallel) else None

    def sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any] | None:
        """DDP's exchange, for one backward; None for a model that DDP does not hold."""
        inner = models.compiled_from(model)
        return _syncing(inner) if isinstance(inner, DistributedDataParallel) else None

    def join(self, models_: Sequence[nn.Module]) -> contextlib.AbstractContextManager[Any] | None:
        """Torch's ``Join`` over those that DDP holds."""
        held: list[Joinable] = [one for one in map(models.compiled_from, models_) if isinstance(one, Joinable)]
        return Join(held) if held else None

    def save(self, draft: Draft, models_: Models, optimizers: Optimizers, *, safe: bool) -> None:
        """States that every rank has in full, and the order in which gradients are exchanged."""
        single.save(draft, models_, optimizers, safe=safe)
        buckets.write(draft, self._heard(models_), self.data_process.num_processes)

    def load(self, folder: Path, models_: Models, optimizers: Optimizers, *, strict: bool) -> Callable[[], None]:
        """What any strategy of this layout wrote; the order is taken up by ``go_on``."""
        take_up_states = single.load(folder, models_, optimizers, strict=strict)
        arrivals, orders = self._heard(models_), buckets.read(folder, self.data_process.num_processes)

        def take_up() -> None:
            take_up_states()
            self._loaded = [(arrivals[name], order) for name, order in orders.items() if name in arrivals]

        return take_up

    def go_on(self) -> None:
        """Exchange gradients in the order that was loaded, of models that have not been trained here yet."""
        loaded, self._loaded = self._loaded, []
        can = together("load_state", lambda: [one.can_replay(order) for one, order in loaded])
        for (one, order), *ranks in zip(loaded, *can, strict=False):
            if all(ranks):
                one.replay(order)

    def _heard(self, models_: Models) -> dict[str, buckets.Arrivals]:
        """What is known of those that this strategy has wrapped."""
        arrivals: Mapping[Any, buckets.Arrivals] = self._arrivals
        found = {name: arrivals.get(models.compiled_from(model)) for name, model in models_.items()}
        return {name: one for name, one in found.items() if one is not None}
