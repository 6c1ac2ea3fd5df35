"""Texts of code that was made in cells: taken from ``linecache`` where it was made, put there where it runs.

With them a worker's tracebacks show lines, and ``inspect.getsource``, ``torch.jit.script`` and ``torch.compile`` work.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_installed: dict[str, str] = {}


def collect(filenames: Iterable[str]) -> dict[str, str]:
    """The texts of those files that only ``linecache`` knows: a cell's, a console's, a generated one's."""
    texts = {}
    for name in filenames:
        # Only what the cache has: getlines would search sys.path for a name that is in no cache.
        if name in linecache.cache and not Path(name).is_file():
            text = "".join(linecache.getlines(name))
            if text:
                texts[name] = text
    return texts


def install(sources: Mapping[str, str]) -> None:
    """Make ``linecache`` know ``sources`` (file name -> text) for as long as the process lives."""
    for name, text in sources.items():
        # Without a modification time, checkcache leaves the entry alone.
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        _installed.pop(name, None)
        _installed[name] = text
    if sources and not hasattr(inspect.getfile, "__wrapped__"):
        inspect.getfile = _with_cell_classes(inspect.getfile)


def _with_cell_classes(getfile: Any) -> Any:
    """Find the file of a class of ``__main__`` too.

    ``inspect`` (up to Python 3.13 at least) asks the class's module for its file, and ``__main__`` has none or another.
    The methods' code knows it.
    """

    @functools.wraps(getfile)
    def find(object: Any) -> Any:  # noqa: A002 - inspect.getfile's own parameter name
        try:
            return getfile(object)
        except (OSError, TypeError):
            if not isinstance(object, type) or object.__module__ not in ("__main__", "__mp_main__"):
                raise
            name = _file_of(object)
            if name is None:
                raise
            return name

    return find


def _file_of(cls: type) -> str | None:
    for code in _codes(cls):
        if code.co_filename in _installed:
            return code.co_filename
    return next((name for name, text in reversed(_installed.items()) if _defines(text, cls)), None)


def _codes(cls: type) -> Iterator[types.CodeType]:
    for value in vars(cls).values():
        function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
        if isinstance(function, types.FunctionType) and function.__qualname__.startswith(f"{cls.__qualname__}."):
            yield function.__code__


def _defines(text: str, cls: type) -> bool:
    if f"class {cls.__name__}" not in text:
        return False
    try:
        nodes = ast.walk(ast.parse(text))
    except SyntaxError:  # a cell with top-level await, say
        return False
    return any(isinstance(node, ast.ClassDef) and node.name == cls.__name__ for node in nodes)
