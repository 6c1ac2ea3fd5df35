"""What a run has come to, in words and as the exception that a launch raises."""

from __future__ import annotations

import functools
import re
import signal
from typing import TYPE_CHECKING

from notebook_launcher.core import pickling
from notebook_launcher.core.cell_labels import in_cells
from notebook_launcher.core.errors import DeadlockError, EngineError, PeerError, RunTimeoutError, WorkerError
from notebook_launcher.core.excerpts import excerpt
from notebook_launcher.launcher.state import Phase, RankState, RunState

if TYPE_CHECKING:
    from notebook_launcher.core.events import Failed

_REASONS = {
    signal.SIGKILL: "most likely the machine ran out of memory: try a smaller batch, model, or number of processes",
    signal.SIGSEGV: "native code crashed; the Python line where it happened is in what it wrote last",
    signal.SIGBUS: "native code crashed; on a machine with a small /dev/shm, it is often full",
    signal.SIGABRT: "native code gave up; its own message is in what it wrote last",
    signal.SIGILL: "native code was built for another processor",
    signal.SIGFPE: "native code divided by zero",
    signal.SIGTERM: "something outside this run asked it to end",
}
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+),.*?Timeout\(ms\)=(\d+)"
)
_CURE = (
    "Every rank must make the same calls in the same order, none under a condition that only some ranks meet: gather, "
    "a barrier and saving are such calls, and the forward of a sharded model (FSDP, ZeRO 3) and each backward are. In "
    "a loop that is longer on some ranks, go on until none has anything left: accelerator.set_trigger() on a rank that "
    "has, and accelerator.check_trigger() on all, in each round."
)
_SHOWN_CHARS = 16_000  # some hundred lines of a traceback
_MORE = "[cut to fit a notebook: run.error has more of it, and so has the exception that you catch]"


def signal_name(code: int) -> str:
    """The signal's name, such as "SIGKILL" for -9, or "signal 70" for one without."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def death(code: int | None, memory: str) -> tuple[str, str]:
    """(kind, sentence) for a process that ended without a word; ``memory`` is the machine's use at the time."""
    if code is None:
        return "exit", "is gone, and nobody knows how it ended"
    if code < 0:
        name = signal_name(code)
        reason = _REASONS.get(signal.Signals(-code), "") if name.startswith("SIG") else ""
        at_the_time = f" ({memory})" if -code == signal.SIGKILL and memory else ""
        return name, f"was ended by {name}" + (f": {reason}{at_the_time}" if reason else "")
    return "exit", f"left with exit code {code} before the function had returned (os._exit or the like)"


def nccl_timeout(written: str) -> str:
    """What a rank died of, where NCCL's watchdog ended it: the collective that the others did not come to; else ""."""
    found = _WATCHDOG.search(written)
    if found is None:
        return ""
    number, name, limit_ms = found.groups()
    return (
        f"waited {int(limit_ms) / 1000:g} s in NCCL's {name}, its collective number {number}, and was ended by NCCL's "
        "watchdog: another rank made other calls or hangs, or the GPUs can't reach each other. `%launcher check` is a "
        "preflight that tells which; where it hangs too, env={'NCCL_P2P_DISABLE': '1'} often helps"
    )


def fate(state: RankState, cause: RankState | None) -> str:
    """One line on what became of a rank."""
    if state.phase is Phase.RAISED and state.failed is not None:
        return _raised(state, state.failed, cause)
    if state.phase is not Phase.DIED:
        return str(state.phase.value)
    if state.sent is None:
        return death(state.exit_code, "")[1]
    code = state.exit_code
    return f"{_doing(state)}, " + (f"ended by {signal_name(code)}" if code is not None and code < 0 else "ended")


def _raised(state: RankState, failed: Failed, cause: RankState | None) -> str:
    if state is not cause and cause is not None and cause.failed is not None and _same(failed, cause.failed):
        return f"raised the same {failed.type_name}"
    if failed.type_name == "KeyboardInterrupt" and state.sent is not None:
        return f"{_doing(state)}, interrupted"
    if failed.peer_lost and state is not cause and failed.type_name != PeerError.__name__:
        return "lost its connection to another rank"  # in the backend's words it is a page
    first_line = failed.message.split("\n", 1)[0][:200]
    if failed.type_name == "SystemExit":
        return f"called sys.exit({first_line})"
    return f"raised {failed.type_name}" + (f": {first_line}" if first_line else "")


def fates(state: RunState, without: int | None = None) -> tuple[str, ...]:
    """One line for each rank but ``without``; ranks of the same fate share one."""
    cause = state.ranks[state.cause] if state.cause is not None else None
    grouped: dict[str, list[int]] = {}
    for rank, one in enumerate(state.ranks):
        if rank != without:
            grouped.setdefault(fate(one, cause), []).append(rank)
    return tuple(f"{_ranks(ranks)}: {text}" for text, ranks in grouped.items())


def error_of(state: RunState, host: str, tails: dict[int, str], memory: str) -> BaseException:
    """The exception that the failed run raises: the worker's own, with a ``WorkerError`` as its cause.

    ``tails`` is the end of each rank's standard error, which for a crash is all there is.
    """
    rank = state.cause if state.cause is not None else 0
    one = state.ranks[rank]
    others = fates(state, without=rank)
    total = len(state.ranks)
    if one.failed is None:
        kind, sentence = death(one.exit_code, memory)
        tail = in_cells(_without_module_list(tails.get(rank, ""))).strip()
        message = f"rank {rank} of {total} died: it {nccl_timeout(tail) or sentence}"
        return WorkerError(message, rank=rank, host=host, kind=kind, traceback_text=tail, others=others)
    failed = one.failed
    headline = f"rank {rank} of {total} raised {failed.type_name}" + (f": {failed.message}" if failed.message else "")
    if failed.type_name == "SystemExit":
        headline = f"rank {rank} of {total} called sys.exit({failed.message}), which ended the run"
    text = in_cells(failed.traceback_text)
    worker_error = WorkerError(
        headline, rank=rank, host=host, kind=failed.type_name, traceback_text=text, others=others
    )
    gone = [number for number, other in enumerate(state.ranks) if other.phase is Phase.RETURNED]
    if failed.peer_lost and gone and failed.type_name != PeerError.__name__:
        worker_error.message = (
            f"rank {rank} of {total} waited for {_ranks(gone)}, which had returned: every rank must make the same "
            f"collective calls (gather, backward, a barrier), as often as the others. {headline}"
        )
        return drawn_as(worker_error, shown(worker_error))
    own, problem = _own_exception(failed, worker_error)
    if own is not None:
        return own
    if problem:
        worker_error.others = (*worker_error.others, f"(a WorkerError in its stead: {problem})")
    return drawn_as(worker_error, shown(worker_error))


def _without_module_list(text: str) -> str:
    """What a crashed process wrote, without the long list of modules that ends Python's report of a crash."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("Extension modules: "))


def _own_exception(failed: Failed, worker_error: WorkerError) -> tuple[BaseException | None, str]:
    """The worker's exception in the kernel; or None where it has to stay text, and why."""
    if failed.error is None:
        return None, f"the {failed.type_name} itself can't be pickled"
    try:
        error = pickling.load_error(failed.error)
        if not isinstance(error, Exception):
            return None, ""  # SystemExit or KeyboardInterrupt of a worker must not end the notebook's kernel
        str(error).encode()  # what is no text, or not UTF-8, no notebook can show
        original = error.__cause__
        error.add_note(f"[rank {worker_error.rank} on {worker_error.host}]")
        drawn_as(error, shown(worker_error)).__cause__ = worker_error
    except Exception as problem:  # noqa: BLE001 - unpickling, and setting attributes, may run the user's code
        return None, f"the {failed.type_name} itself can't be raised here: {type(problem).__name__}: {problem}"
    worker_error.__cause__ = original
    return error, ""


def shown(told: WorkerError) -> str:
    """What a notebook shows of ``told``: the whole of it, or as much as a page can bear."""
    whole = str(told)
    if len(whole) <= _SHOWN_CHARS:
        return whole
    message, *others = (excerpt(text, _SHOWN_CHARS // 4) for text in (told.message, *told.others))
    frames = excerpt(told.traceback_text.rstrip(), _SHOWN_CHARS // 2)
    return "\n".join([message, *([frames] if frames else []), *others, _MORE])


def drawn_as(error: BaseException, text: str) -> BaseException:
    """Make IPython draw ``error`` as ``text``: the worker's frames, not the launcher's."""
    error._render_traceback_ = functools.partial(text.split, "\n")  # type: ignore[attr-defined]
    return error


def drawing(error: BaseException | None) -> str:
    """What a notebook shows of ``error``; "" for none."""
    if error is None:
        return ""
    try:
        return "\n".join(error._render_traceback_())  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - it has no drawing of its own, or may be of the user's own class
        return f"{type(error).__name__}: {error}"


def never_made(rank: int, total: int, problem: str, tail: str) -> EngineError:
    """The error of a rank that never had a process; ``tail`` is the end of what was written in its name."""
    return EngineError("\n".join(filter(None, [f"rank {rank} of {total} was never started: {problem}", tail.strip()])))


def timeout_error(state: RunState, timeout_s: float) -> RunTimeoutError:
    """The error of a run that went on for too long: where each rank was."""
    lines = "\n".join(fates(state))
    return RunTimeoutError(f"the run was stopped after timeout_s={timeout_s:g}\n{lines}")


def deadlock(state: RunState) -> str:
    """In one sentence, who waits for whom."""
    return f"{_ranks(list(state.locked))} wait for each other in different calls, which would be for ever"


def deadlock_error(state: RunState) -> DeadlockError:
    """The error of a run whose ranks made different calls: which, and on which line."""
    lines = [f"{deadlock(state)}:"]
    for rank, pending in state.locked.items():
        where = state.ranks[rank].where
        what = f"{pending.name} number {pending.number}" + (f" of {pending.inputs}" if pending.inputs else "")
        group = "" if len(pending.members) in (0, len(state.ranks)) else f" among ranks {pending.members}"
        lines.append(f"  rank {rank}: {what}{group}" + (f", {where.line}" if where is not None and where.line else ""))
    lines.append(_CURE)
    return DeadlockError("\n".join(lines))


def _same(one: Failed, other: Failed) -> bool:
    return (one.type_name, one.message) == (other.type_name, other.message)


def _doing(state: RankState) -> str:
    where = state.where
    if where is None or not where.call:
        return "was running"
    last = f"; its last collective was {where.last_collective}" if where.last_collective else ""
    return f"was in {where.call}" + (f" ({where.line})" if where.line else "") + last


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
