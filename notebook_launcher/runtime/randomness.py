"""Random numbers of a rank's own for what it reads in its main process, as loader workers have them.

Without this, ranks with the same seed would draw the same augmentations; and a sample that draws more than another
would part the streams that the training draws from, which the ranks may rely on to be equal.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from notebook_launcher.core import config
from notebook_launcher.runtime import checks
from notebook_launcher.runtime.gather import broadcast_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Stream:
    """The random numbers of a library, or of a kind of device: how to read their state, set it, and seed them."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    seed: Callable[[int], object]


_At = tuple[Stream, Any]  # random numbers, and a state of theirs
_known: dict[str, Stream] = {}  # by device type, of kinds that torch has no module of


def know(device_type: str, stream: Stream) -> None:
    """From now on ``device_type`` has random numbers, which torch itself knows nothing of."""
    _known[device_type] = stream


class OwnStream:
    """Calls a function with random numbers that begin at ``seed``, and leaves the process's own where they were.

    Torch's on the CPU, Python's and numpy's. A generator that the function has not drawn from the first time is left
    alone from then on: reading plain data costs nothing, and numpy's, the slowest to exchange, is paid for by those who
    use it.
    """

    def __init__(self, function: Callable[..., Any], seed: int) -> None:
        """``seed`` is below 2**64."""
        self._function = function
        self._seed = seed
        self._generators: list[_At] | None = None  # those that the function draws from, and where it has left them

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        if self._generators == []:
            return self._function(*args)
        before = self._seeded() if self._generators is None else self._generators
        outside = [(stream, stream.read()) for stream, _ in before]
        _write(before)
        try:
            return self._function(*args)
        finally:
            after = [(stream, stream.read()) for stream, _ in before]
            _write(outside)
            if self._generators is None:
                pairs = zip(after, before, strict=True)
                after = [now for now, first in pairs if _comparable(now[1]) != _comparable(first[1])]
            self._generators = after

    def _seeded(self) -> list[_At]:
        """All generators, at the seed; the process's own stay where they are."""
        outside, streams = snapshot(), _streams().values()
        for stream in streams:
            stream.seed(self._seed)
        seeded = [(stream, stream.read()) for stream in streams]
        restore(outside)
        return seeded


def _write(states: Iterable[_At]) -> None:
    for stream, state in states:
        stream.write(state)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:  # noqa: FBT001, FBT002
    """Seed Python's, numpy's and torch's random numbers, on every device.

    ``device_specific`` adds the process's rank. ``deterministic`` has torch refuse operations whose result varies from
    run to run; on CUDA that needs the variable ``CUBLAS_WORKSPACE_CONFIG=:4096:8``. Raises ``ConfigError`` for a seed
    that is no whole number, or negative.
    """
    checks.flags(device_specific=device_specific, deterministic=deterministic)
    seed = checks.whole("seed", seed, of="a stream of random numbers", least=0)  # Python's takes -1 for 1
    if device_specific:
        grouped = dist.is_available() and dist.is_initialized()
        seed += dist.get_rank() if grouped else config.world().rank
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the stream that users draw from
    torch.manual_seed(seed)
    for stream in _known.values():
        stream.seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(mode=True)


def alike_among(twins: dist.ProcessGroup | None, device: torch.device) -> None:
    """Give the ranks of ``twins`` the random streams of the first; None: nobody is to draw what this rank draws."""
    if twins is not None:
        box: list[Any] = [snapshot(device)]
        dist.broadcast_object_list(box, group=twins, group_src=0)
        restore(box[0], device)


def equalize(names: Iterable[str], device: torch.device) -> None:
    """Give every rank the state that rank 0's random streams have: "torch", the CPU's, and that of ``device``'s type.

    Other names are passed over; samplers' generators are equal as it is.
    """
    for name in names:
        if name in {"torch", device.type}:
            stream = _streams(device)[name]
            stream.write(broadcast_object(stream.read()))


def snapshot(device: torch.device | None = None) -> dict[str, Any]:
    """This process's random streams by name: "torch", "python", "numpy", and the type of ``device``."""
    return {name: stream.read() for name, stream in _streams(device).items()}


def restore(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Set the random streams to ``state``, which has what ``snapshot`` has now; ``KeyError`` names what is missing."""
    for name, stream in _streams(device).items():
        stream.write(state[name])


def have_moved(state: dict[str, Any]) -> bool:
    """Whether a random number was drawn since ``state`` was taken."""
    return any(_comparable(stream.read()) != _comparable(state[name]) for name, stream in _streams().items())


def _streams(device: torch.device | None = None) -> dict[str, Stream]:
    legacy: Any = np.random  # the stream that users draw from
    found = {
        # torch.manual_seed would seed every device too
        "torch": Stream(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
        "python": Stream(random.getstate, random.setstate, random.seed),
        "numpy": Stream(
            functools.partial(legacy.get_state, legacy=False),  # of every kind of generator
            legacy.set_state,
            lambda number: legacy.seed(number % 2**32),
        ),
    }
    if device is not None and device.type in _known:
        found[device.type] = _known[device.type]
    elif device is not None and device.type != "cpu":
        module = torch.get_device_module(device)
        found[device.type] = Stream(module.get_rng_state, module.set_rng_state, module.manual_seed)
    return found


def _comparable(state: Any) -> bytes:
    # numpy's is a tuple or a dictionary, by generator, with an array in it.
    return pickle.dumps(state.tolist() if isinstance(state, torch.Tensor) else state)
