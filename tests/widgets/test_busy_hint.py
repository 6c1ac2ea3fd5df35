"""The hint that a cell runs, over a shell that only tells of cells."""

import threading

import pytest
from fake_notebook import FakeShell

from notebook_launcher.widgets import busy_hint
from notebook_launcher.widgets.busy_hint import BusyHint, hears_at_once

LIMIT_S = 10


@pytest.mark.parametrize(
    ("version", "at_once"),
    [
        ("6.17.1", False),
        ("6.31.0", False),
        ("7.0.1", True),
        ("7.3.2", True),
        ("7.4.0", False),
        ("8.0", False),
        ("", False),
    ],
)
def test_which_kernels_hear_at_once(version, at_once):
    assert hears_at_once(version) is at_once


def test_it_comes_while_a_cell_runs_and_goes_at_its_end(monkeypatch):
    monkeypatch.setattr(busy_hint, "_version_of", lambda _: "6.17.1")
    told, shown = [], threading.Event()

    def tell(text):
        told.append(text)
        if text:
            shown.set()

    shell = FakeShell()
    hint = BusyHint(shell, tell, after_s=0.01)
    shell.events.tell("pre_run_cell")
    assert shown.wait(LIMIT_S)
    shell.events.tell("post_run_cell")
    assert told == [busy_hint.TEXT, ""]
    shell.events.tell("pre_run_cell")
    hint.close()
    hint.close()
    assert told[-1] == ""
    assert shell.events.callbacks == {"pre_run_cell": [], "post_run_cell": []}


def test_a_kernel_that_hears_at_once_gets_none(monkeypatch):
    monkeypatch.setattr(busy_hint, "_version_of", lambda _: "7.2.0")
    shell = FakeShell()
    BusyHint(shell, lambda _: None).close()
    assert shell.events.callbacks == {"pre_run_cell": [], "post_run_cell": []}
