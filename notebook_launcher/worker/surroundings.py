"""A worker puts on the notebook's surroundings as they are now: environment, directory, import path, sources, seed."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import sources
from notebook_launcher.core.config import snapshot
from notebook_launcher.worker import at_import, collectives, xla

if TYPE_CHECKING:
    from notebook_launcher.core.events import Surroundings
    from notebook_launcher.core.world import World


def put_on(given: Surroundings, world: World) -> None:
    """Replace environment, directory, path and arguments by ``given``; then say who this rank is."""
    environment = {**given.environment, **world.environment()}
    environment["PYTHONUNBUFFERED"] = "1"  # what the function starts itself is heard as it comes, too
    if world.num_machines == 1:
        # Nothing may listen where another machine could connect; gloo and NCCL would take another interface.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        environment.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if world.device == "cuda":
        for name, value in collectives.recorder_settings().items():
            environment.setdefault(name, value)
    set_environment(environment)
    os.chdir(given.directory)
    sys.path[:] = given.path
    sys.argv[:] = given.argv
    sources.install(given.sources)
    torch = sys.modules.get("torch")
    if torch is not None and world.num_threads:
        torch.set_num_threads(world.num_threads)  # libgomp read OMP_NUM_THREADS when the fork server loaded it
    _seed(world.seed)


def without(*names: str) -> None:
    """Take variables out of the environment."""
    for name in names:
        os.environ.pop(name, None)


def set_environment(wanted: dict[str, str]) -> None:
    """Make the environment ``wanted``, by the differences only: each assignment is a call into the C library."""
    current = snapshot()
    for name in current.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if current.get(name) != value})


def use_device(world: World) -> None:
    """Make the rank's own accelerator the current one, so that captured tensors and plain ``.cuda()`` land there."""
    use = _USE.get(world.device)
    if use is not None:
        use(world)


def _use_current(world: World) -> None:
    import torch

    getattr(torch, world.device).set_device(world.local_rank)


_USE = {"cuda": _use_current, "xpu": _use_current, "tpu": xla.enter}  # by kind; the others have nothing to choose


def show_figures() -> None:
    """Show matplotlib figures that the function left open, as a cell's end does."""
    if "matplotlib_inline.backend_inline" in sys.modules:
        from IPython.core.interactiveshell import InteractiveShell

        if InteractiveShell.initialized():
            sys.modules["matplotlib_inline.backend_inline"].flush_figures()


def leave_process_groups() -> None:
    """Close this rank's connections, so that a rank that still waits for it gets an error instead of silence."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()  # a wrapped model that the function has left behind holds them too
    if distributed is not None:
        _shut_connections()


def _shut_connections() -> None:
    """End the TCP connections that are left, whoever holds them: sharded models keep their groups for good.

    Those of the rendezvous store stay, which may be served from here.
    """
    import psutil

    store = snapshot().get("MASTER_PORT")
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process().net_connections("tcp"):
            if one.raddr and store not in {str(one.laddr.port), str(one.raddr.port)}:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


_seeded_pid = 0  # the process whose generators have a seed of their own


def _seed(seed: int | None) -> None:
    """Seed the global generators, by None with a number that no other rank and no other launch has.

    Without that, all workers would go on from where the fork server's generators stood as it was loaded. A worker that
    has rehearsed has such a number already, and has drawn nothing since.
    """
    global _seeded_pid  # noqa: PLW0603 - the generators are the process's, too
    if seed is None and _seeded_pid == os.getpid():
        return
    _seeded_pid = os.getpid()
    random.seed(seed)
    # Those that are not loaded yet begin with what the system draws, and need no seed but a given one.
    for name, sow in (("numpy", _seed_numpy), ("torch", _seed_torch)):
        if seed is not None or name in sys.modules:
            at_import.once_loaded(name, partial(sow, seed))


def _seed_numpy(seed: int | None, numpy: Any) -> None:
    # The legacy generator is what user code draws from. By None it would be seeded too, at ten times the cost.
    numpy.random.seed(int.from_bytes(os.urandom(4), "big") if seed is None else seed % 2**32)


def _seed_torch(seed: int | None, torch: Any) -> None:
    torch.default_generator.seed() if seed is None else torch.manual_seed(seed)
