"""Objects of the standard library that pickle as the name of a variable, or not at all, where cells make them.

A name says nothing in a worker whose ``__main__`` does not have it yet; these travel as what they are made from.
"""

from __future__ import annotations

import functools
import sys
import typing
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

CachedFunction: Any = type(functools.cache(lambda: None))


def cached_function(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:  # noqa: FBT001
    """Receiver: ``functools.lru_cache`` around ``function``, with nothing in it."""
    return functools.lru_cache(maxsize, typed)(function)


def cached_property(function: Callable[..., Any], name: str | None) -> Any:
    """Receiver: ``functools.cached_property``, which until Python 3.11 holds a lock."""
    made = functools.cached_property(function)
    made.attrname = name
    return made


def type_parameter(kind: Callable[..., Any], module: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Receiver: a ``NewType``, ``ParamSpec`` or ``TypeVarTuple`` that says where it was made."""
    made = kind(*args, **options)
    made.__module__ = module
    return made


def _cached_function(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    parameters = value.cache_parameters()
    return cached_function, (value.__wrapped__, parameters["maxsize"], parameters["typed"])


def _cached_property(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return cached_property, (value.func, value.attrname)


def _new_type(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return type_parameter, (typing.NewType, value.__module__, (value.__name__, value.__supertype__), {})


def _param_spec(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    options = {"bound": value.__bound__, "covariant": value.__covariant__, "contravariant": value.__contravariant__}
    return type_parameter, (typing.ParamSpec, value.__module__, (value.__name__,), options)


def _type_var_tuple(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return type_parameter, (typing.TypeVarTuple, value.__module__, (value.__name__,), {})


def _weak_dict(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return type(value), (dict(value),)


# How to make a value of a type anew, as (callable, arguments).
PARTS: dict[type, Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    functools.cached_property: _cached_property,
    weakref.WeakKeyDictionary: _weak_dict,
    weakref.WeakValueDictionary: _weak_dict,
}
# Likewise, of types whose values pickle as the name of a variable.
NAMED_PARTS: dict[type, Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    CachedFunction: _cached_function,
    typing.NewType: _new_type,
    typing.ParamSpec: _param_spec,
    typing.TypeVarTuple: _type_var_tuple,
}


def is_held(value: Any) -> bool:
    """Tell whether a module other than ``__main__``, which ``value`` says it is from, holds it under its name."""
    if value.__module__ == "__main__":
        return False
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if module is None or not isinstance(name, str):
        return False
    try:
        return functools.reduce(getattr, name.split("."), module) is value
    except AttributeError:
        return False
