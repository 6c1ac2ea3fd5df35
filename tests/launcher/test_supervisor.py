"""The supervisor with ranks that a test plays: real channels and pipes, no process."""

from __future__ import annotations

import itertools
import signal
import threading
import time

import pytest
from fake_rank import FakeRank, RecordingSink, record

from notebook_launcher.core import events
from notebook_launcher.launcher import supervisor as supervisors
from notebook_launcher.launcher.memory import MemoryMeter
from notebook_launcher.launcher.state import RunState
from notebook_launcher.launcher.supervisor import Supervisor

LIMIT_S = 10


class Supervised:
    """Ranks under a supervisor, in this thread (``supervise``) or in another (``begin`` and ``end``)."""

    def __init__(self, *ranks, sinks=(), **options):
        self.ranks = ranks
        self.record = record(len(ranks))
        self.state = RunState(len(ranks), **options)
        self.sink = RecordingSink()
        self.sinks = [self.sink, *sinks]
        self.supervisor = Supervisor(self.state, [rank.worker for rank in ranks], self.record, self.sinks)
        self._thread = threading.Thread(target=self.supervisor.supervise)

    def supervise(self):
        self.begin()
        return self.end()

    def begin(self):
        self._thread.start()

    def end(self):
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self


def until(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def finished(rank, value=None):
    return rank.starts().returns(value).exits()


def test_a_run_of_two_finishes_and_is_told():
    one, two = FakeRank(0), FakeRank(1)
    one.starts()
    one.writes(b"hello\n")
    one.writes(b"oops\n", "stderr")
    one.returns(1).exits()
    finished(two)
    run = Supervised(one, two).supervise()
    assert run.state.status == "finished"
    assert [(line.rank, line.stream, line.text) for line in run.record.output.lines()] == [
        (0, "stdout", "hello"),
        (0, "stderr", "oops"),
    ]
    assert run.record.hosts == {0: "host", 1: "host"}
    assert run.record.pids == {0: one.pid, 1: two.pid}
    assert sorted(run.record.finished) == [0, 1]
    assert run.record.never_made == {}
    assert all(worker.closed for worker in (one.worker, two.worker))


def test_ranks_are_let_go_once_all_have_returned():
    one, two = FakeRank(0), FakeRank(1)
    run = Supervised(one, two)
    run.begin()
    one.starts().returns()
    two.starts()
    until(lambda: 0 in run.record.finished)
    assert one.worker.exit_code is None
    two.returns()
    assert isinstance(one.hears(), events.Leave)
    assert isinstance(two.hears(), events.Leave)
    one.exits()
    two.exits()
    assert run.end().state.status == "finished"


def test_displays_and_metrics_arrive_with_their_rank():
    rank = FakeRank().starts()
    rank.reports(events.Display({"text/plain": "a figure"}))
    rank.reports(events.Metric({"loss": 0.5}, 3, 1000.0))
    rank.returns().exits()
    run = Supervised(rank).supervise()
    assert run.sink.named("displayed") == [("displayed", 0, {"text/plain": "a figure"})]
    assert list(run.record.metrics) == [{"rank": 0, "step": 3, "time_s": 1000.0, "loss": 0.5}]


def test_a_rank_s_loops_and_its_device_s_memory_are_known():
    rank = FakeRank().starts()
    outer, inner = events.Steps(1, 4, "epoch", 2.0), events.Steps(3, 10, "batch", 1.0, 1)
    for steps in (outer, inner):
        rank.reports(steps)
    rank.reports(events.DeviceMemory(10, 100))
    run = Supervised(rank)
    rank.returns().exits()
    run.supervise()
    assert run.record.steps == {0: [outer, inner]}
    assert run.record.device_memory == {0: events.DeviceMemory(10, 100)}
    assert run.record.state is run.state
    run.record.came(0, events.Steps(2, 4, "epoch", 3.0))
    assert [steps.done for steps in run.record.steps[0]] == [2]  # the loop inside it is over


def test_who_is_woken_all_the_time_takes_a_breath_but_not_while_a_rank_waits_to_be_read(monkeypatch):
    rank = FakeRank().starts()
    run = Supervised(rank)
    breaths = []

    def look(*times_s, behind=False):
        before = len(breaths)
        for now_s in times_s:
            run.supervisor._behind = behind
            run.supervisor._breathe(now_s)
        return len(breaths) - before

    with monkeypatch.context() as patch:
        patch.setattr(supervisors.time, "sleep", breaths.append)
        assert look(*(100 + number / 500 for number in range(60))) == 0  # a beginning, or an end: nobody waits
        assert look(*(100.12 + number / 500 for number in range(60))) > 50
        assert all(0 < breath_s <= 0.1 for breath_s in breaths)
        assert look(*(100.24 + number / 500 for number in range(10)), behind=True) == 0
        assert look(100.27, 100.28) == 2
        assert look(104) == 0  # it was calm meanwhile
        assert look(*(104 + number / 500 for number in range(100)), 104.3) > 0
        run.record.finished[0] = events.Finished(None)  # the end waits for nobody
        assert look(104.31) == 0
        run.record.finished.clear()
    rank.returns().exits()
    run.supervise()


def test_output_events_of_engines_without_pipes():
    rank = FakeRank().starts()
    rank.reports(events.Output("stdout", b"from afar\n"))
    rank.returns().exits()
    assert Supervised(rank).supervise().record.output.text(0) == "from afar\n"


def test_a_failure_stops_the_others_by_the_ladder():
    one, two = FakeRank(0), FakeRank(1)
    two.on_signal[signal.SIGINT] = lambda: two.raises(KeyboardInterrupt())
    run = Supervised(one, two)
    run.begin()
    two.starts()
    one.starts().raises(ValueError("no"))
    assert isinstance(two.hears(), events.AskWhere)
    two.reports(events.Where("all_reduce", "line 3 of train", "stack"))
    assert isinstance(one.hears(), events.Leave)
    one.exits()
    two.exits()
    run.end()
    assert run.state.status == "failed"
    assert run.state.cause == 0
    assert two.signals == [signal.SIGINT]
    assert run.state.ranks[1].where.call == "all_reduce"


def test_a_rank_that_dies_gets_its_exit_code_and_last_output():
    rank = FakeRank().starts()
    rank.writes(b"last words", "stderr")
    rank.exits(-signal.SIGSEGV)
    run = Supervised(rank).supervise()
    assert run.state.ranks[0].exit_code == -signal.SIGSEGV
    assert run.record.output.text(0) == "last words\n"


def test_what_a_dead_rank_started_may_write_for_ever(monkeypatch):
    """Its output pipe never runs dry, so the end must not wait for that."""
    rank = FakeRank().starts().returns()
    read = supervisors.os.read
    always = rank.worker.streams["stdout"]
    monkeypatch.setattr(supervisors.os, "read", lambda number, size: b"y\n" if number == always else read(number, size))
    rank.writes(b"y\n")
    rank.exits()
    run = Supervised(rank).supervise()
    assert run.state.status == "finished"


def test_a_rank_that_never_stops_reporting_does_not_keep_others_unheard():
    one, two = FakeRank(0).starts(), FakeRank(1).starts()
    run = Supervised(one, two)
    receive, num_reports = one.worker.channel.receive, itertools.count()

    def always(timeout_s):
        if 1 in run.record.finished:
            return receive(timeout_s)
        if next(num_reports) > 10_000:
            raise TimeoutError
        return events.Metric({}, None, 0.0)

    one.worker.channel.receive = always
    two.returns().exits()  # lies there before the first look: turns count, not the machine's pace
    run.begin()
    until(lambda: 1 in run.record.finished)
    one.returns().exits()
    run.end()
    assert run.state.status == "finished"
    assert next(num_reports) < 10_000


def test_many_reports_at_once_are_all_read():
    rank = FakeRank().starts()
    run = Supervised(rank)
    run.begin()
    for step in range(1000):
        rank.reports(events.Metric({}, step, 0.0))
    rank.returns().exits()
    run.end()
    assert [row["step"] for row in run.record.metrics] == list(range(1000))
    assert run.state.status == "finished"


class _Poisoned:
    def __reduce__(self):
        return (int, ("not a number",))


def test_a_report_that_cannot_be_read_is_noted_and_the_run_goes_on():
    rank = FakeRank().starts()
    rank.reports(events.Metric({"loss": _Poisoned()}, 1, 0.0))
    rank.returns().exits()
    run = Supervised(rank).supervise()
    assert run.state.status == "finished"
    assert run.record.notes[0].startswith("rank 0 reported what can't be read here: ValueError")


class _BrokenSink(RecordingSink):
    def changed(self, view):
        super().changed(view)
        raise OSError("the view is gone")


def test_a_sink_that_fails_is_told_no_more_and_the_run_goes_on():
    rank, broken = FakeRank(), _BrokenSink()
    run = Supervised(rank, sinks=[broken])
    run.begin()
    rank.starts()
    until(lambda: broken.told)
    rank.writes(b"more\n")
    until(lambda: run.record.output.text(0))
    rank.returns().exits()
    assert run.end().state.status == "finished"
    assert len(broken.told) == 1
    assert "_BrokenSink has stopped showing this run: OSError: the view is gone" in run.record.notes
    assert run.sink.named("changed")


# --- servers that die -------------------------------------------------------------------------------------------------


def test_an_orphaned_rank_goes_on_to_its_end():
    rank = FakeRank().starts()
    run = Supervised(rank)
    run.begin()
    rank.loses_server()
    until(lambda: rank.worker.orphaned)
    rank.returns(5)
    assert isinstance(rank.hears(), events.Leave)
    rank.exits()
    run.end()
    assert run.state.status == "finished"
    assert run.record.never_made == {}


def test_an_orphaned_rank_that_dies_has_no_exit_code():
    rank = FakeRank().starts()
    rank.loses_server()
    rank.exits()
    run = Supervised(rank).supervise()
    assert run.state.status == "failed"
    assert run.state.ranks[0].exit_code is None


def test_a_rank_that_never_had_a_process_is_known_as_such():
    rank = FakeRank(pid=False)
    rank.loses_server()  # nobody has written a pid, and nobody will
    rank.exits()
    run = Supervised(rank)
    rank.worker.why_never_made = lambda: "the fork server fell over"
    run.supervise()
    assert run.state.status == "failed"
    assert run.record.never_made == {0: "the fork server fell over"}


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_kill_before_the_process_exists_hangs_up():
    rank = FakeRank(pid=False)
    run = Supervised(rank)
    run.begin()
    run.supervisor.request("kill")
    run.end()
    assert run.state.status == "stopped"
    assert rank.signals == []
    with pytest.raises(ConnectionError):
        rank.hears()
    rank.loses_server()
    rank.exits()


def test_stop_interrupts_and_a_second_stop_kills():
    rank = FakeRank().starts()
    run = Supervised(rank, stop_grace_s=600)
    run.begin()
    until(lambda: 0 in run.record.pids)
    run.supervisor.request("stop")
    until(lambda: rank.signals == [signal.SIGINT])
    rank.reports(events.Interrupted())
    until(lambda: run.state.ranks[0].heard)
    run.supervisor.request("stop")
    run.end()
    assert rank.signals == [signal.SIGINT, signal.SIGKILL]
    assert run.state.status == "stopped"


def test_a_rank_that_does_not_leave_is_killed(monkeypatch):
    monkeypatch.setattr("notebook_launcher.launcher.state.LEAVE_S", 0.0)
    rank = FakeRank().starts().returns()
    run = Supervised(rank).supervise()
    assert rank.signals == [signal.SIGKILL]
    assert run.state.status == "finished"


def test_a_request_after_the_end_is_kept_for_whoever_would_start_again():
    run = Supervised(finished(FakeRank())).supervise()
    assert not run.supervisor.unheard
    run.supervisor.request("stop")
    assert run.supervisor.unheard


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_looked_at_at_most_once_a_second_and_the_highest_use_before_a_death_is_kept(monkeypatch):
    uses = iter([10 << 30, 62 << 30, 1 << 30])
    monkeypatch.setattr(MemoryMeter, "used_bytes", lambda _: next(uses, 0))
    kept = record(1)
    for now_s in (0.0, 0.3, 0.99, 1.0, 1.5, 2.0):
        kept.watch_memory(now_s)
    kept.note_memory()
    assert kept.memory.startswith("62.0 of ")
    assert kept.memory.endswith(" GiB in use just before")
    for now_s in (3.0, 4.0, 5.0, 6.5):
        kept.watch_memory(now_s)
    kept.note_memory()
    assert kept.memory.startswith("1.0 of ")  # 62 GiB were in use too long ago
