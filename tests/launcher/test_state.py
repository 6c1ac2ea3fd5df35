"""The run's state machine, tested by lists: events and ticks in, actions out, no process anywhere."""

from __future__ import annotations

import signal

import pytest

from notebook_launcher.core.events import Failed, Pending, Where
from notebook_launcher.launcher.state import (
    ANSWER_S,
    FAILURE_GRACE_S,
    HEAR_S,
    KILL_S,
    LEAVE_S,
    PATIENCE_S,
    RELEASE_S,
    SETTLE_S,
    STANDING_S,
    Act,
    Action,
    Phase,
    RunState,
    signal_of,
)


def failed(time_ns=0, name="ValueError", *, peer_lost=False):
    return Failed(None, name, "text", "traceback", time_ns, peer_lost=peer_lost)


def running(num_ranks, **options):
    state = RunState(num_ranks, **options)
    for rank in range(num_ranks):
        assert state.started(rank) == []
    return state


def answer(state, *ranks):
    for rank in ranks:
        state.found(rank, Where("all_reduce", f"line {rank}", ""))


def acts(actions):
    return [(action.act, action.rank) for action in actions]


def test_a_run_starts_runs_and_finishes():
    state = RunState(2)
    assert state.status == "starting"
    state.started(0)
    assert state.status == "running"
    state.started(1)
    assert state.returned(0, 1.0) == []
    assert acts(state.returned(1, 2.0)) == [(Act.LEAVE, 0), (Act.LEAVE, 1)]
    assert not state.done
    assert state.exited(0, 0, 2.1) == []
    assert state.exited(1, 0, 2.1) == []
    assert state.done
    assert state.status == "finished"
    assert state.cause is None


def test_an_exit_code_after_the_functions_end_is_no_failure():
    state = running(1)
    state.returned(0, 1.0)
    state.exited(0, -signal.SIGABRT, 1.1)
    assert state.status == "finished"


def test_who_does_not_leave_is_killed():
    state = running(1)
    assert acts(state.returned(0, 1.0)) == [(Act.LEAVE, 0)]
    assert state.tick(1.0 + LEAVE_S - 0.01) == []
    assert acts(state.tick(1.0 + LEAVE_S)) == [(Act.KILL, 0)]
    assert state.tick(1.0 + LEAVE_S + 1) == []  # once
    state.exited(0, -9, 4.0)
    assert state.status == "finished"


def test_the_first_failure_stops_the_others_by_the_ladder():
    state = running(3)
    assert acts(state.raised(1, failed(), 10.0)) == [(Act.ASK_WHERE, 0), (Act.ASK_WHERE, 2)]
    assert state.status == "stopping"
    assert acts(state.tick(10.0 + SETTLE_S / 2)) == [(Act.ASK_WHERE, 0), (Act.ASK_WHERE, 2)]
    answer(state, 0, 2)
    assert state.tick(10.0 + SETTLE_S - 0.01) == []
    assert acts(state.tick(10.0 + SETTLE_S)) == [(Act.INTERRUPT, 0), (Act.INTERRUPT, 2)]
    state.heard(2)
    unheard = 10.0 + SETTLE_S + HEAR_S
    assert acts(state.tick(unheard)) == [(Act.TERMINATE, 0)]
    assert acts(state.tick(unheard + KILL_S)) == [(Act.KILL, 0)]
    heard = 10.0 + SETTLE_S + FAILURE_GRACE_S
    assert acts(state.tick(heard)) == [(Act.TERMINATE, 2)]
    state.exited(0, -9, heard)
    assert acts(state.exited(2, -15, heard)) == [(Act.LEAVE, 1)]
    state.exited(1, 0, heard)
    assert state.status == "failed"
    assert state.cause == 1


def test_everyone_is_gone_within_five_seconds_of_a_failure():
    assert max(SETTLE_S, PATIENCE_S["failure"]) + FAILURE_GRACE_S + KILL_S < 5.0


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_errors_the_earlier_is_the_cause_however_they_arrive(first):
    state = running(2)
    times = {0: 500, 1: 400}
    state.raised(first, failed(times[first]), 1.0)
    state.raised(1 - first, failed(times[1 - first]), 1.1)
    assert state.cause == 1


def test_a_death_explains_the_others_lost_connections():
    state = running(2)
    state.raised(0, failed(1, "RuntimeError", peer_lost=True), 1.0)
    assert state.cause == 0
    state.exited(1, -signal.SIGKILL, 1.05)
    assert state.cause == 1
    assert state.ranks[1].phase is Phase.DIED


def test_a_lost_peer_is_weighed_lighter_than_any_other_error():
    state = running(2)
    state.raised(0, failed(1, "RuntimeError", peer_lost=True), 1.0)
    state.raised(1, failed(2), 1.1)
    assert state.cause == 1


def test_what_comes_after_the_cause_has_settled_does_not_change_it():
    state = running(2)
    state.raised(0, failed(400), 1.0)
    state.tick(1.0 + SETTLE_S)
    state.exited(1, -signal.SIGSEGV, 1.0 + SETTLE_S + 0.1)
    assert state.cause == 0


def test_a_rank_that_is_let_go_by_our_ladder_is_not_the_cause():
    state = running(2)
    state.stop(1.0)
    state.exited(0, -signal.SIGTERM, 2.0)
    state.exited(1, -signal.SIGTERM, 2.0)
    assert state.cause is None
    assert state.status == "stopped"


def test_stop_interrupts_then_terminates_who_did_not_hear():
    state = running(2, stop_grace_s=3.0)
    assert acts(state.stop(1.0)) == [(Act.ASK_WHERE, 0), (Act.ASK_WHERE, 1)]
    answer(state, 0, 1)
    interrupted = 1.01 + ANSWER_S
    assert acts(state.tick(interrupted)) == [(Act.INTERRUPT, 0), (Act.INTERRUPT, 1)]
    state.heard(0)
    assert acts(state.tick(interrupted + HEAR_S + 0.01)) == [(Act.TERMINATE, 1)]
    assert state.tick(3.9) == [Action(Act.KILL, 1)]
    assert acts(state.tick(interrupted + 3.0)) == [(Act.TERMINATE, 0)]


def test_a_rank_in_a_collective_is_gone_within_two_seconds_of_the_interrupt():
    assert PATIENCE_S["stop"] + HEAR_S + KILL_S < 2.0


@pytest.mark.parametrize("reason", PATIENCE_S)
def test_ranks_are_given_time_to_say_where_they_are_and_interrupted_together(reason):
    state = running(3)
    if reason == "failure":
        state.raised(2, failed(), 1.0)
    else:
        state.stop(1.0, reason)
    asked = [(Act.ASK_WHERE, rank) for rank, one in enumerate(state.ranks) if not one.ended]
    least_s = 1.01 + (SETTLE_S if reason == "failure" else ANSWER_S)
    answer(state, 0)
    assert acts(state.tick(least_s)) == asked  # once more, and once only
    assert state.tick(1.0 + PATIENCE_S[reason] - 0.02) == []
    assert acts(state.tick(1.01 + PATIENCE_S[reason])) == [(Act.INTERRUPT, rank) for _, rank in asked]
    assert state.tick(1.02 + PATIENCE_S[reason] + HEAR_S - 0.05) == []  # they have as long from there to hear it


def test_the_last_answer_ends_the_wait():
    state = running(2, timeout_s=1.0)
    state.tick(2.0)
    answer(state, 0)
    assert acts(state.tick(2.6)) == [(Act.ASK_WHERE, 0), (Act.ASK_WHERE, 1)]
    answer(state, 1)
    assert acts(state.tick(2.61)) == [(Act.INTERRUPT, 0), (Act.INTERRUPT, 1)]


def test_who_catches_the_interrupt_may_still_return():
    state = running(2)
    state.stop(1.0)
    state.heard(0)
    state.heard(1)
    assert state.returned(0, 1.5) == []
    assert acts(state.returned(1, 1.6)) == [(Act.LEAVE, 0), (Act.LEAVE, 1)]
    state.exited(0, 0, 1.7)
    state.exited(1, 0, 1.7)
    assert state.status == "stopped"
    assert [one.phase for one in state.ranks] == [Phase.RETURNED, Phase.RETURNED]


def test_a_second_stop_kills_at_once():
    state = running(2)
    state.stop(1.0)
    assert acts(state.stop(1.1)) == [(Act.KILL, 0), (Act.KILL, 1)]


def test_a_stop_during_a_failures_ladder_kills_at_once():
    state = running(2)
    state.raised(0, failed(), 1.0)
    assert acts(state.stop(1.1)) == [(Act.KILL, 0), (Act.KILL, 1)]


def test_kill_without_stop():
    state = running(2)
    assert acts(state.kill(1.0)) == [(Act.KILL, 0), (Act.KILL, 1)]
    state.exited(0, -9, 1.1)
    state.exited(1, -9, 1.1)
    assert state.status == "stopped"


def test_a_run_that_goes_on_for_too_long_is_stopped():
    state = running(1, timeout_s=5.0)
    assert state.tick(5.0) == []
    assert acts(state.tick(5.1)) == [(Act.ASK_WHERE, 0)]
    answer(state, 0)
    assert acts(state.tick(5.11 + ANSWER_S)) == [(Act.INTERRUPT, 0)]
    state.raised(0, failed(name="KeyboardInterrupt"), 5.2)
    state.exited(0, 0, 5.3)
    assert state.status == "timed out"


def test_finished_ranks_release_their_connections_while_others_go_on():
    state = running(3)
    state.returned(0, 1.0)
    state.returned(1, 3.0)
    assert state.tick(1.0 + RELEASE_S - 0.1) == []
    assert acts(state.tick(1.0 + RELEASE_S)) == [(Act.RELEASE, 0)]
    assert acts(state.tick(3.0 + RELEASE_S)) == [(Act.RELEASE, 1)]
    assert state.tick(20.0) == []  # each once


def test_a_lost_peers_only_error_waits_for_what_may_explain_it():
    state = running(1)
    state.raised(0, failed(peer_lost=True), 1.0)
    assert state.tick(1.0 + SETTLE_S / 2) == []
    assert acts(state.tick(1.0 + SETTLE_S)) == [(Act.LEAVE, 0)]


def test_the_time_limit_counts_from_the_launch_also_for_a_rank_that_never_starts():
    state = RunState(1, began_s=100.0, timeout_s=5.0)
    assert state.tick(105.0) == []
    assert acts(state.tick(105.1)) == [(Act.ASK_WHERE, 0)]
    state.exited(0, None, 106.0)
    assert state.status == "timed out"


@pytest.mark.parametrize("ask", [RunState.stop, RunState.kill])
def test_a_stop_during_a_failure_is_remembered(ask):
    state = running(1)
    state.raised(0, failed(), 1.0)
    assert not state.asked_to_stop
    ask(state, 1.1)
    state.exited(0, 0, 1.2)
    assert (state.status, state.asked_to_stop) == ("failed", True)


def test_whom_a_kill_ends_is_not_the_cause():
    state = running(2)
    state.raised(0, failed(), 1.0)
    state.kill(1.05)
    state.exited(1, -signal.SIGKILL, 1.1)
    assert state.cause == 0


def test_a_time_limit_is_nobodys_wish():
    state = running(1, timeout_s=1.0)
    state.tick(2.0)
    assert not state.asked_to_stop


def test_where_a_rank_was_counts_until_it_is_interrupted():
    state = running(1)
    state.stop(0.0)
    state.found(0, Where("all_reduce", "line 3", ""))
    state.tick(ANSWER_S)
    state.found(0, Where("__exit__", "line 9", ""))
    assert state.ranks[0].where.call == "all_reduce"


def test_stop_before_anything_has_started():
    state = RunState(1)
    assert acts(state.stop(0.0)) == [(Act.ASK_WHERE, 0)]
    assert acts(state.tick(ANSWER_S)) == [(Act.INTERRUPT, 0)]
    assert acts(state.tick(ANSWER_S + HEAR_S + 0.01)) == [(Act.TERMINATE, 0)]
    state.exited(0, None, 1.0)
    assert state.status == "stopped"


def test_signals_of_the_ladder():
    assert [signal_of(act) for act in (Act.INTERRUPT, Act.TERMINATE, Act.KILL)] == [
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGKILL,
    ]


# --- ranks that wait for each other -----------------------------------------------------------------------------------


def stands(name, number=3):
    return Pending("0", number, name, "Float (2)", (("Float", 2),), (0, 1), {"0": number}, is_whole=True)


def locked(**options):
    """Rank 0 stands since 1.0, rank 1 since 2.0, in different calls."""
    state = running(2, **options)
    state.waits(0, stands("all_reduce"), 1.0)
    state.waits(1, stands("all_gather"), 2.0)
    return state


def test_ranks_that_have_waited_for_each_other_for_a_while_are_stopped_by_the_ladder():
    state = locked()
    assert state.tick(1.9 + STANDING_S) == []
    assert acts(state.tick(2.0 + STANDING_S)) == [(Act.ASK_WHERE, 0), (Act.ASK_WHERE, 1)]
    assert state.status == "stopping"
    answer(state, 0, 1)
    now_s = 2.0 + STANDING_S + ANSWER_S
    assert acts(state.tick(now_s)) == [(Act.INTERRUPT, 0), (Act.INTERRUPT, 1)]
    assert acts(state.tick(now_s + HEAR_S)) == [(Act.TERMINATE, 0), (Act.TERMINATE, 1)]
    for rank in (0, 1):
        state.exited(rank, -signal.SIGTERM, now_s + HEAR_S)
    assert state.status == "failed"
    assert (state.cause, list(state.locked)) == (None, [0, 1])


def test_one_that_has_gone_on_meanwhile_is_not_held_for_waiting():
    state = locked()
    state.waits(1, None, 3.0)
    assert state.tick(100.0) == []
    state.waits(1, stands("all_gather", 4), 100.0)
    state.waits(1, stands("all_gather", 3), 101.0)  # another: its time begins anew
    assert state.tick(100.5 + STANDING_S) == []
    assert state.tick(101.0 + STANDING_S) != []


def test_the_same_collective_told_again_waits_since_the_first_time():
    state = locked()
    state.waits(1, stands("all_gather"), 9.0)
    assert state.tick(2.0 + STANDING_S) != []


def test_a_run_that_is_being_stopped_stays_so():
    state = locked()
    state.stop(3.0)
    state.tick(4.0 + STANDING_S)
    assert state.locked == {}
    assert state.reason == "stop"


def test_who_has_ended_waits_no_more():
    state = locked()
    state.returned(0, 3.0)
    assert state.tick(2.0 + STANDING_S) == [Action(Act.RELEASE, 0)]
    assert state.locked == {}


def test_one_that_comes_out_of_it_before_it_is_interrupted_was_in_no_deadlock():
    state = locked()
    now_s = 2.0 + STANDING_S
    state.tick(now_s)
    answer(state, 0, 1)
    state.waits(1, None, now_s + ANSWER_S / 2)
    assert (state.status, state.locked, state.ranks[0].where) == ("running", {}, None)
    assert state.tick(now_s + 1.0) == []
    state.returned(0, now_s + 2.0)
    state.returned(1, now_s + 2.0)
    for rank in (0, 1):
        state.exited(rank, 0, now_s + 2.1)
    assert state.status == "finished"


def test_an_error_of_its_own_just_then_is_the_cause():
    state = locked()
    now_s = 2.0 + STANDING_S
    state.tick(now_s)
    assert acts(state.raised(0, failed(), now_s + 0.01)) == [(Act.ASK_WHERE, 1)]
    assert (state.reason, state.cause, state.locked) == ("failure", 0, {})


def test_all_returning_just_then_is_a_run_that_finished():
    state = locked()
    now_s = 2.0 + STANDING_S
    state.tick(now_s)
    state.returned(0, now_s + 0.01)
    assert acts(state.returned(1, now_s + 0.02)) == [(Act.LEAVE, 0), (Act.LEAVE, 1)]
    for rank in (0, 1):
        state.exited(rank, 0, now_s + 0.1)
    assert (state.status, state.locked) == ("finished", {})


def test_in_a_deadlock_a_rank_that_hears_the_interrupt_has_the_grace_of_a_failure():
    state = locked(stop_grace_s=60.0)
    now_s = 2.0 + STANDING_S
    state.tick(now_s)
    answer(state, 0, 1)
    now_s += ANSWER_S
    state.tick(now_s)
    state.heard(0)
    state.tick(now_s + HEAR_S)
    assert acts(state.tick(now_s + FAILURE_GRACE_S))[0] == (Act.TERMINATE, 0)
