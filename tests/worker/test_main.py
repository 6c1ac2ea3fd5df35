"""A worker's first instructions, in children of this process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from notebook_launcher.core import events
from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.errors import ChannelClosedError
from notebook_launcher.worker import main as mains
from notebook_launcher.worker.main import main

LIMIT_S = 30


class Child:
    """A process that is in ``main``; its channel and its standard error."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self.stderr, stderr = os.pipe()
        kernels_end, self._lifeline = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            os.close(self._lifeline)
            main(theirs.detach(), os.open(os.devnull, os.O_WRONLY), stderr, kernels_end)
        theirs.close()
        os.close(stderr)
        os.close(kernels_end)
        self.channel = SocketChannel(ours)

    def cut_lifeline(self):
        """As the system does when the kernel has died."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def end(self):
        """(exit code, standard error) once it has ended."""
        with os.fdopen(self.stderr, "rb") as stream:
            text = stream.read().decode()
        self.channel.close()
        self.cut_lifeline()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), text


def test_a_worker_that_is_not_needed_leaves_without_a_word():
    child = Child()
    child.channel.close()
    assert child.end() == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="the system can't choose the signal")
def test_a_worker_in_native_code_that_lets_no_thread_run_ends_with_its_kernel(monkeypatch):
    native = ctypes.PyDLL(None)
    monkeypatch.setattr(mains, "_obey", lambda _: native.sleep(600 + 0 * os.write(2, b"up")))
    child = Child()
    assert os.read(child.stderr, 2) == b"up"
    child.cut_lifeline()
    assert child.end() == (-signal.SIGKILL, "")


def test_a_command_that_is_none_is_reported_as_a_failure():
    child = Child()
    child.channel.send("do something")
    failed = child.channel.receive(LIMIT_S)
    assert failed.type_name == "AttributeError"
    child.channel.send(events.Leave())
    assert child.end() == (0, "")


def test_a_probe_is_answered_with_the_environment_that_was_given(monkeypatch):
    monkeypatch.setattr(
        "notebook_launcher.worker.inspection.devices", lambda: (events.DeviceRow(os.environ["SEEN"], 1),)
    )
    child = Child()
    child.channel.send(events.Probe({"SEEN": "cuda"}))
    assert child.channel.receive(LIMIT_S).rows[0].kind == "cuda"
    assert child.end() == (0, "")


def test_a_worker_whose_command_is_on_its_way_does_not_rehearse(monkeypatch):
    monkeypatch.setattr(mains, "_GRACE_S", LIMIT_S)
    monkeypatch.setattr(mains, "rehearse", lambda: os._exit(9))
    monkeypatch.setattr("notebook_launcher.worker.inspection.devices", tuple)
    child = Child()
    child.channel.send(events.Probe({}))
    assert child.channel.receive(LIMIT_S).rows == ()
    assert child.end() == (0, "")


def test_a_probe_that_fails_tells_why_in_its_output(monkeypatch):
    monkeypatch.setattr("notebook_launcher.worker.inspection.devices", lambda: 1 / 0)
    child = Child()
    child.channel.send(events.Probe({}))
    with pytest.raises(ChannelClosedError):
        child.channel.receive(LIMIT_S)
    code, text = child.end()
    assert code == 1
    assert "ZeroDivisionError" in text


def test_a_worker_that_waits_ignores_the_kernels_ctrl_c_and_leads_its_own_group():
    child = Child()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG)
    while os.getpgid(child.pid) != child.pid:  # it takes its first steps
        os.sched_yield()
    while not _ignores_interrupts(child.pid):
        os.sched_yield()
    os.kill(child.pid, signal.SIGINT)
    child.channel.close()
    assert child.end() == (0, "")


def _ignores_interrupts(pid):
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = [line.split()[1] for line in status if line.startswith("SigIgn")]
    return bool(int(mask, 16) & 1 << (signal.SIGINT - 1))


def test_main_is_empty_and_has_no_file(monkeypatch):
    seen = {}

    def obey(_):
        import sys

        module = sys.modules["__main__"]
        seen["names"] = sorted(name for name in vars(module) if not name.startswith("_"))
        raise RuntimeError(f"file: {getattr(module, '__file__', None)}, names: {seen['names']}")

    monkeypatch.setattr(mains, "_obey", obey)
    code, text = Child().end()
    assert code == 1
    assert "file: None, names: " in text
    assert "test_" not in text.partition("names: ")[2]
