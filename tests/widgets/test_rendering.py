import html.parser
import types

import pytest

from notebook_launcher.core.events import Display
from notebook_launcher.launcher.output import OutputLog
from notebook_launcher.widgets.ansi import to_html
from notebook_launcher.widgets.rendering import render, render_display, render_text

ALLOWED_TAGS = {"div", "pre", "span", "img"}  # what an untrusted notebook keeps
ALLOWED_ATTRIBUTES = {"style", "tabindex", "src", "alt"}


class Reader(html.parser.HTMLParser):
    """The text of a page, and what does not belong there."""

    def __init__(self, page):
        super().__init__()
        self.text = ""
        self.open = []
        self.wrong = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag != "img":
            self.open.append(tag)
        self.wrong += [tag] * (tag not in ALLOWED_TAGS)
        self.wrong += [name for name, _ in attrs if name not in ALLOWED_ATTRIBUTES]

    def handle_endtag(self, tag):
        if self.open.pop() != tag:
            self.wrong.append(f"/{tag}")

    def handle_data(self, data):
        self.text += data


def read(page):
    reader = Reader(page)
    assert reader.wrong == []
    assert reader.open == []
    return reader.text


def a_view(output, **facts):
    return types.SimpleNamespace(
        **{
            "headline": "2 processes · CPU",
            "notes": ["a note <i>"],
            "status": "running",
            "elapsed_s": 75.0,
            "summary": "",
            "output": output,
            **facts,
        }
    )


def a_log(*feeds, **options):
    log = OutputLog(2, **options)
    for rank, stream, data in feeds:
        log.feed(rank, stream, data)
    return log


@pytest.mark.parametrize("form", [lambda view: read(render(view)), render_text])
def test_both_forms_show_everything(form):
    view = a_view(a_log((0, "stdout", b"hello\n"), (1, "stderr", b"oops\n"), (1, "stdout", b"\r50%")))
    text = form(view)
    for part in ("running", "2 processes · CPU", "a note <i>", "[0] hello", "[1] oops", "[1] 50%", "1 min 15 s"):
        assert part in text
    view.status, view.summary = "failed", "rank 1 failed: ValueError: <x>"
    assert "rank 1 failed: ValueError: <x>" in form(view)
    assert "1 min 15 s" not in form(view)


def test_what_a_worker_printed_is_never_markup():
    nasty = b"<script>alert(1)</script></pre></div><img src=x onerror=1> \" ' & \x1b[31m<b>\x1b[0m\n"
    page = render(a_view(a_log((0, "stdout", nasty), (1, "stderr", b"\r<i>")), summary="<u>"))
    assert "<script>alert(1)</script></pre></div>" in read(page)
    assert "<script" not in page


def test_stderr_is_marked():
    page = render(a_view(a_log((0, "stdout", b"a\n"), (0, "stderr", b"b\n"))))
    assert page.count("border-left") == 1


def test_lines_that_are_not_shown_are_counted_and_the_log_is_named(tmp_path):
    log = a_log((0, "stdout", b"x\n" * 500_000), (1, "stdout", b"y\n"), folder=tmp_path)
    view = a_view(log)
    assert f"... 499,000 earlier lines of rank 0 not shown; all of them: {tmp_path / 'rank_0.log'}" in render_text(view)
    assert f"... 499,000 earlier lines of rank 0 not shown; all of them: {tmp_path / 'rank_0.log'}" in read(
        render(view)
    )
    assert "rank 1 not shown" not in read(render(view))
    assert "... 499,991 earlier lines not shown" in read(render(view, last=10))
    log.close()


def test_a_log_file_that_failed_is_named(tmp_path):
    (tmp_path / "file").touch()
    view = a_view(a_log((0, "stdout", b"x\n"), folder=tmp_path / "file"))
    assert "the log of rank 0 ends early" in read(render(view))


def test_a_long_line_is_cut_and_says_by_how_much():
    text = read(render(a_view(a_log((0, "stdout", b"x" * 100_000 + b"\n")))))
    assert "x ... [95,000 more characters of this line not shown]" in text
    assert len(text) < 6_000


def test_a_page_is_bounded_however_wide_the_lines_are():
    log = a_log(*((number % 2, "stdout", b"%04d" % number + b"x" * 6_000 + b"\n") for number in range(1_500)))
    view = a_view(log)
    page = render(view)
    assert len(page) < 2_500_000
    assert "1499xxx" in page
    num_shown = page.count("more characters of this line not shown")
    counts = [
        int(line.split()[1].replace(",", "")) for line in render_text(view).splitlines() if "earlier lines" in line
    ]
    assert sum(counts) + num_shown == 1_500


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("\x1b[31mred\x1b[0m plain", ["color:#c62f2f", ">red</span> plain"]),
        ("\x1b[1;4mx", ["font-weight:bold", "text-decoration:underline"]),
        ("\x1b[38;5;196mx", ["color:#ff0000"]),
        ("\x1b[38;5;244mx", ["color:#808080"]),
        ("\x1b[48;2;1;2;3mx", ["background-color:#010203"]),
        ("\x1b[97;101mx", ["color:#ffffff", "background-color:#f14c4c"]),
        ("\x1b[7mx", ["background-color:"]),
        ("\x1b[31;7mx", ["background-color:#cd3131"]),
        ("\x1b[2;3;9mx", ["opacity", "italic", "line-through"]),
    ],
)
def test_colours_become_spans(text, parts):
    page = to_html(text)
    for part in parts:
        assert part in page
    assert read(page) == text.split("m", 1)[1].replace("\x1b[0m", "")


@pytest.mark.parametrize(
    "text", ["\x1b[38;5mx", "\x1b[999mx", "\x1b[x", "\x1b", "x\x1b[", "\x1b[;;;mx", "\x1b[38;2;1;mx"]
)
def test_broken_sequences_do_no_harm(text):
    page = read(to_html(text))
    assert "\x1b" not in page
    assert "m" not in page


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({"text/html": "<div>rich</div>", "text/plain": "poor"}, "<div>rich</div>"),
        ({"image/png": b"\x89PNG", "text/plain": "poor"}, "data:image/png;base64,iVBORw=="),
        ({"image/jpeg": "iVBO\nRw==\n"}, "data:image/jpeg;base64,iVBORw=="),
        ({"image/svg+xml": "<svg/>"}, "data:image/svg+xml;base64,PHN2Zy8+"),
        ({"text/plain": "<Figure>"}, "&lt;Figure&gt;"),
        ({"application/x": {}}, "application/x"),
    ],
)
def test_a_display_becomes_static_html_with_its_rank(data, part):
    page = render_display(3, Display(data))
    assert "rank 3" in read(page)
    assert part in page


@pytest.mark.parametrize("broken", ["<!-- ", "<div class='", "<b", "<script>", "<textarea>", "<style>", "</div></div>"])
def test_a_display_that_breaks_off_leaves_the_summary_visible(broken):
    display = render_display(0, Display({"text/html": f"<i>before</i>{broken}"}))
    reader = Reader(render(a_view(a_log(), summary="finished in 1.0 s"), embedded=[display]))
    assert reader.text.endswith("finished in 1.0 s")
    assert "before" in reader.text
    assert reader.open == []
    assert reader.wrong == ["i"]
