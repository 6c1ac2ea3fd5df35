"""Which functions a notebook defines, the last defined first."""

from __future__ import annotations

import functools
import inspect
import re
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_OLD_NAME = re.compile(r"<ipython-input-(\d+)-")  # up to IPython 7, outside a kernel


class Functions:
    """The functions of one notebook, kept in order while cells run."""

    def __init__(self) -> None:
        """Know of none."""
        self._seen: dict[str, Any] = {}  # by name, the last defined last

    @property
    def names(self) -> tuple[str, ...]:
        """Those that the notebook defines, the last defined first."""
        return tuple(reversed(self._seen))

    def get(self, name: str) -> Callable[..., Any] | None:
        """The function as it was when the notebook was last looked at."""
        found: Callable[..., Any] | None = self._seen.get(name)
        return found

    def look(self, namespace: Mapping[str, Any], cell_numbers: Mapping[str, int]) -> set[str]:
        """Look again; the names that are new, gone or defined anew since the last look.

        ``cell_numbers`` gives the number of the cell for the file name that its code was compiled with.
        """
        found = {name: value for name, value in dict(namespace).items() if _is_the_notebooks(name, value)}
        known = {id(value) for name, value in found.items() if getattr(value, "__name__", "") == name}
        found = {  # a second name for the same function says nothing new
            name: value
            for name, value in found.items()
            if id(value) not in known or getattr(value, "__name__", "") == name
        }
        changed = {name for name, value in found.items() if self._seen.get(name) is not value}
        gone = set(self._seen) - set(found)
        kept = {name: value for name, value in self._seen.items() if name in found and name not in changed}
        # Stable: where no cell's number is known, the order is the namespace's.
        order = sorted(filter(changed.__contains__, found), key=lambda name: _place(found[name], cell_numbers))
        self._seen = {**kept, **{name: found[name] for name in order}}
        return changed | gone


def signature(function: Any) -> inspect.Signature | None:
    """The function's signature, None where it tells none."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _is_the_notebooks(name: str, value: Any) -> bool:
    inner = value
    # Not isinstance: it asks an object for its class, and a proxy (Flask's request) may raise instead of an answer.
    while issubclass(type(inner), functools.partial):
        inner = inner.func
    return not name.startswith("_") and type(inner) is types.FunctionType and inner.__module__ == "__main__"


def _place(function: Any, cell_numbers: Mapping[str, int]) -> tuple[int, int]:
    """The cell and line in which the function was defined; 0 for a cell that is not known."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        unwrapped = inspect.unwrap(function)
    except ValueError:  # it wraps itself
        return 0, 0
    if type(unwrapped) is not types.FunctionType:
        return 0, 0
    file = unwrapped.__code__.co_filename
    old = _OLD_NAME.match(file)
    number = cell_numbers.get(file, int(old[1]) if old else 0)
    return number, unwrapped.__code__.co_firstlineno if number else 0
