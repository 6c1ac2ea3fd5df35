"""In which order samples are read: the same on every rank, new in each epoch, repeatable; and each rank's share."""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils import data as torch_data

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import gather, sharding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from notebook_launcher.runtime.process import Process

_SHUFFLERS = (torch_data.RandomSampler, torch_data.SubsetRandomSampler, torch_data.WeightedRandomSampler)
_SAME_EVERYWHERE = (torch_data.SequentialSampler, torch_data.BatchSampler, *_SHUFFLERS)  # given the same generator
_MAX_SEED = 2**63 - 1
_MAX_AHEAD = 2**16  # items of a sampler that has no more are all drawn before the first is used
_AHEAD = 64  # of one that has, or may go on for ever
_PLAIN = (int, float, str, tuple, list, torch.Tensor, np.generic)

Notes = collections.deque[sharding.Round[Any]]


def samplers_of(base: Any) -> list[Any]:
    """A sampler and those that it draws from: a batch sampler's sampler, and so on."""
    found: list[Any] = []
    while base is not None and len(found) < _MAX_DEPTH:
        found.append(base)
        inner = getattr(base, "sampler", None)
        base = getattr(base, "batch_sampler", None) if inner is None else inner
    return found


_MAX_DEPTH = 5  # samplers that refer to one another in a ring


def is_sharded(base: Any, process: Process) -> bool:
    """Whether a sampler gives each rank its own share already; ``ConfigError`` where ``process`` is to get another."""
    for sampler in samplers_of(base):
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):  # as a DistributedSampler
            found, wanted = (sampler.num_replicas, sampler.rank), (process.num_processes, process.rank)
            if process.shares and found != wanted:
                raise ConfigError(
                    f"the {type(sampler).__name__} on rank {process.world.rank} reads share {found[1]} of {found[0]}, "
                    f"and ranks that hold parts of one model must get the same batches, here share {wanted[1]} of "
                    f"{wanted[0]}: leave the sampler out, prepare shares the data itself"
                )
            return True
    return False


class Epochs:
    """Counts the epochs of one loader, and gives each its order.

    A shuffling sampler without a generator of its own is lent one, seeded by (seed, epoch). The seed is rank 0's next
    random number when the first epoch begins, where torch draws it too: so ``shuffle=True``, seeded as in plain torch,
    reads the same first epoch, and any number of processes reads the same order in all of them. A sampler with a
    generator keeps it; the ranks' are made equal.
    """

    def __init__(
        self, base: Any, dataset: Any, num_ranks: int, *, seed: int | None = None, seed_is_torchs: bool = False
    ) -> None:
        """``base`` is the loader's batch sampler, or its sampler.

        ``seed`` takes the place of the one that is drawn; ``seed_is_torchs`` takes the one that torch was seeded with,
        whatever was drawn since.
        """
        self.samplers = samplers = samplers_of(base)
        self.epoch = 0  # the one that begins next
        self.seed = seed
        self._seed_is_torchs = seed_is_torchs
        self._num_ranks = num_ranks
        self._lent = [sampler for sampler in samplers if isinstance(sampler, _SHUFFLERS) and sampler.generator is None]
        self._own = [
            (sampler.generator, sampler.generator.initial_seed())
            for sampler in samplers
            if isinstance(getattr(sampler, "generator", None), torch.Generator)
        ]
        self._listeners = [thing for thing in (*samplers, dataset) if hasattr(thing, "set_epoch")]
        self._told = 0
        self.was_set = False

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one, for samplers, batch sampler and data set alike."""
        self.epoch = epoch
        self.was_set = True
        self._tell(epoch, self._listeners)

    @property
    def generators(self) -> list[torch.Generator]:
        """Those that the samplers were given."""
        return [generator for generator, _ in self._own]

    def state(self) -> dict[str, Any]:
        """What ``load`` takes: which epoch begins next, and what its order comes from."""
        return {"epoch": self.epoch, "seed": self.seed, "was_set": self.was_set}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.epoch, self.seed, self.was_set = state["epoch"], state["seed"], state["was_set"]

    def announce(self) -> None:
        """Every rank calls this before it asks its samplers for the next epoch's order; again does no harm."""
        # Whoever sets a sampler's epoch without us has taken over its count.
        listeners = [thing for thing in self._listeners if getattr(thing, "epoch", self._told) == self._told]
        self._tell(self.epoch, listeners)
        for generator, first_seed in self._own:
            if self.was_set:
                generator.manual_seed((first_seed + self.epoch) % _MAX_SEED)
            if self._num_ranks > 1:
                generator.set_state(gather.broadcast_object(generator.get_state()))

    def begin(self) -> None:
        """Start the epoch that was announced: every rank calls this, and then draws its first index."""
        epoch = self.epoch
        self.epoch += 1
        if not self._lent:
            return
        if self.seed is None:
            drawn = torch.initial_seed() if self._seed_is_torchs else random_int()
            self.seed = gather.broadcast_object(drawn) if self._num_ranks > 1 else drawn
        for sampler in self._lent:
            sampler.generator = torch.Generator().manual_seed((self.seed + epoch) % _MAX_SEED)

    def started(self) -> None:
        """The first index was drawn: take back what was lent, the sampler is the user's."""
        for sampler in self._lent:
            sampler.generator = None

    def _tell(self, epoch: int, listeners: Iterable[Any]) -> None:
        for listener in listeners:
            listener.set_epoch(epoch)
        self._told = epoch


def random_int(generator: torch.Generator | None = None) -> int:
    """One random number, drawn as a ``DataLoader`` draws the seed of its workers."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def agreed(stream: Iterator[Any], base: Any) -> Iterator[Any]:
    """What ``base`` yields, the same on every rank: rank 0's ``stream``, where those of the ranks may differ."""
    if all(type(sampler) in _SAME_EVERYWHERE for sampler in samplers_of(base)):
        return stream
    try:
        num_items = len(base) + 1
    except TypeError:
        num_items = _AHEAD
    return _from_first_rank(stream, num_items if num_items <= _MAX_AHEAD else _AHEAD)


def _from_first_rank(stream: Iterator[Any], num_items: int) -> Iterator[Any]:
    """Rank 0's items, ``num_items`` in a message.

    Every rank draws its own too and drops them: so the random numbers that are drawn, and those that come after them,
    are on each rank the ones of plain torch.
    """
    rank = dist.get_rank()
    while True:
        try:
            drawn = list(itertools.islice(stream, num_items))
        except BaseException:
            if rank == 0:
                gather.broadcast_object(None)  # the others wait for it
            raise
        items = gather.broadcast_object(drawn if rank == 0 else None)
        if items is None:
            return
        yield from items
        if len(items) < num_items:
            return


def _is_plain(item: Any) -> bool:
    """Whether a checkpoint can hold an index, or a list of them."""
    return isinstance(item, _PLAIN) and all(map(_is_plain, item if isinstance(item, tuple | list) else ()))


class After:
    """What was ``drawn`` but for the first ``num_skipped``, which are drawn, at the latest, with the first that is."""

    def __init__(self, drawn: Iterator[Any], notes: Notes, num_skipped: int) -> None:
        """``notes`` are of what is drawn."""
        self._drawn, self._notes, self._num_skipped = drawn, notes, num_skipped

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._drawn)

    def skip(self) -> None:
        """Draw what is skipped, and no more: a sampler may count what it gives."""
        for _ in itertools.islice(self._drawn, self._num_skipped):
            self._notes.popleft()
        self._num_skipped = 0


class SharedSampler:
    """Draws from the loader's own (batch) sampler and yields this rank's share, a batch (or an index) at a time.

    ``notes`` holds, for the pass begun last, what is to be known of each batch that was drawn and not yet handed out.
    """

    def __init__(
        self, base: Any, plan: sharding.Plan, rank: int, epochs: Epochs, *, is_agreed: bool, num_prefetched: int = 0
    ) -> None:
        """``base`` gives lists of indices, or single ones where the loader does not batch.

        ``is_agreed``: every rank draws, and takes what rank 0 has drawn. ``num_prefetched``: batches of this rank's
        share that the loader's workers are given before they are asked for.
        """
        self.base = base
        self.plan = plan
        self.epochs = epochs
        self.notes: Notes = collections.deque()
        self.num_skipped = 0  # batches that passes begun now leave out at their beginning
        self.known: dict[int, Any] = {}  # what passes begun now yield instead of what ``base`` does, by number
        self._rank = rank
        self._is_agreed = is_agreed
        self._num_drawn = 0
        self._drawn: collections.deque[Any] = collections.deque(maxlen=(num_prefetched + 3) * plan.num_parts + _AHEAD)

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass; the epoch begins when its first index is drawn."""
        self.notes = collections.deque()
        self.epochs.announce()
        # Some samplers draw their order here, others at the first index: each where it does in plain torch.
        batches = self._followed(iter(self.base))
        if self._is_agreed:
            batches = agreed(batches, self.base)
        draw = self._draw_alone if self.plan.num_ranks == 1 else self._draw
        drawn = draw(batches, self.notes)
        return After(drawn, self.notes, self.num_skipped) if self.num_skipped else drawn

    def __len__(self) -> int:
        """Batches of this rank's share; raises ``TypeError`` where the sampler has no length."""
        return sharding.num_rounds(len(self.base), self.plan, self._rank, self.num_samples)

    @property
    def num_samples(self) -> int | None:
        """How many samples a pass has, over all ranks; None where only the batch sampler itself could tell."""
        return len(self.base.sampler) if type(self.base) is torch_data.BatchSampler else None  # type: ignore[arg-type]

    def drawn_ahead(self, num_before: int) -> dict[int, Any]:
        """What was drawn of the pass begun last, by number, but for the first ``num_before`` and what isn't plain.

        A sampler may draw from random numbers that training draws from meanwhile, and then not the same once more.
        """
        first = self._num_drawn - len(self._drawn)
        found = {number: item for number, item in enumerate(self._drawn, first) if number >= num_before}
        return {number: item for number, item in found.items() if _is_plain(item)}

    def _followed(self, stream: Iterator[Any]) -> Iterator[Any]:
        self._drawn.clear()
        for number, drawn in enumerate(stream):
            self._num_drawn = number + 1
            self._drawn.append(self.known.get(number, drawn))
            yield self._drawn[-1]

    def __getattr__(self, name: str) -> Any:
        """The loader's own sampler has the rest: ``sampler``, ``batch_size``, ``drop_last``."""
        if name == "base":
            raise AttributeError(name)
        return getattr(self.base, name)

    def _begun(self, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``, once the epoch has begun and the first of them was drawn."""
        self.epochs.begin()
        first = list(itertools.islice(batches, 1))
        self.epochs.started()
        return itertools.chain(first, batches)

    def _draw_alone(self, batches: Iterator[Any], notes: Notes) -> Iterator[Any]:
        """As ``_draw`` where there is nobody to share with: nothing is dealt out, and only the end is to be known."""
        for batch, ahead in itertools.pairwise(itertools.chain(self._begun(batches), [sharding.END])):
            is_last = ahead is sharding.END
            notes.append(sharding.alone(batch, sharding.INDICES, is_last=True) if is_last else sharding.GOES_ON)
            yield batch

    def _draw(self, batches: Iterator[Any], notes: Notes) -> Iterator[Any]:
        for round_ in sharding.rounds(self._begun(batches), self.plan, sharding.INDICES):
            if self._rank >= len(round_.parts):
                return
            notes.append(round_)
            yield round_.parts[self._rank]
