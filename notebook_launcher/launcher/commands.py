"""The ``Run`` commands of a launch: each rank's world, the notebook's surroundings as they are now, the rendezvous."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import socket
import sys
from typing import TYPE_CHECKING

from notebook_launcher.core.config import snapshot
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.events import Run, Surroundings
from notebook_launcher.core.shared_memory import FileDescriptor, pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from notebook_launcher.core.shared_memory import Packed
    from notebook_launcher.core.world import World

_BACKLOG = 1024  # every rank may connect before rank 0 begins to serve


def pack_surroundings(sources: Mapping[str, str], environment: Mapping[str, str]) -> Packed:
    """The notebook as it is now, packed once for all ranks; ``environment`` is added to the notebook's own.

    Raises ``ConfigError`` where the working directory is gone.
    """
    try:
        directory = os.getcwd()  # noqa: PTH109 - a string is what travels
    except FileNotFoundError:
        raise ConfigError(
            "the notebook's working directory has been removed, and the ranks would begin in it: os.chdir() to one "
            "that is there."
        ) from None
    given = Surroundings(
        environment={**snapshot(), **environment},
        directory=directory,
        path=list(sys.path),
        argv=list(sys.argv),
        sources=dict(sources),
    )
    return pack(pickle.dumps(given, protocol=5), ())


@contextlib.contextmanager
def commands(worlds: Sequence[World], surroundings: Packed, payload: Packed, attempt: int) -> Iterator[list[Run]]:
    """One command a rank, with a fresh rendezvous: a socket that listens from now on, so that no port is raced for.

    The machine of rank 0 makes it, on a port that the system picks where none was asked for. Raises ``ConfigError``.
    """
    if worlds[0].machine_rank != 0:
        yield [Run(dataclasses.replace(world, attempt=attempt), surroundings, payload) for world in worlds]
        return
    with _listen(worlds[0].main_address, worlds[0].main_port) as listening:
        port = listening.getsockname()[1]
        store = FileDescriptor(os.dup(listening.fileno()))
        yield [
            Run(
                dataclasses.replace(world, attempt=attempt, main_port=port),
                surroundings,
                payload,
                store if world.rank == 0 else None,
            )
            for world in worlds
        ]


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"main_process_ip={address!r}, main_process_port={port}: can't listen there ({error.strerror}). "
            "Give an address of this machine and a free port."
        ) from error
    listening.listen(_BACKLOG)
    return listening
