"""A checkpoint's folder: written beside its place and put there whole, checked before it is read, never executed.

``checkpoint.json``, written last, has the size and crc32 of every file; a folder without it is no checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import sys
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch

from notebook_launcher.core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

MANIFEST = "checkpoint.json"
FORMAT = 1
_CHUNK_BYTES = 2**24
_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    np.array(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in "?SU" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]},
]  # numbers and strings; no objects


def beside(folder: Path, state: str) -> Path:
    """The hidden sibling of ``folder``: "saving", "old" (taken out of its place) or "removing"."""
    return folder.with_name(f".{folder.name}.{state}")


class _Counted:
    """A file being written, its size and crc32."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self.path = path
        self.size = self.crc = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error  # torch's writer makes something unreadable of it
            raise
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


class Draft:
    """Files on their way into ``folder``: all at once by ``commit``, or, ``in_place``, each when it is complete.

    Only a rank that ``writes`` has files of its own; a strategy whose ranks all write puts theirs in ``path``.
    """

    def __init__(self, folder: Path, *, writes: bool = True, in_place: bool = False) -> None:
        """Nothing is touched but, ``in_place``, that the folder is made."""
        self.folder = folder
        self.writes = writes
        self.path = folder if in_place else beside(folder, "saving")
        self._in_place = in_place
        self._files: dict[str, list[int]] = {}
        if in_place:
            folder.mkdir(parents=True, exist_ok=True)

    def begin(self) -> None:
        """Clear away what an interrupted save left, and put back what it took out of its place."""
        folder, aside = self.folder, beside(self.folder, "old")
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file; name a folder")
        if Path.cwd().is_relative_to(folder):
            raise ConfigError(f"{folder} holds the working directory, and is replaced as a whole; name another folder")
        if aside.exists() and not folder.exists():
            aside.rename(folder)
        remove(self.path)
        self.path.mkdir(parents=True)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[_Counted]:
        """The file ``name``, to be written; it is on the disk when the context ends."""
        path = self.path / name
        written = beside(path, "saving") if self._in_place else path
        with written.open("wb") as file:
            counted = _Counted(file, written)
            try:
                yield counted
                file.flush()
                os.fsync(file.fileno())
            except Exception:
                written.unlink()
                if counted.error is not None:
                    raise counted.error from None
                raise
        if self._in_place:
            written.replace(path)
        self._files[name] = [counted.size, counted.crc]

    def text(self, name: str, text: str) -> None:
        """A text file."""
        with self.open(name) as file:
            file.write(text.encode())

    def objects(self, name: str, thing: Any, *, of_any_kind: bool = False) -> None:
        """``thing`` as torch saves it; ``ConfigError`` for a kind that can't be loaded without executing pickle."""
        with self.open(name) as file, torch.serialization.safe_globals(_NUMPY):
            torch.save(thing, cast("IO[bytes]", file))
            file.flush()
            unsafe = [] if of_any_kind else torch.serialization.get_unsafe_globals_in_checkpoint(str(file.path))
            if unsafe:
                raise ConfigError(
                    f"{name} would hold {', '.join(sorted(unsafe))}, which can't be loaded without executing pickle; "
                    "have state_dict() return tensors, arrays, numbers, strings, lists and dictionaries only"
                )

    def commit(self, facts: dict[str, Any]) -> None:
        """Put the draft in its place, with ``facts`` in its manifest; what else was in the folder stays there.

        At every moment either the folder there was before can be loaded, or the new one.
        """
        for path in self.path.rglob("*"):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and name not in self._files:  # a hook's
                self._files[name] = [path.stat().st_size, _crc(path)]
                _sync(path)
        files = dict(self._files)
        self.text(MANIFEST, json.dumps({"format": FORMAT, **facts, "files": files}, indent=1))
        self._carry_over()
        _sync(self.path)
        self._put_in_place()
        _sync(self.folder.parent)
        remove(self.path, beside(self.folder, "old"))

    def discard(self) -> None:
        """Give it up."""
        remove(self.path)

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
            self.folder, self.path, ignore=passed_over, copy_function=_link, symlinks=True, dirs_exist_ok=True
        )

    def _put_in_place(self) -> None:
        folder, aside = self.folder, beside(self.folder, "old")
        if folder.exists():
            if _exchange(self.path, folder):
                return
            if aside.exists():
                remove(folder)  # what is set aside is the last checkpoint, this is none
            else:
                folder.rename(aside)
        self.path.rename(folder)


def locate(folder: Path) -> Path:
    """``folder``, or where an interrupted save left what was in it; ``CheckpointError`` where there is none."""
    for place in (folder, beside(folder, "old")):
        if (place / MANIFEST).is_file():
            return place
    why = f"it has no {MANIFEST}" if folder.is_dir() else "there is no such folder"
    raise CheckpointError(f"{folder} holds no checkpoint: {why}. Name a folder that save_state has written.")


def manifest(folder: Path) -> dict[str, Any]:
    """What ``folder`` says of itself; ``CheckpointError`` where that can't be read."""
    path = folder / MANIFEST
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        version, _ = facts["format"], facts["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}. Load another checkpoint.") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} is of format {version!r}, and this version reads {FORMAT}")
    return facts


def checked(folder: Path, *, ignore: str = "") -> dict[str, Any]:
    """The manifest of ``folder``, all of whose files are as they were saved; those that begin with ``ignore`` aside.

    Raises ``CheckpointError`` with the name of the first that is not.
    """
    facts = manifest(folder)
    for name, (size, crc) in facts["files"].items():
        path = folder / name
        if ignore and name.startswith(ignore):
            continue
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. Load another checkpoint.")
        found = path.stat().st_size
        if found != size:
            raise CheckpointError(f"{path} is damaged: {found} bytes, not {size}. Load another checkpoint.")
        if _crc(path) != crc:
            raise CheckpointError(f"{path} is damaged: its content has changed. Load another checkpoint.")
    return facts


def read(path: Path) -> Any:
    """What ``objects`` wrote to ``path``, on the CPU; nothing in it is executed."""
    try:
        with torch.serialization.safe_globals(_NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it asks for {named[1]}, and nothing is executed" if named else str(error).partition("\n")[0]
        raise CheckpointError(f"{path} can't be read: {why}. Load another checkpoint.") from error


def take_away(folder: Path) -> None:
    """Delete a checkpoint, which is none any more from the first moment on."""
    aside = beside(folder, "removing")
    remove(aside)
    folder.rename(aside)
    remove(aside)


def remove(*folders: Path) -> None:
    """Delete what is there of ``folders``; what can't be deleted stays."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the system can't."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return swap is not None and swap(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb", buffering=0) as file:
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        while size := file.readinto(chunk):
            crc = zlib.crc32(chunk[:size], crc)
    return crc


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
