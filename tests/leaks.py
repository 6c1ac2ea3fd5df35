"""What a test may not leave behind: variables, folder, path, threads, processes, descriptors, files, shared memory."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from multiprocessing import resource_tracker
from pathlib import Path

MARK = "PYTEST_LEAK_MARK"  # in the environment of everything that a test starts, so that orphans are found too
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at only
_TRACKER = resource_tracker._resource_tracker
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
# IPython's history writer and tqdm's monitor live as long as the process, once somebody has used them.
_LASTING_THREADS = ("IPythonHistorySavingThread", "tqdm_monitor")
_LASTING_FILES = ("pytest-of-", "torchinductor_", "pymp-", "ipython-")  # pymp-: removed by multiprocessing at exit
_LASTING_VARIABLES = ("PYTEST_CURRENT_TEST",)


@dataclasses.dataclass
class Snapshot:
    """What there is at one moment."""

    variables: dict[str, str]
    directory: str
    path: list[str]
    signals: dict[int, object]
    threads: set[threading.Thread]
    processes: dict[int, str]
    descriptors: set[str]
    files: set[str]
    shared_memory: set[str]
    process_group: bool


@dataclasses.dataclass
class Kept:
    """What the launcher keeps warm on purpose: the fork server and the workers standing by."""

    processes: set[int | None]
    descriptors: set[int | None]
    threads: set[object]


def mark() -> str:
    """Mark this process's children-to-be; called once, before any test."""
    os.environ[MARK] = uuid.uuid4().hex
    return os.environ[MARK]


def take() -> Snapshot:
    """Look."""
    kept = kept_warm()
    return Snapshot(
        variables={name: value for name, value in os.environ.items() if name not in _LASTING_VARIABLES},
        directory=str(Path.cwd()),
        path=list(sys.path),
        signals={number: signal.getsignal(number) for number in _SIGNALS},
        threads={thread for thread in threading.enumerate() if not _may_last(thread, kept)},
        processes=_processes(kept),
        descriptors=_descriptors(kept),
        files={name for name in _names(Path(tempfile.gettempdir())) if not name.startswith(_LASTING_FILES)},
        shared_memory=_names(SHARED_MEMORY),
        process_group=_has_process_group(),
    )


def left_behind(before: Snapshot, limit_s: float) -> list[str]:
    """What is new since ``before`` and stays so for ``limit_s``, one line each; processes need a moment to be gone."""
    deadline = time.monotonic() + limit_s
    found = _differences(before, take())
    if found:
        gc.collect()  # what only a reference cycle holds is not left behind
    while found and time.monotonic() < deadline:
        time.sleep(0.02)  # nothing tells of a process that is no child, or of a file that goes
        found = _differences(before, take())
    return found


def end_kept() -> None:
    """End what is kept warm."""
    if warm := sys.modules.get("notebook_launcher.launcher.warm"):
        warm.shutdown()
    _TRACKER._stop()


def put_back(before: Snapshot) -> None:
    """Undo what can be undone, so that the next test fails by its own faults only."""
    for name in set(os.environ) - set(before.variables) - set(_LASTING_VARIABLES):
        del os.environ[name]
    os.environ.update(before.variables)
    os.chdir(before.directory)
    sys.path[:] = before.path
    for number, disposition in before.signals.items():
        signal.signal(number, disposition)
    for pid in set(_processes(kept_warm())) - set(before.processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if _has_process_group() and not before.process_group:
        sys.modules["torch.distributed"].destroy_process_group()


def kept_warm() -> Kept:
    """What the launcher keeps in this process by its own account, and multiprocessing's one tracker process."""
    kept = Kept(set(), set(), set())
    kept.processes.add(_TRACKER._pid)
    kept.descriptors.add(_TRACKER._fd)
    module = sys.modules.get("notebook_launcher.launcher.warm")
    if module is None:
        return kept
    warm = module._warm
    with warm.lock:
        for server in filter(None, [warm.server, *warm.retired]):
            kept.processes.add(server.pid)
            kept.descriptors |= {server._channel.fileno(), server._log.fileno(), server._lifeline.writer}
            kept.threads.add(server._watcher)
        for worker in warm.standing_by:
            worker.read_status()
            kept.processes.add(worker.pid)
            kept.descriptors |= {worker.channel.fileno(), *worker.streams.values(), worker.status, worker._process}
    return kept


def _differences(before: Snapshot, after: Snapshot) -> list[str]:
    names = sorted(before.variables.keys() | after.variables.keys())
    changed = [name for name in names if before.variables.get(name) != after.variables.get(name)]
    found = [f"environment variable {name} is {after.variables.get(name)!r} now" for name in changed]
    if before.directory != after.directory:
        found.append(f"the working directory is {after.directory} now")
    if before.path != after.path:
        found.append(f"sys.path is {after.path} now")
    found += [
        f"{signal.Signals(n).name} goes to {after.signals[n]}"
        for n in _SIGNALS
        if before.signals[n] != after.signals[n]
    ]
    found += [f"thread {thread.name!r}" for thread in after.threads - before.threads]
    found += [
        f"process {pid} ({_state(pid)}): {command}"
        for pid, command in after.processes.items()
        if pid not in before.processes and not _has_known_parent(pid, before)
    ]
    found += [f"open descriptor {item}" for item in sorted(after.descriptors - before.descriptors)]
    found += [f"{Path(tempfile.gettempdir()) / name}" for name in sorted(after.files - before.files)]
    found += [f"shared memory {name}" for name in sorted(_of_nobody_else(after.shared_memory - before.shared_memory))]
    if after.process_group and not before.process_group:
        found.append("torch.distributed's process group")
    return found


def _may_last(thread: threading.Thread, kept: Kept) -> bool:
    return thread in kept.threads or thread.name in _LASTING_THREADS or type(thread).__name__ == "TMonitor"


def _processes(kept: Kept) -> dict[int, str]:
    """Command lines of everything that carries this session's mark, orphans included, but for what is kept warm."""
    wanted = f"{MARK}={os.environ.get(MARK, '')}".encode()
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - no Path: each test looks twice, at every process
        if not name.isdecimal() or int(name) == os.getpid() or int(name) in kept.processes:
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if wanted in _read(f"/proc/{name}/environ"):
                found[int(name)] = _read(f"/proc/{name}/cmdline").replace(b"\0", b" ").decode(errors="replace")[:200]
    return found


def _read(path: str) -> bytes:
    number = os.open(path, os.O_RDONLY)
    try:
        parts = [os.read(number, 1 << 17)]
        while parts[-1]:
            parts.append(os.read(number, 1 << 17))
        return b"".join(parts)
    finally:
        os.close(number)


def _state(pid: int) -> str:
    """What tells a process apart from others of the same command line: its state, age, parent and open sockets."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        links = [str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return "it has ended meanwhile"
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    age_s = uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    sockets = sum(link.startswith("socket:") for link in links)
    return f"{fields[0]}, {age_s:.1f} s old, child of {fields[1]}, {sockets} sockets of {len(links)} descriptors"


def _has_known_parent(pid: int, before: Snapshot) -> bool:
    """Whether a process that was there before the test started it: a kernel that several tests share has its own."""
    while pid > 1:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return True  # it has just ended
        pid = int(fields[1])
        if pid in before.processes:
            return True
    return False


def _descriptors(kept: Kept) -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - as above
        with contextlib.suppress(OSError):  # the listing's own descriptor
            if int(name) not in kept.descriptors:
                found.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")  # noqa: PTH115
    return found


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()  # noqa: PTH208


def _of_nobody_else(names: set[str]) -> set[str]:
    """The shared memory that no process outside this session has mapped: the folder is the whole machine's."""
    own = f"{MARK}={os.environ.get(MARK, '')}".encode()
    for folder in Path("/proc").glob("[0-9]*") if names else ():
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if int(folder.name) != os.getpid() and own not in (folder / "environ").read_bytes():
                maps = (folder / "maps").read_text()
                names = {name for name in names if f"{SHARED_MEMORY}/{name}" not in maps}
    return names


def _has_process_group() -> bool:
    module = sys.modules.get("torch.distributed")
    return bool(module and module.is_available() and module.is_initialized())
