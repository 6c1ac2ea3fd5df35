"""``Stream``: cuts what a rank writes to one stream into lines, without drawing it where that gives the same lines."""

from __future__ import annotations

import codecs
import re

from notebook_launcher.launcher.screen import MAX_LINE_CHARS, Screen, cut_note

_TAIL_BYTES = 4096  # a line with escape sequences that is longer is drawn as it comes
_BINARY_LINE_BYTES = 8192  # of a line that is no text: more than anybody looks at
_BINARY_MIN = 16  # a few of them may come from a terminal program
_BINARY_ONE_IN = 64
_NEVER_IN_TEXT = bytes([*range(7), *range(0x10, 0x1B), *range(0x1C, 0x20)])
_NOT_SHOWN = bytes([*range(9), *range(0x0B, 0x20), 0x7F])

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")
_RETURNS = re.compile(rb"\r+\n")
_SGR = re.compile(rb"\x1b(?:\[[0-9;:]{0,200}(?:m|\Z)|\Z)")  # also one whose end has not come
_COLOUR_LEFT_ON = re.compile(rb"\x1b\[(?!0?m)[0-9;:]*m[^\x1b\n]*\n")


class Stream:
    """Cuts one stream of one rank into lines."""

    def __init__(self) -> None:
        self._tail: list[bytes] = []  # the line that has begun
        self._tail_bytes = 0
        self._num_cut = 0
        self._tail_escapes = False
        self._tail_binary = False
        self._return = b""  # a carriage return that may be half of "\r\n"
        self._screen: Screen | None = None

    def feed(self, data: bytes) -> list[bytes | str]:
        """The lines that ``data`` completes."""
        data = self._return + data
        self._return = b""
        lines: list[bytes | str] = []
        if self._tail_binary:
            end = data.find(b"\n") + 1 or len(data)
            lines, data = self._cut_binary(data[:end]), data[end:]
        if _is_binary(data):
            return lines + self._cut_binary(data)
        if b"\r" in data:
            self._return = b"\r" if data.endswith(b"\r") else b""
            data = _RETURNS.sub(b"\n", data.rstrip(b"\r") if self._return else data)
        return lines + (self._cut(data) if self._screen is None else self._draw(self._screen, data))

    def live(self) -> list[str]:
        """The lines that have begun or may still change, without blank ones."""
        if self._screen is not None:
            return self._screen.live()
        if not self._tail:
            return []
        if self._tail_escapes:
            screen = Screen()  # it knows what to do with half an escape sequence
            screen.feed(self._begun())
            texts = screen.live()
        else:
            decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")  # leaves half a character out
            texts = [text for text in [_without_controls(decoder.decode(self._begun()))] if text.strip()]
        return [text + cut_note(self._num_cut, "bytes") for text in texts]

    def finish(self) -> list[bytes | str]:
        """Nothing more will come: the lines that have begun."""
        screen = self._screen or Screen()
        screen.feed(self._begun())
        note = cut_note(self._num_cut, "bytes")
        self._screen = None
        self._forget_tail()
        return [text + note for text in screen.finish()]

    def _cut(self, data: bytes) -> list[bytes | str]:
        """Cut ``data`` without drawing it where that gives the same lines."""
        if self._tail_escapes:
            data = b"".join(self._tail) + data
            self._forget_tail()
        if not (b"\x1b" in data or b"\r" in data or b"\x08" in data):
            return [*self._split(data)]
        body, newline, rest = data.rpartition(b"\n")
        escapes = b"\x1b" in rest
        if (
            _moves(rest)
            or _moves(body)
            or _COLOUR_LEFT_ON.search(body + newline)
            or (escapes and len(rest) > _TAIL_BYTES)
        ):
            self._screen = Screen()
            data = b"".join(self._tail) + data
            self._forget_tail()
            return self._draw(self._screen, data)
        lines = self._split(data)
        self._tail_escapes = escapes
        return [*lines]

    def _cut_binary(self, data: bytes) -> list[bytes | str]:
        """Cut ``data`` that is no text: what it would do to a terminal, nobody wants to see drawn."""
        lines: list[bytes | str] = [] if self._screen is None else [*self._screen.finish()]
        self._screen = None
        lines += [piece.translate(None, _NOT_SHOWN) for piece in self._split(data, _BINARY_LINE_BYTES)]
        self._tail_binary = bool(self._tail)  # to the line's end: a short read says little
        return lines

    def _begun(self) -> bytes:
        """The line that has begun, as far as it can be shown."""
        begun = b"".join(self._tail)
        return begun.translate(None, _NOT_SHOWN) if self._tail_binary else begun

    def _draw(self, screen: Screen, data: bytes) -> list[bytes | str]:
        body, newline, rest = data.rpartition(b"\n")
        lines: list[bytes | str] = [*screen.feed(body + newline)]
        if newline and screen.idle:
            self._screen = None
            return lines + self._cut(rest)
        lines += screen.feed(rest)
        if screen.idle:
            self._screen = None
        return lines

    def _forget_tail(self) -> None:
        self._tail, self._tail_bytes, self._num_cut = [], 0, 0
        self._tail_escapes = self._tail_binary = False

    def _split(self, data: bytes, max_bytes: int = MAX_LINE_CHARS) -> list[bytes]:
        """Cut at newlines; of a line, ``max_bytes`` are kept."""
        pieces = data.split(b"\n")
        rest = pieces.pop()
        first = []
        if pieces and self._tail:
            self._extend(pieces.pop(0), max_bytes)
            first = [b"".join(self._tail) + cut_note(self._num_cut, "bytes").encode()]
            self._forget_tail()
        if len(data) > max_bytes:
            pieces = [_capped(piece, max_bytes) for piece in pieces]
        if rest:
            self._extend(rest, max_bytes)
        return first + pieces

    def _extend(self, piece: bytes, max_bytes: int) -> None:
        room = max(0, max_bytes - self._tail_bytes)
        self._num_cut += max(0, len(piece) - room)
        if room:
            self._tail.append(piece[:room])
        self._tail_bytes += min(len(piece), room)


def text_of(line: bytes | str) -> str:
    """A completed line as text."""
    return line if isinstance(line, str) else _without_controls(line.decode("utf-8", "backslashreplace"))


def _without_controls(text: str) -> str:
    return _CONTROLS.sub("", text) if _CONTROLS.search(text) else text


def _moves(data: bytes) -> bool:
    """Whether ``data`` moves the cursor or erases: anything but text, newlines, colours and a sequence's beginning."""
    if b"\r" in data or b"\x08" in data:
        return True
    return b"\x1b" in data and b"\x1b" in _SGR.sub(b"", data)


def _is_binary(data: bytes) -> bool:
    """Whether ``data`` is no text: many bytes in it that no program writes to a terminal."""
    num_strange = len(data) - len(data.translate(None, _NEVER_IN_TEXT))
    return num_strange >= _BINARY_MIN and num_strange * _BINARY_ONE_IN >= len(data)


def _capped(piece: bytes, max_bytes: int) -> bytes:
    if len(piece) <= max_bytes:
        return piece
    return piece[:max_bytes] + cut_note(len(piece) - max_bytes, "bytes").encode()
