"""What a payload unpickles to: a call, a name, or a cell. Calling it runs it and returns the rank's result."""

from __future__ import annotations
import __future__

import ast
import asyncio
import dataclasses
import importlib
import inspect
import io
import sys
import tokenize
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from types import CodeType

_SILENT = (tokenize.ENDMARKER, tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT)


@dataclasses.dataclass(frozen=True)
class Call:
    """``function(*args, **kwargs)``; a coroutine is run to its end."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Any:
        """Run it; returns the function's result and raises what it raises."""
        result = self.function(*self.args, **self.kwargs)
        return asyncio.run(_finish(result)) if inspect.iscoroutine(result) else result


@dataclasses.dataclass(frozen=True)
class Named:
    """A function of this package by its name, "module:function", for whoever may not load it himself."""

    name: str
    args: tuple[Any, ...] = ()

    def __call__(self) -> Any:
        """Load it and run it."""
        module, _, function = self.name.partition(":")
        return getattr(importlib.import_module(module), function)(*self.args)


@dataclasses.dataclass(frozen=True)
class Cell:
    """Statements to run in ``__main__``, and the notebook's ``names`` that they use.

    ``source`` is Python, free of magics; ``flags`` are those of the ``from __future__`` imports that were in force.
    """

    source: str
    filename: str
    names: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flags: int = 0

    def __call__(self) -> Any:
        """Run it; returns the last expression's value, None where there is none or a ``;`` follows it.

        A coroutine is run to its end, as ``Call`` does: it can't travel, so nobody else could await it.
        """
        namespace = sys.modules["__main__"].__dict__
        namespace.update(self.names)
        statements, last = compile_cell(self.source, self.filename, self.flags)
        if not any(code is not None and code.co_flags & inspect.CO_COROUTINE for code in (statements, last)):
            exec(statements, namespace)  # noqa: S102 - running the user's cell is the purpose
            result = None if last is None else eval(last, namespace)  # noqa: S307 - likewise
            return asyncio.run(_finish(result)) if inspect.iscoroutine(result) else result
        return asyncio.run(_run(statements, last, namespace))


def compile_cell(source: str, filename: str, flags: int = 0) -> tuple[CodeType, CodeType | None]:
    """The cell's statements and, apart, the expression whose value is its result; raises ``SyntaxError``."""
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(source, filename, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not _ends_in_semicolon(source):
        last = compile(ast.Expression(tree.body.pop().value), filename, "eval", flags, dont_inherit=True)
    return compile(tree, filename, "exec", flags, dont_inherit=True), last


def future_flags(namespace: Mapping[str, Any]) -> int:
    """The compiler flags of the ``from __future__`` imports that ``namespace`` still shows."""
    flags = 0
    for name in __future__.all_feature_names:
        feature = namespace.get(name)
        if feature is not None and feature is getattr(__future__, name):
            flags |= feature.compiler_flag
    return flags


def _ends_in_semicolon(source: str) -> bool:
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in _SILENT]
    return bool(tokens) and tokens[-1].string == ";"


async def _finish(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _run(statements: CodeType, last: CodeType | None, namespace: dict[str, Any]) -> Any:
    result = None
    for code in (statements, last):
        if code is not None:
            result = eval(code, namespace)  # noqa: S307 - the user's cell
            if code.co_flags & inspect.CO_COROUTINE:
                result = await result
    if last is None:
        return None
    return await result if inspect.iscoroutine(result) else result
