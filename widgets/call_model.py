"""From what was typed for a function's arguments to its call: values, text, or what is wrong with each."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.widgets.argument_controls import Argument, ArgumentError, literal, python_of, value_of
from notebook_launcher.widgets.code import CallText

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_launcher.widgets.controls import Held


class CallError(Exception):
    """Arguments that can't be; ``texts`` says why, by control."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        super().__init__("\n".join(texts.values()))
        self.texts = dict(texts)


class _Given(NamedTuple):
    argument: Argument
    held: Held
    by_name: bool


def errors(arguments: Sequence[Argument], typed: Mapping[str, Held], namespace: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with what was typed, by control, as far as it shows without evaluating."""
    found = {}
    for given in _given(arguments, typed):
        try:
            python_of(given.argument, given.held, namespace)
        except ArgumentError as error:
            found[given.argument.name] = str(error)
    return found


def text(
    function: str, arguments: Sequence[Argument], typed: Mapping[str, Held], namespace: Mapping[str, Any]
) -> CallText:
    """The call as Python; arguments that are as the function has them are left out. Raises ``ArgumentError``."""
    args, kwargs = [], []
    for given in _given(arguments, typed):
        written = python_of(given.argument, given.held, namespace)
        parameter = given.argument.parameter
        if parameter.kind is parameter.VAR_POSITIONAL:
            args.append(f"*{written}" if written.isidentifier() or written[:1] in "([" else f"*({written})")
        elif given.by_name:
            kwargs.append(("**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name, written))
        else:
            args.append(written)
    return CallText(function, tuple(args), tuple(kwargs))


def values(
    arguments: Sequence[Argument], typed: Mapping[str, Held], namespace: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's ``args`` and ``kwargs``, expressions evaluated in ``namespace``. Raises ``CallError``."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    found: dict[str, str] = {}
    for given in _given(arguments, typed):
        parameter = given.argument.parameter
        try:
            value = value_of(given.argument, given.held, lambda source: _evaluated(source, namespace))
            if parameter.kind is parameter.VAR_POSITIONAL:
                args += _unpacked(value, tuple, "a tuple, such as (1, 2)", parameter.name)
            elif parameter.kind is parameter.VAR_KEYWORD:
                further = _unpacked(value, dict, "a dict with names, such as {'a': 1}", parameter.name)
                _check_new(further, arguments, parameter.name)
                kwargs |= further
            elif given.by_name:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        except ArgumentError as error:
            found[given.argument.name] = str(error)
    if found:
        raise CallError(found)
    return tuple(args), kwargs


def _given(arguments: Sequence[Argument], typed: Mapping[str, Held]) -> list[_Given]:
    """The arguments that the call gives, and whether by name: those without a default first, by their place."""
    held = [(one, typed.get(one.name, one.control.default)) for one in arguments]
    given = []
    by_place = _num_by_place(held)
    for index, (one, value) in enumerate(held):
        parameter = one.parameter
        starred = parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
        left_out = value == "" if starred else index >= by_place and one.is_default(value)
        if not left_out:
            given.append(
                _Given(one, value, by_name=index >= by_place and parameter.kind is not parameter.VAR_POSITIONAL)
            )
    return given


def _num_by_place(held: Sequence[tuple[Argument, Held]]) -> int:
    """How many of the first arguments stand without their names."""
    num = 0
    further = any(one.parameter.kind is one.parameter.VAR_POSITIONAL and value != "" for one, value in held)
    leading = True
    for index, (one, value) in enumerate(held, 1):
        parameter = one.parameter
        if parameter.kind not in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}:
            break
        leading = leading and parameter.default is parameter.empty
        nameless = parameter.kind is parameter.POSITIONAL_ONLY and not one.is_default(value)
        if leading or nameless or further:
            num = index
    return num


def _evaluated(source: str, namespace: Mapping[str, Any]) -> Any:
    try:
        return eval(compile(source.strip(), "<argument>", "eval"), dict(namespace))  # noqa: S307 - the notebook's user typed it, to be evaluated in the notebook
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"{source.strip()} can't be worked out: {type(error).__name__}: {error}.") from error


def _unpacked(value: Any, kind: type[Any], words: str, name: str) -> Any:
    allowed = (tuple, list) if kind is tuple else kind
    if not isinstance(value, allowed) or (kind is dict and not all(isinstance(key, str) for key in value)):
        raise ArgumentError(f"{name} takes {words}, not {literal(value)}.")
    return value


def _check_new(further: Mapping[str, Any], arguments: Sequence[Argument], name: str) -> None:
    kinds = {one.parameter.name: one.parameter.kind for one in arguments}
    for given in further:
        if kinds.get(given) in {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
            raise ArgumentError(f"{name} holds {given}, which has a control of its own: leave it out.")
