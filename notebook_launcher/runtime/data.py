"""Prepared loaders: each rank's share of a ``DataLoader``, on its device, with the end of the data known in time."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from notebook_launcher.runtime import dispatch, sharding, trees
from notebook_launcher.runtime.randomness import OwnStream
from notebook_launcher.runtime.sampling import Epochs, Notes, SharedSampler, is_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher.runtime.accumulation import Iteration, Progress
    from notebook_launcher.runtime.process import Process


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """How loaders are shared among the processes."""

    split_batches: bool = False
    even_batches: bool = True
    dispatch_batches: bool | None = None  # None: for data that can only be read in order
    non_blocking: bool = False


@dataclasses.dataclass
class _Share:
    """What a prepared loader has beside what it was before."""

    progress: Progress
    plan: sharding.Plan
    epochs: Epochs
    rank: int  # in the plan: 0 for a loader that is not divided
    process: Process
    sampler: SharedSampler | None  # None: an iterable data set, shared as batches of data
    dispatches: bool
    device: torch.device | None  # None: batches stay where they are
    non_blocking: bool
    generator: torch.Generator | None  # the loader's own, for the seeds of its workers
    latest: Iteration | None = None


class PreparedLoader(DataLoader[Any]):
    """A loader of the type that was given to ``prepare``, which yields this rank's batches on this rank's device."""

    _share: _Share

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """This rank's batches of the next epoch."""
        share = self._share
        self._seed_workers()
        batches, next_round = self._batches()
        iteration = share.progress.begin(self, self._known_length())
        share.latest = iteration
        advance, device, rank = share.progress.advance, share.device, share.rank
        is_divided = share.plan.num_ranks == share.process.num_processes
        try:
            for batch in batches:
                round_ = next_round()
                if is_divided:
                    advance(iteration, round_.is_last[rank], round_.sizes, round_.counts)
                else:
                    advance(iteration, round_.is_last[rank], (), ())
                yield batch if device is None else trees.move(batch, device, non_blocking=share.non_blocking)
        finally:
            share.progress.end(iteration)

    def __len__(self) -> int:
        """Batches that this rank gets; raises ``TypeError`` where the data has no length."""
        share = self._share
        if share.sampler is not None:
            return len(share.sampler)
        return sharding.num_rounds(super().__len__(), share.plan, share.rank)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` (from 0) the next one: its order is always the same. Without this, epochs count themselves."""
        self._share.epochs.set_epoch(epoch)

    @property
    def total_batch_size(self) -> int:
        """Samples that all processes together read in one step."""
        size = self._share.plan.batch_size or 1
        return size if self._share.plan.split else size * self._share.process.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set, over all processes."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch handed out last was the last of its pass."""
        return self._share.latest is not None and self._share.latest.is_last

    @property
    def remainder(self) -> int:
        """Real samples, over all processes, in the batches handed out last; -1 before the end of a pass."""
        latest = self._share.latest
        return sum(latest.counts) if latest is not None and latest.is_last else -1

    def _known_length(self) -> int | None:
        # An iterable data set may promise a length that it does not keep.
        if self._share.sampler is None:
            return None
        try:
            return len(self)
        except TypeError:
            return None

    def _seed_workers(self) -> None:
        """Give each rank's loader workers random numbers of their own; rank 0's are those of plain torch."""
        share = self._share
        if not share.process.rank or not self.num_workers:
            return
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=share.generator).item())
        self.generator = torch.Generator().manual_seed((drawn + share.process.rank) % 2**63)

    def _separate_streams(self, batches: Any) -> None:
        """Give what each rank reads in its main process random numbers of its own; alone, they are plain torch's."""
        share = self._share
        fetcher = getattr(batches, "_dataset_fetcher", None)
        if share.process.num_processes > 1 and fetcher is not None:
            seed = batches._base_seed + share.process.rank  # noqa: SLF001 - as torch makes its workers' seeds
            fetcher.fetch = OwnStream(fetcher.fetch, seed)

    def _batches(self) -> tuple[Iterator[Any], Callable[[], sharding.Round[Any]]]:
        """The batches, and what to ask for the round that each belongs to."""
        sampler = self._share.sampler
        if sampler is not None:
            batches = super().__iter__()
            self._separate_streams(batches)
            return batches, sampler.notes.popleft
        notes: Notes = collections.deque()
        return self._data_batches(super().__iter__, notes), notes.popleft

    def _data_batches(self, read: Callable[[], Iterator[Any]], notes: Notes) -> Iterator[Any]:
        share = self._share
        share.epochs.announce()
        share.epochs.begin()
        source = iter(()) if share.dispatches and share.rank else read()
        rounds = sharding.rounds(source, share.plan, sharding.DATA)
        pairs = dispatch.received(rounds, share.rank) if share.dispatches else dispatch.own(rounds, share.rank)
        for batch, round_ in pairs:
            notes.append(round_)
            yield batch


def prepare(
    loader: DataLoader[Any], process: Process, progress: Progress, options: DataOptions, *, place: bool = True
) -> PreparedLoader:
    """This rank's share of ``loader``, which is left as it is. One that is prepared already is given back.

    ``place`` False leaves batches on the CPU. A loader whose sampler gives each rank its own share already (a
    ``DistributedSampler``) is not divided again. Raises ``ConfigError`` for a batch size that can't be split.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    iterable = isinstance(loader.dataset, IterableDataset)
    base = None if iterable else loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    num_ranks = 1 if is_sharded(base) else process.num_processes
    rank = process.rank if num_ranks > 1 else 0
    plan = _plan(loader, num_ranks, options)
    epochs = Epochs(base, loader.dataset, process.num_processes)
    sampler = None if iterable else SharedSampler(base, plan, rank, epochs)
    dispatches = options.dispatch_batches if options.dispatch_batches is not None else iterable
    share = _Share(
        progress=progress,
        plan=plan,
        epochs=epochs,
        rank=rank,
        process=process,
        sampler=sampler,
        dispatches=iterable and dispatches and num_ranks > 1,
        device=process.device if place and process.device.type != "cpu" else None,
        non_blocking=options.non_blocking,
        generator=loader.generator,
    )
    return _as_prepared(loader, share)


def _plan(loader: DataLoader[Any], num_ranks: int, options: DataOptions) -> sharding.Plan:
    batch_size = loader.batch_size
    drop_last = loader.drop_last
    if batch_size is None and loader.batch_sampler is not None:  # one of the user's own
        batch_size = getattr(loader.batch_sampler, "batch_size", None)
        drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
    return sharding.Plan(
        num_ranks, batch_size, drop_last=drop_last, even=options.even_batches, split=options.split_batches
    )


def _as_prepared(loader: DataLoader[Any], share: _Share) -> PreparedLoader:
    """A twin of ``loader``, of its own class, that draws its indices from ``share``."""
    kind = type(loader)
    prepared_kind: Any = PreparedLoader if kind is DataLoader else type(kind.__name__, (PreparedLoader, kind), {})
    prepared: PreparedLoader = prepared_kind.__new__(prepared_kind)
    # Past DataLoader.__setattr__, which allows none of this after construction.
    prepared.__dict__.update(copy.copy(loader.__dict__), _share=share, _iterator=None)
    if share.sampler is not None:
        place = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        prepared.__dict__[place] = share.sampler
    return prepared
