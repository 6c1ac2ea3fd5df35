"""Where the ranks of a run meet: a store that rank 0 serves on a socket which the launcher has held since before.

``init_process_group`` with its default ``env://`` finds it by ``MASTER_ADDR`` and ``MASTER_PORT``. A function that
names another address or port, as PyTorch's own tutorial does, meets there as under any launcher.
"""

from __future__ import annotations

import _thread
import importlib
import select
import sys
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

from notebook_launcher.core.config import snapshot
from notebook_launcher.worker import at_import

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher.core.world import World

_TORCHS = "torch.distributed.rendezvous"
_stores: list[Any] = []  # kept for the process's life: the others are its clients


def serve_when_asked(world: World, listening: int) -> None:
    """Host the store on the socket ``listening`` once somebody knocks: who joins no process group pays nothing."""
    _thread.start_new_thread(_serve, (world, listening))


def _serve(world: World, listening: int) -> None:
    poller = select.poll()
    poller.register(listening, select.POLLIN)
    poller.poll()
    distributed = importlib.import_module("torch.distributed")
    _stores.append(
        distributed.TCPStore(
            world.main_address,
            world.main_port,
            world.world_size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    )


def lead_to(world: World) -> None:
    """Make ``env://`` lead every rank of this run, rank 0 too, to the store as a client.

    torch's variable ``TORCHELASTIC_USE_AGENT_STORE`` says the same for any address, and then a function that picks its
    own port waits for a server that nobody is. It also gives a second ``init_process_group`` the first one's keys.
    """
    if "torch" in sys.modules:
        importlib.import_module(_TORCHS)  # now, which a worker that stands by has done in time
    at_import.once_loaded(_TORCHS, partial(_enter, world))


def _enter(world: World, module: Any) -> None:
    handlers = module._rendezvous_handlers  # noqa: SLF001 - "env" is taken, so that registering it is refused
    own = handlers["env"]
    handlers["env"] = Meeting(world, own.otherwise if isinstance(own, Meeting) else own)  # a rehearsal's goes


class Meeting:
    """A rendezvous handler as torch wants it: it yields (store, rank, world size)."""

    def __init__(self, world: World, otherwise: Callable[..., Iterator[Any]]) -> None:
        """For a rank of ``world``; ``otherwise`` is torch's own handler."""
        self.otherwise = otherwise
        self._world = world
        self._num_joined = 0

    def __call__(self, url: str, timeout: Any = None, **options: Any) -> Iterator[Any]:
        """Meet as ``url`` and the environment say."""
        variables = snapshot()
        address, port = self._world.main_address, self._world.main_port
        limit = {} if timeout is None else {"timeout": timeout}
        if (variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")) != (address, str(port)):
            yield from self.otherwise(url, **limit, **options)
            return
        asked = parse_qs(urlparse(url).query)
        rank, size = (
            int(asked[name][0]) if name in asked else int(variables[name.upper()]) for name in ("rank", "world_size")
        )
        distributed = importlib.import_module("torch.distributed")
        store = distributed.TCPStore(address, port, size, is_master=False, **limit)
        self._num_joined += 1  # the same on all ranks, since joining is collective
        yield distributed.PrefixStore(f"group_{self._num_joined}", store), rank, size
        raise RuntimeError("this process group can't meet again; destroy it and make another")
