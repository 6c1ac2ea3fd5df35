"""A check's words, and its thread, with an invented run."""

import threading
import types

import pytest

from notebook_launcher.launcher.preflight import Check as Found
from notebook_launcher.launcher.preflight import Preflight
from notebook_launcher.widgets.check import Check, answer, progress

LIMIT_S = 10
HEADLINE = "2 processes · CPU (gloo) · fp32 · DDP"
WELL = Preflight(HEADLINE, tuple(Found(name, ok=True, text="right") for name in ("workers", "fp32")))


class FakeRun:
    def __init__(self, status="starting"):
        self.view = types.SimpleNamespace(status=status)
        self.num_stops = 0
        self.sinks = []

    def show_in(self, sink):
        self.sinks.append(sink)
        return True

    def stop(self):
        self.num_stops += 1

    def becomes(self, status):
        self.view.status = status
        for sink in self.sinks:
            sink.changed(self.view)


def test_how_far_it_is_in_words():
    assert progress("") == "Checking: looking at this machine ... Stop ends it."
    assert progress(HEADLINE, "starting") == f"Checking {HEADLINE}: the processes start ... Stop ends it."
    assert "they compute, and exchange what they have" in progress(HEADLINE, "running")
    assert "the processes are being ended" in progress(HEADLINE, "stopping")


def test_what_came_of_it_in_words():
    text, is_bad = answer(WELL)
    assert text.splitlines() == [f"All is well: {HEADLINE}", "✓ workers: right", "✓ fp32: right"]
    assert not is_bad
    text, is_bad = answer(Preflight("", (Found("options", ok=False, text="num_processes=3 is more than 1"),)))
    assert text.splitlines() == ["Something is wrong", "✗ options: num_processes=3 is more than 1"]
    assert is_bad
    assert answer(Preflight(HEADLINE, (), is_stopped=True)) == ("The check was stopped before its end.", False)


def checked(check):
    """What is told of a check on its way, and of its end."""
    told, ends = [], []
    one = Check(check, told.append, lambda *end: ends.append(end))
    one.thread.join(LIMIT_S)
    assert not one.thread.is_alive()
    (end,) = ends
    return told, end


def test_each_status_is_told_once_and_nothing_after_the_end():
    def check(begun):
        run = FakeRun()
        begun(run)
        for status in ("starting", "running", "running", "stopping", "finished"):
            run.becomes(status)
        return WELL

    assert checked(check) == (["starting", "running", "stopping"], answer(WELL))


@pytest.mark.parametrize("error", [ZeroDivisionError("odd"), KeyboardInterrupt("odd")])
def test_a_fault_of_ours_is_an_answer_too(error):
    def check(_):
        raise error

    _, (text, is_bad) = checked(check)
    assert f"{type(error).__name__}: odd" in text
    assert is_bad


@pytest.mark.parametrize("before", [True, False])
def test_a_stop_reaches_the_run_also_where_it_came_before_there_was_one(before):
    run, has_begun, may_begin, may_end = FakeRun(), *(threading.Event() for _ in range(3))

    def check(begun):
        assert may_begin.wait(LIMIT_S)
        begun(run)
        has_begun.set()
        assert may_end.wait(LIMIT_S)
        return WELL

    one = Check(check, lambda _: None, lambda *_: None)
    if before:
        one.stop()
    may_begin.set()
    assert has_begun.wait(LIMIT_S)
    assert run.num_stops == int(before)
    one.stop()
    assert run.num_stops == 1 + int(before)
    may_end.set()
    one.thread.join(LIMIT_S)
