"""The supervisor: a thread a run that reads what workers say, asks the state machine, and does what it answers."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import events
from notebook_launcher.core.errors import ChannelClosedError
from notebook_launcher.launcher import outcome
from notebook_launcher.launcher.state import Act, Action, Phase, signal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_launcher.launcher.engines import Worker
    from notebook_launcher.launcher.record import Record
    from notebook_launcher.launcher.sinks import Sink
    from notebook_launcher.launcher.state import RunState

_PAINT_S = 0.1  # a sink is told of changes at most this often
_IDLE_S = 0.25  # the longest wait; deadlines of seconds need no finer clock
_OPENING_S = 5.0  # the longest wait for sinks to open
_LADDER_S = 0.05  # the wait while a ladder is being climbed
_READ_BYTES = 1 << 20  # more than a pipe holds, so one read takes all that is there
_LOOKS_AT_ONCE, _LOOKS_PER_S = 60, 10  # so many follow each other as they come; then there is a wait between two
_MUCH_BYTES, _MANY_EVENTS = 32 << 10, 50  # found in one look: a rank may be waiting for us to read on
_MAX_EVENTS = 200  # of one rank at a time: one that never stops reporting must not keep us from the others
_MESSAGES: dict[Act, events.Command] = {
    Act.ASK_WHERE: events.AskWhere(),
    Act.INTERRUPT: events.Interrupting(),  # and the signal
    Act.RELEASE: events.Release(),
    Act.LEAVE: events.Leave(),
}


def tell(sinks: list[Sink], record: Record, call: Callable[[Sink], None]) -> None:
    """Call every sink. One that fails is told no more: a broken view must not end the training that it shows."""
    for sink in list(sinks):
        try:
            call(sink)
        except Exception as error:  # noqa: BLE001 - a sink is anybody's code
            sinks.remove(sink)
            record.note([f"{type(sink).__name__} has stopped showing this run: {type(error).__name__}: {error}"])


class Supervisor:
    """Supervises one attempt of a run: ``supervise`` returns when every process is gone."""

    def __init__(self, state: RunState, workers: Sequence[Worker], record: Record, sinks: list[Sink]) -> None:
        """Watch ``workers``, keep what they say in ``record``, tell ``sinks``."""
        self.state = state
        self._workers = list(workers)
        self._record = record
        record.state = state
        self._sinks = sinks
        self._lock = threading.Lock()
        self._requests: list[str] = []
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector = selectors.DefaultSelector()
        self.kill_wanted = False  # set by any thread, seen at the next look: needs no lock, so nothing can interrupt it
        self._hung_up = [False] * len(workers)
        self._unread: set[int] = set()  # ranks whose channels may hold more than was read at a time
        self._next_paint_s = 0.0
        self._next_look_s = 0.0
        self._looks_left, self._looked_s = float(_LOOKS_AT_ONCE), 0.0
        self._behind = False  # whether this look has found much
        self._on_event: dict[type, Callable[[int, Any], list[Action]]] = {
            events.Started: self._started,
            events.Output: lambda rank, event: self._output(rank, event.stream, event.data),
            events.Display: self._display,
            events.Metric: self._metric,
            events.Metrics: self._metrics,
            events.Steps: self._steps,
            events.DeviceMemory: self._device_memory,
            events.Interrupted: self._heard,
            events.Where: self._where,
            events.Waits: self._waits,
            events.Finished: self._finished,
            events.Failed: self._failed,
        }

    def request(self, what: str) -> None:
        """Ask for "stop" or "kill", or only "wake" the supervisor to look, from any thread."""
        with self._lock:
            self._requests.append(what)
            if self._wake_writer >= 0:
                os.write(self._wake_writer, b"!")

    @property
    def unheard(self) -> bool:
        """Whether somebody asked for something when all was over already."""
        with self._lock:
            return bool({"stop", "kill"} & set(self._requests)) or self.kill_wanted

    def supervise(self) -> None:
        """Run until every worker's process is gone; then close all lines."""
        self._register()
        self._next_look_s = time.monotonic() + _IDLE_S
        try:
            while not self.state.done:
                ready = [key.data for key, _ in self._selector.select(self._wait_s())]
                for source, rank in [*ready, *(("channel", rank) for rank in self._unread)]:
                    self._do(self._read(source, rank))
                self._do(self._take_requests())
                self._do(self.state.tick(time.monotonic()))
                self._see_to_workers(time.monotonic())
                self._record.watch_memory(time.monotonic())
                self._paint()
                self._breathe(time.monotonic())
        finally:
            self._close()

    # --- what comes in ----------------------------------------------------------------------------------------------

    def _register(self) -> None:
        self._selector.register(self._wake_reader, selectors.EVENT_READ, ("wake", -1))
        for rank, worker in enumerate(self._workers):
            self._selector.register(worker.channel.fileno(), selectors.EVENT_READ, ("channel", rank))
            self._selector.register(worker.status, selectors.EVENT_READ, ("status", rank))
            for stream, number in worker.streams.items():
                self._selector.register(number, selectors.EVENT_READ, (stream, rank))

    def _see_to_workers(self, now_s: float) -> None:
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _IDLE_S
            for rank, worker in enumerate(self._workers):
                worker.see_to(hung_up=self._hung_up[rank])

    def _wait_s(self) -> float:
        if self._unread:
            return 0.0
        wait_s = _LADDER_S if self.state.reason else _IDLE_S
        if self._record.changed and self._record.shown.is_set():
            wait_s = min(wait_s, max(0.0, self._next_paint_s - time.monotonic()))
        return wait_s

    def _breathe(self, now_s: float) -> None:
        """Where small things come by the thousand a second, let some gather: it is the looks that cost the kernel."""
        earned = (now_s - self._looked_s) * _LOOKS_PER_S
        self._looks_left = max(-1.0, min(_LOOKS_AT_ONCE, self._looks_left + earned) - 1)
        self._looked_s = now_s
        is_ending = self.state.reason or self._record.finished
        if self._looks_left < 0 and not (self._behind or self._unread or is_ending):
            time.sleep(-self._looks_left / _LOOKS_PER_S)
        self._behind = False

    def _read(self, source: str, rank: int) -> list[Action]:
        if source == "wake":
            os.read(self._wake_reader, 4096)
            return []
        if source == "channel":
            return self._read_channel(rank)
        if source == "status":
            return self._read_status(rank)
        self._read_stream(rank, source)
        return []

    def _read_channel(self, rank: int, *, to_the_end: bool = False) -> list[Action]:
        worker, actions = self._workers[rank], list[Action]()
        self._unread.discard(rank)
        if self._hung_up[rank]:
            return []
        number = worker.channel.fileno()
        for num_events in range(_MAX_EVENTS):
            try:
                event = worker.channel.receive(0)
            except TimeoutError:
                self._behind = self._behind or num_events >= _MANY_EVENTS
                return actions
            except ChannelClosedError as error:
                self._hung_up[rank] = True
                # So says the system where what was sent had not been read when the other end was gone.
                worker.missed = worker.missed or isinstance(error.__cause__, ConnectionResetError)
                self._selector.unregister(number)
                return actions + self._gone_if_orphaned(rank)
            except Exception as error:  # noqa: BLE001 - what a display or a metric carries is the user's
                self._record.note([f"rank {rank} reported what can't be read here: {type(error).__name__}: {error}"])
                continue
            actions += self._on_event[type(event)](rank, event)
            if worker.channel.drained and not to_the_end:
                self._behind = self._behind or num_events >= _MANY_EVENTS
                return actions
        self._unread.add(rank)
        return actions

    def _read_status(self, rank: int) -> list[Action]:
        worker = self._workers[rank]
        if not worker.read_status():
            return []
        self._selector.unregister(worker.status)
        actions = self._gone_if_orphaned(rank)
        return actions if worker.orphaned else actions + self._gone(rank, worker.exit_code)

    def _gone_if_orphaned(self, rank: int) -> list[Action]:
        """Without a fork server nobody learns the exit code: the channel's end is the process's end."""
        worker = self._workers[rank]
        return self._gone(rank, None) if worker.orphaned and self._hung_up[rank] else []

    def _gone(self, rank: int, code: int | None) -> list[Action]:
        worker, actions = self._workers[rank], self._read_channel(rank, to_the_end=True)  # its last words first
        while rank in self._unread:
            actions += self._read_channel(rank, to_the_end=True)
        for stream in list(worker.streams):
            self._read_stream(rank, stream)  # once: what it started may go on writing for ever
        if worker.pid is None and self.state.ranks[rank].sent is None:
            self._record.never_made[rank] = worker.why_never_made()
        elif self._was_lost(rank, code):
            self._record.never_made[rank] = f"the process made for it {outcome.death(code, '')[1]}"
        self._record.note(worker.notes)
        self._record.note_memory()
        return actions + self.state.exited(rank, code, time.monotonic())

    def _was_lost(self, rank: int, code: int | None) -> bool:
        """Whether the rank's process was killed before it had read what it is to run."""
        starting = self.state.reason == "" and self.state.ranks[rank].phase is Phase.STARTING
        return starting and self._workers[rank].missed and code in (None, -signal.SIGKILL)

    def _read_stream(self, rank: int, stream: str) -> None:
        number = self._workers[rank].streams.get(stream)
        if number is None:
            return
        try:
            data = os.read(number, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._behind = self._behind or len(data) >= _MUCH_BYTES
            self._output(rank, stream, data)
        else:
            self._selector.unregister(number)
            os.close(self._workers[rank].streams.pop(stream))

    # --- events -----------------------------------------------------------------------------------------------------

    def _started(self, rank: int, event: events.Started) -> list[Action]:
        self._record.started(rank, event)
        self._record.note(self._workers[rank].notes)
        return self.state.started(rank)

    def _output(self, rank: int, stream: str, data: bytes) -> list[Action]:
        self._record.output.feed(rank, stream, data)
        self._record.changed = True
        return []

    def _display(self, rank: int, event: events.Display) -> list[Action]:
        self._record.shown.wait(_OPENING_S)
        tell(self._sinks, self._record, lambda sink: sink.displayed(rank, event))
        return []

    def _metric(self, rank: int, event: events.Metric) -> list[Action]:
        one = {name: [value] for name, value in event.values.items()}
        self._record.add_metrics(rank, events.Metrics(one, [event.step], [event.time_s]))
        return []

    def _metrics(self, rank: int, event: events.Metrics) -> list[Action]:
        self._record.add_metrics(rank, event)
        return []

    def _steps(self, rank: int, event: events.Steps) -> list[Action]:
        self._record.came(rank, event)
        return []

    def _device_memory(self, rank: int, event: events.DeviceMemory) -> list[Action]:
        self._record.holds(rank, event)
        return []

    def _heard(self, rank: int, _: events.Interrupted) -> list[Action]:
        self.state.heard(rank)
        return []

    def _where(self, rank: int, event: events.Where) -> list[Action]:
        self.state.found(rank, event)
        return []

    def _waits(self, rank: int, event: events.Waits) -> list[Action]:
        self.state.waits(rank, event.pending, time.monotonic())
        return []

    def _finished(self, rank: int, event: events.Finished) -> list[Action]:
        self._record.finished[rank] = event
        return self.state.returned(rank, time.monotonic())

    def _failed(self, rank: int, event: events.Failed) -> list[Action]:
        return self.state.raised(rank, event, time.monotonic())

    # --- what goes out ----------------------------------------------------------------------------------------------

    def _take_requests(self) -> list[Action]:
        with self._lock:
            requests, self._requests = self._requests, []
        actions = []
        if self.kill_wanted:
            self.kill_wanted = False
            requests.append("kill")
        for what in requests:
            if what == "stop":
                actions += self.state.stop(time.monotonic())
            elif what == "kill":
                actions += self.state.kill(time.monotonic())
        return actions

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            self._record.changed = True
            worker = self._workers[action.rank]
            if action.act in _MESSAGES:
                with contextlib.suppress(ChannelClosedError):  # it has gone: its status will say so
                    worker.channel.send(_MESSAGES[action.act])
            if action.act in (Act.ASK_WHERE, Act.RELEASE, Act.LEAVE):
                continue
            if worker.pid is None and action.act in (Act.TERMINATE, Act.KILL):
                # Not forked yet. It will find its channel closed and leave.
                self._hang_up(action.rank)
                self._do(self.state.exited(action.rank, None, time.monotonic()))
            else:
                worker.signal(signal_of(action.act))

    def _hang_up(self, rank: int) -> None:
        if not self._hung_up[rank]:
            self._hung_up[rank] = True
            self._selector.unregister(self._workers[rank].channel.fileno())
            self._workers[rank].channel.close()

    def _paint(self) -> None:
        self._record.status = self.state.status
        now_s = time.monotonic()
        if self._record.changed and now_s >= self._next_paint_s and self._record.shown.is_set():
            self._record.changed = False
            self._next_paint_s = now_s + _PAINT_S
            tell(self._sinks, self._record, lambda sink: sink.changed(self._record))

    def _close(self) -> None:
        self._selector.close()
        for worker in self._workers:
            worker.close()
        with self._lock:
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            self._wake_writer = -1
