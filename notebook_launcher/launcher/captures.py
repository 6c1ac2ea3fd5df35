"""What a function takes along: finds the variable that can't travel, and those that are large."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import named_pickling, pickling, refusals
from notebook_launcher.core.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MAX_DEPTH = 30
_MAX_ITEMS = 10_000  # of a container, when the one item that can't be pickled is looked for


@dataclasses.dataclass(frozen=True)
class Root:
    """Something handed over by itself. ``kind``: "function", "argument" or, of a cell, "variable"."""

    kind: str
    name: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Part:
    """A value that another refers to. ``text`` is a variable's name, or ".name" or "[key]" for what a value holds."""

    text: str
    value: Any
    kind: str  # "global variable", "closure variable", "default argument", ... or "" for what is inside a value


def explain(error: Exception, owner: str, roots: Sequence[Root]) -> PayloadError:
    """The error that names the variable, who uses it, its type, and what to do instead."""
    for root in roots:
        problem = _problem(root.value)
        if problem is not None:
            trail = [Part(root.name, root.value, root.kind)]
            problem = _descend(trail, problem, {id(root.value)})
            return PayloadError(_message(owner, trail, problem))
    return PayloadError(f"{owner} can't travel to the ranks: {_first_line(error)}")


def large(roots: Sequence[Root], limit_bytes: int) -> list[tuple[str, int]]:
    """Variables and arguments of more than ``limit_bytes``, the largest first: (name, bytes)."""
    found: dict[int, tuple[str, int]] = {}
    seen: set[int] = set()
    for root in roots:
        for part in _values(Part(root.name, root.value, root.kind), seen):
            size = pickling.measure(part.value)
            if size > limit_bytes:
                found.setdefault(id(part.value), (part.text, size))
    return sorted(found.values(), key=lambda each: -each[1])


def _values(part: Part, seen: set[int]) -> Iterator[Part]:
    """The variables behind ``part`` that are no code: itself, or what its functions and classes refer to."""
    if id(part.value) in seen:
        return
    seen.add(id(part.value))
    inner = _code_parts(part.value)
    if inner is None:
        yield part
        return
    for each in inner:
        if each.text.startswith((".", "[")):
            each = Part(f"{part.text}{each.text}", each.value, each.kind)  # noqa: PLW2901 - the same part, fully named
        yield from _values(each, seen)


def _code_parts(value: Any) -> list[Part] | None:  # noqa: PLR0911 - one return for each kind of code
    """What a piece of code refers to; None for a value that is no code, [] for code that a worker imports."""
    match value:
        case types.FunctionType():
            return _function_parts(value) if pickling.travels_by_value(value) else []
        case types.MethodType():
            return [Part("", value.__func__, "function"), Part("self", value.__self__, "object")]
        case functools.partial():
            items = [*((f"args[{i}]", each) for i, each in enumerate(value.args)), *value.keywords.items()]
            return [Part("", value.func, "function"), *(Part(name, each, "argument") for name, each in items)]
        case type():
            if not pickling.travels_by_value(value):
                return []
            bases = [Part(base.__name__, base, "base class") for base in value.__bases__]
            return bases + [Part(f".{name}", each, "") for name, each in _class_items(value)]
        case property():
            accessors = {"fget": value.fget, "fset": value.fset, "fdel": value.fdel}
            return [Part("", each, "function") for each in accessors.values() if each is not None]
        case staticmethod() | classmethod():
            return [Part("", value.__func__, "function")]
        case types.ModuleType():
            return []
    return [Part("", inspect.unwrap(value), "function")] if isinstance(value, named_pickling.CachedFunction) else None


def _class_items(cls: type) -> Iterator[tuple[str, Any]]:
    automatic = (types.GetSetDescriptorType, types.MemberDescriptorType)
    for name, value in vars(cls).items():
        if name not in ("__dict__", "__weakref__", "_abc_impl") and not isinstance(value, automatic):
            yield name, value


def _function_parts(function: types.FunctionType) -> list[Part]:
    parts = [Part(name, each, "global variable") for name, each in pickling.captured_globals(function).items()]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            parts.append(Part(name, cell.cell_contents, "closure variable"))
        except ValueError:  # not yet set
            continue
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    named = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
    named.update(function.__kwdefaults__ or {})
    parts += [Part(name, each, "default argument") for name, each in named.items()]
    return parts + [Part(f".{name}", each, "") for name, each in vars(function).items()]


# --- the search for what can't be pickled -----------------------------------------------------------------------------


def _descend(trail: list[Part], problem: Exception, seen: set[int]) -> Exception:
    """Follow what fails down to the innermost value that fails by itself; ``trail`` grows by each step."""
    while len(trail) < _MAX_DEPTH:
        for part in _parts(trail[-1].value):
            if id(part.value) in seen:
                continue
            seen.add(id(part.value))
            found = _problem(part.value)
            if found is not None:
                trail.append(part)
                problem = found
                break
        else:
            break
    return problem


def _parts(value: Any) -> list[Part]:  # noqa: PLR0911 - one return for each kind of value
    if isinstance(value, types.FunctionType | type) and not pickling.travels_by_value(value):
        return []
    rule = refusals.rule_of(type(value))
    if rule is not None:
        return []
    code = _code_parts(value)
    if code:
        return code
    match value:
        case dict():
            return [Part(f"[{key!r}]", each, "") for key, each in [*value.items()][:_MAX_ITEMS]]
        case list() | tuple():
            return [Part(f"[{i}]", each, "") for i, each in enumerate(value[:_MAX_ITEMS])]
        case set() | frozenset():
            return [Part("{...}", each, "") for each in [*value][:_MAX_ITEMS]]
        case types.ModuleType():
            return [Part(f".{name}", each, "") for name, each in vars(value).items() if not name.startswith("__")]
    attributes = getattr(value, "__dict__", None)
    return [Part(f".{name}", each, "") for name, each in attributes.items()] if isinstance(attributes, dict) else []


def _problem(value: Any) -> Exception | None:
    try:
        pickling.measure(value)
    except Exception as error:  # noqa: BLE001 - the answer is what pickling raised, of any kind
        return error
    return None


# --- the message ------------------------------------------------------------------------------------------------------


def _message(owner: str, trail: list[Part], problem: Exception) -> str:
    # The innermost variable, the path from it to the culprit, and the function that it belongs to.
    start = max(i for i, part in enumerate(trail) if part.kind and part.text)
    user = next(
        (p for p in reversed(trail[:start]) if isinstance(p.value, types.FunctionType | types.MethodType)), None
    )
    user_name = owner if user is None else f"{user.value.__qualname__.rpartition('<locals>.')[2]}()"
    path = f"`{trail[start].text}{''.join(part.text for part in trail[start + 1 :])}`"
    through = "" if user_name == owner else f" ({owner} uses {user_name})"
    where = {
        "function": f"{path} itself",
        "argument": f"the argument {path} of {owner}",
        "variable": f"the variable {path}, which {owner} uses,",
    }.get(trail[start].kind, f"the {trail[start].kind} {path}, which {user_name} uses{through},")
    culprit = problem.value if isinstance(problem, refusals.RefusedError) else trail[-1].value
    rule = refusals.rule_of(type(culprit))
    reason = "belongs to this process" if rule else f"can't be pickled ({_first_line(problem)})"
    advice = rule.advice if rule else "create it inside the function, or pass what it is made from (a path, a name)"
    kind = refusals.type_name(type(culprit))
    return f"{where} can't travel to the ranks: it is of type {kind}, which {reason}. {advice[0].upper()}{advice[1:]}."


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
