"""A rehearsal: a worker that stands by goes once through what a command will make it do.

A forked process copies each page at its first write to it, and looking at a Python object is a write. The rehearsal
takes those copies while nobody waits; they are what most of a first line's time would be spent on.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
import types

from notebook_launcher.core import events, pickling
from notebook_launcher.core.channel import SocketChannel
from notebook_launcher.core.config import snapshot
from notebook_launcher.core.shared_memory import pack
from notebook_launcher.core.tasks import Call
from notebook_launcher.core.world import World
from notebook_launcher.worker import serve, surroundings

_NUM_KNOWN = 16  # ranks


def rehearse() -> None:
    """Send a command to this process itself and carry it out; its environment stays until the next command."""
    one, other = SocketChannel.pair()
    one.send(_command())
    serve.Server(other).rehearse(other.receive(0))
    one.receive(0)
    one.close()
    other.close()


def prepare() -> None:
    """Rehearse in the fork server, with what every worker's rehearsal would do alike; the environment is put back."""
    before = snapshot()
    rehearse()
    # The C library keeps all NAME=value that it ever saw, and need not file those of the first ranks again.
    for number in range(_NUM_KNOWN):
        num_ranks = number + 1
        world = World(number, num_ranks, number, num_ranks, num_threads=num_ranks)
        os.environ.update(world.environment())
    surroundings.set_environment(before)


@functools.cache
def _command() -> events.Run:
    """The command, made once in the fork server: pickling a function is what workers need not do."""
    torch = sys.modules.get("torch")
    world = World(device="cpu", num_threads=None if torch is None else torch.get_num_threads(), launched=True)
    given = events.Surroundings(snapshot(), os.getcwd(), list(sys.path), list(sys.argv), {})  # noqa: PTH109 - a string travels
    function = types.FunctionType((lambda: None).__code__, sys.modules["__main__"].__dict__)  # as from a cell
    return events.Run(world, pack(pickle.dumps(given, protocol=5), ()), pickling.dumps(Call(function, (), {})))
