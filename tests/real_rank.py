"""One rank on a real worker: a cell that runs there, the events that it sends, and its output."""

from __future__ import annotations

import os
import select
import time

from notebook_launcher.core import events, pickling
from notebook_launcher.core.config import LaunchConfig
from notebook_launcher.core.tasks import Cell
from notebook_launcher.launcher.commands import commands, pack_surroundings
from notebook_launcher.launcher.plan import make_plan

LIMIT_S = 30
# Enough for a worker that waits, and loaded in a fraction of the time that torch takes.
WITHOUT_TORCH = ("notebook_launcher.core.tasks", "notebook_launcher.worker.serve", "notebook_launcher.worker.shell")


class RealRank:
    """Runs ``source`` as rank 0 of a run of one."""

    def __init__(self, worker, source, *, environment=None, sources=None, **options):
        self.worker = worker
        self.events = []
        plan = make_plan(LaunchConfig(device="cpu", num_processes=1, **options), tuple, environment={})
        given = pack_surroundings(sources or {}, environment or {})
        with commands(plan.worlds, given, pickling.dumps(Cell(source, "<test>")), 0) as (command,):
            worker.channel.send(command)

    def send(self, command):
        self.worker.channel.send(command)

    def until(self, kind):
        """The next event of that kind; those before it are kept in ``events``."""
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            event = self.worker.channel.receive(max(0, deadline_s - time.monotonic()))
            self.events.append(event)
            if isinstance(event, kind):
                return event

    def result(self):
        """What the cell's last expression gave, once the rank has reported."""
        event = self.until((events.Finished, events.Failed))
        assert isinstance(event, events.Finished), event.traceback_text
        assert event.result is not None, event.problem
        return pickling.loads(event.result)

    def leave(self):
        """Let the rank go; returns its exit code."""
        self.send(events.Leave())
        return exit_code(self.worker)

    def read(self, stream="stdout", *, until=b"\n"):
        """What the rank wrote, up to and with ``until``."""
        return read(self.worker, stream, until=until)


def read(worker, stream="stdout", *, until=None):
    """What a worker wrote, up to ``until``, or to the stream's end where that is None."""
    number, data = worker.streams[stream], b""
    while until is None or until not in data:
        ready, _, _ = select.select([number], [], [], LIMIT_S)
        assert ready, data
        piece = os.read(number, 65536)
        if not piece:
            break
        data += piece
    return data.decode()


def pid_of(worker):
    """The worker's pid, once its server has told it: without, no signal reaches it."""
    while not worker.read_status() and worker.pid is None:
        ready, _, _ = select.select([worker.status], [], [], LIMIT_S)
        assert ready, "nobody tells its pid"
    return worker.pid


def exit_code(worker):
    """The worker's exit code, once its status says so; the launcher's ends are closed then."""
    while not worker.read_status():
        ready, _, _ = select.select([worker.status], [], [], LIMIT_S)
        assert ready, "the worker goes on"
    code = worker.exit_code
    worker.close()
    return code
