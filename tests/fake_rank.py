"""A worker without a process: the launcher's ends are real, and a test plays the rank at the other ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

from notebook_launcher.core import events, pickling
from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.config import LaunchConfig
from notebook_launcher.core.forking import STATUS
from notebook_launcher.launcher.forkserver import worker_lines
from notebook_launcher.launcher.output import OutputLog
from notebook_launcher.launcher.record import Record
from notebook_launcher.launcher.run import Run
from notebook_launcher.worker import failure

LIMIT_S = 10
_NO_PROCESS = 1 << 22  # past the largest process id that Linux gives out


class FakeRank:
    """One rank. ``worker`` is what a supervisor is given; the methods do what a real rank's process would."""

    def __init__(self, rank=0, *, pid=True):
        """With ``pid`` False the process is yet to be forked."""
        self.rank = rank
        self.pid = _NO_PROCESS + rank
        self.signals = []
        self.on_signal = {}  # signal -> what the rank does when it comes
        self.worker, request = worker_lines()
        self.worker.signal = self._signal
        self.channel = SocketChannel(socket.socket(fileno=request.channel.detach()))
        self._ends = {name: getattr(request, name).detach() for name in ("stdout", "stderr", "status")}
        if pid:
            self.born()

    def _signal(self, number):
        self.signals.append(signal.Signals(number))
        act = self.on_signal.get(number)
        if act is not None:
            act()
        elif number == signal.SIGKILL:
            self.exits(-number)

    def born(self):
        """The server has forked the process."""
        os.write(self._ends["status"], STATUS.pack(self.pid))

    def starts(self):
        self.channel.send(events.Started(self.pid, "host", 0))
        return self

    def writes(self, data, stream="stdout"):
        os.write(self._ends[stream], data)

    def reports(self, event):
        self.channel.send(event)

    def returns(self, value=None):
        self.channel.send(events.Finished(pickling.dumps_result(value)))
        return self

    def raises(self, error):
        self.channel.send(failure.describe(error))
        return self

    def hears(self):
        """The next command."""
        return self.channel.receive(LIMIT_S)

    def closes_streams(self):
        for name in ("stdout", "stderr"):
            if name in self._ends:
                os.close(self._ends.pop(name))

    def loses_server(self):
        """Whoever reaps the process has died: nobody will tell its exit code."""
        os.close(self._ends.pop("status"))

    def exits(self, code=0):
        """The process is gone."""
        self.closes_streams()
        self.channel.abandon()  # as the system does it: a shutdown first could be seen before what was unread is lost
        if "status" in self._ends:
            with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
                os.write(self._ends["status"], STATUS.pack(code))
            self.loses_server()
        return self


class RecordingSink:
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def opened(self, view):
        self.told.append(("opened", view.status))

    def changed(self, view):
        self.told.append(("changed", view.status))

    def displayed(self, rank, display):
        self.told.append(("displayed", rank, display.data))

    def closed(self, view):
        self.told.append(("closed", view.status, view.summary))

    def named(self, what):
        return [each for each in self.told if each[0] == what]


def record(num_ranks):
    return Record(f"{num_ranks} fakes", [], OutputLog(num_ranks), num_ranks)


def run_of(*attempts, sinks=(), after=lambda: None, **options):
    """A run that has begun: its first attempt is of the ranks ``attempts[0]``, a restart of ``attempts[1]``."""
    kept = record(len(attempts[0]))
    left = iter(attempts)
    run = Run("fake", LaunchConfig(**options), kept, sinks, lambda _: [rank.worker for rank in next(left)])
    run.begin(after)
    return run
