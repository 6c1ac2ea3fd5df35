"""A rehearsal: a worker that stands by goes once through what a command will make it do.

A forked process copies each page at its first write to it, and looking at a Python object is a write. The rehearsal
takes those copies while nobody waits; they are what most of a first line's time would be spent on.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time

from notebook_launcher.core import events, pickling
from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.config import snapshot
from notebook_launcher.core.shared_memory import pack
from notebook_launcher.core.tasks import Call
from notebook_launcher.core.world import World
from notebook_launcher.worker import surroundings


def rehearse() -> None:
    """Send a command to this process itself, put it on, unpickle its payload and report; nothing is left of it."""
    before = snapshot()
    given = events.Surroundings(before, os.getcwd(), list(sys.path), list(sys.argv), {})  # noqa: PTH109 - a string travels
    payload = pickling.dumps(Call(time.monotonic_ns, (), {}))
    command = events.Run(World(launched=True), pack(pickle.dumps(given, protocol=5), ()), payload)
    one, other = SocketChannel.pair()
    one.send(command)
    received = other.receive(0)
    surroundings.put_on(pickle.loads(bytes(received.surroundings.parts[0])), received.world)
    pickling.loads(received.payload)()
    other.send(events.Started(os.getpid(), socket.gethostname(), time.monotonic_ns()))
    one.receive(0)
    one.close()
    other.close()
    surroundings.restore_environment(before)
