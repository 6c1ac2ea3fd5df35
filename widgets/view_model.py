"""A run as a monitor shows it: plain values, made from the run's record. No widgets, no HTML, no clock of its own."""

from __future__ import annotations

import dataclasses
import socket
from typing import TYPE_CHECKING

from notebook_launcher.launcher.outcome import fate
from notebook_launcher.launcher.sgr import without_colours
from notebook_launcher.launcher.state import Phase
from notebook_launcher.widgets.curve_data import Curves
from notebook_launcher.widgets.loop_progress import Loop, bars, counted, time_left_s
from notebook_launcher.widgets.quantities import duration, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_launcher.launcher.output import Line
    from notebook_launcher.launcher.sinks import RunView
    from notebook_launcher.launcher.state import RankState, RunState
    from notebook_launcher.widgets.curve_data import Plot

_LAST_LINE_CHARS = 200


@dataclasses.dataclass(frozen=True)
class State:
    """How a run or a rank stands, in a word and a symbol; ``tone`` ("good", "bad", "warning", "") chooses a colour."""

    word: str
    symbol: str
    tone: str


_STATES = {
    state.word: state
    for state in (
        State("starting", "○", ""),
        State("waiting", "○", ""),
        State("running", "▸", ""),
        State("stopping", "◒", "warning"),
        State("finished", "✓", "good"),
        State("stopped", "■", "warning"),
        State("timed out", "■", "bad"),
        State("failed", "✗", "bad"),
        State("died", "✗", "bad"),
    )
}


@dataclasses.dataclass(frozen=True)
class RankRow:
    """One rank. Texts are "" where nothing is known."""

    rank: int
    state: State
    detail: str  # of a rank that failed: "raised ValueError: ..."
    pid: int | None
    step: str
    rate: str
    memory: str
    device_memory: str
    last_line: str  # without colours
    last_stream: str
    num_lines: int
    log_path: str


@dataclasses.dataclass(frozen=True)
class View:
    """Everything that a monitor shows but the output itself."""

    headline: str
    state: State
    notes: tuple[str, ...]
    elapsed: str
    remaining: str  # "" where nobody knows
    fraction: float | None  # of the work that is done, by the rank that has most left
    rows: tuple[RankRow, ...]
    plots: tuple[Plot, ...]
    summary: str
    error: str


def state_of(word: str) -> State:
    """The state that ``word`` names; one with a plain symbol for a word that is new here."""
    return _STATES.get(word, State(word, "·", ""))


class ViewModel:
    """Makes views of one run. Looking again costs what has come since, however long the run is."""

    def __init__(self, record: RunView, *, compare: RunView | None = None) -> None:
        """Show ``record``, its curves laid over those of ``compare``."""
        self.record = record
        self._host = socket.gethostname()
        self._others: list[RunView] = [] if compare is None or compare is record else [compare]
        self._curves = Curves(names=["this run", "other run"] if self._others else [""])
        self._peaks: dict[int, int] = {}

    def local_pids(self) -> dict[int, int]:
        """The processes of this machine that go on, by rank."""
        states = self._states()
        return {
            rank: pid
            for rank, pid in list(self.record.pids.items())
            if self.record.hosts.get(rank, self._host) == self._host and not (states and states[rank].exited)
        }

    def view(self, memory_bytes: Mapping[int, int] | None = None, *, curves: bool = True) -> View:
        """How the run stands now; ``memory_bytes`` is what the ranks' processes use, by rank, where it is known.

        Without ``curves``, these are as they were in the view before.
        """
        record = self.record
        for rank, used in (memory_bytes or {}).items():
            self._peaks[rank] = max(used, self._peaks.get(rank, 0))
        if curves:
            for number, run in enumerate([record, *self._others]):
                self._curves.take(number, run.metrics)
        ended = bool(record.summary)
        loops = {rank: self._loops(rank) for rank in range(record.num_ranks)}
        rows = [self._row(rank, loops[rank], (memory_bytes or {}).get(rank)) for rank in loops]
        slowest = min(
            ((found[0].fraction, rank) for rank, found in loops.items() if found and found[0].fraction is not None),
            default=None,
        )
        left_s = None if ended or slowest is None else time_left_s(loops[slowest[1]])
        return View(
            headline=record.headline,
            state=state_of(record.status),
            notes=tuple(record.notes),
            elapsed=duration(record.elapsed_s),
            remaining="" if left_s is None else duration(left_s),
            fraction=None if slowest is None else slowest[0],
            rows=tuple(rows),
            plots=self._curves.plots(),
            summary=record.summary,
            error=record.error,
        )

    def _loops(self, rank: int) -> list[Loop]:
        """The rank's loops, the outermost first: those that it reports, else those whose bars it draws."""
        reported = list(self.record.steps.get(rank, ()))
        if reported:
            return counted(reported)
        return bars(without_colours(line.text) for line in self.record.output.live(rank))

    def _states(self) -> list[RankState]:
        return self.record.state.ranks if self.record.state is not None else []

    def _row(self, rank: int, loops: list[Loop], used_bytes: int | None) -> RankRow:
        record = self.record
        states = self._states()
        last = self._last_line(rank)
        held = record.device_memory.get(rank)
        path = record.output.path(rank)
        step = record.metrics.last_steps.get(rank)
        peak = self._peaks.get(rank)
        return RankRow(
            rank=rank,
            state=rank_state(states[rank], record.state) if record.state is not None else state_of("waiting"),
            detail=_detail(states[rank], record.state) if record.state is not None else "",
            pid=record.pids.get(rank),
            step=" · ".join(loop.place for loop in loops) or ("" if step is None else f"step {step:,}"),
            rate=next((loop.rate for loop in reversed(loops) if loop.rate), ""),
            memory=size(used_bytes) if used_bytes is not None else f"peak {size(peak)}" if peak else "",
            device_memory="" if held is None else _of(held.used_bytes, held.total_bytes),
            last_line=without_colours(last.text)[:_LAST_LINE_CHARS] if last is not None else "",
            last_stream=last.stream if last is not None else "",
            num_lines=record.output.num_lines(rank),
            log_path=str(path) if path is not None else "",
        )

    def _last_line(self, rank: int) -> Line | None:
        lines = self.record.output.live(rank) or self.record.output.lines(rank, last=1)
        return lines[-1] if lines else None


def rank_state(one: RankState, run: RunState | None) -> State:
    """Where a rank is in its life, in the words of a table."""
    if one.phase is Phase.RETURNED:
        return state_of("finished")
    if one.phase is Phase.RAISED and not (one.sent is not None and run is not None and run.reason != "failure"):
        interrupted = one.failed is not None and one.failed.type_name == "KeyboardInterrupt" and one.sent is not None
        return state_of("stopped" if interrupted else "failed")
    if one.ended:
        return state_of("stopped" if one.sent is not None else "died")
    if one.sent is not None:
        return state_of("stopping")
    return state_of("waiting" if one.phase is Phase.STARTING else "running")


def _detail(one: RankState, run: RunState | None) -> str:
    if one.phase not in (Phase.RAISED, Phase.DIED):
        return ""
    cause = run.ranks[run.cause] if run is not None and run.cause is not None else None
    return fate(one, cause)


def _of(used: int, total: int | None) -> str:
    return size(used) if total is None else f"{size(used)} of {size(total)}"
