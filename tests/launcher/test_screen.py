import pytest

from notebook_launcher.launcher.screen import Screen
from notebook_launcher.launcher.sgr import PLAIN, Style, runs


def drawn(data):
    screen = Screen()
    return [*screen.feed(data), *screen.finish()]


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (b"abc\rX", ["Xbc"]),
        (b"abcdef\r\x1b[K", []),
        (b"abcdef\x1b[3D\x1b[Kx", ["abcx"]),
        (b"abc\x1b[2K\rx", ["x"]),
        (b"abc\x08\x08X", ["aXc"]),
        (b"\ra\n\rb\x1b[AX", ["aX", "b"]),
        (b"\ra\n\rb\x1b[A\rX\n", ["X", "b"]),
        (b"\ra\n\rb\x1b[A\x1b[J", ["a"]),
        (b"\ra\n\rb\x1b[1Fc", ["c", "b"]),
        (b"a\x1b[5Gb", ["a   b"]),
        (b"a\x1b[3Cb", ["a   b"]),
        (b"a\x1b[99999999999999999999Ab", ["ab"]),
        (b"a\x1bPdata\x1b\\b\x1b]8;;http://x\x1b\\c", ["abc"]),
    ],
)
def test_the_cursor_moves_as_on_a_terminal(data, rows):
    assert drawn(data) == rows


def test_a_wild_column_does_not_fill_the_memory():
    (row,) = drawn(b"\x1b[999999999Cx\x1b[999999999G")
    assert len(row) <= 10_001


def test_rows_out_of_reach_are_completed():
    screen = Screen()
    completed = screen.feed(b"".join(b"\rbar %d\n" % number for number in range(1000)))
    assert completed == [f"bar {number}" for number in range(999)]
    assert screen.live() == ["bar 999"]


def test_three_nested_bars_stay_three_rows():
    screen = Screen()
    completed = []
    for number in range(50):
        for piece in (b"\router %d", b"\n\rmiddle %d\x1b[A", b"\n\n\rinner %d\x1b[A\x1b[A"):
            completed += screen.feed(piece % number)
    assert completed == []
    assert screen.live() == ["outer 49", "middle 49", "inner 49"]


def test_idle_means_nothing_is_begun():
    screen = Screen()
    for data, idle in ((b"", True), (b"\rbar", False), (b"\n", False), (b"text\n", True), (b"\xc3", False)):
        screen.feed(data)
        assert screen.idle == idle, data


@pytest.mark.parametrize(
    ("parameters", "style"),
    [
        ("", PLAIN),
        ("1;4;31", Style(foreground="31", bold=True, underline=True)),
        ("31;0;44", Style(background="44")),
        ("38;5;208", Style(foreground="38;5;208")),
        ("48;2;1;2;999", Style(background="48;2;1;2;255")),
        ("38:2::1:2:3", Style(foreground="38;2;1;2;3")),
        ("38:5:9", Style(foreground="38;5;9")),
        ("1;22;97", Style(foreground="97")),
        ("38;5", PLAIN),
        ("38;2;1", PLAIN),
        ("38", PLAIN),
        ("777;;", PLAIN),
    ],
)
def test_parameters_make_a_style(parameters, style):
    assert PLAIN.then(parameters) == style
    if style.sequence():
        assert [*runs(f"{style.sequence()}x")] == [(style, "x")]
