"""How much memory is in use of what the run's processes may use: the machine's, or less in a container or a job."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import psutil

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class _Files:
    """What a version of control groups calls its facts. ``stat`` is the cache that gives way, a line of memory.stat."""

    limit: str
    used: str
    kills: str
    stat: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "memory.events", "inactive_file")


class MemoryMeter:
    """Reads the memory in use, of the tightest limit that this process is under."""

    def __init__(self, root: Path = Path("/")) -> None:
        """``root`` stands in for the file system's, in tests."""
        self._total_bytes = psutil.virtual_memory().total
        self._files, self._group = _V2, None
        for files, group in _groups(root):
            limit = _number(group / files.limit)
            if limit is not None and limit < self._total_bytes:
                self._files, self._group, self._total_bytes = files, group, limit
        self._num_killed_before = self._num_killed()

    def used_bytes(self) -> int:
        """Bytes in use now, without caches that give way."""
        if self._group is None:
            memory = psutil.virtual_memory()
            return int(memory.total - memory.available)
        cache = _line(self._group / "memory.stat", self._files.stat)
        return max(0, (_number(self._group / self._files.used) or 0) - cache)

    def told(self, used_bytes: int) -> str:
        """What a person should know where ``used_bytes`` were in use and then a process died."""
        text = f"{used_bytes / _GIB:.1f} of {self._total_bytes / _GIB:.1f} GiB in use just before"
        if self._group is not None:
            text += ", which is the limit of this container or job"
        if self._num_killed() > self._num_killed_before:
            text += "; the system has killed a process of it for want of memory"
        return text

    def _num_killed(self) -> int:
        return 0 if self._group is None else _line(self._group / self._files.kills, "oom_kill")


def _groups(root: Path) -> list[tuple[_Files, Path]]:
    """The control groups that this process is in and that this process can see, the innermost first."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files, base = (_V1, root / "sys/fs/cgroup/memory") if controllers else (_V2, root / "sys/fs/cgroup")
        innermost = base / name.strip("/")  # in a container it may be the name outside, which is not here
        found += [(files, group) for group in (innermost, *innermost.parents) if group.is_relative_to(base)]
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    """The number in ``file``; None where there is none, or "max"."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _line(file: Path, name: str) -> int:
    """The number behind ``name`` in ``file``, 0 where there is none."""
    found = re.search(rf"^{name} (\d+)$", _text(file), re.MULTILINE)
    return int(found[1]) if found else 0
