"""Who this process is, and who runs what: what ``Accelerator`` and ``PartialState`` have in common."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from notebook_launcher.core.errors import PeerError
from notebook_launcher.runtime import agreement, checks, gather, splitting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from notebook_launcher.runtime.process import DistributedType, Process

_F = TypeVar("_F", bound="Callable[..., Any]")


class Identity:
    """A process of a run. Whoever inherits sets ``_process``."""

    _process: Process

    @property
    def _data_process(self) -> Process:
        """The process as one of those that share the data."""
        return self._process

    @property
    def device(self) -> torch.device:
        """Where this process's models and batches are."""
        return self._process.device

    @property
    def process_index(self) -> int:
        """This process's rank, from 0, over all machines."""
        return self._process.world.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self._process.world.local_rank

    @property
    def num_processes(self) -> int:
        """Processes in the run."""
        return self._process.world.world_size

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._process.world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self._process.world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self._process.world.rank == self._process.world.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self._process.world.world_size > 1

    @property
    def distributed_type(self) -> DistributedType:
        """What the processes are, in Accelerate's words."""
        return self._process.distributed_type

    def print(self, *values: Any, **keywords: Any) -> None:
        """``print``, once a machine."""
        if self.is_local_main_process:
            print(*values, **keywords)  # noqa: T201 - it is what was asked for

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""
        if self.use_distributed:
            agreement.check("wait_for_everyone")
            dist.barrier()

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """A context whose body rank 0 runs before the others do; where it fails there, they get a ``PeerError``."""
        return self._first("main_process_first", self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """A context whose body the first process of each machine runs before the others do; see the above."""
        return self._first("local_main_process_first", self.is_local_main_process)

    @contextlib.contextmanager
    def _first(self, call: str, goes_first: bool) -> Iterator[None]:  # noqa: FBT001 - two callers, above
        if not self.use_distributed:
            yield
        elif goes_first:
            try:
                yield
            except (Exception, SystemExit) as error:  # an interrupt is everybody's
                _exchange(call, f"rank {self.process_index} raised {type(error).__name__}: {error}")
                raise
            _exchange(call, None)
        else:
            told = next(filter(None, _exchange(call, None)), None)
            if told:
                raise PeerError(f"{told}\nRank {self.process_index} waited for it in {call}, and does not go on.")
            yield

    @contextlib.contextmanager
    def split_between_processes(
        self,
        inputs: Any,
        apply_padding: bool = False,  # noqa: FBT001, FBT002 - Accelerate's
    ) -> Iterator[Any]:
        """A context that gives this process's piece of ``inputs``; the first ranks get one more of what is left over.

        Processes that hold parts of one model get the same.

        They are a list, tuple, tensor or array (along dim 0), ``datasets.Dataset``, or a dictionary, also nested, of
        equally long ones. Fewer items than processes leave empty pieces. ``apply_padding`` repeats a piece's last item
        until all are equally long. Raises ``ValueError`` for unequal lengths, ``TypeError`` for what has no items.
        """
        checks.flags(apply_padding=apply_padding)
        process = self._data_process
        if process.num_processes > 1:
            inputs = splitting.piece(inputs, process.rank, process.num_processes, pad=apply_padding)
        yield inputs

    def destroy_process_group(self, group: Any = None) -> None:
        """Take ``group`` down, or the whole process group; nothing happens where there is none."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group(group)

    def on_main_process(self, function: _F | None = None) -> Callable[..., Any]:
        """Decorate a function to run on rank 0 only; elsewhere it returns None."""
        return _only_if(function, here=self.is_main_process)

    def on_local_main_process(self, function: _F | None = None) -> Callable[..., Any]:
        """Decorate a function to run once a machine; elsewhere it returns None."""
        return _only_if(function, here=self.is_local_main_process)

    def on_last_process(self, function: _F | None = None) -> Callable[..., Any]:
        """Decorate a function to run on the last rank only; elsewhere it returns None."""
        return _only_if(function, here=self.is_last_process)

    def on_process(self, function: _F | None = None, process_index: int = 0) -> Callable[..., Any]:
        """Decorate a function to run on rank ``process_index`` only; elsewhere it returns None. Alone it runs.

        Raises ``ConfigError`` where there is no such rank among several.
        """
        if self.use_distributed:
            checks.rank("on_process", "process_index", process_index, self.num_processes)
        return _only_if(function, here=self.process_index == process_index or not self.use_distributed)

    def on_local_process(self, function: _F | None = None, local_process_index: int = 0) -> Callable[..., Any]:
        """Decorate a function to run on each machine's rank ``local_process_index``; else as ``on_process``."""
        if self.use_distributed:
            here = self._process.world.local_world_size
            most = max(here, self.num_processes - here)  # another machine may have more than this one
            checks.rank("on_local_process", "local_process_index", local_process_index, most)
        return _only_if(function, here=self.local_process_index == local_process_index or not self.use_distributed)


def _exchange(call: str, problem: str | None) -> list[str | None]:
    agreement.check(call)
    return gather.all_objects(problem)


def _only_if(function: _F | None, *, here: bool) -> Callable[..., Any]:
    if function is None:
        return functools.partial(_only_if, here=here)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here else None

    return wrapper
