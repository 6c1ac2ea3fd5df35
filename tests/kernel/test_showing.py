"""Output: whatever writes it, it comes at once, with its rank, in the cell and in the log, however much it is."""

from __future__ import annotations

import base64
import json
import pathlib
import re
import time

import psutil
import pytest

NUM_LINES = 500_000
KEPT_LINES = 1000
INLINE = "module://matplotlib_inline.backend_inline"  # what MPLBACKEND is in a notebook's kernel


@pytest.fixture(scope="module", autouse=True)
def _c_code_buffers_as_it_does_by_itself():
    """Start the kernel without this variable: Python passes it on to C's own streams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        yield


@pytest.fixture
def messages(shared_kernel, monkeypatch):
    """Every message that the kernel publishes while the test reads: seconds, type, content."""
    taken = []
    read = shared_kernel.client.get_iopub_msg

    def reading(*args, **kwargs):
        message = read(*args, **kwargs)
        taken.append((time.monotonic(), message["msg_type"], message["content"]))
        return message

    monkeypatch.setattr(shared_kernel.client, "get_iopub_msg", reading)
    return taken


def lines_of(text, rank):
    """The lines of a rank, without its label."""
    return re.findall(rf"^\[{rank}\] (.*)$", text, flags=re.MULTILINE)


def displayed_by(cell, rank):
    """The MIME bundles that a rank displayed: each comes after a heading with the rank."""
    headings = [number for number, one in enumerate(cell.displays) if one["text/plain"] == f"[{rank}] displayed:"]
    assert all(f">rank {rank}<" in cell.displays[number]["text/html"] for number in headings)
    return [cell.displays[number + 1] for number in headings]


# --- whatever writes it -----------------------------------------------------------------------------------------------


def test_every_way_of_writing_arrives_with_its_rank(shared_kernel, tmp_path):
    cell = shared_kernel.ok(f"""
import ctypes, logging, subprocess
def speak():
    libc = ctypes.CDLL(None)
    print("python", rank())
    os.write(1, b"descriptor\\n")
    libc.puts(b"C puts")
    libc.printf(b"C printf %d\\n", rank())
    subprocess.run(["echo", "a child"], check=True)
    print("two\\nlines")
    print("\\N{{GREEK SMALL LETTER ALPHA}} <b>&amp;</b> \\x1b[31mred\\x1b[0m")
    print("to stderr", file=sys.stderr)
    os.write(2, b"descriptor 2\\n")
    logging.getLogger("x").warning("logged")
    libc.printf(b"C without an end")
_ = launch(speak, num_processes=2, log_dir={str(tmp_path)!r})
""")
    for rank in (0, 1):
        stdout = [f"python {rank}", "descriptor", "C puts", f"C printf {rank}", "a child", "two", "lines"]
        stdout += ["\N{GREEK SMALL LETTER ALPHA} <b>&amp;</b> red", "C without an end"]
        stderr = ["to stderr", "descriptor 2", "logged"]
        shown = lines_of(cell.shown, rank)
        assert [line for line in shown if line not in stderr] == stdout
        assert [line for line in shown if line in stderr] == stderr
        logged = (tmp_path / f"rank_{rank}.log").read_text().replace("\x1b[31m", "").replace("\x1b[0m", "")
        assert all(line in logged for line in shown)
        assert len(logged) == sum(len(line) + 1 for line in shown) - 1, "one line has no end"
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt;" in cell.html
    assert "<b>" not in cell.html
    assert cell.text == "", "nothing but the run's own display"


def test_c_code_and_unfinished_lines_are_seen_while_the_function_goes_on(shared_kernel):
    shared_kernel.start("""
def wait():
    ctypes.CDLL(None).puts(b"from C")
    print("who is", end=" ")
    while not os.path.exists("go on"): time.sleep(0.01)
    print("there")
_ = launch(wait, num_processes=2)
os.remove("go on")
""")
    for rank in (0, 1):
        shared_kernel.wait_for(f"[{rank}] from C")
    began = time.monotonic()
    for rank in (0, 1):
        shared_kernel.wait_for(f"[{rank}] who is")
    assert time.monotonic() - began < 1.0
    release(shared_kernel, "go on")
    cell = shared_kernel.wait()
    assert [lines_of(cell.shown, rank) for rank in (0, 1)] == [["from C", "who is there"]] * 2


def test_a_progress_bar_is_one_line_a_rank_while_it_runs_and_after(shared_kernel):
    shared_kernel.start("""
from tqdm.auto import tqdm
def bars():
    for epoch in tqdm(range(3), desc="epoch", mininterval=0):
        for step in tqdm(range(20), desc="step", leave=False, mininterval=0):
            while epoch == 1 and step == 9 and not os.path.exists("go on"): time.sleep(0.01)
    for _ in tqdm(range(50), desc="last", mininterval=0): pass
    print("done")
_ = launch(bars, num_processes=2)
os.remove("go on")
""")
    for rank in (0, 1):
        shared_kernel.wait_for(f"[{rank}] step:  45%")
        cell = shared_kernel.wait_for(f"[{rank}] epoch:  33%")
    for rank in (0, 1):
        assert [line.split(":")[0] for line in lines_of(cell.shown, rank)] == ["epoch", "step"]
        assert "1/3" in lines_of(cell.shown, rank)[0]
    release(shared_kernel, "go on")
    cell = shared_kernel.wait()
    for rank in (0, 1):
        bars = [line for line in lines_of(cell.shown, rank) if line != "done"]
        assert [line.split("|")[0] for line in bars] == ["epoch: 100%", "last: 100%"]
        assert "done" in lines_of(cell.shown, rank)


def test_output_main_shows_rank_0_and_keeps_the_rest(shared_kernel, tmp_path):
    cell = shared_kernel.ok(f"""
def speak(): print("hello from", rank()); print("warned by", rank(), file=sys.stderr)
run = launch(speak, num_processes=2, output="main", log_dir={str(tmp_path)!r})
print(json.dumps([run.logs(0).splitlines(), run.logs(1).splitlines()]))
""")
    assert lines_of(cell.shown, 0) == ["hello from 0", "warned by 0"]
    assert lines_of(cell.shown, 1) == []
    assert [sorted(lines) for lines in json.loads(cell.stdout)] == [
        [f"hello from {rank}", f"warned by {rank}"] for rank in (0, 1)
    ]
    assert "hello from 1" in (tmp_path / "rank_1.log").read_text()


@pytest.mark.parametrize("ask", ["input('name? ')", "__import__('getpass').getpass()"])
def test_a_rank_that_asks_for_input_is_told_what_to_do(shared_kernel, ask):
    cell = shared_kernel.run(f"def asks(): return {ask}\nlaunch(asks, num_processes=2)")
    assert cell.error == "EOFError"
    assert "a rank can't ask for input" in cell.message
    assert "pass the answer as an argument" in cell.message
    assert f"return {ask}" in cell.traceback


# --- however much it is -----------------------------------------------------------------------------------------------


def test_half_a_million_lines_a_rank_are_logged_and_leave_the_kernel_free(shared_kernel, messages, tmp_path):
    shared_kernel.ok(f"""
def flood():
    number = rank()
    for i in range({NUM_LINES}): print("rank", number, "line", i)
    return i
""")
    messages.clear()
    began = time.monotonic()
    shared_kernel.ok(f"run = launch(flood, num_processes=2, log_dir={str(tmp_path)!r}, wait=False)")
    slowest_s, num_cells, status = 0.0, 0, ""
    while status != "finished":
        asked = time.monotonic()
        status = shared_kernel.ok("print(run.status)").stdout.strip()
        slowest_s = max(slowest_s, time.monotonic() - asked)
        num_cells += 1
    took_s = time.monotonic() - began
    assert shared_kernel.ok("print(run.wait().results)").stdout == f"{[NUM_LINES - 1] * 2}\n"
    assert took_s < 30
    assert slowest_s < 1.5
    assert num_cells > 5
    for rank in (0, 1):
        with (tmp_path / f"rank_{rank}.log").open() as file:
            assert all(line == f"rank {rank} line {number}\n" for number, line in enumerate(file))
        assert (tmp_path / f"rank_{rank}.log").stat().st_size == sum(
            len(f"rank 0 line {i}\n") for i in range(NUM_LINES)
        )
    check_display([one for one in messages if one[1] in ("display_data", "update_display_data")], took_s)


def check_display(paints, took_s):
    """At most ten paints and about a megabyte a second, and at the end the last thousand lines of each rank."""
    *live, (_, _, final) = paints
    assert len(live) <= 10 * took_s + 2
    assert sum(len(json.dumps(content)) for _, _, content in live) <= 1.2e6 * took_s + 100_000
    text = final["data"]["text/plain"]
    for rank in (0, 1):
        expected = [f"rank {rank} line {number}" for number in range(NUM_LINES - KEPT_LINES, NUM_LINES)]
        assert lines_of(text, rank) == expected
        assert f"{NUM_LINES - KEPT_LINES:,} earlier lines of rank {rank} not shown; all of them: " in text
        assert f"rank_{rank}.log" in text
    assert len(final["data"]["text/html"]) < 500_000


def test_a_flood_in_the_foreground_ends_and_can_be_stopped(shared_kernel):
    shared_kernel.start("""
def endless():
    while True: print("x" * 200)
run = launch(endless, num_processes=2)
""")
    shared_kernel.wait_for("[0] xxx")
    shared_kernel.wait_for("[1] xxx")
    began = time.monotonic()
    shared_kernel.interrupt()
    cell = shared_kernel.wait(30)
    assert time.monotonic() - began < 2.0
    assert cell.error == "RunInterrupted"
    assert "earlier lines of rank 1 not shown" in cell.shown


# --- rich displays ----------------------------------------------------------------------------------------------------


def test_html_frames_and_updates_appear_with_their_rank(shared_kernel):
    cell = shared_kernel.ok("""
import pandas as pd
from IPython.display import HTML, Markdown, display
frame = pd.DataFrame({"column": [41, 42]})
def rich():
    display(HTML(f"<b>bold {rank()}</b>"))
    display(frame * (rank() + 1))
    handle = display(Markdown("# first"), display_id=True)
    handle.update(Markdown("# second"))
    print("printed")
_ = launch(rich, num_processes=2)
""")
    for rank in (0, 1):
        bold, frame, markdown = displayed_by(cell, rank)
        assert bold["text/html"] == f"<b>bold {rank}</b>"
        assert f"<td>{42 * (rank + 1)}</td>" in frame["text/html"]
        assert markdown["text/markdown"] == "# second"
        assert lines_of(cell.displays[0]["text/plain"], rank) == ["printed"]


def test_figures_appear_with_their_rank_shown_or_left_open(shared_kernel):
    cell = shared_kernel.ok(f"""
backend = os.environ.get("MPLBACKEND")
os.environ["MPLBACKEND"] = {INLINE!r}
def draw():
    import matplotlib.pyplot as plt
    plt.plot([1, 2, 3])
    plt.show()
    if rank() == 1: plt.figure(figsize=(2, 2)).gca().plot([3, 2, 1])
    return plt.get_backend()
run = launch(draw, num_processes=2)
os.environ["MPLBACKEND"] = backend
print(run.results)
""")
    assert "inline" in cell.stdout
    for rank, num_figures in ((0, 1), (1, 2)):
        figures = displayed_by(cell, rank)
        assert len(figures) == num_figures
        for figure in figures:
            assert base64.b64decode(figure["image/png"]).startswith(b"\x89PNG\r\n")


def test_what_is_displayed_after_the_cell_has_ended_is_part_of_the_runs_display(shared_kernel, messages):
    shared_kernel.ok("""
def late():
    while not os.path.exists("go on"): time.sleep(0.01)
    display(HTML(f"<i>late {rank()}</i>"))
run = launch(late, num_processes=2, wait=False)
""")
    shared_kernel.ok("open('go on', 'w').close(); run.wait(); os.remove('go on')")
    shared_kernel.ok("")
    final = [content["data"]["text/html"] for _, kind, content in messages if kind == "update_display_data"][-1]
    for rank in (0, 1):
        assert f"<i>late {rank}</i>" in final
        assert f">rank {rank}<" in final


def release(kernel, name):
    """Make a file of this name in the kernel's folder: the running function waits for it."""
    (pathlib.Path(psutil.Process(kernel.pid).cwd()) / name).touch()
