"""What samplers and data sets of the user's own keep in their attributes: random numbers, and counts of their passes.

A new process makes them anew, so that the order of a second epoch would be that of the first.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

# By type: how the state of a generator is read, and how it is set.
_STREAMS: dict[type, tuple[Any, Any]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}
_COUNTS = (int, float, str)


class Attributes:
    """Those of a ``holder``, that change as it is read."""

    def __init__(self, holder: Any) -> None:
        """Before it was read. Who has ``set_epoch`` is told the epoch, and needs no count; torch's own have none."""
        self._holder = {} if type(holder).__module__.startswith("torch.") else getattr(holder, "__dict__", {})
        self._has_counts = not hasattr(holder, "set_epoch")
        self._first = self._counts()

    def state(self) -> dict[str, Any]:
        """For ``load``: the counts that are other than at first, and every generator's state."""
        counts = {name: value for name, value in self._counts().items() if value != self._first.get(name)}
        streams = {name: _STREAMS[type(one)][0](one) for name, one in self._holder.items() if type(one) in _STREAMS}
        return {"counts": counts, "streams": streams}

    def load(self, state: dict[str, Any]) -> None:
        """Make the holder what it was."""
        self._holder.update(self._first | state["counts"])
        for name, saved in state["streams"].items():
            if type(one := self._holder.get(name)) in _STREAMS:
                _STREAMS[type(one)][1](one, saved)

    def _counts(self) -> dict[str, Any]:
        return {name: value for name, value in self._holder.items() if self._has_counts and type(value) in _COUNTS}
