"""How far a loader has come, so that after ``load_state`` its next pass is the rest of the one that was interrupted.

The rest is exact: the pass begins with the random numbers that the interrupted one began with, the batches that were
handed out are read again and dropped, and then the random numbers are again those of the moment of saving.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.runtime import randomness
from notebook_launcher.runtime.attributes import Attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from notebook_launcher.runtime.accumulation import Iteration
    from notebook_launcher.runtime.sampling import Epochs

State = dict[str, Any]


class Beginning(NamedTuple):
    """How a pass begins."""

    start: int  # number of the first batch to hand out
    is_exact: bool  # those before it are read and dropped, not passed over
    bring: Callable[[], object] | None  # brings the data set itself there; None: it is read up to there, or passed over
    is_at_end: bool  # it has nothing left there
    drawn: dict[int, Any]  # indices that had been drawn ahead, by number, not to be drawn otherwise now


class Place:
    """One loader's. ``pending`` is what the next pass goes on from, None where it begins an epoch."""

    def __init__(
        self, epochs: Epochs, dataset: Any, generators: Iterable[torch.Generator | None], *, in_process: bool
    ) -> None:
        """``generators`` are those that samplers and loader draw from.

        ``in_process``: batches of data are followed, as they are read in this process. A ``dataset`` with a state of
        its own then goes on from there; what was handed out is not read again.
        """
        self.pending: State | None = None
        self._epochs = epochs
        self._dataset: Any = dataset if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict") else None
        self._generators = [generator for generator in generators if generator is not None]
        own = epochs.samplers if self._dataset is not None else [*epochs.samplers, dataset]
        self._attributes = [Attributes(one) for one in own]
        self._is_own = in_process and self._dataset is not None
        self._beginning: State = {}  # of the latest pass
        self._reading: _Reading | None = None
        self._ahead: tuple[int, list[Any]] = (0, [])

    def state(
        self, latest: Iteration | None, num_parts: int, drawn_ahead: Callable[[int], dict[int, Any]] | None
    ) -> State:
        """For ``load``. ``latest`` is the loader's latest pass; a step takes ``num_parts`` of the data's batches.

        ``drawn_ahead`` tells the indices that were drawn after so many. Of a pass that was left, ``break`` begins the
        next epoch; an exception that is being handled has interrupted it, and it goes on.
        """
        if latest is None or (latest.is_last and not latest.is_open):
            return self.pending or self._now()
        is_over = latest.is_last or latest.was_left
        place = {"batches": latest.index, "num_parts": num_parts, "is_last": latest.is_last, "is_over": is_over}
        read: State = {"ahead": [], "drawn": drawn_ahead(latest.index * num_parts) if drawn_ahead else {}}
        if self._reading is not None and not latest.is_last:  # after its last batch a data set may have begun anew
            read |= self._reading.state(latest.index * num_parts)
        now = self._now()
        return now | place | {"beginning": self._beginning, "is_own": self._is_own, "there": now["dataset"]} | read

    def fits(self, state: State) -> bool:
        """Whether ``state`` is that of a loader with as many generators."""
        return len(state["generators"]) == len(self._generators)

    def load(self, state: State, num_parts: int, num_samples: int, *, is_exact: bool = True) -> None:
        """Go on from ``state``; not ``is_exact`` where the data had another number of shares.

        A step is now ``num_samples``, over all shares.
        """
        self._set(state, dataset="beginning" not in state)
        self.pending = None
        is_exact = is_exact and state.get("is_exact", True)  # False: loaded so before, and saved before it went on
        if "beginning" in state:
            was, now = (state["num_parts"], num_parts) if is_exact else (state["samples"], num_samples)
            num_batches = state["batches"] * was // now
            self.pending = state | {"batches": num_batches, "num_parts": num_parts, "is_exact": is_exact}

    @property
    def num_handed_out(self) -> int:
        """Batches of the epoch that the next pass goes on with; 0 where it begins one."""
        return 0 if self.pending is None or self._is_over(self.pending, None) else int(self.pending["batches"])

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; one that is not the interrupted one begins at its beginning."""
        if self.pending is not None:
            is_that = self.pending["beginning"]["epoch"] == epoch
            self.pending = self.pending | {"is_named": True} if is_that else None
        self._epochs.set_epoch(epoch)

    @staticmethod
    def _is_over(pending: State, skip: int | None) -> bool:
        """Whether all was handed out, or the pass was left, and the next one begins the next epoch.

        Training code finds its epoch by the steps that it has made. Who names the epoch that is over, or skips all of
        it, gets its rest: nothing.
        """
        return pending["is_over"] and not pending.get("is_named") and (skip is None or skip < pending["batches"])

    @contextlib.contextmanager
    def beginning(self, skip: int | None, num_parts: int) -> Iterator[Beginning]:
        """A context in which a pass begins as the interrupted one did: at ``skip``, or where that was if it is None."""
        pending, self.pending = self.pending, None
        if pending is not None and self._is_over(pending, skip):
            self._set(pending, dataset=True)
            pending = None
        here: State = {}
        now = {} if pending is None else randomness.snapshot()  # numpy's takes its time
        was_set = self._epochs.was_set
        start, bring = skip or 0, None
        self._reading, self._ahead = None, (0, [])
        if pending is not None:
            here = self._now()  # what draws from the same generators may have been read since load_state
            self._set(pending["beginning"], dataset=True)
            randomness.restore(pending["beginning"]["random"])
            start = pending["batches"] if skip is None else skip
            if pending["is_exact"] and start == pending["batches"]:
                self._ahead = start * num_parts, pending["ahead"]
                if self._is_own and pending["is_own"]:
                    bring = functools.partial(self._dataset.load_state_dict, pending["there"])
        self._beginning = self._now() | {"random": randomness.snapshot()}
        is_exact = pending is not None and pending["is_exact"] and skip is None
        is_at_end = pending is not None and bring is not None and pending["is_last"]
        drawn = pending.get("drawn", {}) if is_exact and pending is not None else {}  # none in an older checkpoint
        yield Beginning(start, is_exact, bring, is_at_end, drawn)
        if pending is not None:
            randomness.restore(now)
            self._set(here | self._epochs.state(), dataset=False)
            self._epochs.was_set |= was_set

    def follow(self, batches: Iterator[Any], num_before: int, num_parts: int) -> Iterator[Any]:
        """``batches`` of data, the first of which has the number ``num_before``, read in this process."""
        self._reading = _Reading(batches, self._dataset, num_before, num_parts, self._ahead)
        return self._reading

    def _now(self) -> State:
        generators = [generator.get_state() for generator in self._generators]
        attributes = [one.state() for one in self._attributes]
        now = {"generators": generators, "attributes": attributes, "dataset": _state_of(self._dataset)}
        return self._epochs.state() | now

    def _set(self, state: State, *, dataset: bool) -> None:
        self._epochs.load(state)
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.set_state(saved)
        for attributes, saved in zip(self._attributes, state.get("attributes", ()), strict=False):
            attributes.load(saved)
        if dataset and self._dataset is not None and state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])


class _Reading:
    """Batches of data, some of them read ahead: from which random numbers, and where the data set was after each."""

    def __init__(
        self, batches: Iterator[Any], dataset: Any, num_before: int, num_parts: int, ahead: tuple[int, list[Any]]
    ) -> None:
        """``ahead``: a batch's number, and the random numbers to read it and those after it from."""
        self._batches = batches
        self._dataset = dataset
        self._num_read = num_before
        self._notes: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=2 * num_parts + 1)
        self._ahead = {ahead[0] + offset: random for offset, random in enumerate(ahead[1]) if random is not None}
        self._draws: bool | None = None  # whether reading draws random numbers, as the first batch shows

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        random = self._ahead.pop(self._num_read, None)
        outside = randomness.snapshot() if random is not None else None
        if random is not None:
            randomness.restore(random)
        before = randomness.snapshot() if self._draws is not False else None
        try:
            batch = next(self._batches)
            if self._draws is None:
                self._draws = randomness.have_moved(before or {})
        finally:
            if outside is not None:
                randomness.restore(outside)
        self._num_read += 1
        self._notes.append((before if self._draws else None, _state_of(self._dataset)))
        return batch

    def state(self, num_handed_out: int) -> State:
        """The data set after the batches that were handed out, and what those read ahead were read from."""
        num_ahead = max(0, self._num_read - num_handed_out)
        notes = list(self._notes)
        behind = notes[: len(notes) - num_ahead]
        state = {"ahead": [before for before, _ in notes[len(behind) :]]}
        return state | {"there": behind[-1][1]} if behind else state


def _state_of(dataset: Any) -> Any:
    return None if dataset is None else copy.deepcopy(dataset.state_dict())
