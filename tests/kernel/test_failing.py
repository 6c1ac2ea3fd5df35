"""Errors: the worker's own exception, the notebook's own line, and what the other ranks did."""

from __future__ import annotations

import re
import time

import pytest

LIMIT_S = 5.0


def test_an_exception_while_the_others_wait_in_a_collective(shared_kernel):
    began = time.monotonic()
    cell = shared_kernel.run("""
def train():
    dist.init_process_group("gloo")
    if rank() == 1:
        raise RuntimeError("shard 7 is gone")
    dist.all_reduce(torch.ones(1))
launch(train, num_processes=2)
""")
    assert time.monotonic() - began < LIMIT_S
    assert cell.error == "RuntimeError"
    assert "rank 1 of 2 raised RuntimeError: shard 7 is gone" in cell.traceback
    assert 'raise RuntimeError("shard 7 is gone")' in cell.traceback
    assert re.search(r"Cell In\[\d+\], line \d+, in train", cell.traceback)
    assert "rank 0: was in all_reduce" in cell.traceback
    assert "Connection" not in cell.traceback
    assert "supervisor.py" not in cell.traceback


def test_the_workers_own_exception_can_be_caught_by_its_type(shared_kernel):
    cell = shared_kernel.ok("""
class TooBig(ValueError): pass
def train():
    if rank() == 0: raise TooBig("batch 64")
    time.sleep(600)
try:
    launch(train, num_processes=2)
except ValueError as error:
    cause = error.__cause__
    print(type(error) is TooBig, error, error.__notes__)
    print(type(cause).__name__, cause.rank, bool(cause.host), cause.others)
""")
    assert "True batch 64" in cell.stdout
    assert "[rank 0 on" in cell.stdout
    assert "WorkerError 0 True ('rank 1: was in train" in cell.stdout


def test_the_same_error_on_every_rank_is_shown_once(shared_kernel):
    cell = shared_kernel.run("def fn():\n    d = {}\n    return d['missing-key']\nlaunch(fn, num_processes=3)")
    assert cell.error == "KeyError"
    assert cell.shown.count("return d['missing-key']") == 1
    assert "raised the same KeyError" in cell.traceback


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "raise ExceptionGroup('several', [ValueError('a'), KeyError('b')])",
            ["ExceptionGroup", "several", "ValueError: a"],
        ),
        (
            "try: 1 / 0\n    except ZeroDivisionError as e: raise LookupError('no data') from e",
            ["LookupError", "ZeroDivisionError"],
        ),
        ("e = OSError('disk'); e.add_note('look at /data'); raise e", ["OSError", "look at /data"]),
        ("raise ValueError('\\ud800 \\x00 \\x1b[31mred')", ["ValueError", "red"]),
        ("eval('1 +')", ["SyntaxError"]),
    ],
    ids=["group", "cause", "note", "unprintable", "syntax"],
)
def test_every_kind_of_exception_arrives(shared_kernel, body, words):
    cell = shared_kernel.run(f"def fn():\n    {body}\nlaunch(fn, num_processes=1)")
    for word in words:
        assert word in cell.shown


@pytest.mark.parametrize("loaded", [True, False], ids=["extension", "import only"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("eval('1 +')", ["eval('1 +')", "SyntaxError: invalid syntax"]),
        ("raise ExceptionGroup('several', [ValueError('a')])", ["raise ExceptionGroup(", "    | ValueError: a"]),
        (
            "try: raise ExceptionGroup('g', [KeyError('b')])\n    except Exception: raise LookupError('then')",
            ["    | KeyError: 'b'", "LookupError: then"],
        ),
    ],
    ids=["syntax", "group", "after a group"],
)
def test_the_cell_shows_the_users_lines_only(shared_kernel, body, words, loaded):
    shared_kernel.ok("%reload_ext notebook_launcher" if loaded else "%unload_ext notebook_launcher")
    try:
        cell = shared_kernel.run(f"def fn():\n    {body}\nlaunch(fn, num_processes=1)")
    finally:
        shared_kernel.ok("%load_ext notebook_launcher")
    assert cell.error in {"SyntaxError", "ExceptionGroup", "LookupError"}
    assert cell.traceback.startswith(f"rank 0 of 1 raised {cell.error}: ")
    for word in words:
        assert word in cell.traceback
    assert "notebook_launcher" not in cell.traceback
    assert "interactiveshell.py" not in cell.traceback + cell.stderr


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError('x' * 20_000_000)",
        "raise ValueError('x\\n' * 1_000_000)",
        "sys.setrecursionlimit(11_000); odd(0)",
        "sys.exit('x' * 20_000_000)",
    ],
    ids=["one line", "many lines", "recursion", "exit"],
)
def test_no_error_is_longer_than_a_page_can_bear(shared_kernel, body):
    shared_kernel.ok("def odd(n): return even(n + 1)\ndef even(n): return odd(n + 1)")
    cell = shared_kernel.run(f"def fn():\n    {body}\nlaunch(fn, num_processes=1)")
    assert cell.error
    assert len(cell.traceback) < 20_000
    assert len(cell.message) < 5_000
    assert "rank 0 of 1" in cell.traceback
    assert "not shown" in cell.traceback
    assert "run.error has more of it" in cell.traceback
    assert len(cell.html) < 20_000


def test_the_whole_text_of_an_error_is_the_objects(shared_kernel):
    cell = shared_kernel.ok("""
def fn(): raise ValueError("x" * 20_000_000)
run = launch(fn, num_processes=1, wait=False)
try: run.wait()
except ValueError as error: print(len(str(error)), error is run.error)
""")
    assert "20000000 True" in cell.stdout


def test_an_exception_that_cannot_be_pickled_arrives_as_text(shared_kernel):
    cell = shared_kernel.run("""
class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(f"odd {a}")
        import threading; self.lock = threading.Lock()
def fn(): raise Odd(42, 1)
launch(fn, num_processes=2)
""")
    assert cell.error == "WorkerError"
    assert "odd 42" in cell.traceback


def test_a_syntax_error_in_a_launched_cell_starts_nothing(shared_kernel):
    cell = shared_kernel.run("%%launch -n 2\nfor i in range(3)\n    print(i)")
    assert "SyntaxError" in cell.shown
    assert "processes ·" not in cell.shown


def test_an_error_in_a_launched_cell_shows_the_cells_line(shared_kernel):
    cell = shared_kernel.run("%%launch -n 2\nvalues = [1, 2]\nvalues[rank() + 1]")
    assert cell.error == "IndexError"
    assert "values[rank() + 1]" in cell.traceback


def test_a_timeout_says_where_each_rank_was(shared_kernel):
    cell = shared_kernel.run("def fn(): time.sleep(600)\nlaunch(fn, num_processes=2, timeout_s=0.5)")
    assert cell.error == "RunTimeoutError"
    assert "timeout_s=0.5" in cell.traceback
    assert "was in fn" in cell.traceback
    assert (
        "True"
        in shared_kernel.ok(
            "from notebook_launcher import RunTimeoutError; print(issubclass(RunTimeoutError, TimeoutError))"
        ).stdout
    )


def test_a_failed_run_is_started_again_as_often_as_asked(shared_kernel):
    cell = shared_kernel.ok("""
def flaky():
    dist.init_process_group("gloo")
    t = torch.ones(1); dist.all_reduce(t)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank() == 1: raise OSError("first time")
    return t.item()
run = launch(flaky, num_processes=2, max_restarts=1)
print(run.results)
""")
    assert "[2.0, 2.0]" in cell.stdout
    assert "restart 1 of 1" in cell.shown


def test_an_unpicklable_result_spares_the_other_ranks(shared_kernel):
    cell = shared_kernel.ok("""
import threading
def fn(): return threading.Lock() if rank() == 1 else "fine"
run = launch(fn, num_processes=2)
print(run.status, run.results[0], type(run.results[1]).__name__, run.results[1])
""")
    assert "finished fine ResultError rank 1: the result, a lock, can't be pickled" in cell.stdout
