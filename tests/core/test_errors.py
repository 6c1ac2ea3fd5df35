"""Errors are caught by their Python kind, travel between processes, and read well."""

from __future__ import annotations

import pickle

import pytest

from notebook_launcher.core import errors
from notebook_launcher.core.errors import ConfigError, NotebookLauncherError, RunInterrupted, WorkerError
from notebook_launcher.core.registry import Registry


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ConfigError", ValueError),
        ("PayloadError", TypeError),
        ("ResultError", TypeError),
        ("ChannelClosedError", ConnectionError),
        ("EngineError", RuntimeError),
        ("RunTimeoutError", TimeoutError),
        ("WorkerError", RuntimeError),
    ],
)
def test_each_error_is_ours_and_of_a_kind_that_people_catch(name, kind):
    error = getattr(errors, name)
    assert issubclass(error, NotebookLauncherError)
    assert issubclass(error, kind)


def test_every_error_is_in_the_drawn_tree():
    classes = {n for n, value in vars(errors).items() if isinstance(value, type) and issubclass(value, BaseException)}
    assert {name for name in classes if name not in errors.__doc__} == set()


def test_stop_is_not_an_error_of_the_run():
    assert issubclass(RunInterrupted, KeyboardInterrupt)
    assert not issubclass(RunInterrupted, Exception)


def worker_error() -> WorkerError:
    return WorkerError(
        "rank 1 on host-a failed: ValueError: bad batch",
        rank=1,
        host="host-a",
        kind="ValueError",
        traceback_text="Traceback ...\n  File cell 3, line 2\n\n",
        others=("rank 0 was stopped in all_reduce", "rank 2 had finished"),
    )


def test_worker_error_reads_headline_traceback_then_the_others():
    assert str(worker_error()).splitlines() == [
        "rank 1 on host-a failed: ValueError: bad batch",
        "Traceback ...",
        "  File cell 3, line 2",
        "rank 0 was stopped in all_reduce",
        "rank 2 had finished",
    ]


def test_worker_error_of_a_process_that_died_without_a_word():
    assert str(WorkerError("rank 0 was killed (SIGKILL)", rank=0)) == "rank 0 was killed (SIGKILL)"


def test_worker_error_travels_with_its_facts_and_notes():
    error = worker_error()
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    for name in ("message", "rank", "host", "kind", "traceback_text", "others", "__notes__"):
        assert getattr(copy, name) == getattr(error, name), name
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    "name", ["ConfigError", "PayloadError", "ResultError", "ChannelClosedError", "RunTimeoutError"]
)
def test_the_others_travel_too(name):
    copy = pickle.loads(pickle.dumps(getattr(errors, name)("what happened")))
    assert type(copy) is getattr(errors, name)
    assert str(copy) == "what happened"


def test_stop_is_drawn_as_one_line():
    assert RunInterrupted("stopped after 3 s")._render_traceback_() == ["stopped after 3 s"]


def test_a_cell_shows_the_users_own_lines_and_the_message():
    try:
        unknown = Registry("engine", {"local": "x:y"})
        unknown.load("lokal")
    except ConfigError as error:
        told = error._render_traceback_()
    assert told[-1] == "ConfigError: engine 'lokal' is not known. Did you mean 'local'? Known: local."
    assert any('unknown.load("lokal")' in line for line in told)
    assert not any("registry.py" in line for line in told)
