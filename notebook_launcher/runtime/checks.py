"""What arguments may hold. A wrong one is refused where it is given, not where it has done harm. Torch isn't loaded."""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Any

from notebook_launcher.core.errors import ConfigError


def whole(argument: str, given: Any, of: str, least: int = 1) -> int:
    """``given`` as a number ``of`` something; ``ConfigError`` where it is no whole one, or less than ``least``."""
    try:
        number = least - 1 if isinstance(given, bool) else int(given)
    except (TypeError, ValueError, OverflowError):
        number = least - 1
    if number < least or number != given:
        raise ConfigError(f"{argument}={given!r} is no number of {of}; give a whole number, {least} or more")
    return number


def between(argument: str, given: Any, low: float, high: float, usual: float) -> None:
    """Raise ``ConfigError`` where ``given`` is no number between ``low`` and ``high``, neither of which is meant."""
    try:
        is_between = low < given < high
    except TypeError:
        is_between = False
    if not is_between:
        raise ConfigError(f"{argument}={given!r} is no number between {low} and {high}; give one, such as {usual}")


def rank(call: str, argument: str, given: Any, num_processes: int) -> None:
    """Raise ``ConfigError`` where ``given`` is none of the ranks of ``num_processes``."""
    if given not in range(num_processes):
        several = num_processes > 1
        raise ConfigError(
            f"{call}({argument}={given!r}): there is no such rank among {num_processes} process{'es' * several}; give 0"
            + f" to {num_processes - 1}" * several
        )


def instance(call: str, given: object, kind: type | tuple[type, ...], words: str) -> None:
    """Raise ``TypeError`` where ``given`` is not of ``kind``: ``words`` say what ``call`` takes."""
    if not isinstance(given, kind):
        raise wrong_type(call, given, words) from None


def function(call: str, given: object, words: str = "a function") -> None:
    """Raise ``TypeError`` where ``given`` can't be called."""
    if not callable(given):
        raise wrong_type(call, given, words)


def wrong_type(call: str, given: object, words: str) -> TypeError:
    """The error for what is not of the type that ``call`` takes, in ``words``."""
    shown = " ".join(reprlib.repr(given).split())  # a model's is long
    return TypeError(f"{call} takes {words}, and was given {shown}, of type {type(given).__name__}")


def flags(**given: Any) -> None:
    """Raise ``ConfigError`` for an argument that is neither True nor False, as "no" is, which would count as True."""
    for argument, value in given.items():
        if value not in (True, False, None):  # 0, 1 and numpy's are equal to them
            raise ConfigError(f"{argument}={value!r} is neither True nor False; give one of them")


class Flagged:
    """A dataclass whose flags are checked when it is made."""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a flag that is none."""
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]  # whoever inherits is one
        flags(**{one.name: getattr(self, one.name) for one in fields if one.type in {"bool", "bool | None"}})
