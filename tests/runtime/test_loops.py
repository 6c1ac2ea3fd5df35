"""``Accelerator.progress``: what is told of loops, how often, and that nothing of the iteration changes."""

from __future__ import annotations

import pytest

from notebook_launcher.core import events
from notebook_launcher.runtime.loops import Loops


@pytest.fixture
def told():
    """Everything that is told."""
    taken = []
    events.install(taken.append)
    yield taken
    events.install(None)


class Clock:
    def __init__(self):
        self.now_s = 50.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_it_gives_what_the_iterable_gives_where_nobody_launched():
    assert list(Loops().track("abc", None, "")) == ["a", "b", "c"]


def test_the_beginning_and_the_end_are_told_also_of_a_short_loop(told, clock):
    for _ in Loops(clock).track(range(3), None, "batch"):
        clock.now_s += 0.001
    assert [(one.done, one.total, one.name, one.level) for one in told] == [(0, 3, "batch", 0), (3, 3, "batch", 0)]


def test_four_times_a_second_at_most(told, clock):
    for _ in Loops(clock).track(range(1000), None, ""):
        clock.now_s += 0.01
    assert len(told) in range(38, 43)
    assert told[-1].done == 1000
    assert told[-1].elapsed_s == pytest.approx(10)


def test_short_loops_by_the_thousand_are_not_all_told(told, clock):
    loops = Loops(clock)
    for _ in range(1000):
        for _ in loops.track([1, 2], None, ""):
            clock.now_s += 0.0005
    assert len(told) < 30


def test_loops_inside_one_another_know_their_level(told, clock):
    loops = Loops(clock)
    for _ in loops.track(range(2), None, "epoch"):
        for _ in loops.track(range(3), None, "batch"):
            clock.now_s += 1
    assert {(one.name, one.level) for one in told} == {("epoch", 0), ("batch", 1)}


def test_a_loop_that_is_left_early_is_over(told, clock):
    loops = Loops(clock)
    for item in loops.track(range(5), None, ""):
        clock.now_s += 1
        if item == 2:
            break
    list(loops.track(range(1), None, "next"))
    assert told[-1].level == 0
    assert [one.done for one in told if one.name == ""][-1] == 2


@pytest.mark.parametrize(
    ("iterable", "total", "expected"), [(iter([1, 2]), None, 2), ((i for i in range(2)), None, None)]
)
def test_the_total_is_the_length_where_there_is_one(told, iterable, total, expected):
    list(Loops().track(iterable, total, ""))
    assert told[0].total == expected
    assert told[-1].total == 2


def test_a_total_can_be_given(told):
    list(Loops().track((i for i in range(2)), 10, ""))
    assert told[0].total == 10
