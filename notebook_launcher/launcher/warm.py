"""What this kernel keeps warm: one fork server, workers standing by, and what is known of the machine's devices."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import config
from notebook_launcher.core.errors import ChannelClosedError, EngineError
from notebook_launcher.core.events import DeviceRow, Probe
from notebook_launcher.launcher.forkserver import ForkServer, LocalWorker
from notebook_launcher.launcher.plan import DEFAULT_ON_CPU

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # a rank's first optimizer would import it, for a second
    "notebook_launcher.core.tasks",
    "notebook_launcher.core.torch_pickling",
    "notebook_launcher.worker.serve",
    "notebook_launcher.worker.shell",
    "notebook_launcher.runtime.accelerator",
)
_PROBE_TIMEOUT_S = 120.0
_LOOK_S = 0.25  # how often whoever waits for an answer sees to the worker
# Read by libraries while they load, so a change needs a new server.
_READ_AT_LOAD = (
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "KMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "LD_",
    "MALLOC_",
    "TORCH_LOGS",
    "PYTORCH_",
)
_ONLY_WHERE_ASKED = ("torch_xla",)  # it replaces functions of torch's, clip_grad_norm_ for one
# What decides which devices a process sees.
_VISIBILITY = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("PJRT_DEVICE", "CPU_NUM_DEVICES"),
)


class _Warm:
    """The state, behind one lock: launches may come from several threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.probing = threading.Lock()  # apart: a look takes seconds, and a launch on the CPU needs none
        self.server: ForkServer | None = None
        self.settings: list[tuple[str, str]] = []  # those of the environment that it has read
        self.retired: list[ForkServer] = []  # replaced while runs of theirs went on
        self.standing_by: list[LocalWorker] = []
        self.devices: dict[tuple[str | None, ...], tuple[DeviceRow, ...]] = {}


_warm = _Warm()


def get_ready() -> None:
    """Do in the background what the first launch would wait for; returns at once.

    That is: the fork server, the modules that a launch needs in the kernel, a look at the devices, and workers standing
    by, one for each accelerator, on the CPU as many as a launch takes by default.
    """
    server = _server(None)
    threading.Thread(target=_get_ready, args=(server,), name="notebook-launcher-warm-up", daemon=True).start()


def _get_ready(server: ForkServer) -> None:
    server.warm.wait()
    importlib.import_module("notebook_launcher.launcher.launch")
    try:
        num_devices = max((row.num_devices for row in devices() if row.kind != "cpu"), default=0)
    except EngineError:
        return  # the first launch meets it again, and says it where a person can see it
    with _warm.lock:
        if _warm.server is server and not _warm.standing_by:
            stand_by(num_devices or DEFAULT_ON_CPU)


def take(num_workers: int, *, fresh: bool = False, preload: Sequence[str] = ()) -> list[LocalWorker]:
    """``num_workers`` workers, those standing by first; returns at once. Raises ``EngineError``."""
    with _warm.lock:
        return _take(_server(tuple(preload)), num_workers, fresh=fresh)


def _take(server: ForkServer, num_workers: int, *, fresh: bool = False) -> list[LocalWorker]:
    taken: list[LocalWorker] = []
    if not fresh:
        ready = _alive_standing_by()
        taken, _warm.standing_by = ready[:num_workers], ready[num_workers:]
        for worker in taken:
            worker.signal(signal.SIGCONT)  # whoever has stopped it did not mean this launch
    try:
        while len(taken) < num_workers:
            taken.append(server.fork(fresh=fresh))
    except EngineError:
        for worker in taken:
            worker.close()
        raise
    return taken


def prepare(num_workers: int, preload: Sequence[str] = ()) -> None:
    """Let there be ``num_workers`` workers for the ``take`` that follows; returns at once."""
    with _warm.lock, contextlib.suppress(EngineError):  # take meets it again
        while len(_warm.standing_by) < num_workers:
            server = _server(tuple(preload))
            _warm.standing_by.append(server.fork())


def stand_by(num_workers: int) -> None:
    """Keep ``num_workers`` workers forked and waiting for the next launch; more than that are let go."""
    with _warm.lock:
        if _warm.server is None or not _warm.server.alive:
            return
        ready = _alive_standing_by()
        for extra in ready[num_workers:]:
            extra.close()
        _warm.standing_by = ready[:num_workers]
        with contextlib.suppress(EngineError):  # it has just died: the next launch meets it again, and starts another
            while len(_warm.standing_by) < num_workers:
                _warm.standing_by.append(_warm.server.fork())


def devices(added: Mapping[str, str] | None = None) -> tuple[DeviceRow, ...]:
    """What devices this machine has, as a worker sees them with the environment as it is now, and ``added``.

    Asked once for each setting of the variables that hide devices. Raises ``EngineError`` when no worker can answer.
    """
    environment = {**config.snapshot(), **(added or {})}
    key = tuple(environment.get(name) for name in _VISIBILITY)
    with _warm.probing:
        if key not in _warm.devices:
            _warm.devices[key] = _probe(environment)
        return _warm.devices[key]


def shutdown() -> None:
    """End the fork server, the workers standing by and whatever else the server has forked."""
    with _warm.lock:
        _discard_standing_by()
        for server in (*_warm.retired, _warm.server):
            if server is not None:
                server.close()
        _warm.server, _warm.retired = None, []


def _server(preload: tuple[str, ...] | None) -> ForkServer:
    """A server that has loaded ``preload`` at least, or where that is None, the one that is there."""
    environment = config.snapshot()
    settings = sorted((name, value) for name, value in environment.items() if name.startswith(_READ_AT_LOAD))
    with _warm.lock:
        current = _warm.server
        fits = current is not None and (preload is None or _fits(set(preload), set(current.wanted)))
        if current is not None and fits and current.alive and _warm.settings == settings:
            return current
        _retire()
        _warm.server, _warm.settings = ForkServer(_PRELOAD, preload or ()), settings
        return _warm.server


def _fits(preload: set[str], loaded: set[str]) -> bool:
    """Whether a server that has ``loaded`` is one for ``preload``."""
    return preload <= loaded and not (loaded - preload) & set(_ONLY_WHERE_ASKED)


def _retire() -> None:
    """Put the server away, and close those put away whose runs have ended."""
    _discard_standing_by()
    if _warm.server is not None:
        _warm.retired.append(_warm.server)
    for server in list(_warm.retired):
        if not server.busy:
            _warm.retired.remove(server)
            server.close()
    _warm.server = None


def _alive_standing_by() -> list[LocalWorker]:
    alive = []
    for worker in _warm.standing_by:
        if worker.gone:
            worker.close()
        else:
            alive.append(worker)
    return alive


def _discard_standing_by() -> None:
    for worker in _warm.standing_by:
        worker.close()
    _warm.standing_by = []


def _probe(environment: dict[str, str], *, again: bool = True) -> tuple[DeviceRow, ...]:
    with _warm.lock:
        (worker,) = _take(_server(None), 1, fresh=sys.platform == "darwin")  # Apple's GPU is not seen in a fork
    try:
        worker.channel.send(Probe(environment))
        answer = _answer(worker)
    except (ChannelClosedError, TimeoutError) as error:
        why = _why(worker, error)
        if again and worker.pid is None:  # the fork server has died under our hands: there will be another
            return _probe(environment, again=False)
        raise EngineError(f"no worker could look at this machine's devices: {why}") from error
    finally:
        worker.close()
    rows: tuple[DeviceRow, ...] = answer.rows
    return rows


def _answer(worker: LocalWorker) -> Any:
    deadline_s = time.monotonic() + _PROBE_TIMEOUT_S
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            return worker.channel.receive(min(_LOOK_S, left_s))
        except TimeoutError:
            if left_s <= _LOOK_S:
                raise
            worker.read_status()
            worker.see_to(hung_up=False)


def _why(worker: LocalWorker, error: Exception) -> str:
    """Why a worker that was asked something did not answer."""
    if isinstance(error, TimeoutError):
        return f"there was no answer for {_PROBE_TIMEOUT_S:g} s"
    worker.read_status()
    if worker.pid is None:
        return worker.why_never_made()
    with contextlib.suppress(BlockingIOError):
        if written := os.read(worker.streams["stderr"], 1 << 16):
            return written.decode(errors="replace").strip()
    return str(error)


def _forget() -> None:
    """In a process that the user's code forked from the kernel: the server and the workers are the kernel's."""
    global _warm  # noqa: PLW0603 - the module is the kernel's one instance
    _warm = _Warm()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
atexit.register(shutdown)
