"""A worker's first instructions: its own process group, its streams, and the wait for a command."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import traceback
import types

from notebook_launcher.core import lifeline
from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.errors import ChannelClosedError
from notebook_launcher.core.events import Devices, Probe, RunThreads
from notebook_launcher.worker import orphans, streams
from notebook_launcher.worker.rehearsal import rehearse

_GRACE_S = 0.05  # a launch that asked for this worker sends its command by then


def main(channel: int, stdout: int, stderr: int, kernels_end: int) -> None:
    """Take the descriptors, wait for a command, carry it out, and leave by ``os._exit``; never returns."""
    code = 1
    try:
        os.setsid()  # the kernel's Ctrl-C reaches the kernel's group; workers hear of it through the ladder
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        streams.redirect(stdout, stderr)
        faulthandler.enable()
        orphans.adopt()
        lifeline.hold(kernels_end, signal.SIGKILL, -os.getpid())  # with all that is in its group
        os.close(kernels_end)
        _new_main_module()
        line = SocketChannel(socket.socket(fileno=channel))
        code = _obey(line)
    except ChannelClosedError:
        code = 0  # the kernel has gone, or needs this worker no more
    except BaseException:  # noqa: BLE001 - the last frame of the process
        traceback.print_exc()
    finally:
        streams.flush()
        # Interpreter exit after gloo sometimes aborts ("terminate called without an active exception").
        os._exit(code)


def _obey(line: SocketChannel) -> int:
    try:
        command = line.receive(_GRACE_S)
    except TimeoutError:  # nobody waits for this worker yet
        rehearse()
        command = line.receive(None)
    if isinstance(command, Probe):
        from notebook_launcher.worker.inspection import devices

        os.environ.clear()
        os.environ.update(command.environment)
        line.send(Devices(devices()))
        return 0
    if isinstance(command, RunThreads):
        from notebook_launcher.worker.rank_threads import Host

        return Host(line, command).run()
    from notebook_launcher.worker.serve import Server

    return Server(line).run(command)


def _new_main_module() -> None:
    """Give the process an empty ``__main__``, as a notebook's: no file, so children that are spawned don't run one."""
    from notebook_launcher.worker import shell

    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    shell.install(module)
    sys.modules["__main__"] = module
