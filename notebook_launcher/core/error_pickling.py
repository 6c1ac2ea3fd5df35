"""Exceptions that keep their type, state, notes, causes and groups, whatever the signature of their ``__init__``.

Python pickles an exception as a call of its class with ``args``, which fails, or says something else, for every class
whose ``__init__`` takes other arguments than it passes on; and it drops ``__cause__`` and ``__context__``.
"""

from __future__ import annotations

import pickle
from typing import Any

_MAKE_ARGS_STATE = 3
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement, not one of the interpreter's own


def reduce_error(error: BaseException, *, chained: bool) -> Any:
    """A reduction that rebuilds ``error`` without its traceback; with its cause and context if ``chained``."""
    chain = (error.__cause__, error.__context__, error.__suppress_context__) if chained else (None, None, False)
    reduced = error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not isinstance(reduced, tuple) or len(reduced) > _MAKE_ARGS_STATE:
        return reduced  # the class's own and unusual way
    make, args, *rest = reduced
    state = rest[0] if rest else None
    kind = type(error)
    if make is kind and _has_own(kind, "__init__", "__new__") and not _has_own(kind, "__reduce__", "__reduce_ex__"):
        if isinstance(error, BaseExceptionGroup):
            args = (error.message, error.exceptions)  # its args are those that its own __new__ was given
        return rebuild, (kind, args), (error.args, state, chain), None, None, set_state
    return make, args, (None, state, chain), None, None, set_state


def rebuild(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Receiver: an exception of that type, made without running what the class says about making it."""
    base = kind
    while base.__flags__ & _HEAP_TYPE:
        base = base.__base__  # type: ignore[assignment]  # the chain ends in BaseException at the latest
    error = base.__new__(kind, *args)
    base.__init__(error, *args)
    return error


def set_state(error: BaseException, state: tuple[tuple[Any, ...] | None, Any, tuple[Any, Any, bool]]) -> None:
    """Receiver: state setter of an exception."""
    args, inner, (cause, context, suppress) = state
    if args is not None:
        error.args = args
    if inner is not None:
        error.__setstate__(inner)
    error.__cause__, error.__context__, error.__suppress_context__ = cause, context, suppress


def _has_own(kind: type, *names: str) -> bool:
    """Tell whether a Python class, as against the interpreter's own, defines one of ``names``."""
    return any(name in base.__dict__ for base in kind.__mro__ if base.__flags__ & _HEAP_TYPE for name in names)
