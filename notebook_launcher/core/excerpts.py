"""Long texts cut to what can be read: the beginning, the end, and how much lies between."""

from __future__ import annotations

import re

_LINES_AT_LEAST = 8  # share the room, however long each of them is
_CHARACTERS = " ... [{:,} characters not shown] ... "
_LINES = "... {:,} lines not shown ..."
_OLD_CHARACTERS = re.compile(r" \.\.\. \[([\d,]+) characters not shown\] \.\.\. ")
_OLD_LINES = re.compile(r"^\.\.\. ([\d,]+) lines not shown \.\.\.$", re.MULTILINE)


def excerpt(text: str, max_chars: int) -> str:
    """``text`` in about ``max_chars``: lines that are too long lose their middle, then the text does.

    What is said of an earlier cut of the same text is added up.
    """
    if len(text) <= max_chars:
        return text
    max_line_chars = max_chars // _LINES_AT_LEAST
    head, start = list[str](), 0
    room = max_chars // 2
    while room > 0 and start < len(text):
        stop = text.find("\n", start)
        stop = len(text) if stop < 0 else stop
        head.append(_cut(text[start:stop], max_line_chars))
        room -= len(head[-1]) + 1
        start = stop + 1
    tail, end = list[str](), len(text)
    room = max_chars // 2
    while room > 0 and end > start:
        begin = max(start, text.rfind("\n", start, end) + 1)
        tail.append(_cut(text[begin:end], max_line_chars))
        room -= len(tail[-1]) + 1
        end = begin - 1
    if end > start:
        num_lines = text.count("\n", start, end) + 1 + _sum(_OLD_LINES, text[start:end])
        head.append(_LINES.format(num_lines))
    return "\n".join([*head, *reversed(tail)])


def _cut(line: str, max_chars: int) -> str:
    if len(line) <= max_chars:
        return line
    half = max_chars // 2
    num_more = len(line) - 2 * half + _sum(_OLD_CHARACTERS, line[half:-half])
    return line[:half] + _CHARACTERS.format(num_more) + line[-half:]


def _sum(old: re.Pattern[str], cut_out: str) -> int:
    """How much more than its own length is missing from ``cut_out``, as its notes say."""
    if "not shown" not in cut_out:
        return 0  # a pattern would take seconds where there are millions of lines
    counts = [(int(found[1].replace(",", "")), found[0]) for found in old.finditer(cut_out)]
    return sum(count - (len(note) if old is _OLD_CHARACTERS else 1) for count, note in counts)
