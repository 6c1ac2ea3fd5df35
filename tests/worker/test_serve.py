"""One rank's life, in a real worker on a real channel."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import psutil
import pytest
from real_rank import LIMIT_S, RealRank, exit_code, pid_of, read

from notebook_launcher.core import events, pickling
from notebook_launcher.core.channel import MemoryChannel
from notebook_launcher.launcher import warm
from notebook_launcher.worker import serve


@pytest.fixture
def start():
    """Starts ranks that are gone with the test."""
    ranks = []

    def make(source, **options):
        (worker,) = warm.take(1)
        ranks.append(RealRank(worker, source, **options))
        return ranks[-1]

    yield make
    for rank in ranks:
        if not rank.worker.closed:
            rank.worker.channel.close()
            exit_code(rank.worker)


def test_a_rank_starts_returns_and_leaves(start):
    rank = start("import os\nprint('hello')\n(os.environ['RANK'], os.getpid())")
    started = rank.until(events.Started)
    assert rank.result() == ("0", started.pid)
    assert started.host == socket.gethostname()
    assert rank.read() == "hello\n"
    assert [type(event).__name__ for event in rank.events] == ["Started", "Finished"]
    assert rank.leave() == 0


def test_a_rank_waits_to_be_let_go(start):
    rank = start("1")
    rank.result()
    assert not rank.worker.read_status()
    assert psutil.Process(rank.worker.pid).is_running()
    assert rank.leave() == 0


def test_a_rank_that_leaves_does_what_an_interpreters_end_would(start, tmp_path):
    rank = start(f"""
import atexit, builtins, io
class Broken(io.StringIO):
    def flush(self): raise LookupError
class Proxy:
    __class__ = property(lambda self: 1 / 0)
builtins.kept = open({str(tmp_path / "file")!r}, "w"), Broken(), Proxy()
kept[0].write("not flushed")
atexit.register(print, "registered first")
atexit.register(lambda: 1 / 0)
""")
    rank.result()
    assert (tmp_path / "file").read_text() == ""
    rank.send(events.Leave())
    assert rank.read(until=None) == "registered first\n"
    assert "ZeroDivisionError" in rank.read("stderr", until=None)
    assert exit_code(rank.worker) == 0
    assert (tmp_path / "file").read_text() == "not flushed"


def test_an_exception_is_reported(start):
    rank = start("values = {}\nvalues['missing']", sources={"<test>": "values = {}\nvalues['missing']\n"})
    failed = rank.until(events.Failed)
    assert (failed.type_name, failed.message) == ("KeyError", "'missing'")
    assert "values['missing']" in failed.traceback_text
    assert "serve.py" not in failed.traceback_text
    assert type(pickling.load_error(failed.error)) is KeyError
    assert rank.leave() == 0


def test_what_happens_before_the_function_is_reported_too(start, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    worker_may_begin = threading.Event()
    monkeypatch.setattr("real_rank.pack_surroundings", _then((tmp_path / "gone").rmdir, worker_may_begin.set))
    failed = start("1").until(events.Failed)
    assert worker_may_begin.is_set()
    assert failed.type_name == "FileNotFoundError"
    assert "gone" in failed.message


def _then(*calls):
    """``pack_surroundings``, and ``calls`` after it."""
    from notebook_launcher.launcher.commands import pack_surroundings

    def pack(*args):
        packed = pack_surroundings(*args)
        for call in calls:
            call()
        return packed

    return pack


def test_a_result_that_cannot_be_pickled_says_so(start):
    rank = start("import threading\nthreading.Lock()")
    finished = rank.until(events.Finished)
    assert finished.result is None
    assert finished.problem.startswith("the result, a lock, can't be pickled: ")
    assert rank.leave() == 0


def test_sys_exit_is_reported_and_does_not_end_the_process(start):
    rank = start("import sys\nsys.exit(4)")
    failed = rank.until(events.Failed)
    assert (failed.type_name, failed.message) == ("SystemExit", "4")
    assert rank.leave() == 0


# --- interrupts and questions -----------------------------------------------------------------------------------------

SLEEP = "import time\nprint('up')\ntime.sleep(600)"


def interrupt(rank):
    assert pid_of(rank.worker)
    rank.send(events.Interrupting())
    rank.worker.signal(signal.SIGINT)


def test_an_interrupt_is_a_keyboard_interrupt_in_the_function_and_is_reported_as_heard(start):
    rank = start(SLEEP)
    rank.read()
    interrupt(rank)
    assert rank.until(events.Failed).type_name == "KeyboardInterrupt"
    if not any(isinstance(event, events.Interrupted) for event in rank.events):
        rank.until(events.Interrupted)
    assert rank.leave() == 0


def test_the_function_may_catch_the_interrupt(start):
    rank = start(
        "import time\ntry:\n    print('up')\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    pass\n'partial'"
    )
    rank.read()
    interrupt(rank)
    assert rank.result() == "partial"


def test_an_interrupt_after_the_function_is_nothing(start):
    rank = start("7")
    assert rank.result() == 7
    interrupt(rank)
    assert rank.leave() == 0


def test_a_rank_says_where_it_is(start):
    source = "import time\ndef train():\n    print('up')\n    time.sleep(600)\ntrain()"
    rank = start(source, sources={"<test>": source})
    rank.read()
    rank.send(events.AskWhere())
    where = rank.until(events.Where)
    assert where.call == "train"
    assert where.line == "line 4 of train: time.sleep(600)"
    assert "train()" in where.stack


def test_a_question_that_cannot_be_answered_does_not_make_the_rank_deaf(start):
    source = (
        "import sys\nfrom notebook_launcher.worker import inspection\n"
        "def broken(thread):\n    inspection.where = real\n    raise RuntimeError('no frames')\n"
        "real, inspection.where = inspection.where, broken\nprint('up')\nimport time; time.sleep(600)"
    )
    rank = start(source)
    rank.read()
    rank.send(events.AskWhere())
    assert "no frames" in rank.read("stderr", until=b"no frames")
    rank.send(events.AskWhere())
    rank.until(events.Where)


def test_release_without_a_process_group_is_nothing(start):
    rank = start("8")
    assert rank.result() == 8
    rank.send(events.Release())
    assert rank.leave() == 0


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["running", "waiting to leave"])
def test_a_rank_whose_kernel_is_gone_ends_with_all_that_it_started(start, ending):
    source = "import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid)"
    rank = start(f"{source}\nimport time; time.sleep(600)" if ending == "running" else source)
    child = psutil.Process(int(rank.read()))
    if ending != "running":
        rank.until(events.Finished)
    rank.worker.channel.close()
    assert exit_code(rank.worker) == -signal.SIGKILL
    child.wait(LIMIT_S)


def test_threads_that_are_left_do_not_keep_the_process(start):
    rank = start("import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n1")
    rank.result()
    assert rank.leave() == 0


def test_output_without_a_newline_arrives_while_the_function_runs(start):
    rank = start("import time\nprint('half a line', end='')\ntime.sleep(600)")
    assert rank.read(until=b"line") == "half a line"


def test_a_stream_that_cannot_be_flushed_does_not_make_the_rank_deaf(start):
    source = "import sys, types\nsys.stdout = types.SimpleNamespace(flush=lambda: 1 / 0, write=len)\n9"
    rank = start(source)
    assert rank.result() == 9
    assert rank.leave() == 0


def test_displays_are_events(start):
    rank = start("from IPython.display import display\ndisplay({'a': 1})\nNone")
    display = rank.until(events.Display)
    assert display.data["text/plain"] == "{'a': 1}"
    assert rank.leave() == 0


def test_a_rank_that_crashes_leaves_the_python_line(start):
    rank = start("import ctypes\nctypes.string_at(0)")
    text = read(rank.worker, "stderr")
    assert "Segmentation fault" in text
    assert "string_at" in text
    assert exit_code(rank.worker) == -signal.SIGSEGV


def test_a_rank_that_hears_twice_reports_it_once():
    """The flag is set in the main thread and told by the one that listens, as the channel's lock may be held there."""
    ours, theirs = MemoryChannel.pair()
    one = serve.Server(theirs)
    with pytest.raises(KeyboardInterrupt):
        one._hear(signal.SIGINT, None)
    assert one._interrupted.is_set()
    with pytest.raises(TimeoutError):
        ours.receive(0)


@pytest.mark.parametrize(
    "ending",
    ["return", "raise", "exit"],
)
def test_a_process_that_the_function_forks_does_not_speak_for_the_rank(ending):
    from notebook_launcher import launch

    def fail():
        raise ValueError("in the child")

    endings = {"return": lambda: "child", "raise": fail, "exit": lambda: sys.exit(0)}

    def function():
        pid = os.fork()
        if pid == 0:
            return endings[ending]()
        _, status = os.waitpid(pid, 0)
        return "parent", os.waitstatus_to_exitcode(status)

    run = launch(function, num_processes=1, device="cpu")
    assert run.result == ("parent", int(ending == "raise"))


@pytest.mark.parametrize(("last", "kind", "failed"), [("1", "Finished", False), ("1 / 0", "Failed", True)])
def test_what_the_function_owes_is_done_before_its_end_is_told(start, last, kind, failed):
    rank = start(f"from notebook_launcher.core import endings\nendings.register(print)\n{last}")
    rank.until((events.Finished, events.Failed))
    assert type(rank.events[-1]).__name__ == kind
    assert rank.read() == f"{failed}\n"


def test_what_is_owed_and_fails_costs_no_result(start):
    rank = start("from notebook_launcher.core import endings\nendings.register(lambda failed: 1 / 0)\n7")
    assert rank.result() == 7
    assert "ZeroDivisionError" in rank.read("stderr")


def test_a_failure_is_told_though_what_is_owed_takes_for_ever(start):
    rank = start(
        "import time\nfrom notebook_launcher.core import endings\nfrom notebook_launcher.worker import serve\n"
        "serve._CLOSING_S = 0.05\nendings.register(lambda failed: time.sleep(1000))\n1 / 0"
    )
    assert rank.until(events.Failed).type_name == "ZeroDivisionError"


def test_what_is_owed_by_a_function_that_hears_no_interrupt_is_done_in_its_stead(start):
    rank = start(
        "import time\nfrom notebook_launcher.core import endings\nendings.register(print)\n"
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\nprint('up')\ntime.sleep(1000)"
    )
    assert rank.read() == "up\n"
    rank.send(events.Interrupting())
    assert rank.read() == "True\n"


def test_a_function_that_hears_the_interrupt_does_itself_what_it_owes(start):
    rank = start(
        "import time\nfrom notebook_launcher.core import endings\nendings.register(print)\n"
        "try:\n    print('up')\n    time.sleep(99)\nexcept KeyboardInterrupt:\n    time.sleep(0.5)\n    print('saved')"
    )
    assert rank.read() == "up\n"
    interrupt(rank)
    assert rank.read(until=b"e\n") == "saved\nFalse\n"


def test_an_interrupt_that_was_not_seen_before_a_wait_is_given_again(start):
    rank = start(SLEEP)
    rank.read()
    rank.send(events.Interrupting())  # and no signal
    assert rank.until(events.Failed).type_name == "KeyboardInterrupt"
