"""The options of ``%launch`` and ``%%launch``: made from ``LaunchConfig``'s fields, read from the front of a line.

What follows the options is left as it was typed: it is Python.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import textwrap
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.config import field_rows
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.registry import unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.core.options import OptionRow

_SHORT = {"num_processes": "n", "device": "d", "mixed_precision": "p", "strategy": "s"}
_METAVARS = {
    "choice": "NAME",
    "int": "N",
    "float": "SECONDS",
    "str": "TEXT",
    "int list": "N,N",
    "str list": "NAME,NAME",
    "pairs": "NAME=VALUE",
}
_LISTS = (_METAVARS["int list"], _METAVARS["str list"])
_WIDTH = 100
_INDENT = 34


@dataclasses.dataclass(frozen=True)
class Flag:
    """One option as it is typed."""

    name: str  # "num_processes"
    metavar: str  # "" when it takes no value
    description: str
    choices: tuple[str, ...] = ()
    short: str = ""
    repeatable: bool = False

    @property
    def long(self) -> str:
        """``--num-processes``."""
        return "--" + self.name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a line said. ``rest`` is the text after the options."""

    options: dict[str, Any]  # for LaunchConfig.make
    rest: str = ""
    config: str | None = None
    save: str | None = None
    background: bool = False
    monitor: bool = False
    help: bool = False


@functools.cache
def flags() -> tuple[Flag, ...]:
    """Every option of ``%launch``, in the order to show them."""
    own = (
        Flag("config", "FILE", "YAML file with options, Accelerate's too; options in the line come first."),
        Flag("save", "NAME", "Notebook variable for the list of results, by rank."),
        Flag("background", "", "Leave the kernel free while the run goes on."),
        Flag("monitor", "", "Show the run by a monitor: a row a rank, curves, a stop button."),
        Flag("help", "", "Show this text.", short="h"),
    )
    return (*(_flag(row) for row in field_rows()), *own)


def _flag(row: OptionRow) -> Flag:
    pairs = row.kind == "pairs"
    return Flag(
        row.name,
        _METAVARS[row.kind],
        row.description + (" Repeatable." if pairs else ""),
        choices=row.choices,
        short=_SHORT.get(row.name, ""),
        repeatable=pairs,
    )


@functools.cache
def spellings() -> dict[str, Flag]:
    """Flags by what may be typed: ``-n``, ``--num-processes``."""
    return {text: flag for flag in flags() for text in (flag.long, *(["-" + flag.short] * bool(flag.short)))}


def parse(line: str, expand: Callable[[str], str] = lambda text: text) -> Arguments:
    """Read the options at the front of ``line``; ``expand`` fills notebook variables into their values.

    Raises ``ConfigError`` for an option that is not known, lacks its value, or has one that it doesn't take.
    """
    options: dict[str, Any] = {}
    own: dict[str, Any] = {}
    place = _skip_space(line, 0)
    while re.match(r"-[-A-Za-z]", line[place:]):
        flag, value, place = _option(line, place)
        if value is not None:
            value = expand(value)
        if flag.name in {"config", "save", "background", "monitor", "help"}:
            own[flag.name] = True if value is None else value
        elif flag.repeatable:
            options.setdefault(flag.name, {}).update([_pair(flag, value or "")])
        else:
            options[flag.name] = value
    if not str(own.get("save", "results")).isidentifier():
        raise ConfigError(f"--save {own['save']} can't be: it takes a variable's name, such as results.")
    if own.get("save") and own.get("background"):
        raise ConfigError(
            "--save waits for the results and --background doesn't: leave one out, or take Run.results later."
        )
    return Arguments(options=options, rest=line[place:].strip(), **own)


def _option(line: str, place: int) -> tuple[Flag, str | None, int]:
    """The flag at ``place``, its value, and where the next word begins."""
    word, end = _word(line, place, stop="=")
    if not word.startswith("--") and word[:2] in spellings() and len(word) > 2:  # noqa: PLR2004 - "-n4"
        word, end = word[:2], place + 2
    flag = spellings().get(word.replace("_", "-"))
    if flag is None:
        raise unknown_name("option", word, spellings())
    attached = end < len(line) and not line[end].isspace()
    if not flag.metavar:
        if attached:
            raise ConfigError(f"{flag.long} takes no value: leave {line[end:].split(maxsplit=1)[0]} out.")
        return flag, None, _skip_space(line, end)
    start = end + (line[end] == "=") if attached else _skip_space(line, end)
    if start >= len(line):
        raise ConfigError(f"{flag.long} needs a value, such as {flag.long} {_example(flag)}.")
    value, end = _word(line, start)
    if value.endswith(",") and flag.metavar in _LISTS and end < len(line):
        raise ConfigError(
            f"{flag.long} {value} ends with a comma: a list has no spaces here, as in {flag.long} {_example(flag)}."
        )
    return flag, value, _skip_space(line, end)


def _word(line: str, place: int, stop: str = "") -> tuple[str, int]:
    """The word that begins at ``place`` without its quotes, and where it ends: at a space or at ``stop``."""
    text, quote = "", ""
    while place < len(line):
        letter = line[place]
        if quote:
            if letter == quote:
                quote = ""
            else:
                text += letter
        elif letter in "'\"":
            quote = letter
        elif letter.isspace() or letter == stop:
            break
        else:
            text += letter
        place += 1
    if quote:
        raise ConfigError(f"a quotation mark {quote} is not closed in the options: {line.strip()}")
    return text, place


def _skip_space(line: str, place: int) -> int:
    return len(line) - len(line[place:].lstrip())


def _pair(flag: Flag, value: str) -> tuple[str, str]:
    name, separator, text = value.partition("=")
    if not separator or not name:
        raise ConfigError(f"{flag.long} {value} can't be: it takes a name and a value, such as {flag.long} A=1.")
    return name, text


def _example(flag: Flag) -> str:
    if flag.choices:
        return flag.choices[-1]
    return {
        "N": "2",
        "SECONDS": "60",
        "N,N": "0,1",
        "NAME,NAME": "numpy,scipy",
        "NAME=VALUE": "A=1",
        "FILE": "config.yaml",
    }.get(flag.metavar, "name")


def help_text(usage: str, purpose: str) -> str:
    """What ``-h`` prints: how to type it, what it does, each option with its choices."""
    lines = [usage, "", textwrap.fill(purpose, _WIDTH), "", "options:"]
    for flag in flags():
        short = f"-{flag.short}, " if flag.short else "    "
        value = " " + ("{" + ",".join(flag.choices) + "}" if flag.choices else flag.metavar) if flag.metavar else ""
        head = f"  {short}{flag.long}{value}"
        if len(head) >= _INDENT:
            lines.append(head)
            head = ""
        pad = " " * _INDENT
        lines += textwrap.wrap(flag.description, _WIDTH, initial_indent=head.ljust(_INDENT), subsequent_indent=pad)
    return "\n".join(lines)
