"""How many samples are in a batch that is shorter than its loader's others, where the batch itself doesn't tell.

A batch of a known size shows which of its lists have one element a sample. Of data shorter than one batch only the
loader knows the size, before ``collate_fn`` makes a batch of the samples: a list of two may be two images, or the
images and the labels of one sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclasses.dataclass
class _Short:
    """A batch on its way from ``collate_fn``, perhaps out of a loader worker."""

    batch: Any
    size: int

    def pin_memory(self) -> _Short:
        """The same in pinned memory: torch's thread asks for it."""
        return _Short(pin_memory(self.batch), self.size)  # type: ignore[no-untyped-call]


@dataclasses.dataclass
class _Counting:
    """A ``collate_fn`` that tells the size of short batches."""

    collate: Callable[[Any], Any]
    batch_size: int

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        return batch if len(samples) >= self.batch_size else _Short(batch, len(samples))


@contextlib.contextmanager
def counted(loader: DataLoader[Any], iterate: Any, batch_size: int | None) -> Iterator[None]:
    """A context in which ``iterate``, ``loader``'s way to be read, gives batches whose sizes ``Sizes`` can tell.

    A subclass's own way may look into batches, and gets them as they are.
    """
    collate = loader.collate_fn
    if batch_size is None or iterate.__func__ is not DataLoader.__iter__:
        yield
        return
    # Past DataLoader.__setattr__, as iterators take it when they are made.
    loader.__dict__["collate_fn"] = _Counting(collate, batch_size)
    try:
        yield
    finally:
        loader.__dict__["collate_fn"] = collate


class Sizes:
    """Iterates once over batches as they are; ``first`` is the first's size, where it is ``batch_size`` or less."""

    def __init__(self, batches: Iterable[Any], batch_size: int | None) -> None:
        """``batch_size`` is the loader's."""
        self.first = batch_size
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        """The batches."""
        for number, batch in enumerate(self._batches):
            is_short = isinstance(batch, _Short)
            if is_short and number == 0:
                self.first = batch.size
            yield batch.batch if is_short else batch
