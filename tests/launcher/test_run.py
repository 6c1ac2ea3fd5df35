"""``Run`` as its user holds it, with ranks that a test plays: no process."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time

import pytest
from fake_rank import LIMIT_S, FakeRank, RecordingSink, record, run_of

from notebook_launcher.core import events
from notebook_launcher.core.config import LaunchConfig
from notebook_launcher.core.errors import (
    EngineError,
    ResultError,
    RunInterrupted,
    RunTimeoutError,
    WorkerError,
)
from notebook_launcher.core.shared_memory import pack
from notebook_launcher.launcher import run as runs
from notebook_launcher.launcher.run import Run, history


def until(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def finished(rank, value):
    return rank.starts().returns(value).exits()


def test_results_come_by_rank():
    run = run_of([finished(FakeRank(0), "a"), finished(FakeRank(1), "b")])
    assert run.wait(LIMIT_S) is run
    assert run.results == ["a", "b"]
    assert run.result == "a"
    assert run.returned == {0: "a", 1: "b"}
    assert run.status == "finished"
    assert run.error is None
    assert repr(run).startswith("<Run fake: 2 fakes: finished in ")


def test_a_run_is_shown_while_it_goes_on():
    rank, sink = FakeRank(), RecordingSink()
    run = run_of([rank], sinks=[sink])
    assert run.pids == [None]
    assert "starting" in repr(run)
    rank.starts()
    until(lambda: run.pids == [rank.pid] and run.status == "running")
    rank.writes(b"one\n")
    until(lambda: run.logs() == "one\n")
    rank.reports(events.Metric({"loss": 1.0}, 1, 0.0))
    until(lambda: run.metrics)
    assert run.metrics[0]["loss"] == 1.0
    assert run.logs(0) == "one\n"
    rank.returns().exits()
    run.wait(LIMIT_S)
    assert sink.told[-1] == ("closed", "finished", run._record.summary)
    assert len(sink.named("closed")) == 1


def test_what_is_asked_for_after_the_end_is_called_after_the_end():
    rank, called = FakeRank(), threading.Event()
    run = run_of([rank], after=called.set)
    assert not called.is_set()
    finished(rank, None)
    assert called.wait(LIMIT_S)
    assert run.status == "finished"


def test_a_failed_run_raises_and_keeps_the_other_results():
    one, two = FakeRank(0), FakeRank(1)
    two.starts().returns("kept").exits()
    one.starts().raises(KeyError("missing")).exits()
    run = run_of([one, two])
    with pytest.raises(KeyError, match="missing") as caught:
        run.wait(LIMIT_S)
    assert isinstance(caught.value.__cause__, WorkerError)
    assert caught.value.__cause__.host == "host"
    assert run.error is caught.value
    with pytest.raises(KeyError, match="missing"):
        _ = run.results
    assert run.returned == {1: "kept"}
    assert run.error.run is run
    assert run.status == "failed"
    assert "rank 0 raised KeyError: 'missing'" in repr(run)
    with pytest.raises(KeyError) as again:
        run.wait()
    assert len(again.traceback) <= 2  # its own frames, not those of earlier waits too


def test_a_rank_that_never_was_raises_an_engine_error():
    tries = [FakeRank(pid=False), FakeRank(pid=False)]  # a second try is made by itself, and no third
    for rank in tries:
        rank.worker.why_never_made = lambda: "the server fell over"
        rank.writes(b"no memory for a process\n", "stderr")
        rank.loses_server()
        rank.exits()
    run = run_of(*([rank] for rank in tries))
    with pytest.raises(EngineError, match="rank 0 of 1 was never started: the server fell over\nno memory") as caught:
        run.wait(LIMIT_S)
    assert "nobody knows" not in str(caught.value)
    assert "rank 0 was never started: the server fell over" in repr(run)


def test_a_crash_shows_the_end_of_what_the_rank_wrote():
    rank = FakeRank().starts()
    rank.writes(b"Fatal Python error: Segmentation fault\n", "stderr")
    rank.exits(-signal.SIGSEGV)
    run = run_of([rank])
    with pytest.raises(WorkerError, match="SIGSEGV") as caught:
        run.wait(LIMIT_S)
    assert "Fatal Python error" in str(caught.value)


# --- results ----------------------------------------------------------------------------------------------------------


def test_a_result_that_could_not_travel_says_why():
    rank = FakeRank().starts()
    rank.reports(events.Finished(None, "the result, a lock, can't be pickled"))
    rank.exits()
    run = run_of([rank])
    assert run.wait(LIMIT_S).status == "finished"
    assert isinstance(run.result, ResultError)
    assert str(run.result) == "rank 0: the result, a lock, can't be pickled"


def test_a_result_that_cannot_be_made_here_says_why():
    rank = FakeRank().starts()
    rank.reports(events.Finished(pack(b"no pickle", ())))
    rank.exits()
    result = run_of([rank]).result
    assert isinstance(result, ResultError)
    assert "the result can't be made here: UnpicklingError" in str(result)


# --- waiting, stopping ------------------------------------------------------------------------------------------------


def test_wait_gives_up_after_its_own_timeout_and_the_run_goes_on():
    rank = FakeRank().starts()
    run = run_of([rank])
    with pytest.raises(TimeoutError, match="still goes on after 0 s; wait again"):
        run.wait(0)
    began_s = time.monotonic()
    with pytest.raises(TimeoutError, match=r"after 0\.02 s"):
        run.wait(timeout_s=0.02)
    assert time.monotonic() - began_s < 1
    rank.returns(1).exits()
    assert run.wait(LIMIT_S).result == 1


def test_a_run_past_its_own_timeout_fails_with_what_each_rank_did():
    rank = FakeRank()
    rank.on_signal[signal.SIGINT] = lambda: rank.exits(-signal.SIGINT)
    run = run_of([rank], timeout_s=0.01)
    rank.starts()
    assert isinstance(rank.hears(), events.AskWhere)
    rank.reports(events.Where("forward", "line 2 of train: y = model(x)", ""))
    with pytest.raises(RunTimeoutError, match=r"timeout_s=0\.01\nrank 0: was in forward") as caught:
        run.wait(LIMIT_S)
    assert isinstance(caught.value, TimeoutError)
    assert run.status == "timed out"


def test_stop_ends_a_run_without_an_error():
    rank = FakeRank()
    rank.on_signal[signal.SIGINT] = lambda: rank.returns("partial").exits()
    run = run_of([rank])
    rank.starts()
    until(lambda: run.status == "running")
    run.stop()
    assert run.wait(LIMIT_S).status == "stopped"
    assert run.results == ["partial"]
    run.stop()
    run.kill()  # both harmless by now


def test_kill_is_immediate():
    rank = FakeRank()
    run = run_of([rank], stop_grace_s=600)
    rank.starts()
    until(lambda: run.status == "running")
    run.kill()
    run.wait(LIMIT_S)
    assert rank.signals == [signal.SIGKILL]
    assert "ended by SIGKILL" in repr(run)


def _main_thread_waits():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code is not Run._wait_until.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.fixture
def interrupt():
    """Sends this process's main thread, once it waits for the run, the notebook's Stop when each condition holds."""
    threads, problems = [], []

    def when(*conditions):
        def send():
            try:
                for condition in conditions:
                    until(lambda: condition() and _main_thread_waits())  # noqa: B023 - called at once
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            except AssertionError as problem:
                problems.append(problem)

        threads.append(threading.Thread(target=send))
        threads[-1].start()

    yield when
    for thread in threads:
        thread.join(LIMIT_S)
    assert not problems


def test_an_interrupt_of_wait_stops_the_run(interrupt):
    rank = FakeRank()
    rank.on_signal[signal.SIGINT] = lambda: rank.raises(KeyboardInterrupt()).exits()
    run = run_of([rank])
    rank.starts()
    interrupt(lambda: run.status == "running")
    with pytest.raises(RunInterrupted, match="stopped after") as caught:
        run.wait(LIMIT_S)
    assert isinstance(caught.value, KeyboardInterrupt)
    assert caught.value._render_traceback_() == [str(caught.value)]
    assert rank.signals == [signal.SIGINT]
    assert run.results == [None]  # what there is can be looked at


def test_a_second_interrupt_kills(interrupt):
    rank = FakeRank()
    run = run_of([rank], stop_grace_s=600)
    rank.starts()
    interrupt(lambda: run.status == "running", lambda: rank.signals)
    with pytest.raises(RunInterrupted):
        run.wait(LIMIT_S)
    assert rank.signals == [signal.SIGINT, signal.SIGKILL]


def test_an_interrupt_is_no_error_when_every_rank_returned_all_the_same(interrupt):
    rank = FakeRank()
    rank.on_signal[signal.SIGINT] = lambda: rank.returns("partial").exits()
    run = run_of([rank])
    rank.starts()
    interrupt(lambda: run.status == "running")
    assert run.wait(LIMIT_S).results == ["partial"]


def test_an_interrupt_while_results_are_waited_for_is_not_swallowed(interrupt):
    rank = FakeRank()
    rank.on_signal[signal.SIGINT] = lambda: rank.raises(KeyboardInterrupt()).exits()
    run = run_of([rank])
    rank.starts()
    interrupt(lambda: run.status == "running")
    with pytest.raises(RunInterrupted):
        _ = run.results
    assert run.results == [None]


# --- starting again ---------------------------------------------------------------------------------------------------


def test_a_failed_run_is_started_again():
    first = FakeRank().starts().raises(OSError("once")).exits()
    second = finished(FakeRank(), "there")
    run = run_of([first], [second], max_restarts=1)
    assert run.wait(LIMIT_S).results == ["there"]
    assert run._record.notes == ["restart 1 of 1: rank 0 raised OSError: once"]


def test_an_earlier_attempts_results_do_not_count():
    first = [finished(FakeRank(0), "stale"), FakeRank(1).starts().raises(OSError("a")).exits()]
    second = [FakeRank(0).starts().raises(OSError("b")).exits(), finished(FakeRank(1), "new")]
    run = run_of(first, second, max_restarts=1)
    with pytest.raises(OSError, match="b"):
        run.wait(LIMIT_S)
    assert run.returned == {1: "new"}


def test_no_more_restarts_than_asked_for():
    attempts = [[FakeRank().starts().raises(OSError(str(number))).exits()] for number in range(3)]
    run = run_of(*attempts, max_restarts=2)
    with pytest.raises(OSError, match="2"):
        run.wait(LIMIT_S)
    assert len(run._record.notes) == 2


def test_a_restart_that_cannot_start_ends_the_run_with_the_reason():
    sink = RecordingSink()
    kept = record(1)

    def start(number):
        if number:
            raise EngineError("no descriptors left")
        return [FakeRank().starts().raises(OSError("first")).exits().worker]

    run = Run("fake", LaunchConfig(max_restarts=3), kept, [sink], start)
    run.begin(lambda: None)
    with pytest.raises(EngineError, match="no descriptors"):
        run.wait(LIMIT_S)
    assert run.status == "failed"
    assert sink.told[-1] == ("closed", "failed", "failed: EngineError: no descriptors left")


def test_a_stop_between_two_attempts_is_not_lost():
    """The first attempt's end and the stop cross: what was asked of the one that is over holds for the next."""
    first = FakeRank().starts().raises(OSError("first")).exits()
    run = Run("fake", LaunchConfig(max_restarts=1), record(1), [], lambda _: [first.worker])
    ended = run._supervisor = run._attempt(0)
    run._begun.set()
    ended.supervise()
    run.stop()
    assert run._restart(ended, 1) is None


@pytest.mark.parametrize("ask", [Run.stop, Run.kill])
def test_a_stop_of_a_failing_attempt_starts_no_other(ask):
    failing, other = FakeRank(0).starts().raises(OSError("first")), FakeRank(1).starts()
    other.on_signal = {signal.SIGINT: lambda: None, signal.SIGTERM: lambda: None}
    run = run_of([failing, other], [], max_restarts=3)
    until(lambda: run._supervisor.state.reason == "failure")
    ask(run)
    until(lambda: signal.SIGKILL in other.signals)
    failing.exits()
    with pytest.raises(OSError, match="first"):
        run.wait(LIMIT_S)
    assert run.returned == {}


def test_results_are_loaded_once_and_their_messages_let_go():
    run = run_of([finished(FakeRank(), ["one object"])])
    assert run.results[0] is run.results[0]
    assert run._record.finished == {}


class SlowToLoad:
    """Its loading is interrupted, the first time."""

    def __init__(self, problem):
        self.problem = problem

    def __reduce__(self):
        return (load_slowly, (self.problem,))


_loaded = []


def load_slowly(problem):
    _loaded.append(problem)
    if problem is KeyboardInterrupt and _loaded.count(problem) == 1:
        raise KeyboardInterrupt
    if problem is SystemExit:
        raise SystemExit(3)
    return "loaded"


def test_an_interrupt_while_results_are_loaded_loses_none():
    run = run_of([finished(FakeRank(0), "quick"), finished(FakeRank(1), SlowToLoad(KeyboardInterrupt))])
    with pytest.raises(KeyboardInterrupt):
        _ = run.results
    assert run.results == ["quick", "loaded"]


def test_a_result_that_exits_as_it_is_loaded_is_its_ranks_only():
    run = run_of([finished(FakeRank(0), "good"), finished(FakeRank(1), SlowToLoad(SystemExit))])
    assert run.results[0] == "good"
    assert isinstance(run.results[1], ResultError)


def test_a_server_that_died_under_the_launch_is_replaced_once_for_free():
    lost, sound = FakeRank(pid=False), finished(FakeRank(), "second try")
    lost.worker.why_never_made = lambda: "the server fell over"
    lost.loses_server()
    lost.exits()
    run = run_of([lost], [sound])
    assert run.results == ["second try"]
    assert "started again" in run._record.notes[0]


def killed_before_it_read(rank):
    """A rank whose process is killed while its command lies in its channel, unread."""
    rank.worker.channel.send("a command")
    rank.exits(-signal.SIGKILL)
    return rank


def test_a_rank_killed_before_it_had_read_its_command_is_replaced_once_for_free():
    run = run_of([killed_before_it_read(FakeRank())], [finished(FakeRank(), "second try")])
    assert run.results == ["second try"]
    assert run._record.notes[0].startswith(
        "started again: rank 0 was never started: the process made for it was ended by SIGKILL"
    )


def test_a_rank_killed_before_it_had_read_its_command_is_not_replaced_once_another_works():
    """What the other has done by then can't be undone."""
    lost, other = FakeRank(0), FakeRank(1).starts()
    run = run_of([lost, other])
    until(lambda: 1 in run._record.pids)
    killed_before_it_read(lost)
    with pytest.raises(
        EngineError, match="rank 0 of 2 was never started: the process made for it was ended by SIGKILL"
    ):
        run.wait(LIMIT_S)


def test_a_rank_that_crashes_in_what_it_reads_is_not_started_again():
    rank = FakeRank()
    rank.worker.channel.send("a command")
    rank.hears()
    run = run_of([rank.exits(-signal.SIGKILL)])
    with pytest.raises(WorkerError, match="SIGKILL"):
        run.wait(LIMIT_S)


def test_a_rank_that_the_run_does_not_have():
    run = run_of([finished(FakeRank(), 1)])
    with pytest.raises(IndexError, match="there is no rank 5 in this run: its ranks are 0 to 0"):
        run.logs(5)
    run.wait(LIMIT_S)


def test_what_starting_raises_is_raised_at_once():
    def start(_):
        raise EngineError("no process")

    run = Run("fake", LaunchConfig(), record(1), [], start)
    with pytest.raises(EngineError, match="no process"):
        run.begin(lambda: None)
    assert run.status == "failed"


def test_an_interrupt_while_the_workers_start_ends_them():
    """The start goes on in its thread; what it started is ended, and the interrupt is the caller's."""
    rank, going, go_on = FakeRank(), threading.Event(), threading.Event()

    def start(_):
        going.set()
        assert go_on.wait(LIMIT_S)
        return [rank.worker]

    def interrupt():
        assert going.wait(LIMIT_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    run = Run("fake", LaunchConfig(), record(1), [], start)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run.begin(lambda: None)
    run.kill()  # as launch does, and before the workers are there
    go_on.set()
    until(lambda: signal.SIGKILL in rank.signals)
    assert run.wait(LIMIT_S).status == "stopped"


def test_a_fault_of_the_launcher_itself_ends_the_run_and_is_raised(monkeypatch):
    sink, rank = RecordingSink(), FakeRank()
    monkeypatch.setattr(runs.Supervisor, "_paint", lambda _: 1 / 0)
    run = run_of([rank], sinks=[sink])
    with pytest.raises(ZeroDivisionError):
        run.wait(LIMIT_S)
    assert sink.told[-1][0] == "closed"
    assert "the launcher itself failed: ZeroDivisionError" in repr(run)
    with pytest.raises(ConnectionError):  # a rank that finds its channel closed ends itself
        rank.hears()
    rank.exits()


def test_who_is_shown_a_run_later_is_told_of_its_end_and_after_it_that_nothing_will_come():
    rank, sink = FakeRank(), RecordingSink()
    run = run_of([rank])
    assert run.show_in(sink) is True
    finished(rank, 1)
    run.wait(LIMIT_S)
    assert sink.told[-1] == ("closed", "finished", run.view.summary)
    assert run.show_in(RecordingSink()) is False


def test_a_view_can_stop_its_run_and_holds_it_not():
    rank = FakeRank().starts()
    run = run_of([rank])
    view = run.view
    view.stop()
    until(lambda: signal.SIGINT in rank.signals)
    rank.raises(KeyboardInterrupt()).exits()
    run.wait(LIMIT_S)
    del run
    gc.collect()
    view.stop()  # there is nothing left to stop


def test_a_failed_run_s_record_has_the_error_as_the_notebook_shows_it():
    rank = FakeRank().starts()
    run = run_of([rank])
    rank.raises(ValueError("bad batch")).exits()
    with pytest.raises(ValueError, match="bad batch"):
        run.wait(LIMIT_S)
    assert "rank 0 of 1 raised ValueError: bad batch" in run.view.error


# --- what the kernel knows of its runs --------------------------------------------------------------------------------


def test_history_has_the_runs_that_somebody_holds():
    one = run_of([finished(FakeRank(), 1)]).wait(LIMIT_S)
    two = run_of([finished(FakeRank(), 2)]).wait(LIMIT_S)
    mine = [run for run in history() if run in (one, two)]
    assert mine == [one, two]
    del mine, two
    until(lambda: gc.collect() is not None and len([run for run in history() if run.name == "fake"]) == 1)


def test_a_run_that_nobody_holds_goes_on():
    rank, called = FakeRank(), threading.Event()
    run_of([rank], after=called.set)
    gc.collect()
    rank.starts()
    finished_by = rank.returns().exits()
    assert called.wait(LIMIT_S)
    assert finished_by.signals == []


def test_the_programs_end_ends_its_runs():
    rank = FakeRank()
    run = run_of([rank])
    rank.starts()
    until(lambda: run.status == "running")
    runs._end_all()
    assert run.status == "stopped"
    assert rank.signals == [signal.SIGKILL]
    assert run not in runs._running
