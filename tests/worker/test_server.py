"""The fork server's own parts, in this process; servers as processes are in tests/launcher/test_forkserver.py."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.errors import ChannelClosedError
from notebook_launcher.core.forking import STATUS, Loading
from notebook_launcher.launcher.forkserver import worker_lines
from notebook_launcher.worker import server as servers

LIMIT_S = 10


@pytest.fixture
def channels():
    ours, theirs = SocketChannel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def server(channels):
    wake = socket.socketpair()
    for end in wake:
        end.settimeout(0)
    lifeline, kernels_end = os.pipe()
    yield servers._Server(channels[1], wake, lifeline)
    for number in (lifeline, kernels_end):
        os.close(number)
    for end in wake:
        end.close()


def test_loading_says_what_it_loads_and_what_it_could_not(channels, tmp_path, monkeypatch):
    ours, theirs = channels
    (tmp_path / "leaves.py").write_text("raise SystemExit('no')")
    monkeypatch.syspath_prepend(str(tmp_path))
    problems = servers._load(["json", "no_such_module", "leaves"], theirs)
    assert [ours.receive(LIMIT_S) for _ in range(3)] == [Loading("json"), Loading("no_such_module"), Loading("leaves")]
    assert problems == [
        "no_such_module: ModuleNotFoundError: No module named 'no_such_module'",
        "leaves: SystemExit: no",
    ]


def test_loading_ends_with_the_kernel(channels):
    ours, theirs = channels
    ours.close()
    with pytest.raises(ChannelClosedError):
        servers._load(["json"], theirs)


def test_warnings_of_what_is_loaded_are_nobodys(channels, tmp_path, monkeypatch):
    (tmp_path / "warns.py").write_text("import warnings\nwarnings.warn('old', DeprecationWarning)")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert servers._load(["warns"], channels[1]) == []
    assert "warns" in sys.modules
    monkeypatch.delitem(sys.modules, "warns")


def test_a_process_that_the_system_refuses_is_told_and_the_server_goes_on(channels, server, monkeypatch):
    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(servers.os, "fork", refuse)
    worker, request = worker_lines()
    channels[0].send(request)
    del request
    server.serve_one()
    assert worker.read_status()
    assert worker.pid is None
    assert worker.orphaned
    assert worker.why_never_made() == "the system refused another process"
    assert b"can't be forked: [Errno 11] Resource temporarily unavailable" in os.read(worker.streams["stderr"], 1000)
    worker.close()


def test_pid_and_exit_code_are_told(channels, server, monkeypatch):
    monkeypatch.setattr(servers._Server, "_become_worker", lambda *_: os._exit(5))
    worker, request = worker_lines()
    channels[0].send(request)
    del request
    server.serve_one()
    pid = STATUS.unpack(os.read(worker.status, STATUS.size))[0]
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    server._reap()
    assert STATUS.unpack(os.read(worker.status, STATUS.size))[0] == 5
    assert server._status == {}
    worker.close()


def test_killing_all_ends_workers_that_lead_no_group_yet(channels, server, monkeypatch):
    def wait_for_ever(*_):
        import time

        time.sleep(600)

    monkeypatch.setattr(servers._Server, "_become_worker", wait_for_ever)
    worker, request = worker_lines()
    channels[0].send(request)
    del request
    server.serve_one()
    server.kill_all()
    assert server._status == {}
    assert worker.read_status()
    assert worker.exit_code == -9
    worker.close()
