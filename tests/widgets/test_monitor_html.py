"""A monitor's static form: all that a person needs, in what untrusted notebooks keep, and nothing that runs."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from watched import Watched

from notebook_launcher.core.errors import WorkerError
from notebook_launcher.launcher.outcome import drawing
from notebook_launcher.widgets import monitor_html
from notebook_launcher.widgets.view_model import ViewModel

NASTY = "<script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31mred\x1b[0m"


class Reader(HTMLParser):
    """Collects the elements, and checks that they are closed in order."""

    VOID = ("img", "br")

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.attributes, self.text = [], [], [], ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def final(watched, **options):
    return monitor_html.final(ViewModel(watched.record).view(), watched.record, **options)


def texts(watched, **options):
    return Reader(final(watched, **options)).text


def test_a_finished_run_shows_ranks_output_and_summary():
    watched = Watched().writes(0, "hello\n").writes(1, "world\n").ends()
    page = final(watched)
    text = Reader(page).text
    for part in ("✓ finished", "2 processes · CPU", "a note", "hello", "world", "finished in 2.0 s", "rank 1: 1 line"):
        assert part in text
    assert page.count("<details") == 2
    assert page.count("<details open") == 1


def test_what_ranks_write_stays_text_and_keeps_its_colours():
    watched = Watched(1).writes(0, NASTY + "\n").writes(0, NASTY + "\n", "stderr").writes(0, "\r" + NASTY)
    watched.logs(0, 0, **{NASTY: 1.0}).steps(0, (1, 2, NASTY, 1.0))
    reader = Reader(final(watched.raises(0, message=NASTY).ends("failed", error=NASTY)))
    assert "script" not in reader.tags
    assert all("onerror" not in attributes for _, attributes in reader.attributes)
    assert all(attributes["src"].startswith("data:") for tag, attributes in reader.attributes if tag == "img")
    assert "<script>alert(1)</script>" in reader.text
    assert re.search(r"<span style=\"color:#c62f2f[^>]*>red</span>", final(watched))


def test_only_what_untrusted_notebooks_keep_is_used():
    page = final(Watched().logs(0, 0, loss=1.0).logs(0, 1, loss=0.5).writes(0, "x\n").ends())
    assert not {"svg", "style", "script", "link", "button", "input"} & set(Reader(page).tags)
    assert 'alt="loss; 0.5 at step 1"' in page
    assert 'src="data:image/svg+xml;base64,' in page


def test_the_error_is_shown_and_the_failed_rank_s_output_is_open():
    error = drawing(WorkerError("rank 1 of 2 raised ValueError", rank=1, host="h", kind="ValueError"))
    watched = Watched().writes(0, "fine\n").writes(1, "last words\n").raises(1).ends("failed", error)
    page = final(watched)
    assert "rank 1 of 2 raised ValueError" in Reader(page).text
    opened = page.partition("<details open")[2].partition("</details>")[0]
    assert "last words" in opened
    assert "raised ValueError: bad batch" in opened


def test_the_last_thousand_lines_are_shown_and_where_the_rest_is(tmp_path):
    def written(**options):
        watched = Watched(1, **options)
        watched.writes(0, "".join(f"line {number}\n" for number in range(1500)))
        return texts(watched.ends())

    text = written()
    assert "line 500\n" in text
    assert "line 499\n" not in text
    assert "… 500 earlier lines not shown; log_dir keeps all" in text
    assert f"log: {tmp_path}/rank_0.log" in written(folder=tmp_path)


def test_standard_error_has_a_mark_and_stands_where_it_came():
    page = final(Watched(1).writes(0, "a\n").writes(0, "oops\n", "stderr").writes(0, "b\n").ends())
    assert re.search(r"a\n<span style=\"display:block;border-left[^>]*>oops\n</span>b\n", page)


def test_long_lines_and_floods_are_cut_to_what_a_page_bears():
    watched = Watched(2)
    for rank in (0, 1):
        watched.writes(rank, ("x" * 100_000 + "\n") * 1000)
    page = final(watched.ends())
    assert len(page) < 2 * monitor_html.MAX_CHARS
    assert "more characters" in page


def test_columns_of_which_nothing_is_known_are_left_out():
    watched = Watched()
    assert "step" not in monitor_html.table(ViewModel(watched.record).view().rows)
    assert "epoch 1/2" in monitor_html.table(ViewModel(watched.steps(0, (1, 2, "epoch", 1.0)).record).view().rows)


def test_progress_stands_in_words_beside_the_bar():
    page = monitor_html.clock(ViewModel(Watched(1).steps(0, (5, 10, "", 10.0)).record).view())
    assert '<progress value="50" max="100"' in page
    assert "50 % done" in page
    assert "about 10.0 s left" in page


def test_live_curves_show_their_values_where_one_points():
    plots = ViewModel(Watched().logs(0, 0, loss=1.0).logs(0, 10, loss=0.5).record).view().plots
    page = monitor_html.drawings(plots)
    assert "nl-hover" in page
    assert "at 10: 0.5" in page
    assert "nl-hover" not in monitor_html.images(plots)


def test_what_the_curves_leave_out_is_told():
    watched = Watched(10).logs(0, 0, loss=float("inf"))
    for rank in range(10):
        watched.logs(rank, 1, loss=1.0)
    text = texts(watched.ends())
    assert "loss: 2 more series are not drawn" in text
    assert "loss: 1 values are not finite" in text


@pytest.mark.parametrize("num_ranks", [1, 64])
def test_any_number_of_ranks(num_ranks):
    assert final(Watched(num_ranks).ends()).count("<details") == num_ranks


def test_displays_stand_below_the_output():
    assert "<p>a figure</p>" in final(Watched().ends(), embedded=["<p>a figure</p>"])


def test_as_text_it_has_a_table_the_last_values_and_the_lines():
    watched = Watched().writes(1, "\x1b[31mhello\x1b[0m\n").logs(0, 3, loss=0.25).steps(1, (1, 2, "", 1.0)).ends()
    lines = monitor_html.text(ViewModel(watched.record).view(), watched.record).splitlines()
    assert lines[0].split() == ["rank", "state", "step", "rate"]
    assert lines[2].split() == ["1", "✓", "finished", "1/2", "1", "steps/s"]
    assert "loss: 0.25" in lines
    assert "[1] hello" in lines
    assert lines[-1] == "finished in 2.0 s"


@pytest.mark.parametrize(("folder", "link"), [("logs <1>", "logs%20%3C1%3E/rank_0.log"), (None, None)])
def test_the_log_is_a_link_where_the_notebook_can_follow_it(tmp_path, monkeypatch, folder, link):
    monkeypatch.chdir(tmp_path)
    watched = Watched(folder=Path(folder) if folder else tmp_path).writes(0, "hello\n").ends()
    reader = Reader(final(watched))
    links = [attributes["href"] for tag, attributes in reader.attributes if tag == "a"]
    assert links == ([link] if link else [])
    assert f"log: {Path(folder) if folder else tmp_path}/rank_0.log" in reader.text
