"""Saving in the background: what is to be written is copied, and threads write it while training goes on.

What code may change at any time, as weights, is copied at once. What only an optimizer's step changes, as Adam's
moments, a thread copies: the step, and whoever asks the prepared optimizer for its state, waits for it.

The rank that puts the checkpoint in its place learns from files ``.rank<n>`` what the others have written: each is
locked until that rank's thread has ended, or its process.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.core.errors import CheckpointError
from notebook_launcher.runtime import folders, shards, storage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from torch import nn

    from notebook_launcher.runtime.optim import PreparedOptimizer

Files = dict[str, list[int]]
_BLOCK_BYTES = 2**26


class Guard:
    """Has whoever would change the state of an optimizer wait until it is copied."""

    copying: threading.Thread | None = None

    def wait(self, *_: object) -> None:
        """Wait; torch calls it before each step."""
        if self.copying is not None:
            self.copying.join()
            self.copying = None

    def over(self, optimizers: Iterable[PreparedOptimizer], models: Iterable[nn.Module]) -> set[int]:
        """Where the memory begins that nothing but a step of ``optimizers`` changes, which will wait."""
        found: set[int] = set()
        for optimizer in optimizers:
            inner = optimizer.optimizer
            if not getattr(type(inner).step, "hooked", False):  # torch's own do, and what is derived from them
                continue
            if optimizer.guard is not self:
                optimizer.guard = self
                inner.register_step_pre_hook(self.wait)
            found |= {_memory_of(one) for values in inner.state.values() for one in values.values()}
        for model in models:  # an optimizer may remember a weight itself
            found -= set(map(_memory_of, itertools.chain(model.parameters(), model.buffers())))
        return found - {0}


def _memory_of(value: Any) -> int:
    """Where the memory of a tensor begins; 0 for what isn't in plain memory of this process."""
    tensor = shards.local(value) if isinstance(value, torch.Tensor) else None
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.layout != torch.strided or tensor.is_inference():
        return 0
    return tensor.untyped_storage().data_ptr()


class Memory:
    """Where copies are kept. It stays from one save to the next: new memory takes the system longer than the copy."""

    def __init__(self) -> None:
        """Empty."""
        self._blocks: list[torch.Tensor] = []
        self.reset()

    def reset(self, guarded: Collection[int] = ()) -> None:
        """Give up what is kept; what begins at ``guarded`` may be copied later."""
        self._block = self._used = 0
        self._guarded = guarded
        self._later: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def keep(self, chunk: bytes | torch.Tensor) -> bytes | memoryview:
        """``chunk`` as it is now; if guarded, once ``copy`` has been called."""
        if isinstance(chunk, bytes):
            return chunk
        data = storage.flat(chunk)
        kept = self._room(data.numel())
        if data.is_cpu and data.untyped_storage().data_ptr() in self._guarded:
            self._later.append((kept, data, data._version))  # noqa: SLF001 - torch has no other word for it
        elif data.is_cpu:
            kept.numpy()[:] = data.numpy()  # torch's threads would wait for one another, on cores that are busy
        else:
            kept.copy_(data)
        return kept.numpy().data

    def copy(self) -> None:
        """Copy what was left for later; ``CheckpointError`` where it has been changed nevertheless."""
        later, self._later = self._later, []
        for kept, data, version in later:
            kept.numpy()[:] = data.numpy()
            if data._version != version:  # noqa: SLF001
                raise CheckpointError(
                    "the state of an optimizer was changed while it was copied, by other code than its step; have that "
                    "code take it from the prepared optimizer's state, which waits, or leave out async_=True"
                )

    def _room(self, num_bytes: int) -> torch.Tensor:
        while self._block < len(self._blocks) and self._used + num_bytes > self._blocks[self._block].numel():
            self._block, self._used = self._block + 1, 0
        if self._block == len(self._blocks):
            self._blocks.append(_allocated(max(num_bytes, _BLOCK_BYTES)))
        self._used += num_bytes
        return self._blocks[self._block][self._used - num_bytes : self._used]


def _allocated(num_bytes: int) -> torch.Tensor:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # fewer pages; none shared with loader workers, to be copied
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)


class Background:
    """One save on its way."""

    def __init__(self, draft: storage.Draft, rank: int, guard: Guard) -> None:
        """Of what ``draft`` keeps, on this rank."""
        self._draft = draft
        self._rank = rank
        self._guard = guard
        self._claimed: int | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def claim(self) -> None:
        """Say that this rank will write; before the one that waits for it looks."""
        if self._draft.writes or not self._draft.kept:
            return
        path = self._draft.path / f".rank{self._rank}"
        self._claimed = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            folders.flock(self._claimed)
        except OSError as error:
            raise CheckpointError(
                f"async_=True needs a file system with locks, and {path} can't be locked: {error}; leave it out"
            ) from error

    def give_up(self) -> None:
        """Nothing will be written: other ranks can't."""
        if self._claimed is not None:
            os.close(self._claimed)

    def start(self, commit: Callable[[Files], None]) -> None:
        """Begin; ``commit``, called with all ranks' files on ranks that write what all have, ends it."""
        self._guard.copying = copying = threading.Thread(target=self._copy, name="save_state")
        copying.start()
        self._thread = threading.Thread(target=self._run, args=(copying, commit), name="save_state")
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def result(self) -> None:
        """Wait for the end; raise ``CheckpointError`` where the checkpoint was not saved."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            text = str(self._error) if isinstance(self._error, CheckpointError) else repr(self._error)
            raise CheckpointError(
                f"{self._draft.folder} could not be saved in the background, and is as it was before: {text}"
            ) from self._error

    def _copy(self) -> None:
        try:
            self._draft.copy_kept()
        except Exception as error:  # noqa: BLE001 - it is raised where somebody waits
            self._error = error

    def _run(self, copying: threading.Thread, commit: Callable[[Files], None]) -> None:
        copying.join()
        try:
            if self._error is None:
                self._draft.write_kept()
        except Exception as error:  # noqa: BLE001 - as above
            self._error = error
        if self._draft.writes:
            self._finish(commit)
        elif self._claimed is not None:
            told = {"files": self._draft.files, "error": repr(self._error) if self._error else ""}
            os.write(self._claimed, json.dumps(told).encode())
            folders.unlock(self._claimed)

    def _finish(self, commit: Callable[[Files], None]) -> None:
        files: Files = {}
        try:
            told = {path: _outcome(path) for path in sorted(self._draft.path.glob(".rank*"))}  # once all have ended
            if self._error is not None:
                raise self._error  # noqa: TRY301
            for path, one in told.items():
                if one["error"]:
                    raise CheckpointError(f"on {path.name[1:]}: {one['error']}")  # noqa: TRY301
                files |= one["files"]
                path.unlink()
            commit(files)
        except Exception as error:  # noqa: BLE001 - it is raised where somebody waits
            self._error = error
            self._draft.discard()


def _outcome(path: Path) -> dict[str, Any]:
    """What the rank of ``path`` has written, once it has."""
    with path.open("rb") as file:
        folders.flock(file.fileno(), wait=True)
        text = file.read()
    found: dict[str, Any] = json.loads(text or '{"error": "the process ended before it had written its part"}')
    return found
