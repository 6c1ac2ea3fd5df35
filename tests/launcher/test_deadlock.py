"""Who waits for whom for ever: from what ranks say of the collectives in which they stand, no process anywhere."""

from __future__ import annotations

import pytest

from notebook_launcher.core.events import Pending
from notebook_launcher.launcher.deadlock import locked

ALL = (0, 1, 2, 3)


def stands(group, number, name="all_reduce", *, sizes=(("Float", 6),), members=ALL, reached=None, is_whole=True):
    reached = {group: number} if reached is None else reached
    return Pending(group, number, name, "Float (2, 3)", sizes, members, reached, is_whole)


def test_nobody_is_locked_where_nobody_waits():
    assert locked({}) == ()


def test_all_in_the_same_call_only_take_their_time():
    assert locked(dict.fromkeys(ALL, stands("0", 7))) == ()


def test_who_waits_for_one_that_is_elsewhere_may_still_go_on():
    assert locked({0: stands("0", 7), 1: stands("0", 7), 3: stands("0", 7)}) == ()


@pytest.mark.parametrize("name", ["all_gather", "barrier"])
def test_the_same_number_and_another_call_never_meet(name):
    assert locked({0: stands("0", 7), 1: stands("0", 7, name), 3: stands("1", 1, members=(3,))}) == (0, 1)


@pytest.mark.parametrize("other", [(("Float", 7),), (("Double", 6),), ()])
def test_a_sum_of_tensors_that_differ_never_ends(other):
    assert locked({0: stands("0", 7), 1: stands("0", 7, sizes=other)}) == (0, 1)


def test_a_broadcast_moves_bytes_of_whatever_dtype():
    both = {0: stands("0", 7, "broadcast", sizes=(("Bool", 6),)), 1: stands("0", 7, "broadcast", sizes=(("Byte", 6),))}
    assert locked(both) == ()
    assert locked(both | {1: stands("0", 7, "broadcast", sizes=(("Byte", 7),))}) == (0, 1)


@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather", "scatter"])
def test_in_a_call_that_goes_one_way_a_rank_may_not_need_the_other(name):
    """Rank 1 waits for what rank 0 will send, rank 2 for rank 1; that rank 2 is not there yet holds up nobody."""
    waiting = {1: stands("0", 5, name), 2: stands("h", 3, members=(1, 2))}
    assert locked(waiting) == ()


def test_two_groups_of_one_name_are_not_one():
    waiting = {0: stands("7", 3, members=(0, 1)), 1: stands("7", 3, members=(0, 1))}
    waiting |= {2: stands("7", 3, "barrier", members=(2, 3)), 3: stands("7", 3, "barrier", members=(2, 3))}
    assert locked(waiting) == ()


def test_what_each_gives_may_differ_in_size_elsewhere():
    both = {rank: stands("0", 7, "all_to_all", sizes=(("Float", rank),)) for rank in ALL}
    assert locked(both) == ()


def test_a_circle_over_two_groups():
    """Ranks 0 and 1 meet in one group first, and in another the other way round."""
    one = stands("a", 1, members=(0, 1), reached={"a": 1})
    other = stands("b", 1, members=(0, 1), reached={"b": 1})
    assert locked({0: one, 1: other}) == (0, 1)


def test_who_waits_for_a_circle_is_locked_with_it():
    waiting = {
        0: stands("a", 1, members=(0, 1)),
        1: stands("b", 1, members=(0, 1)),
        2: stands("c", 5, members=(1, 2)),
        3: stands("d", 5, members=(3,)),
    }
    assert locked(waiting) == (0, 1, 2)


def test_a_chain_that_ends_at_a_rank_that_works_is_no_circle():
    waiting = {0: stands("a", 1, members=(0, 1)), 1: stands("b", 1, members=(1, 2))}
    assert locked(waiting) == ()


def test_one_that_has_been_there_already_is_not_waited_for():
    """Of two ranks of a group the quicker is one collective ahead: both are moving data."""
    ahead, behind = stands("0", 8, reached={"0": 9}), stands("0", 7, reached={"0": 9})
    assert locked({0: ahead, 1: behind, 2: behind, 3: ahead}) == ()


def test_a_rank_whose_record_is_not_whole_is_given_the_benefit_of_the_doubt():
    one = stands("a", 1, members=(0, 1))
    other = stands("b", 1, members=(0, 1), is_whole=False)
    assert locked({0: one, 1: other}) == ()


def test_a_group_whose_members_nobody_knows_is_waited_for_by_nobody():
    assert locked({0: stands("a", 1, members=()), 1: stands("b", 1, members=())}) == ()
    assert locked({0: stands("a", 1, members=()), 1: stands("a", 1, "barrier", members=())}) == ()
