"""Options described by a pydantic model's fields: rows from which magics, commands and forms are made, and errors.

An option is a field with a one-line description. What it may hold is said once, in the field's type and bounds; the
words in help texts and in error messages are made from those.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import os
import re
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from notebook_launcher.core import device_words
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.registry import unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo

_UUID = re.compile(r"(GPU|MIG)-[0-9a-f][0-9a-f-]*", re.IGNORECASE)
_KINDS: dict[Any, tuple[str, str]] = {
    int: ("int", "a whole number"),
    float: ("float", "a number"),
    str: ("str", "text"),
    list[int]: ("int list", "a list of whole numbers"),
    list[int | str]: ("int list", "a list of whole numbers, or of GPUs' UUIDs"),
    list[str]: ("str list", "a list of names"),
    dict[str, str]: ("pairs", "names and values, both text"),
}


@dataclasses.dataclass(frozen=True)
class OptionRow:
    """One option, for whoever offers it: a magic, a command, a form."""

    name: str  # as a Python argument: "num_processes"
    kind: str  # "choice", "int", "float", "str", "int list", "str list" or "pairs"
    words: str  # what it takes, in words: "a whole number from 1 to 1024"
    choices: tuple[str, ...]  # the values of a choice, else ()
    default: Any
    optional: bool  # None is allowed
    description: str


def rows(model: type[BaseModel], *, without: tuple[str, ...] = ()) -> tuple[OptionRow, ...]:
    """A row for each field of ``model``, in the order of the class, except those named in ``without``."""
    return tuple(_row(name, field) for name, field in model.model_fields.items() if name not in without)


def parameters(table: Iterable[OptionRow]) -> list[inspect.Parameter]:
    """The options as a signature's parameters, by name only, for help and completion."""
    return [inspect.Parameter(row.name, inspect.Parameter.KEYWORD_ONLY, default=row.default) for row in table]


def _row(name: str, field: FieldInfo) -> OptionRow:
    parts = _union(field.annotation)
    optional = type(None) in parts
    kept = _plain(next(part for part in parts if part is not type(None)))
    choices: tuple[str, ...] = ()
    if typing.get_origin(kept) is Literal:
        choices = typing.get_args(kept)
        kind, words = "choice", "one of " + ", ".join(choices)
    else:
        kind, words = _KINDS[kept]
    return OptionRow(
        name=name,
        kind=kind,
        words=words + _bounds(field),
        choices=choices,
        default=field.get_default(call_default_factory=True),
        optional=optional,
        description=field.description or "",
    )


def _union(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in {types.UnionType, typing.Union}:
        return typing.get_args(annotation)
    return (annotation,)


def _plain(annotation: Any) -> Any:
    """The type without what is only said about reading it."""
    if typing.get_origin(annotation) is Annotated:
        return _plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is list:
        return list[_plain(typing.get_args(annotation)[0])]  # type: ignore[misc]
    return annotation


def _bounds(field: FieldInfo) -> str:
    found = {key: getattr(rule, key) for rule in field.metadata for key in ("ge", "gt", "le") if hasattr(rule, key)}
    if "ge" in found and "le" in found:
        return f" from {found['ge']} to {found['le']}"
    if "ge" in found:
        return f" of {found['ge']} or more"
    return f" greater than {found['gt']}" if "gt" in found else ""


# --- values as people give them --------------------------------------------------------------------------------------


def _whole(value: object) -> object:
    """Text (a magic, an environment variable) and numpy's integers count; True and 2.0 are mistakes."""
    if isinstance(value, str):
        return int(value.replace("_", "x"))  # int() takes "1_0"
    if isinstance(value, bool):
        raise ValueError("a truth value is no number")  # noqa: TRY004 - pydantic turns only ValueError into its error
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(str(error)) from None


def _number_or_uuid(value: object) -> object:
    """A device's UUID stays text: "GPU-" or "MIG-", as nvidia-smi -L shows it, and hexadecimal digits."""
    if isinstance(value, str) and _UUID.fullmatch(value):
        return value
    return _whole(value)


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a truth value is no number")  # noqa: TRY004 - as above
    return value


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _separated(value: object) -> object:
    """``"0,1"`` is a list of two, a tuple or range is a list, a single number a list of one."""
    if isinstance(value, str):
        if _has_empty_place(value):
            raise ValueError("what is missing can't be guessed")
        return _parts(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return list(value) if isinstance(value, tuple | range | set | frozenset) else value


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _has_empty_place(text: str) -> bool:
    return bool(text.strip()) and not all(part.strip() for part in text.split(","))


def _path(value: object) -> object:
    return os.path.expanduser(os.fspath(value)) if isinstance(value, str | os.PathLike) else value  # noqa: PTH111 - text stays text


WHOLE = BeforeValidator(_whole)
NUMBER_OR_UUID = BeforeValidator(_number_or_uuid)
NUMBER = BeforeValidator(_number)
LOWER = BeforeValidator(_lower)
SEPARATED = BeforeValidator(_separated)
PATH = BeforeValidator(_path)

# --- errors ----------------------------------------------------------------------------------------------------------

_HINTS = {
    **{("device", name): text for name, text in device_words.ADVICE.items()},
    ("device_ids", "all"): "Leave it out to use all.",
    **{("mixed_precision", name): "That is 'no'." for name in ("fp32", "float32", "float", "none", "32-true")},
    **{("mixed_precision", name): "That is 'fp16'." for name in ("float16", "half", "16-mixed")},
    ("mixed_precision", "bf16-mixed"): "That is 'bf16'.",
    **{
        ("mixed_precision", name): "Leave it out, and make the model of float64."
        for name in ("fp64", "float64", "double")
    },
    ("mixed_precision", "fp8"): "Nothing computes in fp8 in this version.",
}
_NUMBERED = "One of several is chosen by device_ids, such as device='{0}', device_ids=[{1}]."
_UNNUMBERED = "{0!r} is written without a number."
_WITH_IDS = ("cuda", "xpu")  # kinds of which device_ids chooses


def origin(sources: Mapping[str, str], *names: str) -> str:
    """Where the named options came from, in brackets, for a message; "" when they all are the caller's arguments."""
    told = [f"{name}: {sources[name]}" for name in names if sources.get(name, "argument") != "argument"]
    return f" ({'; '.join(told)})" if told else ""


def option_error(problem: ValidationError, table: Mapping[str, OptionRow], sources: Mapping[str, str]) -> ConfigError:
    """The package's error for pydantic's: each option that was wrong, its value and what it takes, a line each."""
    lines: dict[str, str] = {}
    for entry in problem.errors(include_url=False, include_context=False):
        name = str(entry["loc"][0])
        lines.setdefault(name, _complaint(name, entry["input"], table, sources, inside=len(entry["loc"]) > 1))
    return ConfigError("\n".join(lines.values()))


def _complaint(
    name: str, value: object, table: Mapping[str, OptionRow], sources: Mapping[str, str], *, inside: bool
) -> str:
    where = origin(sources, name)
    if name not in table:
        return str(unknown_name("option", name, table)) + where
    row = table[name]
    if row.choices and isinstance(value, str):
        kind, _, number = value.partition(":")
        told = _NUMBERED if kind in _WITH_IDS else _UNNUMBERED
        numbered = told.format(kind, number) if kind in row.choices and number.isdecimal() else ""
        hint = numbered or _HINTS.get((name, kind.lower()), "")
        known = f"{name} {value!r} is not known. {hint} Known: {', '.join(row.choices)}." if hint else ""
        return (known or str(unknown_name(name, value, row.choices))) + where
    if isinstance(value, str) and row.kind in {"int list", "str list"} and not inside and _has_empty_place(value):
        parts = _parts(value)
        without = f", or leave it out: {','.join(parts)!r}" if parts else ""
        return f"{name}={shortened(value)} can't be: a place beside a comma is empty{where}. Fill it in{without}."
    words = row.words + ("," if "," in row.words else "") + " or None" if row.optional else row.words
    part = f"{name} holds {shortened(value)}, which" if inside else f"{name}={shortened(value)}"
    advice = _HINTS.get((name, value.lower()), "") if isinstance(value, str) else ""
    return f"{part} can't be: {name} takes {words}{where}. {advice or row.description}"


def shortened(value: object) -> str:
    """A value's repr, cut to what a message can carry."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a broken __repr__ must not hide which option was wrong
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."  # noqa: PLR2004 - about a line
