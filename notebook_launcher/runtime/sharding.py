"""Which rank gets what: rounds of batches, one batch a rank. Pure functions over any kind of batch.

The loader's own stream of batches (lists of indices, or batches of data) is dealt out in rounds, so that the ranks'
batches of a round, put one after the other, are what one process would have read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import trees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Batch = TypeVar("Batch")


class Round(NamedTuple, Generic[Batch]):
    """One batch for each rank, some of them possibly missing where the ranks' shares may be uneven.

    ``sizes`` counts the samples of each part, ``counts`` those that are real: the rest were repeated to fill it.
    """

    parts: list[Batch]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    is_last: tuple[bool, ...]  # by rank: it gets no batch after this one


# Where there is one rank, whose batches need no counting before the last.
GOES_ON: Round[Any] = Round([], (), (), (False,))
END: Any = object()  # what comes after the last batch of a stream


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How a loader is shared. ``batch_size`` is the loader's own, None where batches have no fixed size."""

    num_ranks: int
    batch_size: int | None
    drop_last: bool = False
    even: bool = True
    split: bool = False

    def __post_init__(self) -> None:
        """Refuse a split that would not come out even."""
        if self.split and self.batch_size is not None and self.batch_size % self.num_ranks:
            raise ConfigError(
                f"split_batches=True splits the loader's batch of {self.batch_size} among {self.num_ranks} processes, "
                f"which does not come out even; use a batch size that is a multiple of {self.num_ranks}, or leave out "
                "split_batches to give each process its own batches"
            )

    @property
    def num_parts(self) -> int:
        """The loader's own batches that all ranks together take in a step."""
        return 1 if self.split else self.num_ranks

    @property
    def fills(self) -> bool:
        """Whether a last round may need samples from the first."""
        return self.even and not self.drop_last and self.num_ranks > 1


@dataclasses.dataclass(frozen=True, slots=True)
class Operations(Generic[Batch]):
    """What dealing out needs to know about a kind of batch."""

    size: Callable[[Batch], int]
    join: Callable[[Sequence[Batch]], Batch]
    part: Callable[[Batch, int, int], Batch]


def _index_size(batch: Any) -> int:
    return len(batch) if isinstance(batch, (list, tuple, range)) or getattr(batch, "ndim", None) else 1


INDICES: Operations[Any] = Operations(
    size=_index_size,
    join=lambda batches: [index for batch in batches for index in batch],
    part=lambda batch, start, stop: list(batch[start:stop]),
)


def data_operations(batch_size: int | None, first_size: Callable[[], int | None] | None = None) -> Operations[Any]:
    """For batches of data. The first one's size tells which of its lists have one element a sample: images, targets.

    That is ``batch_size``, or what ``first_size`` says when the first was read.
    """
    depth: int | None = None

    def size(batch: Any) -> int:
        nonlocal depth
        if depth is None:
            depth = trees.row_depth(batch, batch_size if first_size is None else first_size())
        found = trees.num_samples(batch, depth)
        return 1 if found is None else found

    return Operations(
        size=size,
        join=lambda batches: trees.concatenate(batches, -1 if depth is None else depth),
        part=lambda batch, start, stop: trees.part(batch, start, stop, -1 if depth is None else depth),
    )


def rounds(
    batches: Iterable[Batch], plan: Plan, operations: Operations[Batch], start: Sequence[Batch] = ()
) -> Iterator[Round[Batch]]:
    """Deal ``batches`` out. With ``plan.even`` every rank gets as many, filled from the stream's start.

    ``start`` is the first round's, where ``batches`` are the rest of a stream.
    """
    if plan.num_ranks == 1:
        pairs = itertools.pairwise(itertools.chain(batches, [END]))
        return (alone(batch, operations, is_last=ahead is END) for batch, ahead in pairs)
    if plan.split:
        return _split(batches, plan, operations, list(start))
    return _deal(batches, plan, operations, list(start))


def num_rounds(num_batches: int, plan: Plan, rank: int, num_samples: int | None = None) -> int:
    """How many batches ``rank`` gets of a loader that has ``num_batches``; of ``num_samples``, where that is known."""
    if plan.split and not plan.even and num_samples is not None and plan.batch_size and num_batches:
        left = num_samples - (num_batches - 1) * plan.batch_size  # in the last batch, which may not do for all ranks
        return num_batches - (left <= rank * (plan.batch_size // plan.num_ranks))
    if plan.split or plan.num_ranks == 1:
        return num_batches
    full, left = divmod(num_batches, plan.num_ranks)
    if plan.drop_last or not left:
        return full
    return full + 1 if plan.even or rank < left else full


def alone(batch: Batch, operations: Operations[Batch], *, is_last: bool) -> Round[Batch]:
    """A batch of a stream that nobody shares."""
    sizes = (operations.size(batch),)
    return Round([batch], sizes, sizes, (is_last,))


def _deal(
    batches: Iterable[Batch], plan: Plan, operations: Operations[Batch], start: list[Batch]
) -> Iterator[Round[Batch]]:
    stream = iter(batches)
    num_ranks = plan.num_ranks
    # Even shares end together, so one batch ahead tells the end; otherwise the next round's length must be known.
    num_ahead = 1 if plan.even and not plan.drop_last else num_ranks
    head = list(itertools.islice(stream, num_ahead))
    while head:
        current = head + list(itertools.islice(stream, num_ranks - len(head)))
        head = list(itertools.islice(stream, num_ahead))
        start = start or current
        if plan.drop_last:
            if not _is_full(current, plan, operations):
                return
            if not _is_full(head, plan, operations):
                head = []
        if plan.even and not head:
            yield _filled(current, start, plan, operations)
            return
        sizes = tuple(operations.size(batch) for batch in current)
        ends = tuple(rank >= len(head) for rank in range(num_ranks)) if num_ahead > 1 else (False,) * num_ranks
        yield Round(current, sizes, sizes, ends)


def _is_full(batches: list[Batch], plan: Plan, operations: Operations[Batch]) -> bool:
    if len(batches) < plan.num_ranks:
        return False
    return plan.batch_size is None or operations.size(batches[-1]) >= plan.batch_size


def _filled(current: list[Batch], start: list[Batch], plan: Plan, operations: Operations[Batch]) -> Round[Batch]:
    """The last round, made full with samples from the start of the stream."""
    num_ranks, num_missing = plan.num_ranks, plan.num_ranks - len(current)
    sizes = tuple(operations.size(batch) for batch in current)
    has_gap = num_missing > 0 or sizes[-1] != plan.batch_size
    if has_gap and plan.batch_size is not None and all(size == plan.batch_size for size in sizes[:-1]):
        # Batches that can't be joined, padded to different lengths: whole ones fill the gap.
        with contextlib.suppress(ValueError):
            return _level(operations.join(current), operations.join(start), plan.batch_size, num_ranks, operations)
    parts = current + list(itertools.islice(itertools.cycle(start), num_missing))
    counts = sizes + (0,) * num_missing
    return Round(parts, tuple(operations.size(batch) for batch in parts), counts, (True,) * num_ranks)


def _level(
    samples: Batch, start: Batch, batch_size: int, num_ranks: int, operations: Operations[Batch]
) -> Round[Batch]:
    """Cut ``samples`` into one part of ``batch_size`` for each rank, repeating ``start`` as often as it takes."""
    num_real, needed = operations.size(samples), batch_size * num_ranks
    size = num_real
    while size < needed:
        samples = operations.join([samples, operations.part(start, 0, needed - size)])
        before, size = size, operations.size(samples)
        if size <= before:
            raise ValueError(
                f"a batch can't be filled or cut: nothing in it, a {type(samples).__name__}, has a length that is its "
                "number of samples. Have the loader's collate_fn return tensors, arrays or lists, or leave out "
                "split_batches"
            )
    parts = [operations.part(samples, rank * batch_size, (rank + 1) * batch_size) for rank in range(num_ranks)]
    counts = tuple(min(max(num_real - rank * batch_size, 0), batch_size) for rank in range(num_ranks))
    return Round(parts, (batch_size,) * num_ranks, counts, (True,) * num_ranks)


def _split(
    batches: Iterable[Batch], plan: Plan, operations: Operations[Batch], start: list[Batch]
) -> Iterator[Round[Batch]]:
    stream = iter(batches)
    for head in itertools.islice(stream, 1):
        first = start[0] if start else head
        global_size = operations.size(first) if plan.batch_size is None else plan.batch_size
        all_batches = itertools.chain([head], stream)
        dealt = (_pieces(batch, first, global_size or 1, plan, operations) for batch in all_batches)
        for current, ahead in itertools.pairwise(itertools.chain(dealt, [END])):
            num_left = 0 if ahead is END else len(ahead.parts)
            yield current._replace(is_last=tuple(rank >= num_left for rank in range(plan.num_ranks)))


def _pieces(batch: Batch, first: Any, global_size: int, plan: Plan, operations: Operations[Batch]) -> Round[Batch]:
    """One batch of all ranks in pieces, as if it were the last."""
    num_ranks = plan.num_ranks
    size = operations.size(batch)
    piece = -(-global_size // num_ranks) if size <= global_size else -(-size // num_ranks)
    if plan.even and size < piece * num_ranks:
        try:
            return _level(batch, first, piece, num_ranks, operations)
        except ValueError:  # padded to another length than the first
            return _level(batch, batch, piece, num_ranks, operations)
    parts = [operations.part(batch, rank * piece, (rank + 1) * piece) for rank in range(num_ranks)]
    sizes = tuple(min(max(size - rank * piece, 0), piece) for rank in range(num_ranks))
    return Round([part for part, kept in zip(parts, sizes, strict=True) if kept], sizes, sizes, (True,) * num_ranks)
