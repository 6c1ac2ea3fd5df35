"""Gradient accumulation: which micro-batches form a group, when gradients are synced, and what each loss is divided by.

Pure bookkeeping, no tensors. A prepared loader reports each batch to ``Progress``; ``accumulate(model)`` enters the
``Group`` of that model, which looks there where the end of the data is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager


class Iteration:
    """One pass over one prepared loader, as far as it has come."""

    __slots__ = ("counts", "index", "is_last", "is_open", "loader", "sizes", "stamp", "total")

    def __init__(self, loader: object, total: int | None) -> None:
        """``total`` is the number of batches that will come, None where nobody knows."""
        self.loader = loader
        self.total = total
        self.index = 0  # batches handed out
        self.stamp = 0  # Progress.num_batches at the latest of them
        self.is_last = False
        self.is_open = True
        self.sizes: tuple[int, ...] = ()
        self.counts: tuple[int, ...] = ()


class Progress:
    """The passes over an accelerator's loaders that are going on; the latest batch says which one the code is in."""

    __slots__ = ("latest", "num_batches", "open")

    def __init__(self) -> None:
        """Nothing is being read."""
        self.open: list[Iteration] = []
        self.latest: Iteration | None = None
        self.num_batches = 0

    def begin(self, loader: object, total: int | None) -> Iteration:
        """A new pass; one over the same loader that was left in the middle counts as ended."""
        for stale in [iteration for iteration in self.open if iteration.loader is loader]:
            self.end(stale)
        iteration = Iteration(loader, total)
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
    ) -> None:
        """A batch is about to be handed out."""
        self.num_batches += 1
        iteration.index += 1
        iteration.stamp = self.num_batches
        iteration.is_last = is_last
        iteration.sizes = sizes
        iteration.counts = counts
        self.latest = iteration


class Accumulation:
    """What the optimizer, the scheduler and ``backward`` look at: the state set by the micro-batch last entered."""

    __slots__ = ("divisor", "has_run", "is_pending", "num_steps", "owed", "sync", "sync_at_end")

    def __init__(self, num_steps: int, *, sync_at_end: bool = True) -> None:
        """Groups of ``num_steps`` micro-batches; ``sync_at_end`` ends a group with the data."""
        self.num_steps = num_steps
        self.sync_at_end = sync_at_end
        self.sync = True
        self.divisor = num_steps
        self.is_pending = False  # the current group has gradients
        self.has_run = False  # the current micro-batch has had its backward
        self.owed: dict[int, Callable[[], None]] = {}  # zero_grad calls that wait for the group's end

    def zeroing_waits(self) -> bool:
        """Whether a ``zero_grad`` now would lose gradients of an unfinished group, wherever in the loop it stands."""
        return self.is_pending and not (self.sync and self.has_run)

    def settle(self) -> None:
        """Carry out the ``zero_grad`` calls that had to wait."""
        for zero_grad in self.owed.values():
            zero_grad()
        self.owed.clear()


class Group:
    """What ``accumulate`` returns: counts the micro-batches of one set of models. Made once, entered many times."""

    __slots__ = (
        "_abandon",
        "_count",
        "_is_done",
        "_iteration",
        "_local",
        "_planned",
        "_progress",
        "_rescale",
        "_seen",
        "_state",
    )

    def __init__(
        self,
        state: Accumulation,
        progress: Progress,
        *,
        local: Sequence[AbstractContextManager[Any]] = (),
        rescale: Callable[[float], None],
        abandon: Callable[[], None],
    ) -> None:
        """``local`` keep gradients on this rank; ``rescale`` multiplies those collected; ``abandon`` drops them."""
        self._state = state
        self._progress = progress
        self._local = local
        self._rescale = rescale
        self._abandon = abandon
        self._iteration: Iteration | None = None
        self._seen = 0
        self._count = 0  # micro-batches entered of the current group
        self._planned = state.num_steps  # what their losses were divided by
        self._is_done = True

    def __enter__(self) -> None:
        """Begin the next micro-batch."""
        state = self._state
        if state.num_steps == 1:
            state.sync = True
            state.divisor = 1
            state.is_pending = False
            return
        state.has_run = False
        iteration = self._iteration
        if iteration is None or not iteration.is_open or iteration.stamp <= self._seen:
            iteration = self._follow()
        self._seen = self._progress.num_batches
        if self._is_done:
            self._begin(iteration)
        else:
            self._count += 1
        sync = self._count >= state.num_steps or (state.sync_at_end and self._at_end())
        if sync and self._count != self._planned:
            if self._count > 1:
                self._rescale(self._planned / self._count)
            self._planned = self._count
        self._is_done = sync
        state.sync = sync
        state.divisor = self._planned
        if not sync:
            for context in self._local:
                context.__enter__()

    def __exit__(self, *exception: object) -> None:
        """End the micro-batch."""
        if not self._state.sync:
            for context in self._local:
                context.__exit__(None, None, None)

    def _begin(self, iteration: Iteration | None) -> None:
        state = self._state
        if state.owed:
            state.settle()
        state.is_pending = False
        self._count = 1
        self._planned = state.num_steps
        if state.sync_at_end and iteration is not None and iteration.total is not None:
            self._planned = max(1, min(state.num_steps, iteration.total - iteration.index + 1))

    def _follow(self) -> Iteration | None:
        """Find the pass that drives the code now: the one whose batch came last."""
        before, now = self._iteration, self._progress.latest
        if before is not now and before is not None and not (self._is_done or before.is_open or before.is_last):
            # The loop was left in mid-group: its gradients belong to no step that will ever come.
            self._abandon()
            self._is_done = True
        self._iteration = now
        return now

    def _at_end(self) -> bool:
        """Whether the driving pass, or one read in step with it, hands out no more."""
        driver = self._iteration
        if driver is None:
            return False
        if driver.is_last:
            return True
        if len(self._progress.open) == 1:
            return False
        return any(other.is_last and other.index == driver.index for other in self._progress.open)
