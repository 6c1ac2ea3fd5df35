"""Runs for the monitor's tests: a record as a launch makes it, and what a test makes happen to it."""

from __future__ import annotations

import socket

from notebook_launcher.core import events
from notebook_launcher.launcher.output import OutputLog
from notebook_launcher.launcher.record import Record
from notebook_launcher.launcher.state import RunState

HOST = socket.gethostname()


class Watched:
    """A run of some ranks that have started."""

    def __init__(self, num_ranks=2, *, folder=None, started=True):
        self.output = OutputLog(num_ranks, folder=folder)
        self.record = Record(f"{num_ranks} processes · CPU", ["a note"], self.output, num_ranks)
        self.state = self.record.state = RunState(num_ranks)
        for rank in range(num_ranks if started else 0):
            self.record.started(rank, events.Started(100 + rank, HOST, 0))
            self.state.started(rank)
        self.record.status = "running" if started else "starting"

    def writes(self, rank, text, stream="stdout"):
        self.output.feed(rank, stream, text.encode())
        return self

    def logs(self, rank, step, **values):
        one = {name: [value] for name, value in values.items()}
        self.record.add_metrics(rank, events.Metrics(one, [step], [0.0]))
        return self

    def steps(self, rank, *loops):
        """``loops``: (done, total, name, elapsed_s) each, the outermost first."""
        for level, loop in enumerate(loops):
            self.record.came(rank, events.Steps(*loop, level))
        return self

    def raises(self, rank, type_name="ValueError", message="bad batch"):
        self.state.raised(rank, events.Failed(None, type_name, message, "", 1), 1.0)
        return self

    def ends(self, status="finished", error=""):
        for rank, one in enumerate(self.state.ranks):
            if not one.ended:
                self.state.returned(rank, 2.0)
            self.state.exited(rank, 0, 2.0)
        self.output.close()
        self.record.end(status, f"{status} in 2.0 s", error)
        return self
