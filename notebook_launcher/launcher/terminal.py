"""Sinks without a notebook: ``TerminalSink`` prints lines as they come, ``NullSink`` shows nothing."""

from __future__ import annotations

import shutil
import sys
import threading
from typing import TYPE_CHECKING, TextIO

from notebook_launcher.launcher.sgr import RESET, without_colours

if TYPE_CHECKING:
    from notebook_launcher.core.events import Display
    from notebook_launcher.launcher.output import Follower, Line, OutputLog
    from notebook_launcher.launcher.sinks import RunView


class NullSink:
    """Shows nothing; results and logs are there all the same."""

    def opened(self, view: RunView) -> None:
        """Nothing."""

    def changed(self, view: RunView) -> None:
        """Nothing."""

    def displayed(self, rank: int, display: Display) -> None:
        """Nothing."""

    def closed(self, view: RunView) -> None:
        """Nothing."""


class TerminalSink:
    """Prints a run to ``sys.stdout``: headline, every line with its rank, summary.

    Lines that may still change (progress bars) are drawn in place below the others where stdout is a terminal;
    elsewhere they are printed when they are final.
    """

    def __init__(self) -> None:
        """Print nowhere until ``opened``."""
        self._out: TextIO | None = None
        self._log: OutputLog | None = None
        self._follower: Follower | None = None
        self._in_place = False
        self._num_drawn = 0
        self._num_notes = 0
        self._lock = threading.RLock()

    def opened(self, view: RunView) -> None:
        """Print the headline and the notes, and print from now on to what ``sys.stdout`` is now."""
        self._out = sys.stdout
        self._in_place = self._out.isatty()
        self._log = view.output
        self._follower = view.output.follow(self._print_lines)
        with self._lock:
            self._print([view.headline])
            self._print_notes(view)

    def changed(self, view: RunView) -> None:
        """Print the lines and the notes that have come since the last call."""
        with self._lock:
            self._print_lines()
            self._print_notes(view)
            if self._in_place:
                self._draw(view.output.live())

    def displayed(self, rank: int, display: Display) -> None:
        """Print the plain text of what a rank displayed."""
        text = str(display.data.get("text/plain", ", ".join(display.data)))
        with self._lock:
            self._print_lines()
            self._print([f"[{rank}] {line}" for line in text.splitlines()])

    def closed(self, view: RunView) -> None:
        """Print what is left, then the summary."""
        with self._lock:
            self._print_lines()
            self._print([self._labelled(line) for line in view.output.live()])
            self._print_notes(view)
            self._print([view.summary])
            if self._follower is not None:
                view.output.unfollow(self._follower)
            self._follower = self._out = None

    def _print_lines(self) -> None:
        with self._lock:
            if self._follower is not None:
                self._print([self._labelled(line) for line in self._follower.take()])

    def _print_notes(self, view: RunView) -> None:
        new = view.notes[self._num_notes :]
        self._num_notes += len(new)
        self._print(new)

    def _labelled(self, line: Line) -> str:
        if "\x1b" not in line.text:
            return f"[{line.rank}] {line.text}"
        text = line.text + RESET if self._in_place else without_colours(line.text)
        return f"[{line.rank}] {text}"

    def _draw(self, live: list[Line]) -> None:
        """Draw the lines that may still change, each cut to the terminal's width, so that they can be wiped again."""
        width = shutil.get_terminal_size().columns - 1
        rows = [f"[{line.rank}] {without_colours(line.text)}"[:width] for line in live]
        self._write(self._wipe() + "".join(f"{row}\n" for row in rows))
        self._num_drawn = len(rows)

    def _wipe(self) -> str:
        return f"\x1b[{self._num_drawn}A\r\x1b[J" if self._num_drawn else ""

    def _print(self, texts: list[str]) -> None:
        texts = [text for text in texts if text]
        if texts:
            self._write(self._wipe() + "".join(f"{text}\n" for text in texts))
            self._num_drawn = 0

    def _write(self, text: str) -> None:
        """Write and flush; a reader that went away (``| head``) ends the printing, not the run."""
        if self._out is None or not text:
            return
        try:
            try:
                self._out.write(text)
            except UnicodeEncodeError:
                encoding = self._out.encoding or "ascii"
                self._out.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._out.flush()
        except (OSError, ValueError):  # ValueError: it was closed
            self._out = None
