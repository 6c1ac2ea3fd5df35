"""``OutputLog``: what the ranks of a run wrote, as lines, with the last ones kept and all of it in log files.

Half a million lines must cost little: bytes are cut at newlines in bulk and decoded when somebody looks. Only a
stream that moves the cursor (progress bars) or leaves a colour switched on is drawn character by character, by a
``Screen``, for as long as it does. What is no text (a file that somebody printed) is cut too, and never drawn.
"""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING, NamedTuple

from notebook_launcher.launcher.sgr import without_colours
from notebook_launcher.launcher.stream import Stream, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from io import BufferedWriter
    from pathlib import Path

_KEPT_BYTES = 8 << 20  # of one rank
_BACKLOG_BYTES = 4 << 20  # of one follower


class Line(NamedTuple):
    """One line. ``stream`` is "stdout" or "stderr"; ``text`` has no newline and keeps its SGR colours."""

    rank: int
    stream: str
    text: str


class _Block(NamedTuple):
    """Lines that came together. ``order`` counts the blocks of all ranks."""

    order: int
    rank: int
    stream: str
    lines: list[bytes | str]
    num_bytes: int

    def decoded(self) -> list[Line]:
        return [Line(self.rank, self.stream, text_of(line)) for line in self.lines]


class _Kept:
    """The last lines of one rank."""

    def __init__(self, keep_lines: int) -> None:
        self._keep_lines = keep_lines
        self._blocks: collections.deque[_Block] = collections.deque()
        self._num_bytes = 0
        self._num_held = 0
        self.num_lines = 0

    @property
    def num_kept(self) -> int:
        return min(self._num_held, self._keep_lines)

    def append(self, block: _Block) -> None:
        self.num_lines += len(block.lines)
        block = _shortened(block, self._keep_lines)
        self._blocks.append(block)
        self._num_bytes += block.num_bytes
        self._num_held += len(block.lines)
        while len(self._blocks) > 1 and (
            self._num_held - len(self._blocks[0].lines) >= self._keep_lines or self._num_bytes > _KEPT_BYTES
        ):
            oldest = self._blocks.popleft()
            self._num_bytes -= oldest.num_bytes
            self._num_held -= len(oldest.lines)

    def blocks(self) -> list[_Block]:
        blocks = list(self._blocks)
        if self._num_held > self._keep_lines:
            surplus = self._num_held - self._keep_lines
            blocks[0] = blocks[0]._replace(lines=blocks[0].lines[surplus:])
        return blocks


class Follower:
    """Gets every line of the shown ranks, however many come between two looks."""

    def __init__(self, lock: threading.Lock, full: Callable[[], None]) -> None:
        """``full`` is called on the feeding thread when too much waits: it takes."""
        self._lock = lock
        self._blocks: list[_Block] = []
        self._num_bytes = 0
        self._full = full

    def take(self) -> list[Line]:
        """The lines since the last call, in order of arrival."""
        with self._lock:
            blocks, self._blocks, self._num_bytes = self._blocks, [], 0
        return [line for block in blocks for line in block.decoded()]

    def _add(self, block: _Block) -> None:
        self._blocks.append(block)
        self._num_bytes += block.num_bytes

    def _hurry(self) -> None:
        if self._num_bytes > _BACKLOG_BYTES:
            self._full()


class OutputLog:
    """What the ranks wrote. One thread feeds and closes; any thread reads."""

    def __init__(
        self,
        num_ranks: int,
        *,
        keep_lines: int = 1000,
        folder: Path | None = None,
        shown_ranks: Collection[int] | None = None,
    ) -> None:
        """Keep the last ``keep_lines`` of each rank; with ``folder``, append every byte to ``folder/rank_<r>.log``.

        Ranks outside ``shown_ranks`` (None: all are in) are kept too, but followers and what is asked of all ranks
        leave them out.
        """
        self.ranks = [rank for rank in range(num_ranks) if shown_ranks is None or rank in shown_ranks]
        self._folder = folder
        self._lock = threading.Lock()
        self._streams: dict[tuple[int, str], Stream] = {}
        self._kept = [_Kept(keep_lines) for _ in range(num_ranks)]
        self._num_blocks = 0
        self._followers: list[Follower] = []
        self._files: dict[int, BufferedWriter] = {}
        self._problems: dict[int, str] = {}
        self._closed = False

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take in ``data`` that ``rank`` wrote to ``stream``. After ``close`` it goes nowhere."""
        if self._closed or not data:
            return
        self._write(rank, data)
        with self._lock:
            source = self._streams.setdefault((rank, stream), Stream())
            self._append(rank, stream, source.feed(data))
        for follower in self._followers:
            follower._hurry()  # noqa: SLF001 - the two are one mechanism

    def close(self) -> None:
        """End every stream: lines that have begun, bars among them, become lines; log files are closed."""
        with self._lock:
            for (rank, stream), source in sorted(self._streams.items()):
                self._append(rank, stream, source.finish())
            self._closed = True
        for file in self._files.values():
            file.close()
        self._files.clear()

    def follow(self, full: Callable[[], None]) -> Follower:
        """A follower that starts now; ``full`` is called on the feeding thread when megabytes wait to be taken."""
        follower = Follower(self._lock, full)
        with self._lock:
            self._followers.append(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        """Stop collecting lines for ``follower``."""
        with self._lock:
            self._followers = [other for other in self._followers if other is not follower]

    def lines(self, rank: int | None = None, last: int | None = None) -> list[Line]:
        """The kept lines of ``rank``, or of all shown ranks in order of arrival; only the ``last`` of them if given."""
        with self._lock:
            blocks = [block for each in self._chosen(rank) for block in self._kept[each].blocks()]
        if rank is None:
            blocks.sort(key=lambda block: block.order)
        if last is not None:
            blocks = _last_lines(blocks, last)
        return [line for block in blocks for line in block.decoded()]

    def live(self, rank: int | None = None) -> list[Line]:
        """The lines of ``rank``, or of all shown ranks, that may still change: bars, prompts, a line that has begun."""
        with self._lock:
            return [
                Line(each, stream, text)
                for each in self._chosen(rank)
                for stream in ("stdout", "stderr")
                if (each, stream) in self._streams
                for text in self._streams[each, stream].live()
            ]

    def text(self, rank: int) -> str:
        """The kept and the live lines of ``rank`` as plain text, without colours."""
        return "".join(f"{without_colours(line.text)}\n" for line in (*self.lines(rank), *self.live(rank)))

    def num_lines(self, rank: int) -> int:
        """How many lines ``rank`` has completed."""
        return self._kept[rank].num_lines

    def num_dropped(self, rank: int) -> int:
        """How many of them are no longer kept."""
        with self._lock:
            return self._kept[rank].num_lines - self._kept[rank].num_kept

    def path(self, rank: int) -> Path | None:
        """The log file of ``rank``; None without a folder, or when the rank has written nothing."""
        written = (rank, "stdout") in self._streams or (rank, "stderr") in self._streams
        return self._folder / f"rank_{rank}.log" if self._folder is not None and written else None

    def problem(self, rank: int) -> str:
        """Why the log file of ``rank`` is not complete; "" when it is."""
        return self._problems.get(rank, "")

    def _chosen(self, rank: int | None) -> Iterable[int]:
        return self.ranks if rank is None else (rank,)

    def _append(self, rank: int, stream: str, lines: list[bytes | str]) -> None:
        shown = rank in self.ranks
        if not lines:
            return
        self._num_blocks += 1
        block = _Block(self._num_blocks, rank, stream, lines, sum(map(len, lines)))
        self._kept[rank].append(block)
        if shown:
            for follower in self._followers:
                follower._add(block)  # noqa: SLF001 - the two are one mechanism

    def _write(self, rank: int, data: bytes) -> None:
        if self._folder is None or rank in self._problems:
            return
        try:
            if rank not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._files[rank] = (self._folder / f"rank_{rank}.log").open("ab")
            self._files[rank].write(data)
            self._files[rank].flush()
        except OSError as error:  # a full disk must not end the run
            self._problems[rank] = f"the log of rank {rank} ends early: {error}"


def _shortened(block: _Block, keep_lines: int) -> _Block:
    """``block`` without the lines that could not be kept even if it were alone."""
    if len(block.lines) <= keep_lines and block.num_bytes <= _KEPT_BYTES:
        return block
    lines = block.lines[-keep_lines:]
    num_bytes = sum(map(len, lines))
    start = 0
    while num_bytes > _KEPT_BYTES and start < len(lines) - 1:
        num_bytes -= len(lines[start])
        start += 1
    return block._replace(lines=lines[start:], num_bytes=num_bytes)


def _last_lines(blocks: list[_Block], last: int) -> list[_Block]:
    chosen: list[_Block] = []
    for block in reversed(blocks):
        if last <= 0:
            break
        chosen.append(block._replace(lines=block.lines[-last:]))
        last -= len(block.lines)
    return chosen[::-1]
