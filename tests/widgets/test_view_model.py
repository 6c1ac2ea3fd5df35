"""A run's record becomes rows, curves and texts: no widgets, no processes."""

from __future__ import annotations

import time

import pytest
from watched import Watched

from notebook_launcher.core import events
from notebook_launcher.core.events import DeviceMemory
from notebook_launcher.launcher.state import Act
from notebook_launcher.widgets.quantities import rate
from notebook_launcher.widgets.view_model import ViewModel, state_of

GIB = 1 << 30


def view_of(watched, **options):
    return ViewModel(watched.record, **options).view()


def words(view):
    return [row.state.word for row in view.rows]


def test_ranks_wait_until_they_start():
    view = view_of(Watched(started=False))
    assert words(view) == ["waiting", "waiting"]
    assert (view.state.word, view.headline, view.notes) == ("starting", "2 processes · CPU", ("a note",))
    assert (view.remaining, view.fraction, view.plots, view.summary) == ("", None, (), "")


def test_before_there_are_workers_nothing_is_known():
    watched = Watched(started=False)
    watched.record.state = None
    assert words(view_of(watched)) == ["waiting", "waiting"]


def test_each_end_has_its_word():
    watched = Watched(5)
    watched.state.returned(0, 1.0)
    watched.raises(1)
    watched.state.exited(2, -9, 1.0)
    watched.state.ranks[3].sent = Act.TERMINATE
    watched.state.exited(3, -15, 1.0)
    watched.state.ranks[4].sent = Act.INTERRUPT
    view = view_of(watched)
    assert words(view) == ["finished", "failed", "died", "stopped", "stopping"]
    assert view.rows[1].detail == "raised ValueError: bad batch"
    assert "SIGKILL" in view.rows[2].detail


def test_who_was_interrupted_was_stopped_and_has_not_failed():
    watched = Watched(2)
    watched.state.reason = "stop"
    for rank in (0, 1):
        watched.state.ranks[rank].sent = Act.INTERRUPT
    watched.raises(0, "KeyboardInterrupt", "").raises(1, "RuntimeError", "in the clean-up")
    assert words(view_of(watched)) == ["stopped", "stopped"]


def test_every_state_has_a_symbol_beside_its_colour():
    known = [state_of(word) for word in ("starting", "running", "stopping", "finished", "stopped", "failed")]
    assert all(state.symbol for state in known)
    assert len({(state.symbol, state.tone) for state in known}) == len(known)
    assert state_of("something new").word == "something new"


def test_the_last_line_is_the_bar_that_is_being_drawn_and_has_no_colours():
    watched = Watched().writes(0, "one\n\x1b[31mtwo\x1b[0m\n").writes(1, "x\n").writes(1, "\r 10%", "stderr")
    first, second = view_of(watched).rows
    assert (first.last_line, first.last_stream, first.num_lines) == ("two", "stdout", 2)
    assert (second.last_line, second.last_stream) == (" 10%", "stderr")


def test_memory_is_the_process_s_while_it_runs_and_its_peak_afterwards():
    watched = Watched()
    model = ViewModel(watched.record)
    assert [row.memory for row in model.view({0: 3 * GIB, 1: GIB // 2}).rows] == ["3.0 GiB", "512 MiB"]
    model.view({0: GIB})
    watched.ends()
    assert [row.memory for row in model.view().rows] == ["peak 3.0 GiB", "peak 512 MiB"]


def test_device_memory_is_what_the_rank_has_told():
    watched = Watched()
    watched.record.holds(1, DeviceMemory(2 * GIB, 80 * GIB))
    assert [row.device_memory for row in view_of(watched).rows] == ["", "2.0 GiB of 80.0 GiB"]


def test_only_processes_of_this_machine_that_go_on_are_looked_at():
    watched = Watched(3)
    watched.record.hosts[1] = "elsewhere"
    watched.state.exited(2, 0, 1.0)
    assert ViewModel(watched.record).local_pids() == {0: 100}


# --- progress ---------------------------------------------------------------------------------------------------------


def test_loops_inside_one_another_make_one_fraction():
    view = view_of(Watched(1).steps(0, (2, 4, "epoch", 50.0), (5, 10, "", 4.0)))
    (row,) = view.rows
    assert (row.step, row.rate) == ("epoch 2/4 · 5/10", "1.25 steps/s")
    assert view.fraction == pytest.approx(0.625)
    assert view.remaining == "30.0 s"


def test_an_outer_loop_s_step_ends_those_inside():
    watched = Watched(1).steps(0, (0, 2, "epoch", 1.0), (10, 10, "", 1.0)).steps(0, (1, 2, "epoch", 1.0))
    assert view_of(watched).rows[0].step == "epoch 1/2"


def test_the_slowest_rank_says_how_much_is_left():
    view = view_of(Watched(2).steps(0, (9, 10, "", 9.0)).steps(1, (5, 10, "", 10.0)))
    assert (view.fraction, view.remaining) == (0.5, "10.0 s")


def test_a_loop_without_a_known_end_has_a_place_and_a_rate_only():
    view = view_of(Watched(1).steps(0, (1234, None, "batch", 617.0)))
    assert (view.rows[0].step, view.rows[0].rate, view.fraction) == ("batch 1,234", "2 steps/s", None)


@pytest.mark.parametrize("done", [0, 3])
def test_at_the_very_start_nobody_knows_how_long_it_takes(done):
    assert view_of(Watched(1).steps(0, (done, 10, "", 0.0))).remaining == ""


def test_a_bar_that_a_rank_draws_is_read():
    bar = "\rtrain:  40%|####      | 40/100 [00:02<01:03, 19.80it/s, loss=0.3]"
    view = view_of(Watched(1).writes(0, bar, "stderr"))
    assert (view.rows[0].step, view.rows[0].rate) == ("train 40/100", "19.80it/s")
    assert (view.fraction, view.remaining) == (0.4, "1 min 3 s")


def test_what_is_reported_counts_more_than_what_is_drawn():
    watched = Watched(1).writes(0, "\r 40%|##  | 40/100 [00:02<00:03, 1.0it/s]", "stderr").steps(0, (1, 2, "", 1.0))
    assert view_of(watched).rows[0].step == "1/2"


def test_without_either_the_step_is_that_of_the_last_metric():
    assert [row.step for row in view_of(Watched().logs(0, 1200, loss=1.0)).rows] == ["step 1,200", ""]


# --- curves -----------------------------------------------------------------------------------------------------------


def names(plot):
    return [one.name for one in plot.series]


def test_a_plot_a_metric_and_a_line_a_rank():
    view = view_of(Watched().logs(0, 0, loss=1.0, lr=0.1).logs(1, 0, loss=2.0).logs(0, 1, loss=0.5, note="text"))
    assert [plot.title for plot in view.plots] == ["loss", "lr"]
    assert names(view.plots[0]) == ["rank 0", "rank 1"]
    assert view.plots[0].series[0].points == [(0, 1.0), (1, 0.5)]
    assert names(view.plots[1]) == [""]


def test_two_runs_are_laid_over_each_other():
    other = Watched().logs(0, 0, loss=3.0).ends()
    view = view_of(Watched().logs(0, 0, loss=1.0), compare=other.record)
    assert names(view.plots[0]) == ["this run", "other run"]
    watched = Watched()
    assert names(view_of(watched.logs(0, 0, loss=1.0), compare=watched.record).plots[0]) == [""]


def test_only_new_rows_are_read_and_unchanged_plots_are_the_same_objects():
    watched = Watched().logs(0, 0, loss=1.0, lr=1.0)
    model = ViewModel(watched.record)
    before = model.view().plots
    read = []
    stretches = watched.record.metrics.stretches
    watched.record.metrics.stretches = lambda start, stop: (read.append(start), *stretches(start, stop))[1:]
    watched.logs(0, 1, loss=0.5)
    after = model.view().plots
    assert read == [1]
    assert [(p.x, p.y) for p in after[0].series[0].points] == [(0, 1.0), (1, 0.5)]
    assert after[1] is before[1]


def test_a_million_points_cost_little_to_look_at_again_and_keep_their_extremes():
    watched = Watched(1)
    for step in range(200_000):
        watched.logs(0, step, loss=1e3 if step == 123_457 else float(step % 7))
    model = ViewModel(watched.record)
    (series,) = model.view().plots[0].series
    assert len(series.points) <= 512
    assert max(series.points, key=lambda point: point.y) == (123_457, 1e3)
    began_s = time.thread_time()
    for _ in range(100):
        model.view()
    assert time.thread_time() - began_s < 0.5


def test_values_that_are_not_finite_and_series_without_room_are_counted():
    watched = Watched(10).logs(0, 0, loss=float("nan")).logs(0, 1, loss=1.0)
    for rank in range(1, 10):
        watched.logs(rank, 0, loss=1.0)
    (plot,) = view_of(watched).plots
    assert (plot.num_not_finite, plot.num_left_out, len(plot.series)) == (1, 2, 8)


def test_metrics_that_take_the_launcher_s_own_names_do_no_harm():
    watched = Watched(1)
    watched.record.add_metrics(0, events.Metrics({"rank": [[1]], "step": ["two"], "loss": [1.0]}, [3], [0.0]))
    assert view_of(watched).plots[0].series[0].points == [(0, 1.0)]


@pytest.mark.parametrize(
    ("num_per_s", "text"),
    [
        (0, ""),
        (12.44, "12.4 steps/s"),
        (999.6, "1,000 steps/s"),
        (72_234.5, "72,200 steps/s"),
        (0.32, "3.12 s/step"),
        (1 / 7200, "7,200 s/step"),
    ],
)
def test_rates_are_written_without_exponents(num_per_s, text):
    assert rate(num_per_s) == text
