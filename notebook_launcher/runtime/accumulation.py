"""Gradient accumulation: which micro-batches form a group, when gradients are synced, and what each loss is divided by.

Pure bookkeeping, no tensors. A prepared loader reports each batch to ``Progress``; ``accumulate(model)`` enters the
``Group`` of that model, which looks there where the end of the data is. Each set of models has a group of its own, and
optimizers follow the group of the models that they train: a discriminator's ends when it ends, whatever its generator's
does.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from notebook_launcher.runtime.loss_scaling import LossScaling
    from notebook_launcher.runtime.optim import PreparedOptimizer


def _handled() -> int:
    """Which exception is being handled; no reference, which would keep its frames alive."""
    return id(sys.exception())


@dataclasses.dataclass(slots=True, eq=False)
class Iteration:
    """One pass over one prepared loader, as far as it has come."""

    loader: object
    total: int | None  # batches that will come, None where nobody knows
    number: int  # by which other passes know this one
    led: set[int] = dataclasses.field(default_factory=set)  # passes that this one was a batch ahead of
    apart: set[int] = dataclasses.field(default_factory=set)  # passes that are not read in step with this one
    index: int = 0  # batches handed out
    stamp: int = 0  # Progress.num_batches at the latest of them
    prior: int = 0  # and at the one before
    is_last: bool = False
    ends_group: bool = False  # some rank's batch is its last: all exchange gradients, since that one won't any more
    is_open: bool = True
    handled: int = dataclasses.field(default_factory=_handled)  # when it began: the training may be in a handler itself
    sizes: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def was_left(self) -> bool:
        """Whether it was ended, and not by an exception that is being handled."""
        return not self.is_open and self.handled == _handled()


class Progress:
    """The passes over an accelerator's loaders that are going on; the latest batch says which one the code is in."""

    __slots__ = ("latest", "num_backwards", "num_batches", "num_passes", "open", "optimizers")

    def __init__(self, optimizers: Sequence[object] = ()) -> None:
        """Nothing is being read. ``optimizers`` are those of the training, a list that may grow."""
        self.optimizers = optimizers
        self.open: list[Iteration] = []
        self.latest: Iteration | None = None
        self.num_backwards = 0
        self.num_batches = 0
        self.num_passes = 0

    def begin(self, loader: object, total: int | None) -> Iteration:
        """A new pass; one over the same loader that was left in the middle counts as ended."""
        for stale in [iteration for iteration in self.open if iteration.loader is loader]:
            self.end(stale)
        self.num_passes += 1
        iteration = Iteration(loader, total, self.num_passes)
        self.open.append(iteration)
        return iteration

    def end(self, iteration: Iteration) -> None:
        """The pass is over, whichever way it was left; the one around it, if any, is the current one again."""
        iteration.is_open = False
        if iteration in self.open:
            self.open.remove(iteration)
        if self.latest is iteration:
            self.latest = max(self.open, key=lambda other: other.stamp, default=None)

    def advance(
        self,
        iteration: Iteration,
        is_last: bool,  # noqa: FBT001 - called once a batch, where keywords would show
        sizes: tuple[int, ...],
        counts: tuple[int, ...],
        is_last_elsewhere: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """A batch is about to be handed out."""
        self.num_batches += 1
        iteration.index += 1
        iteration.prior, iteration.stamp = iteration.stamp, self.num_batches
        iteration.is_last = is_last
        iteration.ends_group = is_last or is_last_elsewhere
        iteration.sizes = sizes
        iteration.counts = counts
        self.latest = iteration
        if len(self.open) > 1:
            self._compare(iteration)

    def _compare(self, iteration: Iteration) -> None:
        """Note which passes are not read in step with ``iteration``, which has just advanced.

        In step means a batch of each in turn, always in the same order, as ``zip`` reads. A pass that is merely open,
        since somebody kept its iterator, may have come just as far.
        """
        for other in self.open:
            if other is iteration:
                continue
            ahead = iteration.index - other.index
            leader, follower = (iteration, other) if ahead == 1 else (other, iteration)
            leader.led.add(follower.number)
            if ahead not in {0, 1} or leader.number in follower.led:
                leader.apart.add(follower.number)
                follower.apart.add(leader.number)


@dataclasses.dataclass(slots=True, eq=False)
class Window:
    """A group of micro-batches as ``backward``, optimizers and schedulers see it: what the latest of them set."""

    divisor: int  # what a loss is divided by
    scaling: LossScaling | None  # of the losses of fp16, None where they aren't scaled
    sync: bool = True  # gradients are exchanged, and the optimizers step
    is_pending: bool = False  # the group has gradients
    has_run: bool = False  # the current micro-batch has had its backward
    owed: dict[int, Callable[[], None]] = dataclasses.field(default_factory=dict)  # zero_grad calls that had to wait
    items: Any = None  # this rank's of the group, where its losses are sums over items; see weighting
    unit: Any = None  # what those losses were divided by

    def zeroing_waits(self) -> bool:
        """Whether a ``zero_grad`` now would lose gradients of an unfinished group, wherever in the loop it stands."""
        return self.is_pending and not (self.sync and self.has_run)

    def settle(self) -> None:
        """Carry out the ``zero_grad`` calls that had to wait."""
        for zero_grad in self.owed.values():
            zero_grad()
        self.owed.clear()


@dataclasses.dataclass(slots=True, eq=False)
class Accumulation:
    """What an accelerator's groups share; ``current`` is the group that was entered last."""

    num_steps: int  # micro-batches in a group
    sync_at_end: bool = True  # a group ends with the data
    sync_each_batch: bool = False  # gradients are exchanged in every micro-batch
    new_scaling: Callable[[], LossScaling | None] = lambda: None
    saved_scalings: list[Any] = dataclasses.field(default_factory=list)  # of a checkpoint, for groups not made yet
    alone: Window = dataclasses.field(init=False)  # of the code that never calls accumulate
    current: Window = dataclasses.field(init=False)
    entered: Any = None  # the Group that the code is in, whether it syncs, and the same of the one around it

    def __post_init__(self) -> None:
        """Nothing is collected yet."""
        self.forget()

    def next_scaling(self) -> LossScaling | None:
        """Loss scaling for one more group, as it was saved for the one that was made in this turn."""
        scaling = self.new_scaling()
        if scaling is not None and self.saved_scalings:
            scaling.load_state_dict(self.saved_scalings.pop(0))
        return scaling

    def end_if_left(self) -> None:
        """Code outside ``accumulate`` goes on by itself once the loop of the current group was left in its middle."""
        group = self.current
        if isinstance(group, Group) and group.was_left:
            group.drop()
            group.sync, group.divisor = True, self.num_steps

    def forget(self) -> None:
        """Let go of all that was collected."""
        self.alone = self.current = Window(self.num_steps, self.new_scaling())

    def set_num_steps(self, num_steps: int) -> None:
        """Groups have ``num_steps`` micro-batches from the next one entered on."""
        self.num_steps = self.alone.divisor = num_steps


class Group(Window):
    """What ``accumulate`` returns: counts the micro-batches of one set of models. Made once, entered many times."""

    __slots__ = (
        "_abandon",
        "_count",
        "_is_done",
        "_iteration",
        "_local",
        "_planned",
        "_progress",
        "_seen",
        "_shared",
        "optimizers",
        "rescale",
    )

    def __init__(
        self,
        shared: Accumulation,
        progress: Progress,
        *,
        local: Sequence[AbstractContextManager[Any]] = (),
        rescale: Callable[[Any], None],
        abandon: Callable[[], None],
    ) -> None:
        """``local`` keep gradients on this rank; ``rescale`` multiplies those collected; ``abandon`` drops them."""
        super().__init__(shared.num_steps, shared.next_scaling())
        self.optimizers: list[PreparedOptimizer] = []  # those that train the group's models and another's
        self._shared = shared
        self._progress = progress
        self._local = local
        self.rescale = rescale
        self._abandon = abandon
        self._iteration: Iteration | None = None
        self._seen = 0
        self._count = 0  # micro-batches entered of the current group
        self._planned = shared.num_steps  # what their losses were divided by
        self._is_done = True

    def __enter__(self) -> None:
        """Begin the next micro-batch."""
        shared = self._shared
        if shared.num_steps == 1 and self._is_done:
            if self.owed:
                self.settle()
            sync = True
            self.divisor = 1
            self.is_pending = False
        else:
            sync = self._count_up()
        self.sync = sync
        shared.entered = self, sync, shared.entered
        shared.current = self
        for optimizer in self.optimizers:
            optimizer.window = self
        if not sync:
            for context in self._local:
                context.__enter__()

    def __exit__(self, *exception: object) -> None:
        """End the micro-batch; in one that lies in another group's, that one goes on."""
        shared = self._shared
        _, sync, around = shared.entered
        shared.entered = around
        if not sync:
            for context in reversed(self._local):  # each puts back what it found, and two may be of one model
                context.__exit__(None, None, None)
        if around is not None:
            outer = shared.current = around[0]
            for optimizer in outer.optimizers:
                optimizer.window = outer

    def _count_up(self) -> bool:
        """Take one more micro-batch into the group; whether it is the last."""
        shared = self._shared
        self.has_run = False
        iteration = self._iteration
        if iteration is None or not iteration.is_open or iteration.stamp <= self._seen:
            iteration = self._follow()
        self._seen = self._progress.num_batches
        if self._is_done:
            self._begin(iteration)
        else:
            self._count += 1
        sync = self._count >= shared.num_steps or (
            shared.sync_at_end
            and iteration is not None
            and (iteration.ends_group or (len(self._progress.open) > 1 and self._partner_ends(iteration)))
        )
        if sync and self._count != self._planned:
            if self._count > 1 and self.items is None:
                self.rescale(self._planned / self._count)
            self._planned = self._count
        self._is_done = sync
        self.divisor = self._planned
        return sync

    def _begin(self, iteration: Iteration | None) -> None:
        shared = self._shared
        if self.owed:
            self.settle()
        self.is_pending = False
        self.items = None
        self._count = 1
        self._planned = shared.num_steps
        if shared.sync_at_end and iteration is not None and iteration.total is not None:
            num_left = iteration.total - iteration.index + 1
            if num_left < shared.num_steps:
                self._planned = max(1, num_left)

    def _follow(self) -> Iteration | None:
        """Find the pass that drives the code now: the one whose batch came last.

        One that gave a single batch since the last micro-batch goes before one that was read on in between.
        """
        progress, before = self._progress, self._iteration
        if before is not None and before.is_open and progress.num_batches == self._seen:
            return before
        now = progress.latest
        if len(progress.open) > 1:
            single = [one for one in progress.open if one.prior <= self._seen < one.stamp]
            now = max(single, key=lambda one: one.stamp, default=now)
        if before is not now and not self._is_done and self.was_left:
            # The loop was left in mid-group: its gradients belong to no step that will ever come.
            self.drop()
        self._iteration = now
        return now

    @property
    def is_unfinished(self) -> bool:
        """Whether the group has begun, and goes on with the next micro-batch, or would but for an exception."""
        return not (self._is_done or (self.was_left and self._iteration is not None and self._iteration.was_left))

    @property
    def was_left(self) -> bool:
        """Whether the loop that the latest micro-batch was in has ended before its data."""
        return self._iteration is not None and not (self._iteration.is_open or self._iteration.is_last)

    def drop(self) -> None:
        """Leave an unfinished group: its gradients belong to no step that will ever come."""
        if not self._is_done:
            self._abandon()
            self._is_done = True

    def _partner_ends(self, driver: Iteration) -> bool:
        """Whether a pass that is read in step with ``driver`` hands out no more."""
        return any(
            other.ends_group and other.index == driver.index and driver.number not in other.apart
            for other in self._progress.open
        )
