"""The fork server: it has torch and the worker's code loaded, uses neither, and forks a worker for each request.

It runs one thread and never touches a device, so what it forks holds no OpenMP pool and no CUDA context, whatever the
kernel has used. Python's own ``multiprocessing.forkserver`` is not it, for three reasons: it runs an unguarded script
again in each child, it lives on while any child does (so it outlives a killed kernel), and its preload list is shared
with whatever else in the kernel uses it.

The kernel holds the other end of the control channel. When the kernel dies, however it dies, the channel ends, and the
server kills the workers and what they have started, and leaves. The lifeline sees to it that it does: until there are
workers, its end kills the server, whatever a module does that is being loaded; later it wakes one that was stopped.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import logging
import multiprocessing.util
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from typing import Any

from notebook_launcher.core import lifeline
from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.errors import ChannelClosedError
from notebook_launcher.core.forking import STATUS, Fork, Loading, Warm
from notebook_launcher.worker import orphans, rehearsal, streams
from notebook_launcher.worker.huge_pages import collapse
from notebook_launcher.worker.main import main as worker_main

_IDLE_MS = 500
_LAST_S = 2.0  # how long the server's end waits for those of its workers
_LOOK_S = 0.002


def main(control: int, kernels_end: int, preload: list[str]) -> None:
    """Serve the control channel on descriptor ``control`` until the kernel hangs up; never returns.

    ``kernels_end`` is the reading end of the kernel's lifeline.
    """
    code = 1
    channel = SocketChannel(socket.socket(fileno=control))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # whoever started this may have blocked the very signals it lives by
    faulthandler.enable()  # a module that crashes while it is loaded is named
    wake_reader, wake_writer = socket.socketpair()
    for end in (wake_reader, wake_writer):
        end.setblocking(False)  # noqa: FBT003 - the method's own signature
    server = _Server(channel, (wake_reader, wake_writer), kernels_end)
    folders: list[str] = []
    try:
        held = lifeline.hold(kernels_end, signal.SIGKILL, os.getpid())
        problems = _load(preload, channel)
        folders = _forget_exits()
        _rehearse()
        gc.collect()
        gc.freeze()  # what is loaded stays on pages that the workers share
        server.adopt()
        if held >= 0:
            os.close(held)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
        channel.send(Warm(tuple(problems)))
        while True:
            server.serve_one()
    except ChannelClosedError:
        code = 0
    except BaseException:  # noqa: BLE001 - the last frame of the process: say it where the kernel can read it
        traceback.print_exc()
    finally:
        try:
            server.kill_all()
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os._exit(code)


def _load(preload: list[str], channel: SocketChannel) -> list[str]:
    problems = []
    for name in preload:
        channel.send(Loading(name))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - a module that can't load here may still load in a worker
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return problems


def _forget_exits() -> list[str]:
    """Drop what the loaded libraries want to do at the interpreter's end: workers run what is registered as they leave.

    torch would take itself apart, for 40 ms a worker. What the function registers, and temporary folders that it makes,
    come after this. Returns those that the libraries made (torch 2.9 makes one), for the server's own end.
    """
    finalizers: Any = weakref.finalize
    cleanup = tempfile.TemporaryDirectory._cleanup.__func__  # type: ignore[attr-defined]  # noqa: SLF001
    owed = list(finalizers._registry.values())  # noqa: SLF001
    folders = [one.args[0] for one in owed if getattr(one.func, "__func__", None) is cleanup]
    finalizers._registry.clear()  # noqa: SLF001 - there is no public way to any of this
    ends_children: Any = multiprocessing.util
    atexit._clear()  # noqa: SLF001
    for function in (logging.shutdown, ends_children._exit_function, finalizers._exitfunc):  # noqa: SLF001
        atexit.register(function)
    return folders


def _rehearse() -> None:
    """Do here once what each worker will do, so that the caches that it fills are on pages that the workers share."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            streams.buffer_c_by_lines()
            rehearsal.prepare()
    except Exception:  # noqa: BLE001 - a worker meets it again, and has a kernel to tell
        traceback.print_exc()


class _Server:
    def __init__(self, channel: SocketChannel, wake: tuple[socket.socket, socket.socket], kernels_end: int) -> None:
        self._channel = channel
        self._wake = wake
        self._kernels_end = kernels_end
        self._held = -1
        self._adopts = False
        self._own: set[int] = set()  # children that are no worker's: what the loaded modules have started
        self._collapsed = False
        self._status: dict[int, Any] = {}  # pid of a live worker -> its status pipe
        self._poller = select.poll()
        self._poller.register(channel.fileno(), select.POLLIN)
        self._poller.register(wake[0].fileno(), select.POLLIN)

    def adopt(self) -> None:
        """Become the parent of all that a worker leaves behind, to end it; and be woken for that, if need be."""
        self._held = lifeline.hold(self._kernels_end, signal.SIGCONT, os.getpid())
        self._own = orphans.children()
        self._adopts = orphans.adopt()

    def serve_one(self) -> None:
        """Wait for a request or a worker's end, and deal with what there is."""
        if not self._collapsed and not self._poller.poll(_IDLE_MS):
            collapse()  # now, when nobody waits for a fork: each one is cheaper from here on
            self._collapsed = True
        self._poller.poll()
        with contextlib.suppress(BlockingIOError):
            self._wake[0].recv(4096)
        self._reap()
        while True:
            try:
                request = self._channel.receive(0)
            except TimeoutError:
                return
            self._fork(request)

    def kill_all(self) -> None:
        """End every worker, with all that it started; returns when they are gone, or can't be waited for any longer."""
        deadline_s = time.monotonic() + _LAST_S
        while (self._status or self._strays()) and time.monotonic() < deadline_s:
            for pid in self._status:
                for kill in (os.killpg, os.kill):  # the group first; a worker just forked may not lead one yet
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)
            self._reap()

    def _reap(self) -> None:
        ended = [pid for pid in self._status if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        for pid in ended:
            # First what it left running in its group: once it is reaped, its number may be a stranger's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for pid in self._strays():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # one that takes longer is heard of by a signal; then come its own children
        for pid in ended:
            _, status = os.waitpid(pid, 0)
            pipe = self._status.pop(pid)
            with contextlib.suppress(OSError):
                os.write(pipe.fileno(), STATUS.pack(os.waitstatus_to_exitcode(status)))
            pipe.close()

    def _strays(self) -> set[int]:
        """What workers that have ended left behind: those that live have adopted theirs themselves."""
        return orphans.children() - self._own - self._status.keys() if self._adopts else set()

    def _fork(self, request: Fork) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a BLAS thread that handles fork itself is no danger
            try:
                pid = os.fork()
            except OSError as error:
                # Its status ends without a pid, so the kernel knows that it never was; the reason goes with its output.
                with contextlib.suppress(OSError):
                    os.write(request.stderr.fileno(), f"a process can't be forked: {error}\n".encode())
                return
        if pid == 0:
            self._become_worker(request)
        self._status[pid] = request.status
        with contextlib.suppress(OSError):  # the kernel has given up on it: its channel is closed, it will leave
            os.write(request.status.fileno(), STATUS.pack(pid))

    def _become_worker(self, request: Fork) -> None:
        """In the child: let go of all that is the server's, and start the worker; never returns."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.abandon()
            for end in self._wake:
                end.close()
            for pipe in (request.status, *self._status.values()):
                pipe.close()
            if self._held >= 0:
                os.close(self._held)
            descriptors = [item.detach() for item in (request.channel, request.stdout, request.stderr)]
            descriptors.append(self._kernels_end)
            if request.fresh:
                _execute_fresh(descriptors)
            worker_main(*descriptors)
        except BaseException:  # noqa: BLE001 - nothing above this frame belongs to the child
            traceback.print_exc()
        finally:
            os._exit(1)


def _execute_fresh(descriptors: list[int]) -> None:
    for number in descriptors:
        os.set_inheritable(number, True)  # noqa: FBT003 - the function's own signature
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from notebook_launcher.worker.main import main; "
        f"main(*{descriptors!r})"
    )
    os.execv(sys.executable, [sys.executable, "-P", "-c", code])  # noqa: S606 - no shell is wanted
