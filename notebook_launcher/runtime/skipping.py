"""``skip_first_batches``: go on in the middle of an epoch without reading what lies before."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from notebook_launcher.runtime import checks
from notebook_launcher.runtime.data import PreparedLoader

if TYPE_CHECKING:
    from collections.abc import Iterator


def skip_first_batches(dataloader: DataLoader[Any] | None = None, num_batches: int = 0) -> DataLoader[Any]:
    """A loader whose every pass is an epoch of ``dataloader`` without its first ``num_batches``.

    The number counts from the epoch's beginning: right after ``load_state``, ``skip_first_batches(loader,
    loader.batches_seen)`` is what ``loader`` itself hands out next, and as many batches as were seen are not skipped
    twice. They are not read either, but for data that can only be read in order: so random numbers of loader workers
    begin anew, as they don't when ``loader`` goes on by itself. A prepared loader counts this process's batches.
    """
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"skip_first_batches takes a DataLoader, and was given {dataloader!r}")
    num_batches = checks.whole("num_batches", num_batches, of="batches to skip", least=0)
    twin = copy.copy(dataloader)
    twin.__dict__["_iterator"] = None
    if isinstance(twin, PreparedLoader):
        twin._skip = num_batches  # noqa: SLF001 - its own
    elif isinstance(twin.dataset, IterableDataset):
        kind = type(twin)
        twin.__class__ = type(kind.__name__, (_WithoutFirst, kind), {"_num_left_out": num_batches})
    else:
        place = "sampler" if twin.batch_sampler is None else "batch_sampler"
        twin.__dict__[place] = _Rest(twin.__dict__[place], num_batches)  # past DataLoader.__setattr__
    return twin


class _WithoutFirst(DataLoader[Any]):
    """A loader that reads and drops its first batches."""

    _num_left_out: int

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return itertools.islice(super().__iter__(), self._num_left_out, None)


class _Rest:
    """A sampler without its first items; all else is the sampler's own."""

    def __init__(self, base: Any, num_left_out: int) -> None:
        self.sampler = base
        self._num_left_out = num_left_out

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.sampler), self._num_left_out, None)

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self._num_left_out)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)
