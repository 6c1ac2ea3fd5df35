"""The workers' IPython shell: displays become events, whatever shell the process had before."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from notebook_launcher.core import events


def run(code):
    """What a fresh interpreter prints for ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


SETUP = """
    import sys, types
    from notebook_launcher.core import events
    from notebook_launcher.worker import shell
    from IPython import get_ipython
    from IPython.display import display, update_display, clear_output
    sent = []
    events.install(sent.append)
"""


def test_displays_are_events_and_nothing_is_printed():
    lines = run(
        SETUP
        + """
    shell.install(types.ModuleType("__main__"))
    display("text", display_id="a")
    update_display("newer", display_id="a")
    clear_output()
    for one in sent:
        print(one.data["text/plain"], one.transient, one.update)
    """
    )
    assert lines == ["'text' {'display_id': 'a'} False", "'newer' {'display_id': 'a'} True"]


def test_the_namespace_is_the_new_main_modules():
    lines = run(
        SETUP
        + """
    module = types.ModuleType("__main__")
    shell.install(module)
    get_ipython().run_cell("x = 5")
    print(module.x, type(get_ipython()).__name__, get_ipython().user_module is module)
    """
    )
    assert lines == ["5 WorkerShell True"]


def test_after_a_fork_the_kernels_shell_is_left():
    lines = run("""
    import types
    from IPython.core.interactiveshell import InteractiveShell
    class KernelShell(InteractiveShell):
        pass
    kernels = KernelShell.instance()
    from notebook_launcher.worker import shell
    from IPython import get_ipython
    shell.install(types.ModuleType("__main__"))
    print(type(get_ipython()).__name__, get_ipython() is kernels)
    """)
    assert lines == ["WorkerShell False"]


def test_hooks_of_the_interpreter_are_left_alone():
    lines = run(
        SETUP
        + """
    shell.install(types.ModuleType("__main__"))
    print(sys.displayhook is sys.__displayhook__, sys.excepthook is sys.__excepthook__)
    """
    )
    assert lines == ["True True"]


def test_no_history_is_written():
    lines = run(SETUP + "\n    import threading\n    print([t.name for t in threading.enumerate()])")
    assert lines == ["['MainThread']"]


@pytest.mark.parametrize("metadata", [None, {"a": 1}])
def test_a_publisher_reports_what_it_is_given(monkeypatch, metadata):
    from notebook_launcher.worker.shell import EventPublisher

    sent = []
    monkeypatch.setattr(events, "_emitter", sent.append)
    EventPublisher.publish(None, {"text/plain": "x"}, metadata, source="ignored", transient=None, update=True)
    assert sent == [events.Display({"text/plain": "x"}, metadata or {}, {}, update=True)]
