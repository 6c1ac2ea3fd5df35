import pytest

from notebook_launcher.core.excerpts import excerpt


def test_a_short_text_stays():
    assert excerpt("a\nb\n", 100) == "a\nb\n"


def test_a_long_line_loses_its_middle_and_says_how_much():
    text = excerpt("begin\n" + "x" * 50_000 + "end\nlast", 8000)
    assert text == "begin\n" + "x" * 500 + " ... [49,003 characters not shown] ... " + "x" * 497 + "end\nlast"


def test_many_lines_lose_those_in_the_middle():
    lines = [f"line {number}" for number in range(10_000)]
    shown = excerpt("\n".join(lines), 1000).split("\n")
    place = next(number for number, line in enumerate(shown) if line.endswith("lines not shown ..."))
    after = len(shown) - place - 1
    assert shown[:place] == lines[:place]
    assert shown[place + 1 :] == lines[-after:]
    assert shown[place] == f"... {10_000 - place - after:,} lines not shown ..."
    assert 900 < len("\n".join(shown)) < 1100


@pytest.mark.parametrize("unit", ["x", "\n", "line\n", "x" * 3000 + "\n"])
@pytest.mark.parametrize("size", [999, 1000, 1001, 1100, 20_000])
def test_it_is_never_much_longer_than_asked_for(unit, size):
    text = (unit * size)[:size]
    shown = excerpt(text, 1000)
    assert len(shown) < 1500
    assert (shown == text) == (size <= 1000) or "\n" in text
    assert shown.startswith(text[:60])
    assert shown.endswith(text[-60:])


def test_cutting_twice_counts_all_that_is_missing():
    line = "x" * 1_000_000
    assert excerpt(excerpt(line, 80_000), 800) == excerpt(line, 800)
    many = "\n".join(f"{number:06}" for number in range(100_000))
    twice, once = (text.split("\n") for text in (excerpt(excerpt(many, 8000), 800), excerpt(many, 800)))
    assert twice == once
