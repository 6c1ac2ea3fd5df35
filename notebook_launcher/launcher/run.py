"""``Run``: one launch as its user holds it, while it goes on and after."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import pickling
from notebook_launcher.core.errors import NotebookLauncherError, ResultError, RunInterrupted
from notebook_launcher.launcher import outcome, past_runs
from notebook_launcher.launcher.state import Phase, RunState
from notebook_launcher.launcher.supervisor import Supervisor, tell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.core.events import Finished
    from notebook_launcher.launcher.engines import Worker
    from notebook_launcher.launcher.record import Record
    from notebook_launcher.launcher.sinks import RunView, Sink

_SLICE_S = 0.25  # the kernel waits in short slices of Python, so that Stop gets through
_TAIL_CHARACTERS = 4000
_GOODBYE_S = 2.0  # how long the end of the program waits for runs that it ends
_history: list[weakref.ref[Run]] = []


def history() -> list[Run]:
    """This kernel's runs that are still held by someone, the oldest first."""
    return [run for run in (reference() for reference in _history) if run is not None]


def all_facts() -> list[past_runs.RunFacts]:
    """Of every run of this kernel, the oldest first: also of those that nobody holds any more."""
    return past_runs.joined(run.facts for run in list(_running))


class Run:
    """One launch: its state while it goes on, its results when it is over.

    ``config`` is the ``LaunchConfig`` that it was started with, ``name`` the function's.
    """

    def __init__(
        self,
        name: str,
        config: LaunchConfig,
        record: Record,
        sinks: Sequence[Sink],
        start: Callable[[int], list[Worker]],
    ) -> None:
        """Hold what is needed; ``begin`` starts the workers by ``start(attempt)``. ``launch`` is what users call."""
        self.name = name
        self.config = config
        self._record = record
        self._sinks = list(sinks)
        self._start = start
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._begun = threading.Event()
        self._values: dict[int, Any] = {}
        self._kill_wanted = self._started_again = False
        self._error: BaseException | None = None
        self._interrupted = False
        self._supervisor: Supervisor | None = None  # None: no workers yet, or none could be started
        self._after: Callable[[], None] = lambda: None
        self._number = past_runs.next_number()
        record.stopped_by(self.stop)
        _history[:] = [reference for reference in _history if reference() is not None]
        _history.append(weakref.ref(self))

    def begin(self, after: Callable[[], None]) -> None:
        """Start the workers and supervise them, on a thread of its own; ``after`` is called there at the end.

        An interrupt reaches the main thread only, so none comes between a worker's start and its supervision there.
        Raises what starting raises.
        """
        self._after = after
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # after, so that it runs before, the fork server's end was registered
        threading.Thread(target=self._supervise, name=f"notebook-launcher-run-{self.name}", daemon=True).start()
        while not self._begun.wait(_SLICE_S):  # an interrupt that comes just before a wait is heard after it
            pass
        if self._supervisor is None and self._error is not None:
            raise self._error

    # --- what a user asks -------------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """One word: starting, running, stopping, finished, failed, stopped, timed out."""
        return self._record.status

    @property
    def results(self) -> list[Any]:
        """What each rank's function returned, by rank; waits for the end.

        A rank that was stopped has None; one whose value could not travel, a ``ResultError`` that says why. Raises the
        worker's exception when a rank failed (``returned`` has what the others gave), and ``RunInterrupted`` when the
        notebook's Stop ended this very wait.
        """
        if self._wait_for_end(None):
            raise RunInterrupted(self._record.summary)
        if self._error is not None:
            raise self._error.with_traceback(None)
        returned = self.returned
        return [returned.get(rank) for rank in range(self._record.num_ranks)]

    @property
    def returned(self) -> dict[int, Any]:
        """What the ranks that have returned gave, by rank; waits for the end, and does not raise when others failed."""
        self._wait_for_end(None)
        with self._lock:
            finished = self._record.finished
            for rank in sorted(finished):
                if rank not in self._values:
                    self._values[rank] = _load(rank, finished[rank])
            finished.clear()  # only now, when none was interrupted: they hold descriptors and memory
            return dict(self._values)

    @property
    def result(self) -> Any:
        """What rank 0's function returned; waits for the end."""
        return self.results[0]

    @property
    def error(self) -> BaseException | None:
        """The exception that ``wait`` raises, None while the run goes on and when all went well."""
        return self._error

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What ``Accelerator.log`` sent so far: rank, step, time_s (Unix time) and the values, a dictionary each."""
        return list(self._record.metrics)

    @property
    def pids(self) -> list[int | None]:
        """The process id of each rank, None where it is not known yet."""
        return [self._record.pids.get(rank) for rank in range(self._record.num_ranks)]

    def logs(self, rank: int = 0) -> str:
        """What a rank has printed so far; of a long output, the last lines (``log_dir`` keeps all).

        Raises ``IndexError`` for a rank that the run does not have.
        """
        if rank not in range(self._record.num_ranks):
            raise IndexError(f"there is no rank {rank!r} in this run: its ranks are 0 to {self._record.num_ranks - 1}")
        return self._record.output.text(rank)

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait for the end and return the run; an interrupt of the notebook stops the run, a second one kills it.

        Raises the worker's exception when a rank failed, ``RunTimeoutError`` when the run passed its own ``timeout_s``,
        ``RunInterrupted`` when the notebook's Stop ended it, ``TimeoutError`` when it goes on after ``timeout_s``.
        """
        self._wait_for_end(timeout_s)
        if self._error is not None:
            raise self._error.with_traceback(None)  # each wait's own, not those of earlier ones too
        if self._interrupted and not self._all_returned:
            raise RunInterrupted(self._record.summary)
        return self

    def stop(self) -> None:
        """Interrupt every rank; those that do not end are terminated, then killed. A second call kills at once."""
        self._request("stop")

    def kill(self) -> None:
        """End every rank's process now."""
        # A plain flag first: whatever interrupts the rest, the supervisor sees it.
        self._kill_wanted = True
        if self._supervisor is not None:
            self._supervisor.kill_wanted = True
            self._supervisor.request("wake")

    @property
    def view(self) -> RunView:
        """What a monitor may read of the run, at any time and from any thread."""
        return self._record

    @property
    def facts(self) -> past_runs.RunFacts:
        """What a table of runs says of this one."""
        return past_runs.facts_of(self._number, self.name, self.config, self._record)

    def show_in(self, sink: Sink) -> bool:
        """Tell ``sink`` of what comes, its end included; False where the run has ended, and nothing will come."""
        with self._lock:
            if self._record.summary:
                return False
            self._sinks.append(sink)
            return True

    def __repr__(self) -> str:
        """One line a person can read."""
        what = self._record.summary or f"{self.status}, {self._record.elapsed_s:.1f} s"
        return f"<Run {self.name}: {self._record.headline}: {what}>"

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _all_returned(self) -> bool:
        supervisor = self._supervisor
        return supervisor is not None and all(one.phase is Phase.RETURNED for one in supervisor.state.ranks)

    def _request(self, what: str) -> None:
        self._begun.wait(_GOODBYE_S)
        with self._lock:  # not while one attempt gives way to the next
            if self._supervisor is not None:
                self._supervisor.request(what)

    def _attempt(self, number: int) -> Supervisor:
        workers = self._start(number)
        state = RunState(
            len(workers),
            began_s=self._record.began_s,
            stop_grace_s=self.config.stop_grace_s,
            timeout_s=self.config.timeout_s,
        )
        return Supervisor(state, workers, self._record, self._sinks)

    def _supervise(self) -> None:
        _running.add(self)
        try:
            supervisor: Supervisor | None = self._attempt(0)
            attempt = 0
            while supervisor is not None:
                self._supervisor = supervisor
                supervisor.kill_wanted = self._kill_wanted
                self._begun.set()
                supervisor.supervise()
                attempt += 1
                last, supervisor = supervisor.state, self._restart(supervisor, attempt)
            self._conclude(last)
        except BaseException as error:  # noqa: BLE001 - a fault of ours must reach the user, not end a thread in silence
            self._error = error
            whose = "failed" if isinstance(error, NotebookLauncherError) else "the launcher itself failed"
            self._end("failed", f"{whose}: {type(error).__name__}: {error}")
        finally:
            _running.discard(self)
            self._ended.set()
            self._begun.set()
            self._after()

    def _restart(self, ended: Supervisor, attempt: int) -> Supervisor | None:
        """Start the ranks once more if that is left to do, and nobody has asked for the run's end meanwhile."""
        with self._lock:
            if ended.state.status != "failed" or ended.state.asked_to_stop or ended.unheard or self._kill_wanted:
                return None
            # A fork server that died under our hands is no failure of the function's, which has not begun anywhere.
            for_free = bool(self._record.never_made) and not self._record.pids and not self._started_again
            self._started_again = self._started_again or for_free
            number = attempt - self._started_again
            if not for_free and number > self.config.max_restarts:
                return None
            what = "started again" if for_free else f"restart {number} of {self.config.max_restarts}"
            self._record.begin_again(f"{what}: {self._why(ended.state)}")
            return self._attempt(number)

    def _conclude(self, state: RunState) -> None:
        record = self._record
        if state.locked:
            self._error = outcome.deadlock_error(state)
        elif state.status == "failed":
            cause = state.cause or 0
            tails = {rank: record.output.text(rank)[-_TAIL_CHARACTERS:] for rank in range(record.num_ranks)}
            if cause in record.never_made:
                self._error = outcome.never_made(cause, record.num_ranks, record.never_made[cause], tails[cause])
            else:
                host = record.hosts.get(cause) or socket.gethostname()
                self._error = outcome.error_of(state, host, tails, record.memory)
        elif state.status == "timed out":
            self._error = outcome.timeout_error(state, self.config.timeout_s or 0.0)
        if self._error is not None:
            with contextlib.suppress(Exception):  # the user's own class may take no attributes
                self._error.run = self  # type: ignore[attr-defined]
        self._end(state.status, self._summary(state))

    def _end(self, status: str, summary: str) -> None:
        self._record.output.close()
        with self._lock:  # whoever wants to be shown in time, is; whoever comes later, is told so
            self._record.end(status, summary, outcome.drawing(self._error))
            past_runs.keep(self.facts)
        self._record.shown.wait(_GOODBYE_S)
        tell(self._sinks, self._record, lambda sink: sink.closed(self._record))

    def _why(self, state: RunState) -> str:
        """What became of the rank that failed first."""
        if state.locked:
            return outcome.deadlock(state)
        cause = state.cause or 0
        problem = self._record.never_made.get(cause)
        fate = outcome.fate(state.ranks[cause], None)
        return f"rank {cause} {fate if problem is None else f'was never started: {problem.splitlines()[0]}'}"

    def _summary(self, state: RunState) -> str:
        took = f"{self._record.elapsed_s:.1f} s"
        if state.status == "finished":
            return f"finished in {took}"
        if state.status == "failed":
            return f"failed after {took}: {self._why(state)}"
        return f"{state.status} after {took}: {'; '.join(outcome.fates(state))}"

    def _wait_for_end(self, timeout_s: float | None) -> bool:
        """Wait, and return whether an interrupt came meanwhile and not every rank returned all the same."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        num_interrupts, waiting = 0, True
        while waiting:
            try:
                self._wait_until(deadline_s, stop=num_interrupts > 0)
                waiting = False
            except KeyboardInterrupt:
                num_interrupts += 1  # and no more than that here, where another one would end the wait
        if not self._ended.is_set():
            raise TimeoutError(f"{self!r} still goes on after {timeout_s:g} s; wait again, or stop() it")
        self._interrupted = self._interrupted or num_interrupts > 0
        return num_interrupts > 0 and not self._all_returned

    def _wait_until(self, deadline_s: float, *, stop: bool) -> None:
        if stop:
            self.stop()  # the second time, the state machine kills
        while not self._ended.is_set() and (left_s := deadline_s - time.monotonic()) > 0:
            self._ended.wait(min(_SLICE_S, left_s))


def _load(rank: int, finished: Finished) -> Any:
    if finished.result is None:
        return ResultError(f"rank {rank}: {finished.problem}")
    try:
        return pickling.loads(finished.result)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - unpickling runs the user's code
        return ResultError(f"rank {rank}: the result can't be made here: {type(error).__name__}: {error}")


_running: set[Run] = set()  # a run that nobody holds goes on all the same


def _end_all() -> None:
    """The program ends: so do its runs, in an orderly way, before the fork server takes their processes from them."""
    running = list(_running)
    for run in running:
        run.kill()
    deadline_s = time.monotonic() + _GOODBYE_S
    for run in running:
        run._ended.wait(max(0.0, deadline_s - time.monotonic()))  # noqa: SLF001 - the same module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # they are the kernel's, not those of a process that it forked
