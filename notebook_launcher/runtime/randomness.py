"""Random numbers of a rank's own for what it reads in its main process, as loader workers have them.

Without this, ranks with the same seed would draw the same augmentations; and a sample that draws more than another
would part the streams that the training draws from, which the ranks may rely on to be equal.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.core import config
from notebook_launcher.runtime.gather import broadcast_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclasses.dataclass
class _Generator:
    """A generator of the process: how to read, set and seed it; and where the stream of its own has come to."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    seed: Callable[[int], object]
    inside: Any = None


@dataclasses.dataclass(frozen=True)
class DeviceStream:
    """The random numbers of a kind of device: how to read their state, set it, and seed them."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    seed: Callable[[int], object]


_known: dict[str, DeviceStream] = {}  # by device type, of kinds that torch has no module of


def know(device_type: str, stream: DeviceStream) -> None:
    """From now on ``device_type`` has random numbers, which torch itself knows nothing of."""
    _known[device_type] = stream


def _stream(device: torch.device) -> DeviceStream:
    if device.type in _known:
        return _known[device.type]
    module = torch.get_device_module(device)
    return DeviceStream(module.get_rng_state, module.set_rng_state, module.manual_seed)


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
        self._generators: list[_Generator] | None = None  # those that the function draws from

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        if self._generators is None:
            return self._call_first(*args)
        if not self._generators:
            return self._function(*args)
        outside = [generator.read() for generator in self._generators]
        for generator in self._generators:
            generator.write(generator.inside)
        try:
            return self._function(*args)
        finally:
            for generator, state in zip(self._generators, outside, strict=True):
                generator.inside = generator.read()
                generator.write(state)

    def _call_first(self, *args: Any) -> Any:
        generators = _generators()
        outside = [generator.read() for generator in generators]
        for generator in generators:
            generator.seed(self._seed)
        before = [_comparable(generator.read()) for generator in generators]
        try:
            return self._function(*args)
        finally:
            for generator, state in zip(generators, outside, strict=True):
                generator.inside = generator.read()
                generator.write(state)
            self._generators = [
                generator
                for generator, first in zip(generators, before, strict=True)
                if _comparable(generator.inside) != first
            ]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:  # noqa: FBT001, FBT002
    """Seed Python's, numpy's and torch's random numbers, on every device.

    ``device_specific`` adds the process's rank. ``deterministic`` has torch refuse operations whose result varies from
    run to run; on CUDA that needs the variable ``CUBLAS_WORKSPACE_CONFIG=:4096:8``.
    """
    import numpy as np

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
        if name == "torch":
            torch.set_rng_state(broadcast_object(torch.get_rng_state()))
        elif name == device.type:
            stream = _stream(device)
            stream.write(broadcast_object(stream.read()))


def snapshot(device: torch.device | None = None) -> dict[str, Any]:
    """This process's random streams by name: "torch", "python", "numpy", and the type of ``device``."""
    state = {generator.name: generator.read() for generator in _generators()}
    if device is not None and device.type != "cpu":
        state[device.type] = _stream(device).read()
    return state


def restore(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Set the random streams to ``state``, which has what ``snapshot`` has now; ``KeyError`` names what is missing."""
    for generator in _generators():
        generator.write(state[generator.name])
    if device is not None and device.type != "cpu":
        _stream(device).write(state[device.type])


def have_moved(state: dict[str, Any]) -> bool:
    """Whether a random number was drawn since ``state`` was taken."""
    return any(_comparable(generator.read()) != _comparable(state[generator.name]) for generator in _generators())


def _generators() -> list[_Generator]:
    def seed_torch(number: int) -> None:
        torch.default_generator.manual_seed(number % 2**63)  # torch.manual_seed would seed every device too

    found = [
        _Generator("torch", torch.get_rng_state, torch.set_rng_state, seed_torch),
        _Generator("python", random.getstate, random.setstate, random.seed),
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        legacy = numpy.random
        seed_numpy = lambda number: legacy.seed(number % 2**32)  # noqa: E731
        read_numpy = functools.partial(legacy.get_state, legacy=False)  # of every kind of generator
        found.append(_Generator("numpy", read_numpy, legacy.set_state, seed_numpy))
    return found


def _comparable(state: Any) -> bytes:
    # numpy's is a tuple or a dictionary, by generator, with an array in it.
    return pickle.dumps(state.tolist() if isinstance(state, torch.Tensor) else state)
