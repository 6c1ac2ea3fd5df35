"""Colours in text: the SGR escape sequences (ESC, ``[1;31m``) that terminals understand, as a value."""

from __future__ import annotations

import functools
import itertools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SGR = re.compile(r"\x1b\[([0-9;:]{0,200})m")
RESET = "\x1b[0m"

_CHANGES: dict[int, dict[str, Any]] = {
    1: {"bold": True},
    2: {"faint": True},
    3: {"italic": True},
    4: {"underline": True},
    7: {"inverse": True},
    9: {"strike": True},
    21: {"underline": True},
    22: {"bold": False, "faint": False},
    23: {"italic": False},
    24: {"underline": False},
    27: {"inverse": False},
    29: {"strike": False},
    39: {"foreground": ""},
    49: {"background": ""},
    **{code: {"foreground": str(code)} for code in (*range(30, 38), *range(90, 98))},
    **{code: {"background": str(code)} for code in (*range(40, 48), *range(100, 108))},
}
_EXTENDED = {38: "foreground", 48: "background"}
_CODES = {"bold": "1", "faint": "2", "italic": "3", "underline": "4", "inverse": "7", "strike": "9"}
_NUM_AFTER = {5: 1, 2: 3}  # 38;5;n and 38;2;r;g;b


class Style(NamedTuple):
    """How a character looks.

    A colour is the SGR parameters that choose it: "31", "48;5;120", "38;2;255;0;0"; "" is none.
    """

    foreground: str = ""
    background: str = ""
    bold: bool = False
    faint: bool = False
    italic: bool = False
    underline: bool = False
    inverse: bool = False
    strike: bool = False

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - styles are values, and few
    def then(self, parameters: str) -> Style:
        """The style after the sequence with ``parameters``. What is not understood changes nothing."""
        style = self
        parts = iter(parameters.split(";"))
        for part in parts:
            if ":" in part:
                style = _extended(style, _colon_form(part))
                continue
            code = int(part or 0)
            if code == 0:
                style = PLAIN
            elif code in _EXTENDED:
                style = _extended(style, itertools.chain([code], _numbers(parts)))
            else:
                style = style._replace(**_CHANGES.get(code, {}))
        return style

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - likewise
    def sequence(self) -> str:
        """The escape sequence that turns plain text into this style; "" for plain."""
        codes = [code for name, code in _CODES.items() if getattr(self, name)]
        codes += [colour for colour in (self.foreground, self.background) if colour]
        return f"\x1b[{';'.join(codes)}m" if codes else ""


PLAIN = Style()


def runs(text: str) -> Iterator[tuple[Style, str]]:
    """``text`` in pieces of one style, without the sequences."""
    style = PLAIN
    position = 0
    for match in SGR.finditer(text):
        if match.start() > position:
            yield style, text[position : match.start()]
        style = style.then(match[1])
        position = match.end()
    if position < len(text):
        yield style, text[position:]


def without_colours(text: str) -> str:
    """``text`` without SGR sequences."""
    return SGR.sub("", text) if "\x1b" in text else text


def _extended(style: Style, numbers: Iterable[int]) -> Style:
    """``style`` with a colour of the 256 or of all: ``numbers`` starts 38 or 48, then 5, n or 2, r, g, b."""
    source = iter(numbers)
    code, kind = next(source, 0), next(source, 0)
    values = list(itertools.islice(source, _NUM_AFTER.get(kind, 0)))
    if code not in _EXTENDED or not values or len(values) < _NUM_AFTER[kind]:
        return style
    colour = ";".join(str(value) for value in (code, kind, *(min(value, 255) for value in values)))
    changes: dict[str, Any] = {_EXTENDED[code]: colour}
    return style._replace(**changes)


def _numbers(parts: Iterable[str]) -> Iterator[int]:
    for part in parts:
        yield int(part) if part.isdecimal() else 0


def _colon_form(part: str) -> list[int]:
    """38:5:n and 38:2:[space]:r:g:b as the numbers of the semicolon form."""
    numbers = list(_numbers(part.split(":")))
    return [*numbers[:2], *numbers[-3:]] if numbers[1:2] == [2] else numbers
