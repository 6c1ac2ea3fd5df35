"""Adopting what descendants leave behind, in a child of this process: it lasts as long as the process that does."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from notebook_launcher.worker import orphans

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system knows no such thing")


def in_a_child(function):
    """What ``function`` says in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, repr(function()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    return text


def daemon():
    """The pid of a process that made a session of its own, and whose parent has ended."""
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        os.setsid()
        second = os.fork()
        if second == 0:
            signal.pause()
        os.write(writer, str(second).encode())
        os._exit(0)
    os.waitpid(first, 0)
    pid = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    return pid


def test_a_daemon_is_adopted():
    def adopts():
        assert orphans.adopt()
        pid = daemon()
        found = orphans.children()
        os.kill(pid, signal.SIGKILL)
        return found == {pid} and os.waitpid(pid, 0)[0] == pid

    assert in_a_child(adopts) == "True"


def test_children_are_those_that_live_and_those_to_be_reaped():
    def has():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        before = orphans.children()
        os.waitpid(pid, 0)
        return before == {pid}, orphans.children()

    assert in_a_child(has) == "(True, set())"


def test_systems_without(monkeypatch):
    monkeypatch.setattr(orphans, "_prctl", None)
    assert orphans.adopt() is False
    monkeypatch.setattr(orphans.os, "getpid", lambda: -1)
    assert orphans.children() == set()
