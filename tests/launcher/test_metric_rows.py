"""Rows of metrics: what was logged comes back as it was, from columns."""

from __future__ import annotations

import pickle
import tracemalloc

import pytest

from notebook_launcher.core.events import Metrics
from notebook_launcher.launcher.metric_rows import _MAX_TABLES, MetricRows


def logged(*rows):
    """Rows, each (rank, step, values), added one at a time."""
    made = MetricRows()
    for number, (rank, step, values) in enumerate(rows):
        made.add(rank, Metrics({name: [value] for name, value in values.items()}, [step], [float(number)]))
    return made


def expected(*rows):
    return [
        {"rank": rank, "step": step, "time_s": float(number), **values}
        for number, (rank, step, values) in enumerate(rows)
    ]


ROWS = [
    (0, 1, {"loss": 0.5, "tokens": 3}),
    (1, 1, {"loss": 0.25, "tokens": 4}),
    (0, 2, {"loss": 0.125, "tokens": 5}),
    (0, None, {"loss": float("inf")}),
    (0, 3, {"loss": 1, "tokens": 6}),  # an integer among numbers with a point stays one
    (0, 4, {"loss": 0.5, "tokens": 1 << 70}),
    (0, 5, {"loss": True, "tokens": None}),
    (0, 6, {"loss": "nan", "tokens": [1, 2]}),
    (0, 7, {}),
    (1, 2, {"tokens": 1, "loss": 2.0}),
    (1, 3, {"rank": 9, "step": "nine", "time_s": 0.0}),  # the user's own names win
]


def test_rows_come_back_as_they_were_logged():
    rows, wanted = logged(*ROWS), expected(*ROWS)
    assert len(rows) == len(ROWS)
    for found in (list(rows), rows[:], [rows[number] for number in range(len(rows))]):
        assert found == wanted
        assert [list(map(type, row.values())) for row in found] == [list(map(type, row.values())) for row in wanted]
        assert list(map(list, found)) == list(map(list, wanted))  # the order of the names, too
    assert rows[-1] == wanted[-1]
    assert rows[2:9:3] == wanted[2:9:3]
    assert pickle.loads(pickle.dumps(list(rows))) == wanted
    with pytest.raises(IndexError):
        rows[len(ROWS)]


def test_several_at_once_are_as_one_after_another():
    together = MetricRows()
    together.add(1, Metrics({"loss": [0.5, 0.25]}, [1, 2], [0.0, 1.0]))
    together.add(1, Metrics({"loss": [3, 4.0]}, [3, None], [2.0, 3.0]))
    one = [(1, 1, {"loss": 0.5}), (1, 2, {"loss": 0.25}), (1, 3, {"loss": 3}), (1, None, {"loss": 4.0})]
    assert list(together) == expected(*one) == list(logged(*one))
    assert [type(row["loss"]) for row in together] == [float, float, int, float]


@pytest.mark.parametrize("start", range(len(ROWS) + 1))
@pytest.mark.parametrize("num_left", [0, 1])
def test_stretches_are_the_rows_of_each_rank_in_order(start, num_left):
    rows, stop = logged(*ROWS), len(ROWS) - num_left
    found = {0: [], 1: []}
    for stretch in rows.stretches(start, stop):
        for place, row in enumerate(stretch.rows()):
            values = {name: column[place] for name, column in stretch.columns.items()}
            found[stretch.rank].append((stretch.rank, stretch.steps[place], values))
            assert {"rank": stretch.rank, "step": stretch.steps[place], "time_s": row["time_s"], **values} == row
    for rank, own in found.items():
        assert own == [row for row in ROWS[start:stop] if row[0] == rank]


def test_a_stretch_goes_on_past_the_rows_of_others_until_its_rank_logs_other_names():
    loss, both = {"loss": 1.0}, {"loss": 1.0, "accuracy": 0.5}
    rows = logged((0, 0, loss), (0, 1, loss), (1, 0, loss), (0, 2, loss), (0, 3, both), (1, 1, loss), (0, 4, loss))
    found = [(one.rank, list(one.steps), list(one.columns)) for one in rows.stretches(0, 7)]
    assert found == [(0, [0, 1, 2], ["loss"]), (1, [0, 1], ["loss"]), (0, [3], [*both]), (0, [4], ["loss"])]


def test_names_by_the_thousand_are_kept_row_by_row():
    given = [(0, None, {f"loss of batch {number}": 1.0}) for number in range(_MAX_TABLES + 10)]
    given += [(0, 1, {}), (0, 2, {"loss of batch 0": 2.0})]
    rows = logged(*given)
    assert list(rows) == expected(*given)
    assert len(rows._tables) == _MAX_TABLES + 1


def test_a_million_rows_take_little_memory():
    rows, num_rows = MetricRows(), 100_000
    tracemalloc.start()
    for first in range(0, num_rows, 100):
        steps = list(range(first, first + 100))
        values = [1 / (1 + step) for step in steps]
        rows.add(first % 800 // 100, Metrics({"loss": values, "lr": [0.1] * 100}, steps, values))
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == num_rows
    assert used_bytes / num_rows < 60
