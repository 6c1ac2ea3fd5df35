"""``Monitor`` and its live widgets, without a front end; in a notebook: tests/kernel/test_monitoring.py."""

from __future__ import annotations

import time
import types

import pytest
from fake_notebook import num_widgets
from watched import Watched

from notebook_launcher.core.events import Display
from notebook_launcher.widgets.live_view import LiveView, Pane
from notebook_launcher.widgets.monitor import Monitor
from notebook_launcher.widgets.view_model import ViewModel

LIMIT_S = 10


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watch():
    """Monitors whose painters are gone with the test."""
    made = []

    def make(watched, **options):
        made.append((Monitor(watched.record, **options), watched.record))
        return made[-1][0]

    yield make
    for monitor, record in made:
        monitor.closed(record)


def pages(box):
    """The HTML of all widgets in ``box``."""
    own = [box.value] if isinstance(getattr(box, "value", None), str) else []
    return own + [page for child in getattr(box, "children", ()) for page in pages(child)]


def shown(box):
    return "\n".join(pages(box))


def until(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def live_view(watched, clock):
    view = LiveView(watched.record, log_scale=False, clock=clock)
    model = ViewModel(watched.record)

    def paint(**options):
        return view.paint(model.view(), [], cell_runs=False, **options)

    return view, paint


# --- a pane -----------------------------------------------------------------------------------------------------------


def test_a_pane_sends_only_what_is_new(clock):
    pane, sent = Pane(clock), []
    pane.widget.observe(lambda change: sent.append(change.new), "value")
    for key, page in (("a", "one"), ("a", "never asked for"), ("b", "one"), ("c", "two")):
        clock.now_s += 1
        pane.offer(key, lambda page=page: page)
    assert [page.count("one") for page in sent] == [1, 0]


def test_a_pane_is_painted_ten_times_a_second_and_no_more_bytes_than_its_own(clock):
    small, large = Pane(clock), Pane(clock, bytes_per_s=1000)
    painted = {"small": 0, "large": 0}
    for number in range(1000):
        clock.now_s += 0.01
        for name, pane, page in (("small", small, "x"), ("large", large, "x" * 1000)):
            before = pane.widget.value
            pane.offer(number, lambda page=page, number=number: f"{page}{number}")
            painted[name] += pane.widget.value != before
    assert painted["small"] in range(95, 105)
    assert painted["large"] in range(8, 12)
    assert large.is_late


def test_a_pane_that_is_dear_to_make_is_made_less_often(clock):
    spent = types.SimpleNamespace(now_s=0.0)
    pane = Pane(clock, cpu_share=0.01, cpu_clock=lambda: spent.now_s)
    made = []

    def make():
        spent.now_s += 0.02
        made.append(clock.now_s)
        return f"{len(made)}"

    for number in range(1000):
        clock.now_s += 0.01
        pane.offer(number, make)
    assert len(made) in range(5, 7)
    assert pane.is_late
    pane.offer("chosen", make, at_once=True)
    assert pane.widget.value.count(str(len(made))) == 1


# --- the live view ----------------------------------------------------------------------------------------------------


def test_the_live_view_shows_ranks_output_in_tabs_and_curves(clock):
    watched = Watched().writes(0, "hello\n").writes(1, "world\n").logs(0, 1, loss=0.5)
    view, paint = live_view(watched, clock)
    paint()
    page = shown(view.box)
    for part in ("▸ running", "hello", "world", "<svg", "nl-hover"):
        assert part in page
    tabs = view.box.children[-2]
    assert [tabs.get_title(rank) for rank in (0, 1)] == ["rank 0", "rank 1"]
    assert "world" in tabs.children[1].value
    view.close()


def test_only_parts_that_changed_are_painted(clock):
    watched = Watched().writes(0, "hello\n").writes(1, "quiet\n")
    view, paint = live_view(watched, clock)
    paint()
    clock.now_s += 5
    paint()  # rank 1's lines in full, now that it is calm
    painted = []
    for child in (*view.box.children[1:-2], *view.box.children[-2].children):
        child.observe(lambda change: painted.append(change.new), "value")
    watched.writes(0, "more\n")
    clock.now_s += 5
    paint()
    assert sum("more" in page and "<table" not in page for page in painted) == 1
    assert not any("quiet" in page and "<table" not in page for page in painted)
    view.close()


def test_a_tab_behind_shows_the_end_while_its_rank_goes_on_and_all_when_it_is_calm(clock):
    watched = Watched()
    view, paint = live_view(watched, clock)
    behind = view.box.children[-2].children[1]
    watched.writes(1, "".join(f"line {number}.\n" for number in range(1000)))
    paint()
    assert ("line 999." in behind.value, "line 700." in behind.value) == (True, False)
    clock.now_s += 5
    paint()
    assert "line 0." in behind.value
    view.close()


def test_the_output_that_a_person_turns_to_is_as_it_is_now(clock):
    watched = Watched().writes(1, "one\n")
    view, paint = live_view(watched, clock)
    paint()
    watched.writes(1, "two\n")
    clock.now_s += 0.2
    paint()
    tabs = view.box.children[-2]
    assert "two" not in tabs.children[1].value  # nobody looks
    tabs.selected_index = 1
    paint()
    assert "two" in tabs.children[1].value
    view.close()


def test_of_a_flood_the_end_is_shown_and_all_when_it_is_held_or_calm(clock):
    watched = Watched()
    view, paint = live_view(watched, clock)
    in_front, behind = view.box.children[-2].children

    def flood():
        for rank in range(2):
            watched.writes(rank, "".join(f"line {number}.\n" for number in range(1000)))
        clock.now_s += 5
        paint()

    flood()
    assert [f"line {number}." in in_front.value for number in (999, 850, 700)] == [True, True, False]
    clock.now_s += 2
    paint()
    assert "line 0." in in_front.value
    flood()
    assert "line 0." not in in_front.value
    view.hold.value = True
    paint()
    assert "line 0." in in_front.value
    assert "line 0." in behind.value
    watched.writes(0, "more\n")
    clock.now_s += 5
    paint()
    assert "more" not in in_front.value
    view.close()


def test_a_few_lines_at_a_time_are_no_flood(clock):
    watched = Watched().writes(0, "".join(f"line {number}.\n" for number in range(90)))
    view, paint = live_view(watched, clock)
    for _ in range(3):
        watched.writes(0, "more\n" * 90)
        clock.now_s += 0.2
        paint()
    assert "line 0." in view.box.children[-2].children[0].value
    view.close()


def test_held_output_stays_as_it_is(clock):
    watched = Watched(1).writes(0, "one\n")
    view, paint = live_view(watched, clock)
    paint()
    view.hold.value = True
    watched.writes(0, "two\n")
    clock.now_s += 5
    paint()
    (tab,) = view.box.children[-2].children
    assert "two" not in tab.value
    watched.ends()
    paint(at_once=True)
    assert "two" in tab.value
    view.close()


def test_many_ranks_are_chosen_from_a_list(clock):
    watched = Watched(40).writes(0, "first\n").writes(39, "last of all\n")
    view, paint = live_view(watched, clock)
    paint()
    picker, output = view.box.children[-2].children
    assert "first" in output.value
    picker.value = 39
    clock.now_s += 5
    paint()
    assert "last of all" in output.value
    view.close()


@pytest.mark.parametrize("num_ranks", [2, 40], ids=["tabs", "a list"])
def test_the_rank_that_failed_comes_to_the_front(clock, num_ranks):
    watched = Watched(num_ranks).writes(1, "the batch is bad\n")
    view, paint = live_view(watched, clock)
    paint()
    assert view.in_front == 0
    watched.raises(1)
    paint()
    assert view.in_front == 1
    view.close()


def test_the_rank_that_a_person_has_chosen_stays_in_front(clock):
    watched = Watched(3)
    view, paint = live_view(watched, clock)
    paint()
    view.box.children[-2].selected_index = 2
    watched.raises(1)
    paint()
    assert view.in_front == 2
    view.close()


def test_stop_asks_the_run_and_says_what_a_second_one_does(clock):
    watched, asked = Watched(), []

    class Stopper:
        def stop(self):
            asked.append(1)

    stopper = Stopper()
    watched.record.stopped_by(stopper.stop)
    view, paint = live_view(watched, clock)
    assert (view.stop_button.description, view.stop_button.disabled) == ("Stop", False)
    view.stop_button.click()
    assert view.stop_button.description == "Stop at once"
    view.stop_button.click()
    assert asked == [1, 1]
    watched.record.status = "stopping"
    paint()
    assert "Kill every rank now" in view.stop_button.tooltip
    watched.ends("stopped")
    paint(at_once=True)
    assert view.stop_button.disabled
    view.close()


def test_every_control_has_a_label_and_a_tooltip(clock):
    view, _ = live_view(Watched(), clock)
    for control in view.box.children[0].children:
        assert control.description
        assert control.tooltip
    view.close()


# --- the monitor ------------------------------------------------------------------------------------------------------


def test_a_monitor_paints_what_comes_by_itself(watch):
    watched = Watched()
    monitor = watch(watched)
    box = monitor.widget
    watched.writes(1, "came later\n")
    monitor.changed(watched.record)
    until(lambda: "came later" in shown(box))


def test_an_embedded_monitor_keeps_its_widgets_when_the_run_has_ended(watch):
    watched = Watched()
    monitor = watch(watched)
    box = monitor.widget
    monitor.closed(watched.ends().record)
    assert "✓ finished" in shown(box)
    box.children[0].children[1].value = True  # a logarithmic scale can still be chosen
    assert "✓ finished" in monitor.html()


def test_a_monitor_that_is_closed_leaves_no_widgets_and_can_be_shown_again(watch):
    before = num_widgets()
    watched = Watched()
    monitor = watch(watched)
    monitor.widget  # noqa: B018 - makes it
    assert num_widgets() > before + 20
    monitor.close()
    monitor.close()
    assert num_widgets() == before
    assert "running" in shown(monitor.widget)
    monitor.closed(watched.ends().record)
    monitor.close()
    assert num_widgets() == before


def test_of_a_run_that_has_ended_nothing_is_painted_any_more(watch):
    asked = []
    monitor = watch(Watched().ends(), attach=lambda one: bool(asked.append(one)))
    assert "✓ finished" in shown(monitor.widget)
    assert asked == [monitor]
    assert monitor._painter is None


def test_displays_are_kept_and_updated_by_name(watch):
    watched = Watched()
    monitor = watch(watched)
    monitor.displayed(1, Display({"text/html": "<b>picture 1</b>"}, transient={"display_id": "a"}))
    monitor.displayed(1, Display({"text/html": "<b>picture 2</b>"}, transient={"display_id": "a"}, update=True))
    monitor.displayed(1, Display({"text/html": "<b>stray</b>"}, transient={"display_id": "b"}, update=True))
    page = monitor.html()
    assert "picture 2" in page
    assert "picture 1" not in page
    assert "stray" not in page


def test_a_monitor_whose_view_breaks_says_so(watch):
    watched = Watched()
    monitor = watch(watched)
    monitor.widget  # noqa: B018 - starts the painter
    kept, watched.record.metrics = watched.record.metrics, None
    monitor.changed(watched.record)
    until(lambda: any("the monitor has stopped: TypeError" in note for note in watched.record.notes))
    watched.record.metrics = kept


def test_as_text_it_is_a_table(watch):
    assert repr(watch(Watched().writes(0, "hello\n"))).splitlines()[0].split() == ["rank", "state"]
