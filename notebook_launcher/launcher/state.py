"""A run as a pure state machine: what happened and what time it is go in, what is to be done comes out.

No process, no clock, no thread is touched here; ``supervisor`` does what the actions say. Times are seconds of any
monotonic clock.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from typing import TYPE_CHECKING

from notebook_launcher.launcher import deadlock

if TYPE_CHECKING:
    from notebook_launcher.core.events import Failed, Pending, Where

SETTLE_S = 0.3  # after the first failure, how long an earlier one may still come in before the cause is named
ANSWER_S = 0.05  # how long ranks have at least to say where they are, before an interrupt takes them elsewhere
STANDING_S = 8.0  # how long ranks have been known to wait for each other before it is said that it is for ever
# And at most: on a busy machine an answer takes its time.
PATIENCE_S = {"stop": 0.3, "failure": 1.0, "timeout": 1.0, "deadlock": 1.0}
HEAR_S = 0.8  # after an interrupt, how long a rank that does not hear it (it is in a collective) is left alone
FAILURE_GRACE_S = 2.0  # after another rank's failure, how long one that heard the interrupt may clean up
KILL_S = 0.5  # from terminate to kill
LEAVE_S = 2.0  # from permission to leave to kill
RELEASE_S = 5.0  # how long finished ranks keep their connections while others go on


class Phase(enum.Enum):
    """Where one rank is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    RETURNED = "returned"
    RAISED = "raised"
    DIED = "died"


class Act(enum.Enum):
    """What the supervisor is to do to a rank."""

    ASK_WHERE = "ask where"
    INTERRUPT = "interrupt"
    TERMINATE = "terminate"
    KILL = "kill"
    RELEASE = "release"
    LEAVE = "leave"


@dataclasses.dataclass(frozen=True)
class Action:
    """One thing to do to one rank."""

    act: Act
    rank: int


@dataclasses.dataclass
class RankState:
    """What is known of one rank."""

    phase: Phase = Phase.STARTING
    exited: bool = False
    exit_code: int | None = None
    failed: Failed | None = None
    where: Where | None = None
    pending: Pending | None = None  # the collective in which it stands
    pending_s: float = 0.0  # since when that is known
    heard: bool = False
    released: bool = False
    sent: Act | None = None  # the hardest step of the ladder that it was sent
    ended_s: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether its function is over, one way or another."""
        return self.phase in (Phase.RETURNED, Phase.RAISED, Phase.DIED)


class RunState:
    """One run: a state for each rank, and the ladder once it is being stopped."""

    def __init__(
        self, num_ranks: int, *, began_s: float = 0.0, stop_grace_s: float = 5.0, timeout_s: float | None = None
    ) -> None:
        """``stop_grace_s``: how long a rank that heard the interrupt may go on.

        ``timeout_s`` is the limit of the whole run, counted from ``began_s``: a rank that never starts is late, too.
        """
        self.ranks = [RankState() for _ in range(num_ranks)]
        self.reason = ""  # why it is being stopped: "failure", "deadlock", "stop", "timeout"; "" while it is not
        self.cause: int | None = None  # the rank whose failure came first
        self.locked: dict[int, Pending] = {}  # by rank, the collectives in which ranks wait for each other for ever
        self._grace_s = stop_grace_s
        self._timeout_s = timeout_s
        self.asked_to_stop = False  # by somebody, whatever else made it stop: then it is not started again
        self._began_s = began_s
        self._stopping_s = 0.0  # when the ladder began
        self._interrupted_s: float | None = None  # when it came to the interrupt
        self._asked_again = False
        self._left_s: float | None = None  # when the ranks were let go

    # --- what happened ----------------------------------------------------------------------------------------------

    def started(self, rank: int) -> list[Action]:
        """The rank's function began."""
        state = self.ranks[rank]
        if state.phase is Phase.STARTING:
            state.phase = Phase.RUNNING
        return []

    def heard(self, rank: int) -> None:
        """The rank's function got its ``KeyboardInterrupt``."""
        self.ranks[rank].heard = True

    def found(self, rank: int, where: Where) -> None:
        """The rank said where it is; once it was interrupted, that is where the interrupt took it."""
        if self.ranks[rank].sent is None:
            self.ranks[rank].where = where

    def waits(self, rank: int, pending: Pending | None, now_s: float) -> None:
        """The rank stands still in a collective, or goes on."""
        state = self.ranks[rank]
        before = state.pending
        if pending is None:
            self._dissolve(rank)
        if pending is None or before is None or (pending.group, pending.number) != (before.group, before.number):
            state.pending_s = now_s
        state.pending = pending

    def returned(self, rank: int, now_s: float) -> list[Action]:
        """The rank's function returned."""
        return self._end(rank, Phase.RETURNED, now_s)

    def raised(self, rank: int, failed: Failed, now_s: float) -> list[Action]:
        """The rank's function raised."""
        self.ranks[rank].failed = failed
        return self._end(rank, Phase.RAISED, now_s)

    def exited(self, rank: int, code: int | None, now_s: float) -> list[Action]:
        """The rank's process is gone; ``code`` is negative for a signal, None where nobody knows."""
        state = self.ranks[rank]
        state.exited, state.exit_code = True, code
        # An exit after the function's end is a note, never a failure.
        return [] if state.ended else self._end(rank, Phase.DIED, now_s)

    # --- what is wanted ---------------------------------------------------------------------------------------------

    def stop(self, now_s: float, reason: str = "stop") -> list[Action]:
        """Begin the ladder; when it has begun already, jump to its end."""
        self.asked_to_stop = self.asked_to_stop or reason == "stop"
        if self.reason == "":
            return self._begin_ladder(reason, now_s)
        return self.kill(now_s)

    def kill(self, now_s: float) -> list[Action]:
        """End every process now."""
        self.asked_to_stop = True
        if self.reason == "":
            self.reason, self._stopping_s = "stop", now_s
        return [self._step(rank, Act.KILL) for rank, state in enumerate(self.ranks) if not state.exited]

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed."""
        if self.all_ended:
            return self._let_go(now_s)
        if self.reason:
            return self._climb(now_s)
        if self._timeout_s is not None and now_s - self._began_s > self._timeout_s:
            return self.stop(now_s, "timeout")
        return self._unlock(now_s) or self._release(now_s)

    # --- what it has come to ----------------------------------------------------------------------------------------

    @property
    def all_ended(self) -> bool:
        """Whether every rank's function is over."""
        return all(state.ended for state in self.ranks)

    @property
    def done(self) -> bool:
        """Whether every rank's process is gone too."""
        return self.all_ended and all(state.exited for state in self.ranks)

    @property
    def status(self) -> str:
        """One word: starting, running, stopping, finished, failed, stopped, timed out."""
        if not self.done:
            began = any(state.phase is not Phase.STARTING for state in self.ranks)
            return "stopping" if self.reason else "running" if began else "starting"
        if self.reason == "timeout":
            return "timed out"
        if self.reason == "stop":
            return "stopped"
        return "failed" if self.cause is not None or self.locked else "finished"

    # --- inside -----------------------------------------------------------------------------------------------------

    def _end(self, rank: int, phase: Phase, now_s: float) -> list[Action]:
        state = self.ranks[rank]
        state.phase, state.ended_s = phase, now_s
        self._dissolve(rank)
        # Whom the ladder has reached ends by it, and explains nothing.
        if phase is not Phase.RETURNED and self.reason in ("", "failure") and state.sent is None:
            first = self.reason == ""
            if first or now_s - self._stopping_s <= SETTLE_S:
                self._weigh(rank)
            if first:
                return self._begin_ladder("failure", now_s)
        return self._let_go(now_s) if self.all_ended else []

    def _weigh(self, rank: int) -> None:
        """Keep the likeliest cause: a death explains the others' errors; of two errors, the earlier."""
        if self.cause is None or self._weight(rank) < self._weight(self.cause):
            self.cause = rank

    def _weight(self, rank: int) -> tuple[int, int]:
        failed = self.ranks[rank].failed
        if failed is None:
            return (0, 0)
        return (2 if failed.peer_lost else 1, failed.time_ns)

    def _begin_ladder(self, reason: str, now_s: float) -> list[Action]:
        self.reason, self._stopping_s = reason, now_s
        running = [rank for rank, state in enumerate(self.ranks) if not state.ended]
        actions = [Action(Act.ASK_WHERE, rank) for rank in running]
        return actions + (self._let_go(now_s) if self.all_ended else [])

    def _climb(self, now_s: float) -> list[Action]:
        running = [rank for rank, state in enumerate(self.ranks) if not state.ended]
        if self._interrupted_s is None:
            return self._ask_or_interrupt(running, now_s)
        passed_s = now_s - self._interrupted_s
        grace_s = FAILURE_GRACE_S if self.reason in ("failure", "deadlock") else self._grace_s
        actions = []
        for rank in running:
            state = self.ranks[rank]
            limit_s = max(grace_s, HEAR_S) if state.heard else HEAR_S
            if state.sent is Act.INTERRUPT and passed_s >= limit_s:
                actions.append(self._step(rank, Act.TERMINATE))
            elif state.sent is Act.TERMINATE and passed_s >= limit_s + KILL_S:
                actions.append(self._step(rank, Act.KILL))
        return actions

    def _ask_or_interrupt(self, running: list[int], now_s: float) -> list[Action]:
        """Interrupt all at once: where one of them is may change with what becomes of another."""
        passed_s = now_s - self._stopping_s
        least_s = SETTLE_S if self.reason == "failure" else ANSWER_S
        silent = [rank for rank in running if self.ranks[rank].phase is Phase.RUNNING and not self.ranks[rank].where]
        if passed_s >= (max(least_s, PATIENCE_S[self.reason]) if silent else least_s):
            self._interrupted_s = now_s
            return [self._step(rank, Act.INTERRUPT) for rank in running]
        if not self._asked_again and passed_s >= least_s / 2:
            self._asked_again = True  # by now a rank waits where it would have waited
            return [Action(Act.ASK_WHERE, rank) for rank in running]
        return []

    def _step(self, rank: int, act: Act) -> Action:
        self.ranks[rank].sent = act
        return Action(act, rank)

    def _let_go(self, now_s: float) -> list[Action]:
        """Every function is over: let the processes leave, and end those that don't."""
        present = [rank for rank, state in enumerate(self.ranks) if not state.exited]
        if self._left_s is None:
            if self.reason == "failure" and now_s - self._stopping_s < SETTLE_S and self._may_be_earlier():
                return []
            self._left_s = now_s
            return [Action(Act.LEAVE, rank) for rank in present]
        if now_s - self._left_s >= LEAVE_S:
            return [self._step(rank, Act.KILL) for rank in present if self.ranks[rank].sent is not Act.KILL]
        return []

    def _may_be_earlier(self) -> bool:
        """Whether what is known of the cause so far is only that a peer was lost: its end may not be known yet."""
        cause = self.ranks[self.cause].failed if self.cause is not None else None
        return cause is not None and cause.peer_lost

    def _unlock(self, now_s: float) -> list[Action]:
        """End a run whose ranks wait for each other."""
        standing = {
            rank: state.pending
            for rank, state in enumerate(self.ranks)
            if state.pending is not None and not state.ended and now_s - state.pending_s >= STANDING_S
        }
        self.locked = {rank: standing[rank] for rank in deadlock.locked(standing)}
        return self._begin_ladder("deadlock", now_s) if self.locked else []

    def _dissolve(self, rank: int) -> None:
        """The rank goes on by itself, nobody having been interrupted yet: so it was no deadlock."""
        if self._interrupted_s is None and rank in self.locked:
            self.locked, self.reason, self._asked_again = {}, "", False
            for state in self.ranks:
                state.where = None

    def _release(self, now_s: float) -> list[Action]:
        """Let ranks that finished some time ago close their connections, while others go on."""
        actions = []
        for rank, state in enumerate(self.ranks):
            if state.ended and not state.exited and not state.released and now_s - state.ended_s >= RELEASE_S:
                state.released = True
                actions.append(Action(Act.RELEASE, rank))
        return actions


def signal_of(act: Act) -> int:
    """The signal that carries a step of the ladder."""
    return {Act.INTERRUPT: signal.SIGINT, Act.TERMINATE: signal.SIGTERM, Act.KILL: signal.SIGKILL}[act]
