"""Random numbers of a rank's own for what it reads in its main process, as loader workers have them.

Without this, ranks with the same seed would draw the same augmentations; and a sample that draws more than another
would part the streams that the training draws from, which the ranks may rely on to be equal.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass
class _Generator:
    """A generator of the process: how to read, set and seed it; and where the stream of its own has come to."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    seed: Callable[[int], object]
    inside: Any = None


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


def _generators() -> list[_Generator]:
    def seed_torch(number: int) -> None:
        torch.default_generator.manual_seed(number % 2**63)  # torch.manual_seed would seed every device too

    found = [
        _Generator(torch.get_rng_state, torch.set_rng_state, seed_torch),
        _Generator(random.getstate, random.setstate, random.seed),
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        legacy = numpy.random
        found.append(_Generator(legacy.get_state, legacy.set_state, lambda number: legacy.seed(number % 2**32)))
    return found


def _comparable(state: Any) -> bytes:
    # numpy's is a tuple or a dictionary, by generator, with an array in it.
    return pickle.dumps(state.tolist() if isinstance(state, torch.Tensor) else state)
