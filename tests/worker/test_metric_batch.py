"""Metrics on their way: at once where they are rare, together where they are many."""

from __future__ import annotations

import pytest

from notebook_launcher.core.events import Metric, Metrics
from notebook_launcher.worker.metric_batch import _MAX_WAITING, MetricBatch


class Clock:
    now_s = 10.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def logged(step, **values):
    return Metric(values or {"loss": 1.0}, step, float(step))


def test_what_comes_rarely_goes_at_once(clock):
    sent = []
    batch = MetricBatch(sent.append, clock)
    for step in range(3):
        batch.add(logged(step))
        clock.now_s += 1
    assert sent == [logged(0), logged(1), logged(2)]


def test_what_comes_fast_goes_together_and_in_order(clock):
    sent = []
    batch = MetricBatch(sent.append, clock)
    for step in range(100):
        batch.add(logged(step, loss=1 / (1 + step), lr=0.1))
        clock.now_s += 0.01
    batch.flush()
    batch.flush()
    assert len(sent) < 25
    first, *others = sent
    assert first == logged(0, loss=1.0, lr=0.1)
    assert [step for one in others for step in one.steps] == list(range(1, 100))
    assert [value for one in others for value in one.columns["loss"]] == [1 / (1 + step) for step in range(1, 100)]
    assert others[-1].times_s[-1] == 99.0


def test_who_logs_by_the_hundred_a_second_sends_five_messages_of_them(clock):
    sent = []
    batch = MetricBatch(sent.append, clock)
    for step in range(2000):
        clock.now_s += 0.002
        batch.add(logged(step))
    batch.flush()
    assert len(sent) in range(20, 25)
    assert [step for one in sent[1:] for step in one.steps] == list(range(1, 2000))


def test_other_names_wait_for_those_before_them(clock):
    sent = []
    batch = MetricBatch(sent.append, clock)
    for step in range(6):
        batch.add(logged(step, **({"accuracy": 0.5} if step == 3 else {"loss": 1.0})))
    batch.flush()
    assert sent == [
        logged(0),
        Metrics({"loss": [1.0, 1.0]}, [1, 2], [1.0, 2.0]),
        logged(3, accuracy=0.5),
        Metrics({"loss": [1.0, 1.0]}, [4, 5], [4.0, 5.0]),
    ]


def test_what_may_still_change_goes_at_once_after_what_waits(clock):
    sent = []
    batch = MetricBatch(sent.append, clock)
    for metric in (logged(0), logged(1), logged(2, histogram=[1, 2])):
        batch.add(metric)
    assert sent == [logged(0), logged(1), logged(2, histogram=[1, 2])]


def test_what_cannot_be_sent_is_the_error_of_its_own_call(clock):
    def send(event):
        if "lock" in getattr(event, "values", {}):
            raise TypeError("cannot pickle")
        sent.append(event)

    sent = []
    batch = MetricBatch(send, clock)
    batch.add(logged(0))
    batch.add(logged(1))
    with pytest.raises(TypeError, match="cannot pickle"):
        batch.add(logged(2, lock=object()))
    batch.add(logged(3))
    batch.flush()
    assert sent == [logged(0), logged(1), logged(3)]


def test_no_more_than_a_thousand_wait(clock):
    sent = []
    batch = MetricBatch(sent.append, clock)
    for step in range(_MAX_WAITING + 1):
        batch.add(logged(step))
    assert [len(getattr(one, "steps", [0])) for one in sent] == [1, _MAX_WAITING]
