"""Prepared loaders: each rank's share of a ``DataLoader``, on its device, with the end of the data known in time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd import profiler
from torch.utils.data import DataLoader, IterableDataset, dataloader

from notebook_launcher.core import notices
from notebook_launcher.core.errors import CheckpointError, ConfigError
from notebook_launcher.runtime import dispatch, sharding, short_batches, trees
from notebook_launcher.runtime.places import Beginning, Place, State
from notebook_launcher.runtime.randomness import OwnStream, alike_among, equalize
from notebook_launcher.runtime.sampling import Epochs, SharedSampler, is_sharded, random_int

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from notebook_launcher.runtime.accumulation import Iteration, Progress
    from notebook_launcher.runtime.plugins import DataLoaderConfiguration
    from notebook_launcher.runtime.process import Process

_T = TypeVar("_T")
_TORCHS_OWN = (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter)  # noqa: SLF001


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
    non_blocking: bool
    generator: torch.Generator | None  # the loader's own, for the seeds of its workers
    place: Place  # how far it has come, for checkpoints
    device: torch.device | None = None  # None: batches stay where they are
    rng_types: Sequence[str] = ()  # random streams that each pass makes equal on all ranks
    latest: Iteration | None = None

    def moved(self, batch: Any, device: torch.device) -> Any:
        """The batch on ``device``."""
        put = self.process.backend.put
        return trees.move(batch, device, non_blocking=self.non_blocking) if put is None else put(batch)

    def follow(self, plan: sharding.Plan) -> None:
        """Share the next passes as ``plan`` says."""
        self.plan = plan
        if self.sampler is not None and not self.dispatches:
            self.sampler.plan = plan


class PreparedLoader(DataLoader[Any]):
    """A loader of the type that was given to ``prepare``, which yields this rank's batches on this rank's device."""

    _share: _Share
    _skip: int | None = None  # batches that passes leave out at their beginning; see skipping

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """This rank's batches of the next epoch; after ``load_state`` the rest of the one that was interrupted."""
        share = self._share
        with share.place.beginning(self._skip, share.plan.num_parts) as beginning:
            if share.rng_types:
                equalize(share.rng_types, share.process.device)
            alike_among(share.process.twins, share.process.device)
            self._seed_workers()
            batches = self._batches_from(beginning)
        if beginning.start and self._skip is None and share.process.world.rank == 0:
            batches = _trained_on(batches, beginning.start, share.progress)
        iteration = share.progress.begin(share, self._known_length())
        iteration.index = beginning.start
        share.latest = iteration
        advance, device, rank = share.progress.advance, share.device, share.rank
        is_divided = share.plan.num_ranks == share.process.num_processes
        try:
            for batch, (_, sizes, counts, is_last) in batches:
                if is_divided:
                    advance(iteration, is_last[rank], sizes, counts, True in is_last)
                else:
                    advance(iteration, is_last[rank], (), ())
                yield batch if device is None else share.moved(batch, device)
        finally:
            share.progress.end(iteration)

    def __len__(self) -> int:
        """Batches that this rank gets; raises ``TypeError`` where the data has no length."""
        share = self._share
        if share.sampler is not None and not share.dispatches:
            return len(share.sampler)
        num_samples = self.total_dataset_length if share.sampler is None else share.sampler.num_samples
        return sharding.num_rounds(super().__len__(), share.plan, share.rank, num_samples)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` (from 0) the next one: its order is always the same. Without this, epochs count themselves."""
        self._share.place.set_epoch(epoch)

    @property
    def batches_seen(self) -> int:
        """Batches of the epoch that were handed out, in a pass that is going on or that ``load_state`` goes on with.

        ``enumerate`` counts from 0 in the rest of an epoch; this does not. 0 between passes.
        """
        latest = self._share.latest
        return latest.index if latest is not None and latest.is_open else self._share.place.num_handed_out

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

    def is_twin_of(self, other: PreparedLoader) -> bool:
        """Whether both are the same loader, or one is what ``skip_first_batches`` made of the other."""
        return self._share is other._share

    def place(self) -> State:
        """Where this process is in the loader, for ``go_on``."""
        share = self._share
        drawn = share.sampler.drawn_ahead if share.sampler is not None else None
        told = {"reads": self._reads(), "samples": self._step_samples()}
        return share.place.state(share.latest, share.plan.num_parts, drawn) | told

    def fits(self, place: State) -> bool:
        """Whether ``place`` may be that of this loader."""
        return self._share.place.fits(place)

    def change(self, place: State, *, is_exact: bool = True) -> str:
        """What is read otherwise than it was in the pass that ``place`` is in the middle of; "" where nothing is."""
        before, now = str(place.get("reads")), self._reads()
        if not is_exact and place["samples"] == self._step_samples():  # in batches that add up to the same step
            before, now = (text.partition(" in batches")[0] for text in (before, now))
        return f"{before}, and now {now}" if not place.get("is_over", True) and before != now else ""

    def _step_samples(self) -> int:
        return (self._share.plan.batch_size or 1) * self._share.plan.num_parts

    def _reads(self) -> str:
        try:
            num_samples = f"{len(self.dataset)} samples"  # type: ignore[arg-type]
        except TypeError:
            num_samples = "samples"
        return f"{num_samples} in batches of {self._share.plan.batch_size} by {self.num_workers} workers"

    def go_on(self, place: State, *, is_exact: bool = True) -> None:
        """Let the next pass go on from ``place``; not ``is_exact``: that of a run of another number of processes."""
        if self._share.latest is not None and not self._share.latest.is_open:
            self._share.latest = None  # of the run before
        self._share.place.load(place, self._share.plan.num_parts, self._step_samples(), is_exact=is_exact)

    def _known_length(self) -> int | None:
        # An iterable data set may promise a length that it does not keep.
        if isinstance(self.dataset, IterableDataset):
            return None
        try:
            return len(self)
        except TypeError:
            return None

    def _seed_workers(self) -> None:
        """Give each rank's loader workers random numbers of their own; rank 0's are those of plain torch."""
        share = self._share
        if not share.process.rank or not self.num_workers or share.dispatches or self._iterator is not None:
            return  # persistent workers are seeded once
        self.generator = torch.Generator().manual_seed((random_int(share.generator) + share.process.rank) % 2**63)

    def _batches_from(self, beginning: Beginning) -> Iterator[dispatch.Received]:
        """This rank's batches from ``beginning`` on, each with the round that it belongs to."""
        sampler, start = self._share.sampler, beginning.start
        if sampler is not None:
            sampler.known = beginning.drawn
        if sampler is None or self._share.dispatches:
            batches = self._data_batches(beginning)
        elif beginning.is_exact:
            batches = self._drawn_batches(sampler, 0)
        else:
            return self._drawn_batches(sampler, start)
        if beginning.is_at_end:
            return iter(())
        for number in range(0 if beginning.bring else start):
            if next(batches, None) is None:
                if beginning.is_exact:
                    raise CheckpointError(
                        f"the checkpoint was saved after {start} batches of an epoch, and the data, a "
                        f"{type(self.dataset).__name__}, now has {number}; give the data that was there then"
                    )
                break
        return batches

    def _drawn_batches(self, sampler: SharedSampler, num_skipped: int) -> Iterator[dispatch.Received]:
        sampler.num_skipped = num_skipped
        batches: Any = self._read()
        if not hasattr(batches, "_sampler_iter"):  # a subclass's generator, which begins with its first batch
            batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
        elif num_skipped and not self.num_workers:  # the order is drawn now, as where it was interrupted
            batches._sampler_iter.skip()  # noqa: SLF001 - where torch has it
        sampler.num_skipped = 0
        if type(batches) in _TORCHS_OWN:
            batches = _unlabelled(batches)
        return zip(batches, iter(sampler.notes.popleft, None), strict=False)

    def _read(self) -> Any:
        """The loader's own batches.

        What each rank reads in its main process has random numbers of its own; alone, they are plain torch's.
        """
        batches: Any = super().__iter__()
        fetcher, process = getattr(batches, "_dataset_fetcher", None), self._share.process
        if self._share.sampler is not None and process.num_processes > 1 and fetcher is not None:
            seed = batches._base_seed + process.rank  # noqa: SLF001 - as torch makes its workers' seeds
            fetcher.fetch = OwnStream(fetcher.fetch, seed)
        return batches

    def _data_batches(self, beginning: Beginning) -> Iterator[dispatch.Received]:
        share = self._share
        num_parts, first = share.plan.num_parts, []
        is_sent = share.dispatches and share.process.world.rank > 0
        if is_sent or share.sampler is None:  # a sampler does it where it is read
            share.epochs.announce()
        if is_sent:
            random_int(share.generator)  # as a loader does that is read
        if share.sampler is None:
            share.epochs.begin()
        elif is_sent:
            return itertools.chain(self._begun(), dispatch.received(iter(()), share.process))
        size = share.plan.batch_size
        with short_batches.counted(self, super().__iter__, size):
            if beginning.bring:
                if share.plan.fills and not is_sent:  # the last round may be filled from the epoch's first
                    first = list(itertools.islice(short_batches.Sizes(self._read(), size), num_parts))
                beginning.bring()
            sized = short_batches.Sizes(iter(()) if is_sent else self._read(), size)
        source = iter(sized)
        if share.sampler is None and not self.num_workers:
            source = share.place.follow(source, beginning.start * num_parts if beginning.bring else 0, num_parts)
        rounds = sharding.rounds(source, share.plan, sharding.data_operations(size, lambda: sized.first), first)
        return dispatch.received(rounds, share.process) if share.dispatches else dispatch.own(rounds, share.rank)

    def _begun(self) -> Iterator[dispatch.Received]:
        """Nothing; but where the first batch is asked for, the epoch begins, as on the rank that reads."""
        self._share.epochs.begin()
        self._share.epochs.started()
        yield from ()


def _unlabelled(batches: Any) -> Iterator[Any]:
    """What torch's iterator over a data set with indices gives, without the label that profiles show a batch under.

    A label costs as much as the reading of a small batch. Where something profiles there are labels.
    """
    while True:
        try:
            batch = next(batches) if profiler._is_profiler_enabled else batches._next_data()  # noqa: SLF001
        except StopIteration:
            return
        yield batch


def _trained_on(batches: Iterator[_T], num_before: int, progress: Progress) -> Iterator[_T]:
    """``batches``, which go on after ``num_before``; a warning where as many are skipped once more, by hand."""
    before, num_skipped = progress.num_backwards, 0
    for num_skipped, batch in enumerate(itertools.islice(batches, num_before), 1):  # noqa: B007
        yield batch
    is_unused = progress.num_backwards == before
    following = list(itertools.islice(batches, 1))
    yield from following
    if is_unused and (progress.num_backwards > before if following else progress.optimizers):
        notices.warn(
            f"after load_state the loader goes on by itself, here after {num_before} batches of the epoch, and of the "
            f"next {num_skipped} none had a backward: a loop that skips by hand what it was trained on skips twice. "
            "Leave that out, or take loader.batches_seen for the place; enumerate begins at 0."
        )
    yield from batches


def prepare(
    loader: DataLoader[Any],
    process: Process,
    progress: Progress,
    options: DataLoaderConfiguration,
    *,
    place: bool = True,
    rng_types: Sequence[str] = (),
) -> PreparedLoader:
    """This rank's share of ``loader``, which is left as it is. One that is prepared already is given back.

    ``place`` False leaves batches on the CPU. ``rng_types`` are random streams that each pass makes equal on all ranks.
    A loader whose sampler gives each rank its own share already (a ``DistributedSampler``) is not divided again. Raises
    ``ConfigError`` for a batch size that can't be split, and for a loader that another accelerator prepared.
    """
    if isinstance(loader, PreparedLoader):
        if loader._share.progress is not progress:  # noqa: SLF001 - its own
            raise ConfigError(
                f"this loader over {type(loader.dataset).__name__} was prepared by another Accelerator already, and "
                "can't follow two; prepare the DataLoader that was given to the other, or a new one"
            )
        return loader
    share = _share_of(loader, process, progress, options)
    share.rng_types = rng_types if process.world.world_size > 1 else ()
    share.device = process.device if place and process.device.type != "cpu" else None
    return _as_prepared(loader, share)


def _share_of(
    loader: DataLoader[Any], process: Process, progress: Progress, options: DataLoaderConfiguration
) -> _Share:
    """What this process gets of ``loader``, and how: as indices, or as data that are read by all or by rank 0."""
    iterable = isinstance(loader.dataset, IterableDataset)
    base = None if iterable else loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    num_ranks = 1 if is_sharded(base, process) else process.num_processes
    rank = process.rank if num_ranks > 1 else 0
    plan = _plan(loader, num_ranks, options)
    world_size = process.world.world_size
    epochs = Epochs(
        base, loader.dataset, world_size, seed=options.data_seed, seed_is_torchs=options.use_seedable_sampler
    )
    is_common = num_ranks == process.num_processes and world_size > 1
    dispatches = (iterable if options.dispatch_batches is None else options.dispatch_batches) and is_common
    drawn = (dataclasses.replace(plan, num_ranks=1), 0) if dispatches else (plan, rank)
    is_agreed = is_common and not dispatches
    num_prefetched = loader.num_workers * (loader.prefetch_factor or 0)
    sampler = None
    if not iterable:
        sampler = SharedSampler(base, *drawn, epochs, is_agreed=is_agreed, num_prefetched=num_prefetched)
    in_process = sampler is None and not loader.num_workers
    return _Share(
        progress=progress,
        plan=plan,
        epochs=epochs,
        rank=rank,
        process=process,
        sampler=sampler,
        dispatches=dispatches,
        non_blocking=options.non_blocking,
        generator=loader.generator,
        place=Place(epochs, loader.dataset, [*epochs.generators, loader.generator], in_process=in_process),
    )


def _plan(loader: DataLoader[Any], num_ranks: int, options: DataLoaderConfiguration) -> sharding.Plan:
    batch_size = loader.batch_size
    drop_last = loader.drop_last
    if batch_size is None and loader.batch_sampler is not None:  # one of the user's own
        batch_size = getattr(loader.batch_sampler, "batch_size", None)
        drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
    return sharding.Plan(
        num_ranks, batch_size, drop_last=drop_last, even=options.even_batches, split=options.split_batches
    )


@contextlib.contextmanager
def evenness(loaders: Iterable[PreparedLoader], even: bool | None) -> Iterator[None]:  # noqa: FBT001
    """A context in which passes over ``loaders`` give the ranks ``even`` shares, or uneven ones; None: as they are."""
    shares = [] if even is None else [loader._share for loader in loaders]  # noqa: SLF001 - its own
    before = [share.plan for share in shares]
    for share in shares:
        share.follow(dataclasses.replace(share.plan, even=bool(even)))
    try:
        yield
    finally:
        for share, plan in zip(shares, before, strict=True):
            share.follow(plan)


def _as_prepared(loader: DataLoader[Any], share: _Share) -> PreparedLoader:
    """A twin of ``loader``, of its own class, that draws its indices from ``share``."""
    kind = type(loader)
    prepared_kind: Any = PreparedLoader if kind is DataLoader else type(kind.__name__, (PreparedLoader, kind), {})
    prepared: PreparedLoader = prepared_kind.__new__(prepared_kind)
    # Past DataLoader.__setattr__, which allows none of this after construction.
    prepared.__dict__.update(loader.__dict__, _share=share, _iterator=None)
    if share.sampler is not None:
        place = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        prepared.__dict__[place] = share.sampler
    return prepared
