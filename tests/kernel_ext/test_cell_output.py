"""``CellSink`` in a real kernel, driven from a thread as the supervisor does."""

import time

import pytest

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.kernel_ext.cell_output import CellSink

SETUP = """
import threading, types
from notebook_launcher.core.events import Display
from notebook_launcher.kernel_ext.cell_output import CellSink
from notebook_launcher.launcher.output import OutputLog

def a_view():
    return types.SimpleNamespace(
        headline="2 processes", notes=[], status="running", elapsed_s=0.0, summary="", output=OutputLog(2))

def on_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread

def end(sink, view):
    view.output.close()
    view.status, view.summary = "finished", "finished in 1.0 s"
    sink.closed(view)
"""
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def notebook(kernel):
    kernel.ok(SETUP)
    return kernel


def messages(kernel, until, timeout_s=20):
    """The display messages of all cells, up to the one that ``until`` says yes to."""
    found = []
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        message = kernel.client.get_iopub_msg(timeout=timeout_s)
        if message["msg_type"] in ("display_data", "update_display_data"):
            found.append(message)
            if until(message):
                return found
    raise AssertionError(f"did not come; so far: {found}")


def test_a_cell_shows_its_run_live_and_keeps_the_final_form(notebook):
    notebook.start("""
print("before")
view, sink, go = a_view(), CellSink(), threading.Event()
def supervise():
    view.output.feed(0, "stdout", b"hello <b>\\n")
    sink.changed(view)
    go.wait(20)
    end(sink, view)
sink.opened(view)
thread = on_thread(supervise)
while not view.summary:
    if view.output.lines():
        go.set()
thread.join()
""")
    cell = notebook.wait_for("[0] hello <b>")
    assert cell.text == "before\n"
    cell = notebook.wait()
    assert cell.shown == "before\n\n2 processes\n[0] hello <b>\nfinished in 1.0 s\n\n"
    assert "hello &lt;b&gt;" in cell.html
    assert cell.num_updates == 2


def test_a_flood_paints_ten_times_a_second_and_a_megabyte(notebook):
    cell = notebook.ok("""
import time
now = [0.0]
view, sink = a_view(), CellSink(clock=lambda: now[0])
sink.opened(view)
for step in range(1000):
    view.output.feed(step % 2, "stdout", b"".join(b"%d %s\\n" % (step * 500 + n, b"x" * 400) for n in range(500)))
    if step % 10 == 0:
        now[0] += 0.1
        sink.changed(view)
end(sink, view)
threading.active_count()
""")
    assert 20 <= cell.num_updates <= 90  # in 10 s of its clock, and the pages are about 0.2 MB
    assert "... 249,000 earlier lines of rank 1 not shown" in cell.shown
    assert "[1] 499999 " in cell.shown
    assert cell.html.count("\n[") == 0
    assert len(cell.html) < 2_500_000


def test_the_last_change_is_painted_though_it_came_too_soon(notebook):
    notebook.start("""
view, sink, done = a_view(), CellSink(), threading.Event()
sink.opened(view)
for word in (b"one\\n", b"two\\n", b"three\\n"):
    view.output.feed(0, "stdout", word)
    sink.changed(view)
done.wait(20)
""")
    assert "[0] three" in notebook.wait_for("[0] three").shown
    notebook.interrupt()
    notebook.wait()
    assert "Timer" not in notebook.ok("end(sink, view); print(threading.enumerate())").text


def test_a_display_appears_in_the_cell_with_its_rank(notebook):
    cell = notebook.ok(f"""
view, sink = a_view(), CellSink()
sink.opened(view)
def supervise():
    sink.displayed(1, Display({{"image/png": {PNG!r}, "text/plain": "<Figure>"}}, {{"image/png": {{"width": 9}}}}))
    sink.displayed(0, Display({{"text/plain": "frame"}}, transient={{"display_id": "table"}}))
    sink.displayed(1, Display({{"text/plain": "other"}}, transient={{"display_id": "table"}}))
    sink.displayed(0, Display({{"text/plain": "frame 2"}}, transient={{"display_id": "table"}}, update=True))
    end(sink, view)
on_thread(supervise).join()
""")
    run, *others = cell.displays
    assert "finished" in run["text/plain"]
    assert [bundle["text/plain"] for bundle in others] == [
        *("[1] displayed:", "<Figure>"),
        *("[0] displayed:", "frame 2"),
        *("[1] displayed:", "other"),
    ]
    assert "rank 1" in others[0]["text/html"]
    assert others[1]["image/png"] == "iVBORw0KGgo="


def test_a_widget_of_a_worker_is_shown_as_text(notebook):
    cell = notebook.ok("""
view, sink = a_view(), CellSink()
sink.opened(view)
sink.displayed(0, Display({"application/vnd.jupyter.widget-view+json": {}, "text/plain": "IntSlider(value=3)"}))
end(sink, view)
""")
    assert cell.displays[-1] == {"text/plain": "IntSlider(value=3)"}


def test_after_its_cell_a_run_goes_on_in_its_own_display(notebook):
    launched = notebook.ok("view, sink = a_view(), CellSink()\nsink.opened(view)")
    assert launched.displays[0]["text/plain"] == "2 processes\nrunning, 0.0 s"
    other = notebook.ok("""
def supervise():
    view.output.feed(0, "stdout", b"late\\n")
    sink.displayed(1, Display({"text/plain": "late figure"}, transient={"display_id": "x"}))
    sink.displayed(1, Display({"text/plain": "late figure 2"}, transient={"display_id": "x"}, update=True))
on_thread(supervise).join()
print("other cell")
""")
    assert other.text == "other cell\n"
    assert other.displays == []
    assert other.num_updates >= 1
    notebook.client.execute("on_thread(lambda: end(sink, view)).join()")
    *_, last = messages(notebook, lambda message: "finished" in message["content"]["data"]["text/plain"])
    assert last["msg_type"] == "update_display_data"
    assert "[0] late" in last["content"]["data"]["text/plain"]
    html = last["content"]["data"]["text/html"]
    assert html.count("late figure 2") == 1
    assert html.count("rank 1") == 1
    assert html.count("late figure") == 1


def test_capture_keeps_the_final_form(notebook):
    cell = notebook.ok("""%%capture captured
view, sink = a_view(), CellSink()
sink.opened(view)
def supervise():
    view.output.feed(0, "stdout", b"hello\\n")
    sink.changed(view)
    sink.displayed(0, Display({"text/plain": "figure"}))
    end(sink, view)
on_thread(supervise).join()
""")
    assert cell.displays == []
    shown = notebook.ok("captured.show()")
    assert [bundle["text/plain"] for bundle in shown.displays] == [
        *("[0] displayed:", "figure"),
        "2 processes\n[0] hello\nfinished in 1.0 s",
    ]


def test_nothing_stays_registered_with_the_shell(notebook):
    cell = notebook.ok("""
def registered():
    return len(get_ipython().events.callbacks["post_run_cell"])
before = registered()
view, sink = a_view(), CellSink()
sink.opened(view)
during = registered()
end(sink, view)
print(during - before, registered() - before)
""")
    assert cell.text == "1 0\n"


def test_without_a_shell_it_says_what_to_use_instead(monkeypatch):
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: None)
    with pytest.raises(ConfigError, match=r"sink 'cell' needs a notebook.*Use 'terminal'"):
        CellSink().opened(None)
