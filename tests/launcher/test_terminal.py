import io
import types

from notebook_launcher.core.events import Display
from notebook_launcher.launcher.output import OutputLog
from notebook_launcher.launcher.sinks import SINKS
from notebook_launcher.launcher.terminal import NullSink, TerminalSink


class Tty(io.StringIO):
    def isatty(self):
        return True


def a_view(**options):
    return types.SimpleNamespace(
        headline="2 processes",
        notes=["a note"],
        status="running",
        elapsed_s=1.0,
        summary="",
        output=OutputLog(2, **options),
    )


def opened(view):
    sink = TerminalSink()
    sink.opened(view)
    return sink


def test_lines_are_printed_with_their_rank_as_they_come(capsys):
    view = a_view()
    sink = opened(view)
    assert capsys.readouterr().out == "2 processes\na note\n"
    view.output.feed(1, "stderr", b"\x1b[31mone\x1b[0m\ntw")
    sink.changed(view)
    assert capsys.readouterr().out == "[1] one\n"
    view.output.feed(1, "stderr", b"o\n")
    view.output.close()
    view.summary = "finished in 1.0 s"
    sink.closed(view)
    assert capsys.readouterr().out == "[1] two\nfinished in 1.0 s\n"


def test_notes_are_printed_as_they_come_once_each(capsys):
    view = a_view()
    sink = opened(view)
    view.output.feed(0, "stdout", b"before\n")
    view.notes.append("restart 1 of 3: rank 0 raised OSError")
    sink.changed(view)
    view.output.feed(0, "stdout", b"after\n")
    sink.changed(view)
    view.notes.append("the last note")
    view.summary = "finished in 2.0 s"
    sink.closed(view)
    assert capsys.readouterr().out.splitlines() == [
        "2 processes",
        "a note",
        "[0] before",
        "restart 1 of 3: rank 0 raised OSError",
        "[0] after",
        "the last note",
        "finished in 2.0 s",
    ]


def test_no_line_is_lost_however_few_are_kept(capsys):
    view = a_view(keep_lines=5)
    sink = opened(view)
    for start in range(0, 100_000, 10_000):
        view.output.feed(0, "stdout", b"".join(b"%d\n" % number for number in range(start, start + 10_000)))
    sink.changed(view)
    sink.closed(view)
    printed = capsys.readouterr().out.splitlines()
    assert printed[2:] == [f"[0] {number}" for number in range(100_000)]


def test_a_bar_is_printed_once_when_it_is_final(capsys):
    view = a_view()
    sink = opened(view)
    for step in range(10):
        view.output.feed(0, "stderr", b"\r%d/9" % step)
        sink.changed(view)
    sink.closed(view)
    assert capsys.readouterr().out.splitlines()[2:] == ["[0] 9/9"]


def test_on_a_terminal_bars_are_drawn_in_place(monkeypatch):
    screen = Tty()
    monkeypatch.setattr("sys.stdout", screen)
    view = a_view()
    sink = opened(view)
    view.output.feed(0, "stderr", b"\r1/2")
    view.output.feed(1, "stderr", b"\r1/2")
    sink.changed(view)
    view.output.feed(0, "stdout", b"text\n")
    sink.changed(view)
    assert screen.getvalue().endswith("[0] 1/2\n[1] 1/2\n\x1b[2A\r\x1b[J[0] text\n[0] 1/2\n[1] 1/2\n")


def test_a_display_prints_its_text(capsys):
    sink = opened(a_view())
    sink.displayed(1, Display({"text/plain": "a\nb", "image/png": b""}))
    sink.displayed(0, Display({"image/png": b""}))
    assert capsys.readouterr().out.splitlines()[2:] == ["[1] a", "[1] b", "[0] image/png"]


def test_it_prints_to_what_stdout_was_when_it_opened(capsys, monkeypatch):
    view = a_view()
    sink = opened(view)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    view.output.feed(0, "stdout", b"here\n")
    sink.changed(view)
    assert capsys.readouterr().out.endswith("[0] here\n")


def test_an_encoding_that_cannot_say_it_gets_it_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    view = a_view()
    sink = opened(view)
    view.output.feed(0, "stdout", "ü\n".encode())
    sink.changed(view)
    assert raw.getvalue().endswith(b"[0] \\xfc\n")


def test_a_reader_that_went_away_ends_the_printing_only(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    view = a_view()
    sink = opened(view)
    stream.close()
    view.output.feed(0, "stdout", b"text\n")
    sink.changed(view)
    sink.closed(view)
    assert view.output.text(0) == "text\n"


def test_the_registry_knows_both(capsys):
    assert SINKS.load("terminal") is TerminalSink
    sink = SINKS.load("none")()
    assert isinstance(sink, NullSink)
    view = a_view()
    sink.opened(view)
    sink.changed(view)
    sink.displayed(0, Display({"text/plain": "x"}))
    sink.closed(view)
    assert capsys.readouterr().out == ""
