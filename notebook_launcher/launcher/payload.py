"""What is run on every rank: a function with its arguments, or a cell with the variables it uses, packed once."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import pickling
from notebook_launcher.core.errors import ConfigError, PayloadError
from notebook_launcher.core.options import shortened
from notebook_launcher.core.tasks import Call, Cell, compile_cell, future_flags
from notebook_launcher.launcher.captures import Root, explain, large
from notebook_launcher.launcher.cell_names import used_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_launcher.core.shared_memory import Packed

LARGE_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class Payload:
    """A task, packed for every rank. Keep it while its run goes on: results find the notebook's code by it."""

    packed: Packed
    sources: dict[str, str]  # file name of code made in cells -> its text
    name: str  # for the headline: "train", "cell"
    large: list[tuple[str, int]] = dataclasses.field(default_factory=list)  # variables over 100 MB: name, bytes
    notes: list[str] = dataclasses.field(default_factory=list)  # what a person should know of it, a line each
    kept: tuple[Any, ...] = dataclasses.field(default=(), repr=False)  # the functions and classes that were sent


def for_call(
    function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Payload:
    """Pack ``function(*args, **kwargs)``; raises ``PayloadError`` where something in it can't travel, and says what."""
    kwargs = dict(kwargs or {})
    name = _name(function)

    def roots() -> list[Root]:
        return [Root("function", name, function), *_arguments(function, args, kwargs)]

    return _pack(Call(function, tuple(args), kwargs), name, f"{name}()", roots)


def for_cell(source: str, namespace: Mapping[str, Any], filename: str, *, name: str = "cell") -> Payload:
    """Pack a cell and those of the notebook's variables, in ``namespace``, that it uses.

    ``source`` is Python that IPython has transformed; ``filename`` is what tracebacks show, with the cell's lines.
    Raises ``SyntaxError``, and ``PayloadError`` where a variable can't travel or a call has wrong arguments.
    """
    flags = future_flags(namespace)
    statements, last = compile_cell(source, filename, flags)
    tree = ast.parse(source, filename)
    _check_call_expression(tree, namespace)
    names = used_names([code for code in (statements, last) if code is not None], tree, namespace)
    values = {each: namespace[each] for each in names.needed}
    for each in names.perhaps:
        # The cell sets it, most likely before a function reads it: what can't travel is then not missed.
        with contextlib.suppress(Exception):
            pickling.measure(namespace[each])
            values[each] = namespace[each]

    def roots() -> list[Root]:
        return [Root("variable", each, value) for each, value in values.items()]

    payload = _pack(Cell(source, filename, values, flags), name, "the cell", roots)
    return dataclasses.replace(payload, sources={**payload.sources, filename: source})


def check_call(function: Any, args: Any, kwargs: Any) -> None:
    """Raise ``PayloadError`` or ``ConfigError`` for what could only fail on the ranks: no function, wrong arguments."""
    if not callable(function):
        if inspect.iscoroutine(function):
            function.close()  # nobody will await it; without this Python would warn of it
        given = "None" if function is None else f"an object of type {type(function).__name__}"
        msg = (
            f"a function is needed, and got {given}. If that is the result of a call, drop the parentheses:"
            " launch(train), not launch(train()); arguments go apart, launch(train, args=(3,))."
        )
        raise PayloadError(msg)
    if not isinstance(args, tuple | list):
        msg = f"args is a tuple of the function's arguments, not {shortened(args)}: write args=({shortened(args)},)."
        raise ConfigError(msg)
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        msg = f"kwargs is a dict of the function's arguments by name, not {shortened(kwargs)}."
        raise ConfigError(msg)
    _check_signature(function, args, kwargs or {})


def check_arguments(function: Any, call: ast.Call) -> None:
    """Raise ``PayloadError`` where the arguments of ``call``, known by their text only, don't fit ``function``."""
    args = [_Text(ast.unparse(arg)) for arg in call.args if not isinstance(arg, ast.Starred)]
    kwargs = {word.arg: _Text(ast.unparse(word.value)) for word in call.keywords if word.arg is not None}
    starred = len(args) < len(call.args) or len(kwargs) < len(call.keywords)
    _check_signature(function, args, kwargs, partly=starred)


def _check_signature(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, partly: bool = False) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without one
        return
    try:
        (signature.bind_partial if partly else signature.bind)(*args, **kwargs)
    except TypeError as error:
        texts = [*map(shortened, args), *(f"{key}={shortened(arg)}" for key, arg in kwargs.items())]
        given = ", ".join([*texts, "..."] if partly else texts)
        msg = f"{_name(function)}{signature} can't be called with ({given}): {error}."
        raise PayloadError(msg) from None


def _check_call_expression(tree: ast.Module, namespace: Mapping[str, Any]) -> None:
    """Where a cell is one call of a notebook's function, the number and names of its arguments are known by now."""
    match tree.body:
        case [ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call)]:
            function = namespace.get(name)
            if function is not None and callable(function):
                check_arguments(function, call)


class _Text:
    """Stands for an argument that is known by its text only."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _pack(task: Call | Cell, name: str, owner: str, roots: Callable[[], list[Root]]) -> Payload:
    """``roots`` gives what the task is made of; it is asked where something has to be said of a part."""
    try:
        dumped = pickling.dump(task)
    except Exception as error:  # whatever the objects' own pickling raises, the culprit is named
        raise explain(error, owner, roots()) from error
    sizes = large(roots(), LARGE_BYTES) if dumped.packed.size_bytes > LARGE_BYTES else []
    notes = [f"{each} was reloaded after it was used: the older class travels along" for each in dumped.reloaded]
    return Payload(dumped.packed, dumped.sources, name, sizes, notes, dumped.sent)


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Root]:
    names: list[str] = []
    with contextlib.suppress(TypeError, ValueError):  # a builtin without a signature, wrong arguments
        bound = inspect.signature(function).bind(*args, **kwargs)
        positional = (p for p in bound.signature.parameters.values() if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD))
        names = [p.name for p in positional if p.kind != p.VAR_POSITIONAL]
    roots = [Root("argument", names[i] if i < len(names) else f"args[{i}]", arg) for i, arg in enumerate(args)]
    return roots + [Root("argument", name, arg) for name, arg in kwargs.items()]
