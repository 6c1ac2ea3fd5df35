"""Whether a thread stands still in a collective: with a clock and a record that the test moves by hand."""

from __future__ import annotations

import sys
import threading

import pytest

from notebook_launcher.core.events import Pending, Waits
from notebook_launcher.core.world import World
from notebook_launcher.worker import stillness

PENDING = Pending("0", 3, "all_reduce", "Float (2)", (("Float", 2),), (0, 1), {"0": 3}, is_whole=True)


class Rank:
    """A thread that stands, its clock, and what torch would have recorded of it."""

    def __init__(self, monkeypatch, world):
        self.now_s, self.begun, self.pending, self.num_looks, self.problem = 0.0, {}, None, 0, None
        self._may_go, self._stands = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()
        self._stands.wait(10)
        monkeypatch.setattr(stillness.collectives, "num_begun", lambda: self.begun)
        monkeypatch.setattr(stillness.collectives, "pending", self._look)
        frames = {self._thread.ident: sys._current_frames()[self._thread.ident]}
        self.frames = frames
        monkeypatch.setattr(stillness.sys, "_current_frames", lambda: self.frames)
        self.watch = stillness.StillnessWatch(self._thread.ident, world, lambda: self.now_s)

    def _live(self):
        self._stands.set()
        self._may_go.wait(60)

    def _look(self, thread, rank, world_size):
        assert (thread, rank, world_size) == (self._thread.ident, 1, 2)
        self.num_looks += 1
        if self.problem is not None:
            raise self.problem
        return self.pending

    def moves(self):
        """It is in other code now: this test's own."""
        self.frames = {self._thread.ident: sys._getframe()}

    def after(self, passed_s):
        self.now_s += passed_s
        return self.watch.news()

    def end(self):
        self._may_go.set()
        self._thread.join(10)


@pytest.fixture
def world():
    return World(rank=1, world_size=2, device="cpu")


@pytest.fixture
def rank(monkeypatch, world):
    made = Rank(monkeypatch, world)
    yield made
    monkeypatch.undo()
    made.end()


def test_a_rank_that_waits_is_told_of_once_and_again_when_it_goes_on(rank):
    rank.begun, rank.pending = {"0/0": (3, 2)}, PENDING
    assert rank.after(0.0) is None
    assert rank.after(1.9) is None
    assert rank.after(0.2) == Waits(PENDING)
    assert rank.after(5.0) is None
    rank.moves()
    assert rank.after(0.2) == Waits(None)
    assert rank.after(0.0) is None


def test_the_whole_record_is_looked_at_only_where_something_has_changed(rank):
    rank.begun, rank.pending = {"0/0": (3, 2)}, PENDING
    for _ in range(10):
        rank.after(2.5)
    assert rank.num_looks == 1
    rank.begun = {"0/0": (4, 2)}
    rank.after(2.5)
    assert rank.num_looks == 2


def test_a_rank_that_computes_says_nothing(rank):
    rank.begun, rank.pending = {"0/0": (3, 3), "0/1": (0, 0)}, PENDING
    assert [rank.after(2.5) for _ in range(4)] == [None] * 4
    assert rank.num_looks == 0


def test_it_goes_on_in_native_code_that_never_comes_back_to_python(rank):
    rank.begun, rank.pending = {"0/0": (3, 2)}, PENDING
    assert rank.after(0.0) is None
    assert rank.after(2.5) == Waits(PENDING)
    rank.begun = {"0/0": (3, 3)}
    assert rank.after(2.5) == Waits(None)


def test_a_thread_that_has_ended_is_not_waiting(rank):
    rank.frames = {}
    assert [rank.after(2.5) for _ in range(3)] == [None] * 3


def test_a_record_that_this_version_can_not_read_is_looked_at_once(rank):
    rank.begun, rank.problem = {"0/0": (3, 2)}, TypeError("another shape")
    assert [rank.after(2.5) for _ in range(4)] == [None] * 4
    assert rank.num_looks == 1


@pytest.mark.parametrize("others", [{"device": "cuda"}, {"num_machines": 2}, {"rank": 0, "world_size": 1}])
class TestElsewhere:
    @pytest.fixture
    def world(self, others):
        return World(**{"rank": 1, "world_size": 2, "device": "cpu", **others})

    def test_nobody_looks(self, rank):
        rank.begun, rank.pending = {"0/0": (3, 2)}, PENDING
        assert [rank.after(2.5) for _ in range(3)] == [None] * 3
        assert rank.num_looks == 0
