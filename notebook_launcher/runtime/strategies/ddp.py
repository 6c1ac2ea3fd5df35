"""Data parallel: every rank has the whole model and its own batches; gradients are averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from torch.nn.parallel import DistributedDataParallel

from notebook_launcher.runtime import models
from notebook_launcher.runtime.strategies import single

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from notebook_launcher.runtime.process import Process


class _Forward:
    """A model's ``forward`` that shows the signature of the module inside it."""

    __slots__ = ("model",)

    def __init__(self, model: DistributedModel) -> None:
        self.model = model

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return DistributedDataParallel.forward(self.model, *inputs, **kwargs)  # type: ignore[no-untyped-call]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.model.module.forward  # type: ignore[no-any-return]


class DistributedModel(DistributedDataParallel):
    """``DistributedDataParallel`` through which the module's own attributes and methods can be reached."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """Wrap ``module``; ``options`` are those of ``DistributedDataParallel``."""
        super().__init__(module, **options)
        self.forward = _Forward(self)  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        """What the wrapper lacks, the module has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


class _NoSync:
    """``DistributedDataParallel.no_sync``, made once and entered many times, also within itself."""

    __slots__ = ("_before", "_model")

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(self._model.require_backward_grad_sync)
        self._model.require_backward_grad_sync = False

    def __exit__(self, *exception: object) -> None:
        self._model.require_backward_grad_sync = self._before.pop()


@final
class DistributedData:
    """Torch's DDP."""

    name = "ddp"
    backward = staticmethod(single.backward)
    clip = staticmethod(single.clip)
    step = staticmethod(single.step)
    full_state = staticmethod(single.full_state)

    def __init__(self, process: Process) -> None:
        """Train on the process's device, in the default process group."""
        self._device = process.device

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model behind DDP; one without anything to train, or already behind it, as it is."""
        if isinstance(models.compiled_from(model), DistributedDataParallel):
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        device_ids = None if self._device.index is None else [self._device.index]
        return DistributedModel(model, device_ids=device_ids)

    def no_sync(self, model: nn.Module) -> _NoSync | None:
        """A context without gradient exchange; None for a model that DDP does not hold."""
        inner = models.compiled_from(model)
        return _NoSync(inner) if isinstance(inner, DistributedDataParallel) else None
