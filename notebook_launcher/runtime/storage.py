"""A checkpoint's folder: written beside its place and put there whole, checked before it is read, never executed.

``checkpoint.json``, written last, has the size and crc32 of every file and of itself; a folder without it is no
checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import re
import shutil
import sys
import zlib
from concurrent import futures
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch

from notebook_launcher.core.errors import CheckpointError, ConfigError
from notebook_launcher.runtime import folders, trees

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from notebook_launcher.runtime.staging import Memory

MANIFEST = "checkpoint.json"
FORMAT = 2
_LARGE_BYTES = 2**20
_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    np.array(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in "?SU" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]},
]  # numbers and strings; no objects


def _is_on_xla(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"


class _Counted:
    """A file being written, its size and crc32; what is large is counted and sent to the disk while it is written."""

    def __init__(self, file: IO[bytes], path: Path, pool: futures.Executor | None) -> None:
        self._file = file
        self.path = path
        self.size = self.crc = 0
        self.error: OSError | None = None
        self._pool = pool
        self._on_its_way: futures.Future[None] | None = None

    def write(self, data: bytes | memoryview) -> int:
        pool = self._pool if len(data) >= _LARGE_BYTES else None
        counted = pool.submit(zlib.crc32, data, self.crc) if pool is not None else None
        try:
            self._file.write(data)
            if pool is not None and (self._on_its_way is None or self._on_its_way.done()):
                self.sent()
                self._on_its_way = pool.submit(os.fsync, self._file.fileno())
        except OSError as error:
            self.error = error  # torch's writer makes something unreadable of it
            raise
        finally:  # the data is the caller's again
            crc = counted.result() if counted is not None else zlib.crc32(data, self.crc)
        self.size += len(data)
        self.crc = crc
        return len(data)

    def sent(self) -> None:
        """Raise what the disk has said to what it was sent: it says so once."""
        if self._on_its_way is not None:
            self._on_its_way.result()

    def flush(self) -> None:
        self._file.flush()


class Draft:
    """Files on their way into ``folder``: all at once by ``commit``, or, ``in_place``, each when it is complete.

    Only a rank that ``writes`` writes what all have; a strategy whose ranks have parts has each write its own.
    ``sharded`` is what was asked of it: True for parts, False for all whole, None as it is set up.
    With ``memory``, files are kept there as they are now, and written by ``write_kept``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        writes: bool = True,
        in_place: bool = False,
        sharded: bool | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Nothing is touched but, ``in_place``, that the folder is made."""
        self.folder = folder
        self.writes = writes
        self.path = folder if in_place else folders.beside(folder, "saving")
        self.sharded = sharded
        self.files: dict[str, list[int]] = {}  # size and crc32 of those that are complete
        self._in_place = in_place
        self._locks: list[int] = []
        self._memory = memory
        self.kept: list[tuple[str, list[memoryview | bytes]]] = []  # what ``write_kept`` is to write
        if in_place:
            folder.mkdir(parents=True, exist_ok=True)

    def begin(self) -> None:
        """Clear away what an interrupted save left, and put back what it took out of its place."""
        folder, aside = self.folder, folders.beside(self.folder, "old")
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file; name a folder")
        if folder.is_mount():
            raise _can_not_move(folder)
        if _holds_working_directory(folder):
            raise ConfigError(f"{folder} holds the working directory, and is replaced as a whole; name another folder")
        self.path.mkdir(parents=True, exist_ok=True)
        self._locks.append(folders.lock(self.path))
        if aside.exists() and not folder.exists():
            aside.rename(folder)
        for left in self.path.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[_Counted]:
        """The file ``name``, to be written; it is on the disk when the context ends."""
        path = self.path / name
        written = folders.beside(path, "saving") if self._in_place else path
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(written.open("wb"))
            # In the background nobody waits, and as the interpreter ends there are no pools any more.
            pool = stack.enter_context(futures.ThreadPoolExecutor(2)) if self._memory is None else None
            counted = _Counted(file, written, pool)
            try:
                yield counted
                file.flush()
                counted.sent()
                os.fsync(file.fileno())
            except Exception:
                written.unlink()
                if counted.error is not None:
                    raise counted.error from None
                raise
        if self._in_place:
            written.replace(path)
        self.files[name] = [counted.size, counted.crc]

    def put(self, name: str, chunks: Iterable[bytes | torch.Tensor]) -> None:
        """The file ``name``, of bytes and the bytes of tensors."""
        if self._memory is not None:
            self.kept.append((name, [self._memory.keep(one) for one in chunks]))
            return
        self._write(name, (one if isinstance(one, bytes) else flat(one).cpu().numpy().data for one in chunks))

    def copy_kept(self) -> None:
        """Finish what was kept, before what is ``guarded`` changes."""
        if self._memory is not None:
            self._memory.copy()

    def write_kept(self) -> None:
        """Write what was kept."""
        for name, chunks in self.kept:
            self._write(name, chunks)
        self.kept.clear()

    def _write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        with self.open(name) as file:
            for chunk in chunks:
                file.write(chunk)

    def objects(self, name: str, thing: Any, *, of_any_kind: bool = False) -> None:
        """``thing`` as torch saves it; ``ConfigError`` for a kind that can't be loaded without executing pickle."""
        if any(map(_is_on_xla, trees.leaves(thing))):  # else only a process with torch_xla could read it
            thing = trees.map_leaves(lambda leaf: leaf.detach().cpu() if _is_on_xla(leaf) else leaf, thing)
        if self._memory is not None:
            buffer = io.BytesIO()
            _save(thing, buffer, buffer, name, of_any_kind=of_any_kind)
            self.kept.append((name, [buffer.getbuffer()]))
            return
        with self.open(name) as file:
            _save(thing, file, str(file.path), name, of_any_kind=of_any_kind)

    def commit(self, facts: dict[str, Any], files: Mapping[str, list[int]]) -> None:
        """Put the draft in its place, with ``facts`` in its manifest; what else was in the folder stays there.

        ``files`` are those that all ranks have written. At every moment either the folder there was before can be
        loaded, or the new one.
        """
        self.files |= {name: entry for name, entry in files.items() if (self.path / name).is_file()}
        for path in self.path.rglob("*"):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and name not in self.files:  # a hook's, or DeepSpeed's
                self.files[name] = [path.stat().st_size, folders.crc(path)]
                folders.sync(path)
        facts = {"format": FORMAT, **facts, "files": dict(self.files)}
        self._write(MANIFEST, [json.dumps(facts | {"crc32": crc_of(facts)}, indent=1).encode()])
        self._carry_over()
        folders.sync(self.path)
        self._put_in_place()
        folders.sync(self.folder.parent)
        folders.remove(*([self.path] if len(self._locks) > 1 else []), folders.beside(self.folder, "old"))
        self._unlock()

    def discard(self) -> None:
        """Give it up."""
        if self._locks:  # else the draft is another's
            folders.remove(self.path)
            self._unlock()

    def _unlock(self) -> None:
        while self._locks:
            folders.unlock(self._locks.pop())

    def _carry_over(self) -> None:
        """Link what the folder holds beside its checkpoint into the draft."""
        if not self.folder.exists():
            return
        try:
            replaced = {MANIFEST, *manifest(self.folder)["files"]}
        except CheckpointError:
            replaced = {MANIFEST}

        def passed_over(folder: str, names: list[str]) -> list[str]:
            base = Path(folder).relative_to(self.folder)
            taken = [name for name in names if (self.path / base / name).is_file()]
            return taken + [name for name in names if (base / name).as_posix() in replaced]

        shutil.copytree(
            self.folder, self.path, ignore=passed_over, copy_function=folders.link, symlinks=True, dirs_exist_ok=True
        )

    def _put_in_place(self) -> None:
        folder, aside = self.folder, folders.beside(self.folder, "old")
        if folder.exists():
            replaced = folders.lock(folder)  # before it is where drafts are
            if _exchange(self.path, folder):
                self._locks.append(replaced)
                return
            folders.unlock(replaced)
            if aside.exists():
                folders.remove(folder)  # what is set aside is the last checkpoint, this is none
            else:
                try:
                    folder.rename(aside)
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        raise
                    raise _can_not_move(folder) from error  # mounted from its own file system: is_mount saw nothing
        self.path.rename(folder)


def locate(folder: Path) -> Path:
    """``folder``, or where an interrupted save left what was in it; ``CheckpointError`` where there is none."""
    for place in (folder, folders.beside(folder, "old")):
        if (place / MANIFEST).is_file():
            return place
    why = f"it has no {MANIFEST}" if folder.is_dir() else "there is no such folder"
    raise CheckpointError(f"{folder} holds no checkpoint: {why}. Name a folder that save_state has written.")


def manifest(folder: Path) -> dict[str, Any]:
    """What ``folder`` says of itself; ``CheckpointError`` where that can't be read."""
    path = folder / MANIFEST
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        version, crc = facts["format"], facts.pop("crc32", None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}. Load another checkpoint.") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} is of format {version!r}, and this version reads {FORMAT}")
    if crc != crc_of(facts):
        raise CheckpointError(f"{path} is damaged: its content has changed. Load another checkpoint.")
    outside = [name for name in facts["files"] if PurePath(name).is_absolute() or ".." in PurePath(name).parts]
    if outside:
        raise CheckpointError(f"{path} names {outside[0]!r}, which is not in its folder. Load another checkpoint.")
    return facts


def crc_of(facts: dict[str, Any]) -> int:
    """The crc32 of what a manifest says."""
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def checked(folder: Path, *, ignore: str = "") -> dict[str, Any]:
    """The manifest of ``folder``, all of whose files are as they were saved; those that begin with ``ignore`` aside.

    Raises ``CheckpointError`` with the name of the first that is not.
    """
    facts = manifest(folder)
    for name, entry in facts["files"].items():
        problem = None if ignore and name.startswith(ignore) else _problem(folder / name, *entry)
        if problem is not None:
            if manifest(folder) != facts:  # another process has replaced it meanwhile
                return checked(folder, ignore=ignore)
            raise CheckpointError(f"{folder / name} {problem}. Load another checkpoint.")
    return facts


def _problem(path: Path, size: int, crc: int) -> str | None:
    """What is wrong with a file that was of that size and crc32."""
    if not path.is_file():
        return "is missing"
    try:
        found = path.stat().st_size
        if found != size:
            return f"is damaged: {found} bytes, not {size}"
        return None if folders.crc(path) == crc else "is damaged: its content has changed"
    except OSError as error:
        return f"can't be read: {error}"


def read(path: Path) -> Any:
    """What ``objects`` wrote to ``path``, on the CPU; nothing in it is executed."""
    try:
        with torch.serialization.safe_globals(_NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it asks for {named[1]}, and nothing is executed" if named else str(error).partition("\n")[0]
        raise CheckpointError(f"{path} can't be read: {why}. Load another checkpoint.") from error


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor``, sharing its memory where it is in one piece; in host memory, of one that XLA has."""
    tensor = tensor.cpu() if _is_on_xla(tensor) else tensor
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _save(thing: Any, file: Any, written: Any, name: str, *, of_any_kind: bool) -> None:
    with torch.serialization.safe_globals(_NUMPY):
        with _without_second_crc():
            torch.save(thing, cast("IO[bytes]", file))
        file.flush()
        if file is written:
            file.seek(0)
        unsafe = [] if of_any_kind else torch.serialization.get_unsafe_globals_in_checkpoint(written)
    if not of_any_kind:  # that torch knows a dtype's name does not say that it can build it
        arrays = (leaf for leaf in trees.leaves(thing) if isinstance(leaf, np.ndarray | np.generic))
        unsafe += {f"numpy's {array.dtype}" for array in arrays if type(array.dtype) not in _NUMPY}
    if unsafe:
        raise ConfigError(
            f"{name} would hold {', '.join(sorted(unsafe))}, which can't be loaded without executing pickle; "
            "have state_dict() return tensors, numbers, strings, arrays of them, lists and dictionaries only"
        )


@contextlib.contextmanager
def _without_second_crc() -> Iterator[None]:
    """A context in which torch counts no crc32, which takes it as long as to write: ours is what loading looks at."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _holds_working_directory(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:  # somebody has deleted it
        return False


def _can_not_move(folder: Path) -> ConfigError:
    return ConfigError(
        f"{folder} can't be replaced as a whole: something is mounted just there, or it is in use. Name a folder in "
        f"it, such as {folder / 'checkpoint'}"
    )


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the system can't."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return swap is not None and swap(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
