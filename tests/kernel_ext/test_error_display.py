"""A shell draws errors that bring their drawing along by it, whatever their type; others as it always does."""

from __future__ import annotations

import sys

import pytest

from notebook_launcher.kernel_ext import error_display

OWN = """
def give(error):
    error._render_traceback_ = lambda: ["drawn by", "itself"]
    raise error
"""


@pytest.fixture
def shown(shell, monkeypatch):
    """Runs a cell in a shell with our display; gives what was shown: the error's text and its lines."""
    taken = []
    monkeypatch.setattr(shell, "_showtraceback", lambda _kind, text, lines: taken.append((str(text), lines)))
    error_display.install(shell)
    shell.run_cell(OWN, silent=True)

    def run(source):
        taken.clear()
        shell.run_cell(source, silent=True)
        return taken[-1] if taken else None

    yield run
    error_display.uninstall(shell)


@pytest.mark.parametrize(
    "error",
    [
        "ValueError('x')",
        "SyntaxError('x')",
        "ExceptionGroup('x', [ValueError(1)])",
        "KeyboardInterrupt('x')",
    ],
)
def test_the_drawing_that_an_error_brings_along_is_shown(shown, error):
    text, lines = shown(f"give({error})")
    assert text.startswith("x")
    assert lines == ["drawn by", "itself"]
    assert str(sys.last_value) == text  # for %debug and %tb


def test_also_where_it_was_raised_while_a_group_was_handled(shown):
    source = "try: raise ExceptionGroup('g', [ValueError(1)])\nexcept Exception: give(LookupError('x'))"
    assert shown(source) == ("x", ["drawn by", "itself"])


def test_a_text_that_would_freeze_a_browser_is_cut(shown):
    text, _ = shown("give(ValueError('x' * 1_000_000))")
    assert len(text) < 5000
    assert "characters not shown" in text


def test_other_errors_are_shown_as_ever(shown):
    text, lines = shown("1 / 0")
    assert text == "division by zero"
    assert "1 / 0" in "\n".join(lines)


def test_a_drawing_that_fails_is_left_to_the_shell(shown, capsys):
    source = "error = ValueError('x')\nerror._render_traceback_ = lambda: 1 / 0\nraise error"
    assert shown(source) is None
    assert "ZeroDivisionError" in "".join(capsys.readouterr())


def test_nothing_to_show(shown, shell, monkeypatch, capsys):
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.delattr(sys, "last_type", raising=False)
    monkeypatch.setattr(sys, "last_traceback", None, raising=False)
    shell.showtraceback()
    assert "No traceback" in capsys.readouterr().err


def test_installing_twice_and_taking_away(shell):
    usual = shell.showtraceback
    error_display.install(shell)
    error_display.install(shell)
    error_display.uninstall(shell)
    assert shell.showtraceback == usual
    error_display.uninstall(shell)
    assert shell.showtraceback == usual
