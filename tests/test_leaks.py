"""The leak fixtures find what a test leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing import shared_memory

import leaks
import pytest

_SLEEPER = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def found() -> str:
    return "\n".join(leaks.left_behind(found.before, 0.05))


@pytest.fixture(autouse=True)
def _before():
    found.before = leaks.take()


def test_nothing_is_found_where_nothing_is_left():
    assert not found()


def test_environment(monkeypatch):
    monkeypatch.setenv("LEFT_BEHIND", "1")
    assert "LEFT_BEHIND is '1'" in found()


def test_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) in found()


def test_path(monkeypatch):
    monkeypatch.syspath_prepend("/left/behind")
    assert "/left/behind" in found()


def test_signal_disposition():
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert "SIGTERM" in found()
    signal.signal(signal.SIGTERM, previous)


def test_thread():
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="forgotten", daemon=True)
    thread.start()
    assert "'forgotten'" in found()
    leave.set()
    thread.join()


def test_process():
    with subprocess.Popen(_SLEEPER, stdin=subprocess.PIPE) as process:
        assert f"process {process.pid}" in found()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_orphan():
    reader, writer = os.pipe()
    code = f"import subprocess; print(subprocess.Popen({_SLEEPER!r}, stdin=0, stdout=-3, stderr=-3).pid)"
    done = subprocess.run([sys.executable, "-c", code], stdin=reader, capture_output=True, check=True, timeout=20)
    assert f"process {int(done.stdout)}" in found()
    os.close(writer)
    os.close(reader)


def test_socket():
    with socket.create_server(("127.0.0.1", 0)):
        assert "socket:" in found()


def test_file_and_descriptor():
    with tempfile.NamedTemporaryFile() as file:
        assert "open descriptor" in found()
        assert f"\n{file.name}" in found()


def test_folder():
    with tempfile.TemporaryDirectory(prefix="forgotten-") as folder:
        assert folder in found()


@pytest.mark.skipif(not leaks.SHARED_MEMORY.is_dir(), reason="shared memory has no folder here")
def test_shared_memory():
    memory = shared_memory.SharedMemory(create=True, size=64)
    name = memory.name.lstrip("/")
    memory.close()
    assert name in found()
    memory.unlink()


def test_put_back_undoes_what_can_be_undone(tmp_path):
    with subprocess.Popen(_SLEEPER, stdin=subprocess.PIPE) as process:
        os.environ["LEFT_BEHIND"] = "1"
        os.chdir(tmp_path)
        sys.path.append("/left/behind")
        leaks.put_back(found.before)
        assert process.wait(10) == -signal.SIGKILL
    assert not found()
