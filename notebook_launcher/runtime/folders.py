"""What saving asks of a file system: names beside a folder, locks that end with their process, files on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import zlib
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.errors import CheckpointError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

if TYPE_CHECKING:
    from pathlib import Path

_CHUNK_BYTES = 2**24
_NUMBERED = re.compile(r"checkpoint_(\d+)")


def beside(folder: Path, state: str) -> Path:
    """The hidden sibling of ``folder``: "saving", "old" (taken out of its place) or "removing"."""
    return folder.with_name(f".{folder.name}.{state}")


def is_numbered(folder: Path) -> bool:
    """Whether its name is an automatic one."""
    return _NUMBERED.fullmatch(folder.name) is not None


def number(folder: Path) -> int:
    """That of an automatic name."""
    return int(folder.name.rpartition("_")[2])


def numbered(home: Path) -> list[Path]:
    """The folders with automatic names in ``home``, oldest first."""
    return sorted(filter(is_numbered, home.iterdir()), key=number) if home.is_dir() else []


def tidy(home: Path, limit: int | None) -> None:
    """Delete what interrupted saves left in ``home``, and all but the latest ``limit`` of its numbered folders.

    Such a one is no checkpoint any more from the first moment on.
    """
    for draft in home.glob(".checkpoint_*.saving"):
        with contextlib.suppress(OSError, CheckpointError):  # somebody is writing it
            held = lock(draft)
            remove(draft)
            unlock(held)
    remove(*home.glob(".checkpoint_*.removing"))
    for folder in numbered(home)[:-limit] if limit else ():
        aside = beside(folder, "removing")
        folder.rename(aside)
        remove(aside)


def remove(*folders: Path) -> None:
    """Delete what is there of ``folders``; what can't be deleted stays."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def lock(draft: Path) -> int:
    """Keep other processes from writing into ``draft``, until what is returned is closed or this process ends."""
    if fcntl is None:  # nor does Windows open folders
        return os.open(os.devnull, os.O_RDONLY)
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        flock(descriptor)
        is_ours = os.path.samestat(os.fstat(descriptor), draft.stat())
    except OSError as error:
        is_ours = error.errno in {errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}  # no locks there
    if not is_ours:
        os.close(descriptor)
        raise CheckpointError(
            f"another process is saving into {draft}, and two would write one checkpoint; give each run a folder of "
            "its own (save_on_each_node=True is for folders that machines do not share)"
        )
    return descriptor


def flock(descriptor: int, *, wait: bool = False) -> None:
    """Lock an open file for oneself, or ``wait`` until nobody has; ``OSError`` where that can't be."""
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "this system has no flock")
    fcntl.flock(descriptor, fcntl.LOCK_SH if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(descriptor: int) -> None:
    """Let others have what ``lock`` gave."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may hold it too
    os.close(descriptor)


def link(source: str, target: str) -> None:
    """Have a file under a second name, or a copy of it."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def crc(path: Path) -> int:
    """The crc32 of a file."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        while size := file.readinto(chunk):
            crc = zlib.crc32(chunk[:size], crc)
    return crc


def sync(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk; Windows opens no folders, and is not waited for."""
    if fcntl is None and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
