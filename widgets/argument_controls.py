"""A function's arguments as controls, made from its signature, and what was typed back to values and to Python."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import inspect
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal

from notebook_launcher.core.options import shortened
from notebook_launcher.widgets.controls import Choice, Control, Held
from notebook_launcher.widgets.functions import signature

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NOTHING = inspect.Parameter.empty
_MAX_DEFAULT_CHARS = 60
_KINDS: dict[Any, tuple[str, str]] = {
    bool: ("bool", "True or False"),
    int: ("int", "a whole number"),
    float: ("float", "a number"),
    str: ("str", "text"),
}
_EXPRESSION = ("expression", "a Python expression, which may use the notebook's variables")


class ArgumentError(Exception):
    """What was typed for an argument can't be; the message is for beside its control."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """One parameter: its control, and how what that holds is read."""

    parameter: inspect.Parameter
    control: Control
    kind: str  # "bool", "int", "float", "str", "choice" or "expression"
    optional: bool = False
    values: tuple[Any, ...] = ()  # of a choice, in its order

    @property
    def name(self) -> str:
        """The control's."""
        return self.control.name

    def is_default(self, given: Held) -> bool:
        """Whether what the control holds is the function's own default, which a launch need not give."""
        return self.parameter.default is not _NOTHING and given == self.control.default


def arguments(function: Any) -> tuple[Argument, ...]:
    """An argument for each of the function's parameters, in their order."""
    found = signature(function)
    return tuple(_argument(one, function) for one in found.parameters.values()) if found is not None else ()


def value_of(argument: Argument, given: Held, evaluate: Callable[[str], Any]) -> Any:
    """What is passed for ``given``; ``evaluate`` gives an expression's value. Raises ``ArgumentError``."""
    if argument.kind in {"bool", "choice"}:
        return given if argument.kind == "bool" else _chosen(argument, str(given))
    text = str(given)
    if argument.kind == "str" and (text or argument.parameter.default is not _NOTHING):
        return None if not text and argument.optional else text
    if not text.strip():
        return _empty(argument)
    if argument.kind == "expression":
        check_expression(text)
        return evaluate(text)
    reader = int if argument.kind == "int" else float
    try:
        return reader(text.strip())
    except ValueError:
        takes = _KINDS[reader][1] + (", or nothing for None" if argument.optional else "")
        raise ArgumentError(f"{shortened(text)} can't be: {argument.parameter.name} takes {takes}.") from None


def python_of(argument: Argument, given: Held, namespace: Mapping[str, Any]) -> str:
    """The same as Python: what stands for it in a call. Raises ``ArgumentError``."""
    if argument.kind == "expression" and str(given).strip():
        return check_expression(str(given))
    return literal(value_of(argument, given, lambda _: None), namespace)


def check_expression(text: str) -> str:
    """The expression as it may stand among a call's arguments; ``ArgumentError`` where it is none."""
    try:
        tree = ast.parse(text.strip(), "<argument>", mode="eval")
        compile(tree, "<argument>", "eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # the last two for brackets in brackets
        told = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deeply"
        quoted = " Text needs quotation marks." if text.strip().replace(" ", "").isalnum() else ""
        raise ArgumentError(f"{shortened(text)} is no Python expression: {told}.{quoted}") from None
    bare = isinstance(tree.body, ast.Tuple | ast.NamedExpr)
    return ast.unparse(tree.body) if bare or "#" in text or "\n" in text.strip() else text.strip()


def literal(value: Any, namespace: Mapping[str, Any] | None = None) -> str:
    """Python that gives ``value`` back, which is plain data or an enumeration's member."""
    if isinstance(value, enum.Enum):
        kind = type(value)
        names = [name for name, one in (namespace or {}).items() if one is kind and not name.startswith("_")]
        place = names[0] if names else f"__import__({literal(kind.__module__)}, fromlist=['']).{kind.__qualname__}"
        return f"{place}[{literal(value.name)}]" if not value.name.isidentifier() else f"{place}.{value.name}"
    if isinstance(value, float) and repr(value).lstrip("-") in {"inf", "nan"}:
        return f'float("{value!r}")'
    if isinstance(value, str):
        text = repr(value)
        return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text and "\\'" not in text else text
    if type(value) is list:
        return f"[{', '.join(literal(one) for one in value)}]"
    if type(value) is dict:
        return f"{{{', '.join(f'{literal(key)}: {literal(one)}' for key, one in value.items())}}}"
    return repr(value)


# --- from what was typed to a value -----------------------------------------------------------------------------------


def _chosen(argument: Argument, given: str) -> Any:
    index = next((i for i, choice in enumerate(argument.control.choices) if choice.value == given), -1)
    offset = len(argument.control.choices) - len(argument.values)  # a first choice may stand for none of them
    if index < offset:
        raise ArgumentError(f"{argument.parameter.name} needs a choice.")
    return argument.values[index - offset]


def _empty(argument: Argument) -> Any:
    if argument.optional:
        return None
    raise ArgumentError(f"{argument.parameter.name} needs a value: {argument.control.help.partition(': ')[2]}")


# --- from a parameter to a control ------------------------------------------------------------------------------------


def _argument(parameter: inspect.Parameter, function: Any) -> Argument:
    if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
        return _starred(parameter)
    default = parameter.default
    parts = _parts(_annotation(parameter, function))
    optional = type(None) in parts or default is None
    kept = [part for part in parts if part is not type(None)]
    values = _values(kept, default, optional=optional)
    if values:
        return _choice(parameter, values)
    kind, words = _kind(kept, default)
    text = "" if default is _NOTHING or default is None else _text(default, kind)
    start: Held = default if kind == "bool" else text or ""
    placeholder = "None" if optional else ""
    if text is None:
        placeholder = _cut(default)
    told = "" if default is _NOTHING else f"; default: {_cut(default)}"
    control = Control(
        f"{parameter.name}()",
        parameter.name,
        "flag" if kind == "bool" else "text",
        default=start,
        help=f"{parameter.name}: {words}{', or nothing for None' if optional else ''}{told}.",
        placeholder=placeholder,
        group="argument",
    )
    return Argument(parameter, control, kind, optional)


def _starred(parameter: inspect.Parameter) -> Argument:
    is_tuple = parameter.kind is parameter.VAR_POSITIONAL
    words = "a tuple of further arguments" if is_tuple else "a dict of further arguments by name"
    label = f"{'*' if is_tuple else '**'}{parameter.name}"
    control = Control(
        f"{parameter.name}()", label, "text", help=f"{label}: {words}.", placeholder="none", group="argument"
    )
    return Argument(parameter, control, "expression", optional=True)


def _choice(parameter: inspect.Parameter, values: tuple[Any, ...]) -> Argument:
    default = parameter.default
    choices = tuple(Choice(_key(value), _label(value, values)) for value in values)
    start = next((one.value for one, value in zip(choices, values, strict=True) if _same(value, default)), "")
    if not start:
        choices = (Choice("", "choose one" if default is _NOTHING else _cut(default)), *choices)
    control = Control(
        f"{parameter.name}()",
        parameter.name,
        "choice",
        default=start,
        choices=choices,
        help=f"{parameter.name}: one of {', '.join(_label(value, values) for value in values)}.",
        group="argument",
    )
    return Argument(parameter, control, "choice", values=values)


def _key(value: Any) -> str:
    return value.name if isinstance(value, enum.Enum) else literal(value)


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _label(value: Any, values: tuple[Any, ...]) -> str:
    """The value as a person would write it; text without its quotation marks unless another value looks the same."""
    if isinstance(value, enum.Enum):
        return value.name
    clashes = any(str(one) == value for one in values if not isinstance(one, str))
    return value if isinstance(value, str) and value and not clashes else literal(value)


def _annotation(parameter: inspect.Parameter, function: Any) -> Any:
    """What the parameter is annotated with, as its own parts; ``_NOTHING`` where it is not known."""
    try:
        return _plain(parameter.annotation, getattr(inspect.unwrap(function), "__globals__", {}))
    except Exception:  # noqa: BLE001 - a name that is known to type checkers only: any expression will do
        return _NOTHING


def _plain(annotation: Any, names: dict[str, Any]) -> Any:
    """The annotation without quotation marks and without what is only said about it, in a union's parts too."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):  # quoted twice: under "from __future__ import annotations"
        return _plain(eval(annotation, names), names)  # noqa: S307 - the notebook's own, as typing.get_type_hints does
    if typing.get_origin(annotation) in {Annotated, typing.Final}:
        return _plain(typing.get_args(annotation)[0], names)
    if typing.get_origin(annotation) in {types.UnionType, typing.Union}:
        parts = [_plain(part, names) for part in typing.get_args(annotation)]
        return typing.Union[tuple(parts)]  # noqa: UP007 - of parts that are known only now
    return annotation


def _parts(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in {types.UnionType, typing.Union}:
        return typing.get_args(annotation)
    return () if annotation is _NOTHING else (annotation,)


def _values(kept: list[Any], default: Any, *, optional: bool) -> tuple[Any, ...]:
    """What may be chosen, where the annotation or the default says it; else ()."""
    if not kept and isinstance(default, enum.Enum):
        kept = [type(default)]
    if len(kept) != 1:
        return ()
    values: tuple[Any, ...] = ()
    if typing.get_origin(kept[0]) is Literal:
        values = typing.get_args(kept[0])
    elif isinstance(kept[0], type) and issubclass(kept[0], enum.Enum) and not issubclass(kept[0], enum.Flag):
        values = tuple(kept[0])
    elif kept[0] is bool and (optional or not isinstance(default, bool)):  # a box is either ticked or not
        values = (True, False)
    return (*values, None) if values and optional and None not in values else values


def _kind(kept: list[Any], default: Any) -> tuple[str, str]:
    if len(kept) == 1 and kept[0] in _KINDS:
        allowed = (int, float) if kept[0] is float else (kept[0],)
        if default is _NOTHING or default is None or type(default) in allowed:
            return _KINDS[kept[0]]
    if not kept and type(default) in {bool, str}:
        return _KINDS[type(default)]
    return _EXPRESSION


def _text(default: Any, kind: str) -> str | None:
    """The default as it is typed; None where it has no short text that gives it back."""
    if kind == "str":
        return str(default) if "\n" not in default else None
    with contextlib.suppress(Exception):  # a broken __repr__, text that is no literal: it has none, then
        text = repr(default)
        if kind != "expression" or (len(text) <= _MAX_DEFAULT_CHARS and _same(ast.literal_eval(text), default)):
            return text
    return None


def _cut(value: Any) -> str:
    text = shortened(value)
    return text if len(text) <= _MAX_DEFAULT_CHARS else text[: _MAX_DEFAULT_CHARS - 3] + "..."
