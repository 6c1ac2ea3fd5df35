"""``find_executable_batch_size``: try again with a smaller batch when memory does not do."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import logging
import re
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from notebook_launcher.core import config
from notebook_launcher.runtime import checks, process
from notebook_launcher.runtime.identity import Identity
from notebook_launcher.runtime.memory import release

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

_logger = logging.getLogger(__name__)
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|CUDNN_STATUS_(NOT_SUPPORTED|ALLOC_FAILED)"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Invalid buffer size"
)
_LEAVE_S = 60.0  # how long a rank that ran out of memory waits for the others
_LOOK_S = 0.1  # how often a rank looks whether another ran out of memory
_calls = itertools.count()  # the same on every rank, since each makes the same calls


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function whose first argument is a batch size, to be called without it.

    It is called with ``starting_batch_size``, and after each out-of-memory error again with half of that, or what
    ``reduce_batch_size_fn`` says. What it needs much memory for is made inside it: models, optimizers, loaders.

    On several ranks all call it, and all try the same size. Where one runs out of memory, the others are called out of
    the collectives in which they wait for it, every accelerator's ``free_memory`` is called, and the process group is
    made anew: what was prepared before is of no use. This is for strategies whose ranks have whole models (DDP): with
    FSDP, torch keeps what connects the ranks, so the others are not called out. Where all run out they try again; else
    the run ends with an error a minute later, as nobody knows before whether the others will run out too.

    Raises ``RuntimeError`` when no size is left, ``TypeError`` for a call that gives the batch size itself and for a
    function that takes none, and ``ConfigError`` for a ``starting_batch_size`` that is no number of samples.
    """
    starting_batch_size = checks.whole("starting_batch_size", starting_batch_size, of="samples")
    if reduce_batch_size_fn is not None:
        checks.function("find_executable_batch_size(reduce_batch_size_fn=...)", reduce_batch_size_fn)
    if function is None:
        return lambda decorated: find_executable_batch_size(decorated, starting_batch_size, reduce_batch_size_fn)
    checks.function("find_executable_batch_size", function)
    name, num_parameters = function.__name__, len(inspect.signature(function).parameters)
    if not num_parameters:
        raise TypeError(
            f"find_executable_batch_size gives {name} the batch size, and {name} takes no argument; make it the first: "
            f"def {name}(batch_size)"
        )

    @functools.wraps(function)
    def with_batch_size(*args: Any, **kwargs: Any) -> Any:
        if len(args) + 1 > num_parameters:
            raise TypeError(
                f"{name} was called with {len(args)} arguments and takes {num_parameters}, of which the first, the "
                "batch size, is given by find_executable_batch_size; leave it out of the call"
            )
        call, attempt, size = next(_calls), itertools.count(), starting_batch_size
        while size >= 1:
            with _Attempt(f"find_executable_batch_size/{call}/{next(attempt)}") as tried:
                result = function(size, *args, **kwargs)
            if not tried.ran_out:
                return result
            tried.renew()
            smaller = size // 2 if reduce_batch_size_fn is None else reduce_batch_size_fn()
            checks.whole("reduce_batch_size_fn()", smaller, of="samples", least=0)
            _logger.warning("%s ran out of memory with the batch size %d; next is %s.", name, size, smaller or "none")
            size = smaller
        raise RuntimeError(
            f"no batch size is small enough for {name}: {starting_batch_size} and smaller ones ran out of memory"
        )

    return with_batch_size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that a device, or the machine, has no more memory to give."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


class _Attempt:
    """One try, on all ranks. Once it is left, every rank knows whether any ``ran_out`` of memory."""

    ran_out = False

    def __init__(self, key: str) -> None:
        self._key = key
        self._over = threading.Event()

    def __enter__(self) -> Self:
        world = config.world()
        if world.world_size > 1:
            process.join(process.place(world))
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        if self._size > 1:
            group: Any = dist.group.WORLD
            self._options = {
                "backend": dist.get_backend_config(),
                "rank": dist.get_rank(),
                "world_size": self._size,
                "timeout": group._get_backend(group._device_types[0]).options._timeout,  # noqa: SLF001
                "device_id": group.bound_device_id,
            }
            self._store = c10d._get_default_store()  # noqa: SLF001 - it outlives the group
            self._watch = threading.Thread(target=self._look_out, daemon=True)
            self._watch.start()
            self._store.add(f"{self._key}/entered", 1)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        ran_out = error is not None and is_out_of_memory(error)
        if self._size == 1:
            self.ran_out = ran_out
        else:
            if ran_out:
                self._store.set(self._key, "")
            if error is None:
                self._store.add(f"{self._key}/done", 1)
                while not self._is_told() and self._store.add(f"{self._key}/done", 0) < self._size:
                    time.sleep(_LOOK_S / 5)
            self._over.set()
            self._watch.join()
            # Any other error follows from it: the connection to the rank that ran out was closed.
            self.ran_out = isinstance(error, Exception | None) and self._is_told()
        if self.ran_out:
            traceback.clear_frames(trace)  # they hold the model
        return self.ran_out

    def renew(self) -> None:
        """Free what the try has left, and meet the other ranks in a new process group."""
        if self._size > 1:
            for thing in gc.get_objects():
                if issubclass(type(thing), Identity) and hasattr(thing, "free_memory"):
                    thing.free_memory()
            gc.collect()  # with the last model goes the last connection, which is what wakes ranks that wait in gloo
            self._await_all("entered")  # who is still connecting must not lose us
            _leave_group()
            self._store.add(f"{self._key}/left", 1)
            self._await_all("left")
            dist.init_process_group(store=c10d.PrefixStore(self._key, self._store), **self._options)
        release(torch.accelerator.current_accelerator() or torch.device("cpu"))

    def _await_all(self, what: str) -> None:
        limit_s = time.monotonic() + _LEAVE_S
        while self._store.add(f"{self._key}/{what}", 0) < self._size:
            if time.monotonic() > limit_s:
                raise RuntimeError(
                    f"a rank ran out of memory, and after {_LEAVE_S:g} s another has not come out of its collective to "
                    "try a smaller batch with it; begin with a smaller starting_batch_size"
                )
            time.sleep(_LOOK_S / 5)

    def _is_told(self) -> bool:
        return self._store.check([self._key])

    def _look_out(self) -> None:
        """Call this rank out of NCCL's collectives once another has run out of memory."""
        while not self._over.wait(_LOOK_S):
            if self._is_told():
                _leave_group()
                return


def _leave_group() -> None:
    if not dist.is_initialized():
        return
    try:
        c10d._abort_process_group()  # noqa: SLF001 - destroy_process_group waits for what will never be
    except Exception:  # noqa: BLE001 - some backends can't abort
        dist.destroy_process_group()
