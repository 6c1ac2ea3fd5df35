"""The panel as a person uses it: JupyterLab in a browser, a kernel behind it, runs of real processes."""

from __future__ import annotations

import pytest
from lab import Notebook, Panel

pytestmark = [pytest.mark.slow, pytest.mark.browser]

SETUP = r"""
%load_ext notebook_launcher
import os, sys, time
from typing import Literal
from notebook_launcher import Accelerator, launch, monitor, LaunchConfig
from notebook_launcher.widgets.panel import latest
def train(num_steps: int = 5, lr: float = 0.1):
    accelerator = Accelerator()
    rank = accelerator.process_index
    for step in accelerator.progress(range(num_steps)):
        accelerator.log({"loss": 1 / (1 + step), "accuracy": 1 - 1 / (2 + step)}, step=step)
        print(f"step {step} on rank {rank}")
        time.sleep(0.05)
    return lr * (1 + rank)
def fail():
    print("about to fail", file=sys.stderr)
    if os.environ["RANK"] == "1":
        raise ValueError("bad <b>batch</b>")
    time.sleep(60)
def every_kind(num_epochs: int, lr: float = 1e-3, optimizer: Literal["sgd", "adam"] = "adam", shuffle: bool = True,
               layers=(64, 32), *more, name_of_the_experiment: str = "first", **named): ...
def hostile():
    Accelerator().log({"<img src=x onerror='window.pwned = 1'>": 1.0}, step=1)
    print("<script>window.pwned = 2</script>")
    print("<img src=x onerror='window.pwned = 3'>", file=sys.stderr)
    print("\x1b[31mred\x1b[0m and plain")
    print("y" * 100_000)
    os.write(1, b"half a \xe2\x82\nlast line\n")
"""
HOLD = """
import threading
from notebook_launcher.widgets import check as checks
go_on, work = threading.Event(), checks.Check._work
checks.Check._work = lambda self: (go_on.wait(60), work(self))
print("checks are held")
"""
POINTS = """() => [...document.querySelectorAll('.notebook-launcher-panel polyline')]
    .map(line => line.getAttribute('points').split(' ').length)"""


@pytest.fixture(scope="module")
def notebook(server, chromium):
    one = Notebook(server, chromium, [SETUP, "%launcher"])
    one.run(0)
    one.run(1)
    yield one
    one.close()
    server.end_kernels()


@pytest.fixture
def panel(notebook):
    one = Panel(notebook.output(1))
    yield one
    if one.where.is_visible() and not one.button("Stop").is_disabled():  # a test has failed: the next ones need not
        one.press("Stop")
        one.sees("■ stopped")


def test_a_run_from_the_form_is_watched_and_stopped(notebook, panel):
    panel.sees("2 processes · CPU (gloo)")
    panel.choose("Function", "train")
    panel.fill("num_steps", "10000")
    panel.fill("Processes", "2")
    panel.choose("Precision", "bf16")
    panel.sees("2 processes · CPU (gloo) · bf16")
    notebook.picture("form-light", panel.where)
    panel.press("Launch")
    panel.sees("step 3 on rank 0")
    before = notebook.page.wait_for_function(f"({POINTS})().length == 2 && ({POINTS})()").json_value()
    notebook.page.wait_for_function(f"before => ({POINTS})().every(n => n > before + 2)", arg=max(before))
    notebook.prints("6 * 7", "42")
    panel.where.get_by_role("tab", name="rank 1").click()
    panel.sees("step 4 on rank 1")
    notebook.picture("running-light", panel.where)
    notebook.theme(dark=True)
    notebook.picture("running-dark", panel.where)
    panel.press("Stop")
    panel.sees("■ stopped")
    notebook.picture("stopped-dark", panel.where)
    notebook.prints("run.status", "stopped")


def test_what_is_wrong_is_said_beside_its_control(notebook, panel):
    panel.choose("Function", "every_kind")
    panel.button("More options").click()
    panel.fill("layers", "[1, 2")
    panel.fill("Seed", "-1")
    panel.sees("num_epochs needs a value", "'[1, 2' is no Python expression", "'-1' can't be: it takes")
    panel.press("Launch")
    panel.sees("Nothing was launched.")
    for dark in (False, True):
        notebook.theme(dark=dark)
        notebook.picture(f"refused-{'dark' if dark else 'light'}", panel.where)
    panel.fill("Seed", "")
    panel.button("Fewer options").click()


def test_a_check_is_watched_answered_and_stopped(notebook, panel):
    notebook.theme(dark=False)
    panel.fill("Processes", "2")
    panel.choose("Precision", "bf16")
    panel.sees("a change before anything can be launched")  # the function's arguments, which a check is not for
    notebook.run_new(HOLD).get_by_text("checks are held", exact=True).wait_for()
    panel.press("Check")
    panel.sees("Stop ends it.")
    notebook.picture("checking-light", panel.where)
    assert panel.button("Launch").is_disabled()
    notebook.prints("3 * 7", "21")  # the kernel is free meanwhile
    notebook.prints("go_on.set()", "None")
    panel.sees("All is well: 2 processes · CPU (gloo) · bf16")
    panel.sees("✓ workers: 2 started in", "✓ bf16: products and sums", "✓ all-reduce: latency")
    for dark in (True, False):
        notebook.theme(dark=dark)
        notebook.picture(f"checked-{'dark' if dark else 'light'}", panel.where)
    assert not panel.button("Launch").is_disabled()
    assert panel.button("Stop").is_disabled()
    notebook.prints("go_on.clear()", "None")
    panel.press("Check")
    panel.press("Stop")
    notebook.prints("go_on.set()", "None")
    panel.sees("The check was stopped before its end.")
    notebook.picture("check-stopped-light", panel.where)
    panel.fill("Processes", "70000")
    panel.press("Check")
    panel.sees("Nothing was checked.")
    notebook.picture("check-refused-light", panel.where)
    panel.fill("Processes", "2")


def test_an_error_shows_the_notebook_s_line(notebook, panel):
    panel.choose("Function", "fail")
    panel.press("Launch")
    panel.sees("✗ failed", "Cell In[1], line 17", 'raise ValueError("bad <b>batch</b>")')
    notebook.page.wait_for_function("stop => stop.disabled", arg=panel.button("Stop").element_handle())
    notebook.theme(dark=True)
    notebook.picture("failed-dark", panel.where)


def test_copied_code_gives_the_same_results(notebook, panel):
    notebook.theme(dark=False)
    panel.choose("Function", "train")
    panel.fill("num_steps", "20")
    panel.fill("lr", "0.5")
    panel.press("Launch")
    panel.sees("✓ finished")
    panel.press("Copy as code")
    notebook.picture("finished-light", panel.where)
    codes = [panel.where.locator("textarea").nth(number).input_value() for number in range(2)]
    panel.press("Hide code")
    notebook.prints("(first := run).results", "[0.5, 1.0]")
    for code in codes:
        notebook.run_new(code)
        notebook.prints("run is not first and run.results == first.results and run.config == first.config", "True")


def test_whatever_a_rank_writes_is_text(notebook, panel):
    panel.choose("Function", "hostile")
    panel.press("Launch")
    panel.sees("✓ finished", "<script>window.pwned = 2</script>", r"half a \xe2\x82", "last line")
    panel.sees("<img src=x onerror='window.pwned = 3'>", "<img src=x onerror=")
    notebook.picture("hostile-light", panel.where)
    assert not panel.where.locator("script, img").count()
    red = panel.where.get_by_text("red", exact=True).first
    colours = red.evaluate("here => [here, here.parentElement].map(one => getComputedStyle(one).color)")
    assert len(set(colours)) == 2
    line = panel.where.get_by_text("yyyy").first.inner_text()
    assert 1000 < line.count("y") < 10_000
    assert notebook.page.evaluate("window.pwned") is None


def test_a_panel_twice_and_two_monitors_of_one_run(notebook, panel):
    other = Panel(notebook.run_new("latest()"))
    panel.choose("Function", "train")
    other.fill("num_steps", "10000")
    notebook.page.wait_for_function("one => one.value === '10000'", arg=panel.field("num_steps").element_handle())
    panel.press("Launch")
    for one in (panel, other):
        one.sees("▸ running", "step 2 on rank 0")
    monitors = [notebook.run_new("monitor(run)") for _ in range(2)]
    for one in monitors:
        one.get_by_text("step 10 on rank 0").first.wait_for()
    monitors[0].locator("button.jupyter-button", has_text="Stop").click()
    for one in (*monitors, panel.where, other.where):
        one.get_by_text("■ stopped").first.wait_for()
    monitors[0].locator("details").first.wait_for()
    afterwards = notebook.run_new("monitor(run)")
    afterwards.locator("img").first.wait_for()
    assert not afterwards.locator("button").count()


def test_a_page_loaded_again_goes_on_and_without_its_kernel_shows_what_was_stored(notebook, panel):
    panel.choose("Function", "train")
    panel.fill("num_steps", "10")
    panel.press("Launch")
    panel.sees("✓ finished")
    stored = notebook.output(1).locator(".notebook-launcher-stored")
    stored.get_by_text("✓ finished").first.wait_for(state="attached")
    assert "<script" not in str(notebook.saved().cells[1].outputs)
    panel.fill("num_steps", "10000")
    panel.press("Launch")
    panel.sees("step 2 on rank 0")
    notebook.load_again()
    panel.sees("▸ running", "step 30 on rank 0")
    assert not stored.is_visible()  # the live panel is there
    panel.press("Stop")
    panel.sees("■ stopped")
    notebook.restart_kernel()
    panel.where.locator(".jupyter-widgets-disconnected").filter(visible=True).first.wait_for()
    notebook.load_again()
    stored.locator("img").first.wait_for()
    stored.get_by_text("step 9 on rank 0").first.wait_for()
    stored.get_by_text("To use it again, run this cell.").wait_for()
    notebook.picture("opened-again-light", notebook.output(1))
    assert not notebook.outside
