"""The worker's standard streams, in a child: descriptors 1 and 2 are pipes, and all text goes there."""

from __future__ import annotations

import os
import sys
import threading
import types

from notebook_launcher.worker import streams


def written(function):
    """(stdout, stderr) of a child whose streams are redirected before it calls ``function``."""
    pipes = [os.pipe() for _ in range(2)]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            streams.redirect(pipes[0][1], pipes[1][1])
            function()
            code = 0
        finally:
            streams.flush()
            os._exit(code)
    texts = []
    for reader, writer in pipes:
        os.close(writer)
        with os.fdopen(reader, "rb") as end:
            texts.append(end.read().decode())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, texts
    return tuple(texts)


def test_python_and_c_write_to_the_pipes():
    def write():
        print("python")  # noqa: T201
        sys.stderr.write("error\n")
        sys.__stdout__.write("original\n")
        os.write(1, b"C\n")
        os.system("echo child; echo child error >&2")  # noqa: S605 - a child's output is what is tested

    assert written(write) == ("python\noriginal\nC\nchild\n", "error\nchild error\n")


def test_a_lone_surrogate_is_printed_escaped():
    assert written(lambda: sys.stdout.write("name \udcff\n")) == ("name \\udcff\n", "")


def test_standard_input_is_empty():
    assert written(lambda: sys.stdout.write(f"{sys.stdin.read()!r} {os.read(0, 10)!r}")) == ("'' b''", "")


def test_a_line_is_there_at_once_and_half_a_line_at_the_flush():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    pid = os.fork()
    if pid == 0:
        try:
            streams.redirect(writer, os.dup(writer))
            sys.stdout.write("a line\nhalf")
            os.write(1, b"|")
            streams.flush()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"a line\nhalf|"  # a write that ends a line takes all with it
    os.close(reader)
    os.close(writer)


def test_streams_that_the_user_replaced_do_not_break_the_flush(monkeypatch):
    class Closed:
        def flush(self):
            raise ValueError("I/O operation on closed file")

    for broken in (None, types.SimpleNamespace(), Closed(), types.SimpleNamespace(flush=lambda: 1 / 0)):
        monkeypatch.setattr(sys, "stdout", broken)
        streams.flush()


def test_a_fork_while_another_thread_flushes_leaves_the_child_able_to_flush(monkeypatch):
    inside, go_on = threading.Event(), threading.Event()

    def slow():
        inside.set()
        go_on.wait(10)

    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(flush=slow))
    thread = threading.Thread(target=streams.flush)
    thread.start()
    assert inside.wait(10)
    timer = threading.Timer(0.05, go_on.set)  # the fork waits for the flush's end
    timer.start()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if streams._flush_lock.acquire(timeout=1) else 1)
    thread.join(10)
    timer.join(10)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert streams._flush_lock.acquire(timeout=1)
    streams._flush_lock.release()
