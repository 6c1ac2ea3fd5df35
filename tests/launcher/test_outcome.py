"""What a run has come to, in words and as an exception: from states, without a run."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from notebook_launcher.core.errors import DeadlockError, EngineError, PeerError, RunTimeoutError, WorkerError
from notebook_launcher.core.events import Pending, Where
from notebook_launcher.launcher import outcome
from notebook_launcher.launcher.state import Act, RunState
from notebook_launcher.worker import failure


def state(num_ranks=2):
    made = RunState(num_ranks)
    for rank in range(num_ranks):
        made.started(rank)
    return made


def _raise(error):
    raise error


def failed(error):
    """What a rank would tell of ``error``."""
    try:
        _raise(error)
    except BaseException as caught:  # noqa: BLE001
        return failure.describe(caught)


def raised(error, num_ranks=1):
    made = state(num_ranks)
    made.raised(0, failed(error), 1.0)
    return outcome.error_of(made, "node7", {}, "")


class CustomError(ValueError):
    """An error of a notebook's own."""


class LockedError(Exception):
    """Can't be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.stream = (line for line in ())


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Refuses every attribute."""

    code: int


class UnprintableError(Exception):
    """Its own text raises."""

    def __str__(self):
        raise LookupError("no text")


# --- what is raised ---------------------------------------------------------------------------------------------------


def test_the_workers_own_exception_is_raised_with_a_note_and_a_cause():
    error = raised(CustomError("batch 64"), num_ranks=2)
    assert type(error) is CustomError
    assert error.args == ("batch 64",)
    assert error.__notes__ == ["[rank 0 on node7]"]
    cause = error.__cause__
    assert isinstance(cause, WorkerError)
    assert (cause.rank, cause.host, cause.kind) == (0, "node7", "CustomError")
    assert cause.others == ("rank 1: running",)
    assert "raise error" in cause.traceback_text
    assert str(cause).startswith("rank 0 of 2 raised CustomError: batch 64\nTraceback")


def test_a_notebook_draws_the_workers_text():
    error = raised(CustomError("batch 64"))
    assert error._render_traceback_() == str(error.__cause__).split("\n")


def test_a_notebook_draws_no_more_than_a_page_can_bear():
    error = raised(CustomError("begin" + "x" * 5_000_000 + "end"))
    assert len(str(error)) == 5_000_008
    drawn = "\n".join(error._render_traceback_())
    assert len(drawn) < 8000
    assert drawn.startswith("rank 0 of 1 raised CustomError: beginxxx")
    assert "raise error" in drawn
    assert "[4,999,540 characters not shown]" in drawn.split("\n")[0]
    assert drawn.endswith("[cut to fit a notebook: run.error has more of it, and so has the exception that you catch]")


def test_a_long_chain_is_drawn_by_its_beginning_and_its_end():
    error = ValueError("first")
    for number in range(2_000):
        error, error.__context__ = KeyError(number), error
    lines = raised(error)._render_traceback_()
    assert len("\n".join(lines)) < 10_000
    assert lines[1] == "ValueError: first"
    assert lines[-2] == "KeyError: 1999"
    assert sum("lines not shown" in line for line in lines) == 1


def test_a_long_farewell_is_one_short_line():
    made = state(1)
    made.raised(0, failed(SystemExit("x" * 1_000_000)), 1.0)
    (told,) = outcome.fates(made)
    assert len(told) < 300


def test_the_original_cause_follows_the_worker_error():
    inner = CustomError("outer")
    inner.__cause__ = KeyError("inner")
    error = raised(inner)
    assert isinstance(error.__cause__, WorkerError)
    assert type(error.__cause__.__cause__) is KeyError


def test_notes_of_the_functions_own_stay_first():
    inner = CustomError("x")
    inner.add_note("look at /data")
    assert raised(inner).__notes__ == ["look at /data", "[rank 0 on node7]"]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (LockedError("odd"), "LockedError", "odd"),
        (FrozenError(3), "FrozenError", "3"),
        (UnprintableError(), "UnprintableError", "(its text can't be shown: LookupError)"),
        (ValueError("half a pair: \ud800"), "ValueError", "half a pair: \\ud800"),
    ],
)
def test_what_cannot_be_raised_here_is_told_by_a_worker_error(error, kind, text):
    told = raised(error)
    assert type(told) is WorkerError
    assert told.kind == kind
    assert told.message == f"rank 0 of 1 raised {kind}: {text}"
    str(told).encode()
    assert told._render_traceback_() == str(told).split("\n")


def test_sys_exit_is_told_and_never_raised():
    told = raised(SystemExit(3))
    assert type(told) is WorkerError
    assert told.message == "rank 0 of 1 called sys.exit(3), which ended the run"


def test_a_workers_keyboard_interrupt_does_not_interrupt_the_kernel():
    assert type(raised(KeyboardInterrupt())) is WorkerError


def test_an_error_whose_class_is_not_here_any_more(monkeypatch):
    packed = failed(CustomError("x"))
    made = state(1)
    made.raised(0, packed, 1.0)
    monkeypatch.setattr(outcome.pickling, "load_error", lambda _: 1 / 0)
    told = outcome.error_of(made, "h", {}, "")
    assert type(told) is WorkerError
    assert told.others == (
        (
            "(a WorkerError in its stead: the CustomError itself can't be raised here: "
            "ZeroDivisionError: division by zero)"
        ),
    )


def test_a_run_that_timed_out_says_where_each_rank_was():
    made = state(2)
    made.found(0, Where("all_reduce", "line 3 of train: all_reduce(t)", ""))
    for rank in (0, 1):
        made.ranks[rank].sent = Act.TERMINATE
        made.exited(rank, -signal.SIGTERM, 1.0)
    error = outcome.timeout_error(made, 2.5)
    assert isinstance(error, RunTimeoutError)
    assert str(error) == (
        "the run was stopped after timeout_s=2.5\n"
        "rank 0: was in all_reduce (line 3 of train: all_reduce(t)), ended by SIGTERM\n"
        "rank 1: was running, ended by SIGTERM"
    )


def test_a_rank_that_never_was():
    error = outcome.never_made(1, 4, "the system refused another process", "a process can't be forked: EAGAIN\n")
    assert isinstance(error, EngineError)
    assert str(error) == (
        "rank 1 of 4 was never started: the system refused another process\na process can't be forked: EAGAIN"
    )


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (-signal.SIGKILL, "SIGKILL", ["ended by SIGKILL: most likely", "out of memory", "(61 of 64 GiB)"]),
        (-signal.SIGSEGV, "SIGSEGV", ["ended by SIGSEGV: native code crashed"]),
        (-signal.SIGUSR1, "SIGUSR1", ["ended by SIGUSR1"]),
        (-70, "signal 70", ["ended by signal 70"]),
        (3, "exit", ["exit code 3", "os._exit"]),
        (0, "exit", ["exit code 0"]),
        (None, "exit", ["nobody knows how it ended"]),
    ],
)
def test_a_death_is_named_with_its_likely_reason(code, kind, words):
    got_kind, sentence = outcome.death(code, "61 of 64 GiB")
    assert got_kind == kind
    for word in words:
        assert word in sentence
    assert ("GiB" in sentence) == (code == -signal.SIGKILL)


def test_a_death_raises_a_worker_error_with_the_last_output():
    made = state(2)
    made.exited(1, -signal.SIGSEGV, 1.0)
    error = outcome.error_of(made, "node7", {0: "not this", 1: "Fatal Python error\n"}, "")
    assert type(error) is WorkerError
    assert (error.rank, error.kind, error.traceback_text) == (1, "SIGSEGV", "Fatal Python error")
    assert error.message.startswith("rank 1 of 2 died: it was ended by SIGSEGV")


# --- fates ------------------------------------------------------------------------------------------------------------


def test_ranks_of_the_same_fate_share_a_line_and_the_causes_error_is_named_once():
    made = state(5)
    made.raised(0, failed(KeyError("missing")), 1.0)
    for rank in (1, 3):
        made.raised(rank, failed(KeyError("missing")), 1.1)
    made.returned(2, 1.1)
    made.raised(4, failed(ValueError("another\nsecond line")), 1.1)
    assert outcome.fates(made, without=0) == (
        "ranks 1, 3: raised the same KeyError",
        "rank 2: returned",
        "rank 4: raised ValueError: another",
    )
    assert outcome.fates(made)[0] == "rank 0: raised KeyError: 'missing'"


def test_a_rank_that_heard_the_interrupt():
    made = state(2)
    made.raised(0, failed(ValueError("x")), 1.0)
    made.found(1, Where("train", "", ""))
    made.ranks[1].sent = Act.INTERRUPT
    made.raised(1, failed(KeyboardInterrupt()), 1.5)
    assert outcome.fates(made, without=0) == ("rank 1: was in train, interrupted",)


def test_a_keyboard_interrupt_that_nobody_sent_is_an_error():
    made = state(1)
    made.raised(0, failed(KeyboardInterrupt("by hand")), 1.0)
    assert outcome.fates(made) == ("rank 0: raised KeyboardInterrupt: by hand",)


def test_others_that_left():
    made = state(3)
    made.raised(0, failed(ValueError("x")), 1.0)
    made.raised(1, failed(SystemExit(2)), 1.1)
    made.exited(2, 9, 1.1)
    told = outcome.fates(made, without=0)
    assert told[0] == "rank 1: called sys.exit(2)"
    assert "exit code 9" in told[1]


def test_a_rank_whose_end_nobody_saw_while_it_was_being_stopped():
    made = state(2)
    made.raised(0, failed(ValueError("x")), 1.0)
    made.ranks[1].sent = Act.KILL
    made.exited(1, None, 1.1)
    assert outcome.fates(made, without=0) == ("rank 1: was running, ended",)


@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer [::1]:7"), PeerError("rank 1 raised")])
def test_a_rank_that_waited_for_one_that_had_returned(returned, error):
    made = state(2)
    if returned:
        made.returned(1, 0.5)
    made.raised(0, failed(error), 1.0)
    told = outcome.error_of(made, "node7", {}, "")
    waited = str(told).startswith("rank 0 of 2 waited for rank 1, which had returned: every rank must make the same")
    assert waited == (returned and not isinstance(error, PeerError))
    assert isinstance(told, WorkerError if waited else type(error))


def test_a_rank_that_lost_another_is_told_in_words_not_in_the_backends():
    made = state(2)
    made.exited(1, -signal.SIGKILL, 1.0)
    made.raised(0, failed(RuntimeError("[pair.cc:553] Connection closed by peer [::1]:7. " + "x" * 300)), 1.1)
    assert outcome.fates(made, without=1) == ("rank 0: lost its connection to another rank",)


def test_a_rank_that_hangs_is_told_with_its_last_collective():
    made = state(2)
    made.found(0, Where("item", "line 3 of train", "", "all_reduce number 7 of Float (4), which is under way"))
    made.found(1, Where("train", "", ""))
    for rank in range(2):
        made.ranks[rank].sent = Act.TERMINATE
        made.exited(rank, -signal.SIGTERM, 2.0)
    assert outcome.fate(made.ranks[0], None).startswith(
        "was in item (line 3 of train); its last collective was all_reduce number 7 of Float (4), which is under way"
    )
    assert "collective" not in outcome.fate(made.ranks[1], None)


WATCHDOG = """
[rank1]:[E1201 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, \
OpType=ALLREDUCE, NumelIn=16, NumelOut=16, Timeout(ms)=600000) ran for 600052 milliseconds before timing out.
""".replace("\\\n", "")


def test_a_rank_that_nccls_watchdog_ended_says_what_it_waited_for():
    made = state()
    made.exited(1, -signal.SIGABRT, 1.0)
    text = str(outcome.error_of(made, "node7", {1: WATCHDOG}, ""))
    assert text.startswith(
        "rank 1 of 2 died: it waited 600 s in NCCL's ALLREDUCE, its collective number 7, and was ended by NCCL's "
        "watchdog"
    )
    assert "preflight" in text
    assert "NCCL_P2P_DISABLE" in text
    assert outcome.nccl_timeout("Watchdog caught nothing") == ""


def test_ranks_that_wait_for_each_other_are_named_with_their_calls_and_lines():
    made = state(3)
    made.locked = {
        0: Pending("0", 13, "all_reduce", "Long (2)", (), (0, 1, 2), {}, is_whole=True),
        2: Pending("1", 4, "barrier", "", (), (1, 2), {}, is_whole=True),
    }
    made.ranks[0].where = Where("all_reduce", "line 17 of train: return accelerator.reduce(x)", "")
    error = outcome.deadlock_error(made)
    assert type(error) is DeadlockError
    assert isinstance(error, RuntimeError)
    first, *lines, cure = str(error).splitlines()
    assert first == "ranks 0, 2 wait for each other in different calls, which would be for ever:"
    assert lines == [
        "  rank 0: all_reduce number 13 of Long (2), line 17 of train: return accelerator.reduce(x)",
        "  rank 2: barrier number 4 among ranks (1, 2)",
    ]
    assert cure.startswith("Every rank must make the same calls in the same order")
    assert "accelerator.check_trigger() on all, in each round" in cure
