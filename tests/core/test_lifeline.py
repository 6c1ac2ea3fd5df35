"""Lifelines, held by this process and by children of it."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest

from notebook_launcher.core import lifeline
from notebook_launcher.core.errors import ChannelClosedError
from notebook_launcher.core.lifeline import Lifeline

LIMIT_S = 10
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system can't choose the signal")


@pytest.fixture
def held():
    """Starts a child in a group of its own that has a lifeline and calls a function; gives (pid, what to cut)."""
    children, writers = [], []

    def start(do, number=signal.SIGKILL):
        reader, writer = os.pipe()
        told, tells = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(writer)
            lifeline.hold(reader, number, -os.getpid())
            do(tells)
            os._exit(0)
        os.close(reader)
        os.close(tells)
        text = os.read(told, 100)
        os.close(told)
        children.append(pid)
        writers.append(writer)
        return pid, text

    start.cut = lambda: os.close(writers.pop())
    yield start
    while writers:
        os.close(writers.pop())
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def sleeps_in_native_code(tells):
    """No thread of Python's runs: the interpreter's lock is not let go."""
    native = ctypes.PyDLL(None)
    os.write(tells, b"up")
    native.sleep(600)


def end_of(pid):
    """The signal that ended a child; it stays a child to be reaped."""
    deadline_s = time.monotonic() + LIMIT_S
    while (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
        assert time.monotonic() < deadline_s, "it lives"
        time.sleep(0.001)
    return ended.si_status


def test_who_holds_the_interpreters_lock_for_ever_ends_too(held):
    pid, _ = held(sleeps_in_native_code)
    held.cut()
    assert end_of(pid) == signal.SIGKILL


def test_who_was_stopped_ends_too(held):
    pid, _ = held(sleeps_in_native_code)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    held.cut()
    assert end_of(pid) == signal.SIGKILL


def test_the_group_ends_with_it(held):
    def starts_another(tells):
        with subprocess.Popen(["sleep", "600"]) as process:
            os.write(tells, str(process.pid).encode())

    pid, text = held(starts_another)
    started = psutil.Process(int(text))
    held.cut()
    assert end_of(pid) == signal.SIGKILL
    started.wait(LIMIT_S)


def test_another_signal_may_be_asked_for(held):
    pid, _ = held(sleeps_in_native_code, signal.SIGUSR1)
    held.cut()
    assert end_of(pid) == signal.SIGUSR1


def test_each_process_has_an_arrangement_of_its_own(held):
    """They may well share the pipe, as the fork server's workers do."""

    def forks(tells):
        reader, writer = os.pipe()
        pids = []
        for _ in range(2):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.close(writer)
                lifeline.hold(reader, signal.SIGKILL, os.getpid())
                os.write(tells, b"1")
                ctypes.PyDLL(None).sleep(600)
        os.sched_yield()
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s and not all(_has_lifeline(pid) for pid in pids):
            time.sleep(0.001)
        os.close(writer)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        os._exit(0 if statuses == [-signal.SIGKILL, -signal.SIGKILL] else 1)

    pid, _ = held(forks)
    assert end_of(pid) == 0


def _has_lifeline(pid):
    return psutil.Process(pid).status() == psutil.STATUS_SLEEPING


def test_a_lifeline_that_has_ended_already():
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(ChannelClosedError):
        lifeline.hold(reader, signal.SIGKILL, os.getpid())
    os.close(reader)


def test_a_system_without(monkeypatch):
    monkeypatch.setattr(lifeline.sys, "platform", "darwin")
    assert lifeline.hold(-1, signal.SIGKILL, os.getpid()) == -1


def test_a_sandbox_that_has_not_the_whole_of_linux(monkeypatch):
    def refuse(*_):
        raise OSError(22, "Invalid argument")

    one = Lifeline()
    monkeypatch.setattr(lifeline.fcntl, "fcntl", refuse)
    assert lifeline.hold(one.reader, signal.SIGKILL, os.getpid()) == -1
    one.close()


def test_a_number_that_is_no_descriptor():
    assert lifeline.hold(-1, signal.SIGKILL, os.getpid()) == -1


# --- the kernel's end -------------------------------------------------------------------------------------------------


def has_ended(lifeline):
    ready, _, _ = select.select([lifeline.reader], [], [], 0)
    return bool(ready)


def test_it_ends_when_the_writer_is_closed():
    one = Lifeline()
    reader = os.dup(one.reader)
    assert not has_ended(one)
    one.close()
    one.close()
    assert select.select([reader], [], [], 0)[0]
    os.close(reader)


def test_a_process_that_was_forked_does_not_hold_it():
    one = Lifeline()
    pid = os.fork()
    if pid == 0:
        signal.pause()
    one.let_go()
    assert select.select([one.reader], [], [], LIMIT_S)[0]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    one.close()


def test_what_was_handed_over_is_closed_once():
    one = Lifeline()
    one.hand_over()
    other = os.open(os.devnull, os.O_RDONLY)  # gets the number that was free
    one.hand_over()
    one.close()
    os.fstat(other)
    os.close(other)
