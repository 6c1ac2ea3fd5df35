"""A run watched by a monitor in a notebook without a front end: what the cells are left with."""

from __future__ import annotations

import pytest

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def notebook(shared_kernel):
    """A kernel with a function that logs, reports progress, and goes on until a file is there."""
    shared_kernel.ok("""
from notebook_launcher import Accelerator, monitor
def train(num_steps=3, until="", fail=False):
    accelerator = Accelerator()
    for step in accelerator.progress(range(num_steps), description="epoch"):
        accelerator.log({"loss": 1 / (1 + step)}, step=step)
        print("step", step, "<b>")
    while until and not os.path.exists(until): time.sleep(0.01)
    if fail and rank() == 1: raise ValueError("bad batch")
def goes_on(path): return launch(train, (3, os.path.abspath(path)), num_processes=2, wait=False)
""")
    return shared_kernel


def final(bundle):
    """The HTML of a display in its final form."""
    assert sorted(bundle) == ["text/html", "text/plain"]
    return bundle["text/html"]


def test_a_launch_with_a_monitor_leaves_static_html(notebook):
    cell = notebook.ok("_ = launch(train, num_processes=2, monitor=True)")
    (bundle,) = cell.displays
    page = final(bundle)
    for part in ("✓ finished", "epoch 3/3", "step 2 &lt;b&gt;", "data:image/svg+xml", "<details"):
        assert part in page
    assert "loss: 0.3333" in bundle["text/plain"]


def test_the_magic_shows_a_failure_with_the_notebook_s_line(notebook):
    cell = notebook.run("%launch -n 2 --monitor train(2, fail=True)")
    assert cell.error == "ValueError"
    page = final(cell.displays[0])
    assert "✗ failed" in page
    assert "Cell In[" in page
    assert "raise ValueError(&quot;bad batch&quot;)" in page


def test_a_run_that_goes_on_is_shown_live_twice_and_by_two_monitors(notebook):
    notebook.ok("run = goes_on('one'); first = monitor(run); second = monitor(run)")
    shown = [notebook.ok(name).displays[0] for name in ("first", "first", "second")]
    assert all(WIDGET in bundle and "text/html" in bundle for bundle in shown)
    assert shown[0][WIDGET]["model_id"] == shown[1][WIDGET]["model_id"] != shown[2][WIDGET]["model_id"]
    cell = notebook.ok("""
open("one", "w").close()
run.wait()
import threading; print([t.name for t in threading.enumerate() if "monitor" in t.name])
""")
    assert cell.num_updates >= 4  # the launch's own cell, and three places of monitors
    assert cell.stdout.strip() == "[]"
    page = final(notebook.ok("first").displays[0])
    assert "✓ finished" in page


def test_the_stop_button_stops_the_run(notebook):
    cell = notebook.ok("""
run = goes_on("never")
watching = monitor(run)
box = watching.widget
while run.status == "starting": time.sleep(0.01)
box.children[0].children[0].click()
run.wait()
print(run.status)
""")
    assert cell.stdout.strip() == "stopped"


def test_another_run_is_laid_under_this_one(notebook):
    cell = notebook.ok("""
runs = [launch(train, (n,), num_processes=2) for n in (2, 5)]
monitor(runs[1], compare=runs[0], log_scale=True)
""")
    assert "this run" in cell.displays[-1]["text/html"].partition('alt="loss')[2].partition('"')[0]


def test_all_runs_of_the_kernel_are_in_a_table_also_those_that_nobody_holds(notebook):
    notebook.ok("def forgotten(): pass\nlaunch(forgotten, num_processes=1, seed=7); None")
    bundle = notebook.ok("%launcher runs").displays[0]
    row = next(line for line in bundle["text/plain"].splitlines() if "forgotten" in line)
    for part in ("finished", "1 process · CPU", "seed=7"):
        assert part in row
    assert "loss 0.2" in bundle["text/plain"]
    assert "<table" in bundle["text/html"]
