"""``Screen``: the last few lines of one stream, as a terminal would draw them.

Progress bars rewrite their line with a carriage return, nested bars go up some lines with a cursor movement. Only
what follows a row can tell that it is final, so ``Screen`` holds rows that were rewritten until a line of ordinary text
follows below, or until they are farther up than the cursor has been going.
"""

from __future__ import annotations

import codecs
import itertools
import re

from notebook_launcher.launcher.sgr import PLAIN, RESET, Style

MAX_LINE_CHARS = 1 << 20
_MAX_ROWS = 64
_MAX_MOVE = 10_000  # the column that a cursor movement can reach
_MAX_ESCAPE_CHARS = 4096

_TOKEN = re.compile(
    r"(?P<text>[^\x00-\x08\x0a-\x1f\x7f-\x9f]+)"
    r"|(?P<control>[\n\r\x08])"
    r"|\x1b\[(?P<parameters>[0-?]{0,200})[ -/]*(?P<final>[@-~])"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # a title or link
    r"|\x1b[PX^_][^\x1b]*\x1b\\"  # a message to the terminal itself
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x1f\x7f-\x9f]"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[PX^_][^\x1b]*\x1b?|[ -/]*)\Z")


def cut_note(num_cut: int, unit: str) -> str:
    """The words that stand at the end of a line of which the rest was not kept."""
    return f" ... [{num_cut:,} more {unit} of this line not kept]" if num_cut else ""


class _Row:
    __slots__ = ("_chars", "_coloured", "_num_cut", "_styles", "rewritten")

    def __init__(self) -> None:
        self._chars: list[str] = []
        self._styles: list[Style] = []
        self._coloured = False
        self._num_cut = 0
        self.rewritten = False

    def __len__(self) -> int:
        return len(self._chars)

    @property
    def blank(self) -> bool:
        return not "".join(self._chars).strip()

    def write(self, column: int, text: str, style: Style) -> None:
        room = MAX_LINE_CHARS - column
        if len(text) > room:
            self._num_cut += len(text) - room
            text = text[:room]
        missing = column - len(self._chars)
        if missing > 0:
            self._chars += " " * missing
            self._styles += [PLAIN] * missing
        self._chars[column : column + len(text)] = text
        self._styles[column : column + len(text)] = [style] * len(text)
        self._coloured = self._coloured or style is not PLAIN

    def erase(self, start: int, end: int | None) -> None:
        if end is None:
            del self._chars[start:], self._styles[start:]
        else:
            self.write(start, " " * (min(end, len(self._chars)) - start), PLAIN)

    def text(self) -> str:
        num_shown = len(self._chars)
        if self.rewritten:  # bars wipe their longer past with spaces
            num_shown = len("".join(self._chars).rstrip())
        if not self._coloured:
            return "".join(self._chars[:num_shown]) + cut_note(self._num_cut, "characters")
        parts = []
        column = 0
        for style, group in itertools.groupby(self._styles[:num_shown]):
            end = column + len(list(group))
            text = "".join(self._chars[column:end])
            parts.append(text if style == PLAIN else f"{style.sequence()}{text}{RESET}")
            column = end
        return "".join(parts) + cut_note(self._num_cut, "characters")


class Screen:
    """Draws one stream's bytes. One thread."""

    def __init__(self) -> None:
        """Start with an empty row."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._unfinished = ""  # the beginning of an escape sequence, whose end will come
        self._rows = [_Row()]
        self._row = 0
        self._column = 0
        self._style = PLAIN
        self._reach = 0  # how many rows the cursor has gone up from the lowest
        self._completed: list[str] = []

    def feed(self, data: bytes) -> list[str]:
        """Draw ``data``; return the lines that became final, without their newline and with their colours."""
        text = self._unfinished + self._decoder.decode(data)
        self._unfinished = ""
        unfinished = _UNFINISHED.search(text, max(0, len(text) - _MAX_ESCAPE_CHARS)) if "\x1b" in text else None
        if unfinished is not None:
            self._unfinished = unfinished[0]
            text = text[: unfinished.start()]
        for token in _TOKEN.finditer(text):
            match token.lastgroup:
                case "text":
                    self._rows[self._row].write(self._column, token[0], self._style)
                    self._column = min(self._column + len(token[0]), MAX_LINE_CHARS)
                case "control":
                    self._control(token[0])
                case "final":
                    self._sequence(token["final"], token["parameters"])
        self._release(self._reach + 1)
        return self._take()

    @property
    def idle(self) -> bool:
        """Whether nothing is drawn or begun: a new ``Screen`` would do as well."""
        row = self._rows[0]
        empty = len(self._rows) == 1 and self._column == 0 and (not len(row) or (row.rewritten and row.blank))
        return empty and self._style == PLAIN and not self._unfinished and not self._decoder.getstate()[0]

    def live(self) -> list[str]:
        """The rows that may still change, the lowest last, without blank ones."""
        return [row.text() for row in self._rows if not row.blank]

    def finish(self) -> list[str]:
        """Nothing more will come: return what is left as lines."""
        rest = self._decoder.decode(b"", final=True)
        if rest:
            self._rows[self._row].write(self._column, rest, self._style)
        while len(self._rows) > self._row and self._rows[-1].blank:
            self._rows.pop()
        return [row.text() for row in self._rows]

    def _control(self, char: str) -> None:
        if char == "\n":
            self._newline()
            return
        row = self._rows[self._row]
        if char == "\r" and len(row) and row.blank:  # a bar was wiped; what comes may be ordinary text
            self._rows[self._row] = _Row()
        else:
            row.rewritten = True
        self._column = 0 if char == "\r" else max(0, self._column - 1)

    def _newline(self) -> None:
        row = self._rows[self._row]
        while len(self._rows) > self._row + 1 and self._rows[-1].blank:
            self._rows.pop()
        self._row += 1
        self._column = 0
        if self._row < len(self._rows):
            if self._rows[self._row].blank:
                self._rows[self._row] = _Row()
            return
        self._rows.append(_Row())
        if not row.rewritten:
            self._reach = 0
            self._release(0)
        elif len(self._rows) > _MAX_ROWS:
            self._release(_MAX_ROWS // 2)

    def _release(self, num_held: int) -> None:
        """Complete rows from the top until ``num_held`` with text are left above the lowest, or all with 0."""
        if num_held and self._row <= num_held:
            return
        num_above = sum(1 for row in self._rows[:-1] if not row.blank) if num_held else 0
        num_done = 0
        for row in self._rows[: self._row]:
            if num_held and num_above <= num_held:
                break
            num_above -= bool(num_held and not row.blank)
            num_done += 1
            self._completed.append(row.text())
        del self._rows[:num_done]
        self._row -= num_done

    def _sequence(self, final: str, parameters: str) -> None:
        first = parameters.partition(";")[0]
        count = int(first) if first.isdecimal() else None
        if final == "m":
            if not parameters.strip("0123456789;:"):
                self._style = self._style.then(parameters)
        elif final in "ABCDEFG":
            self._move(final, max(1, count or 1))
        elif final == "K":
            row = self._rows[self._row]
            row.rewritten = True
            row.erase(*((self._column, None), (0, self._column), (0, None))[min(count or 0, 2)])
        elif final == "J" and not count:
            self._rows[self._row].erase(self._column, None)
            del self._rows[self._row + 1 :]

    def _move(self, final: str, count: int) -> None:
        if final in "AF":
            self._reach = max(self._reach, min(_MAX_ROWS, len(self._rows) - 1 - self._row + count))
            self._row = max(0, self._row - count)
        elif final in "BE":
            self._row = min(len(self._rows) - 1, self._row + count)
        elif final == "C":
            self._column = max(self._column, min(self._column + count, _MAX_MOVE))
        elif final == "D":
            self._column = max(0, self._column - count)
        else:
            self._column = min(count - 1, _MAX_MOVE)
        if final in "EF":
            self._column = 0
        self._rows[self._row].rewritten = True

    def _take(self) -> list[str]:
        completed, self._completed = self._completed, []
        return completed
