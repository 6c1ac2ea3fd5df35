"""What samplers and data sets of the user's own keep in their attributes: random numbers, and counts of their passes.

A new process makes them anew, so that the order of a second epoch would be that of the first.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_Kind = tuple[type, Any, Any, Any]
# Of generators: the type, how its state is read and set, and how one is made for a state.
_KINDS: dict[str, _Kind] = {
    "torch": (
        torch.Generator,
        lambda generator: (str(generator.device), generator.get_state()),
        lambda generator, state: generator.set_state(state[1]),
        lambda state: torch.Generator(state[0]),
    ),
    "python": (random.Random, random.Random.getstate, random.Random.setstate, lambda _: random.Random()),  # noqa: S311
    "numpy's old": (
        np.random.RandomState,
        lambda generator: generator.get_state(legacy=False),
        np.random.RandomState.set_state,
        lambda state: np.random.RandomState(getattr(np.random, state["bit_generator"])()),
    ),
    "numpy": (
        np.random.Generator,
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
        lambda state: np.random.Generator(getattr(np.random, state["bit_generator"])()),
    ),
}
_COUNTS = (int, float, str)


class Attributes:
    """Those of a ``holder``, that change as it is read."""

    def __init__(self, holder: Any) -> None:
        """Before it was read. Who has ``set_epoch`` is told its ``epoch``; torch's own have no counts."""
        self._holder = {} if type(holder).__module__.startswith("torch.") else getattr(holder, "__dict__", {})
        self._type = type(holder)
        self._told = "epoch" if hasattr(holder, "set_epoch") else ""
        self._first = self._counts()
        self._first_sizes = self._sizes()
        self._unmade = {name for name, value in self._holder.items() if value is None}

    def state(self) -> dict[str, Any]:
        """For ``load``: the counts that are other than at first, and every generator's state."""
        counts: dict[str, Any] | None
        counts = {name: value for name, value in self._counts().items() if value != self._first.get(name)}
        if self._sizes() != self._first_sizes:
            counts = None  # they may count what it has read and cached, which is not kept
        streams = self._streams().items()
        return {"counts": counts, "streams": {name: (kind, _KINDS[kind][1](one)) for name, (kind, one) in streams}}

    def load(self, state: dict[str, Any]) -> None:
        """Make the holder what it was."""
        if state["counts"] is not None and self._sizes() == self._first_sizes:
            self._holder.update(self._first | state["counts"])
        later = [name for name in self._streams() if name not in state["streams"]]
        for name in later:  # had not been made
            del self._holder[name]
        self._holder.update(dict.fromkeys(self._unmade.intersection(later)))
        for name, (kind, saved) in state["streams"].items():
            type_, _, write, make = _KINDS[kind]
            if self._holder.get(name) is None:  # is made where it is first needed
                self._holder[name] = make(saved)
            if type(self._holder[name]) is type_:
                write(self._holder[name], saved)

    def _counts(self) -> dict[str, Any]:
        counts = {name: one for name, one in self._holder.items() if type(one) in _COUNTS or isinstance(one, np.number)}
        counts.pop(self._told, None)
        return counts

    def _sizes(self) -> dict[str, int]:
        """How much is in the lists and dictionaries of data that are read by index."""
        held = self._holder if hasattr(self._type, "__getitem__") else {}
        return {name: len(one) for name, one in held.items() if isinstance(one, list | dict | set)}

    def _streams(self) -> dict[str, tuple[str, Any]]:
        kinds = {type_: kind for kind, (type_, *_) in _KINDS.items()}
        return {name: (kinds[type(one)], one) for name, one in self._holder.items() if type(one) in kinds}
