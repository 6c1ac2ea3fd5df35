"""What a model looks like after ``prepare``, and the way back to the module that was given.

Under mixed precision, a model is seen through a view: an object of a subclass of the model's own class that shares its
attributes, parameters and hooks, and whose call runs under autocast and gives back fp32. So the module itself stays as
it was (it pickles, its type is its own), and a method that calls the model, as ``generate`` does, gets the precision
chosen. A method that calls submodules past the model's own call (``self.encoder(x)``) runs in fp32, as in torch; put
``accelerator.autocast()`` around it.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from notebook_launcher.runtime import trees

if TYPE_CHECKING:
    from notebook_launcher.runtime.precision import Precision

_slots = object.__setattr__  # past nn.Module.__setattr__, which would register the module as its own child


class Transparent(nn.Module):
    """A wrapper through which the attributes and methods of its ``module`` can be reached."""

    def __getattr__(self, name: str) -> Any:
        """What the wrapper lacks, the module has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


class Wrapper(Transparent):
    """What a strategy puts around a model where torch has nothing to put there."""

    def __init__(self, module: nn.Module) -> None:
        """Hold ``module``, under that name."""
        super().__init__()
        self.module = module


WRAPPERS: list[Any] = [DistributedDataParallel, DataParallel, Wrapper]  # with a ``module``; strategies add their own


class AutocastView:
    """The part of a view's class that differs from the model's own."""

    __slots__ = ()
    viewed: nn.Module
    _precision: Precision
    _autocast: Any
    _depth: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, half-precision tensors among them as fp32."""
        if self._depth:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        _slots(self, "_depth", 1)
        try:
            with self._autocast:
                outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            _slots(self, "_depth", 0)
        return trees.to_float32(outputs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as the module and its precision: the class was made in this process."""
        return autocast_view, (self.viewed, self._precision)

    def __copy__(self) -> nn.Module:
        """A view of a copy, whose attributes are its own."""
        return autocast_view(copy.copy(self.viewed), self._precision)

    def _replicate_for_data_parallel(self) -> Any:
        """What ``nn.DataParallel`` runs on another device."""
        return _dress(super()._replicate_for_data_parallel(), self.viewed, self._precision)  # type: ignore[misc]


def autocast_view(module: nn.Module, precision: Precision) -> nn.Module:
    """``module`` as seen in ``precision``; the module itself where that is fp32."""
    if not precision.is_mixed or isinstance(module, AutocastView):
        return module
    kind: Any = type(module)
    names = {"__slots__": ("_autocast", "_depth", "_precision", "viewed"), "__module__": kind.__module__}
    view_kind: Any = type(kind)(kind.__name__, (AutocastView, kind), names)
    view = view_kind.__new__(view_kind)
    _slots(view, "__dict__", module.__dict__)
    return _dress(view, module, precision)


def _dress(view: nn.Module, module: nn.Module, precision: Precision) -> nn.Module:
    _slots(view, "viewed", module)
    _slots(view, "_precision", precision)
    _slots(view, "_autocast", precision.autocast())
    _slots(view, "_depth", 0)
    return view


def unwrap(model: nn.Module, *, keep_torch_compile: bool = True) -> nn.Module:
    """The module that ``prepare`` was given, through every wrapper that it, or torch, put around it.

    A module that was compiled before ``prepare`` is given back compiled, unless ``keep_torch_compile`` is false.
    """
    outer = compiled_from(model)
    if isinstance(outer, tuple(WRAPPERS)):
        return unwrap(cast("nn.Module", outer.module), keep_torch_compile=keep_torch_compile)
    if isinstance(outer, AutocastView):
        return unwrap(outer.viewed, keep_torch_compile=keep_torch_compile)
    return model if keep_torch_compile else outer


def compiled_from(model: nn.Module) -> nn.Module:
    """What ``torch.compile`` was given, for a compiled module; the view that was taken of it stays out of the way."""
    if isinstance(model, AutocastView):
        return model
    return getattr(model, "_orig_mod", model) if "_orig_mod" in model.__dict__.get("_modules", ()) else model
