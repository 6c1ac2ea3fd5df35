"""The last collective, from torch's flight recorder: a real one with gloo, invented ones for NCCL."""

from __future__ import annotations

import json
import sys
import types

import pytest

from notebook_launcher import RunTimeoutError, launch
from notebook_launcher.core.world import World
from notebook_launcher.launcher import state
from notebook_launcher.worker import collectives, surroundings

BINDINGS = "torch._C._distributed_c10d"


def entry(name="nccl:all_reduce", state="started", *, number=7, made=1, **more):
    return {
        "profiling_name": name,
        "state": state,
        "collective_seq_id": number,
        "p2p_seq_id": 2,
        "is_p2p": False,
        "input_dtypes": ["BFloat16"],
        "input_sizes": [[64, 10]],
        "retired": False,
        "time_created_ns": made,
        **more,
    }


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (entry(), "all_reduce number 7 of BFloat16 (64, 10), which is under way"),
        (entry(state="scheduled"), "all_reduce number 7 of BFloat16 (64, 10), which has not begun on the device"),
        (entry(state="completed"), "all_reduce number 7 of BFloat16 (64, 10), which is done"),
        (entry(retired=True), "all_reduce number 7 of BFloat16 (64, 10), which is done"),
        (entry("nccl:send", is_p2p=True), "send number 2 of BFloat16 (64, 10), which is under way"),
        (entry("gloo:barrier", "scheduled", input_dtypes=[]), "barrier number 7, which is not done"),
        ({"collective_seq_id": 1}, "a collective number 1, which is not done"),
    ],
)
def test_in_words(one, text):
    assert collectives.told(one) == text


def _install(monkeypatch, **dumps):
    def dump(found):
        return lambda _collectives, _active: found if isinstance(found, bytes) else json.dumps(found).encode()

    made = types.SimpleNamespace(**{name: dump(found) for name, found in dumps.items()})
    monkeypatch.setitem(sys.modules, BINDINGS, made)


THREAD = 139708


class Default:
    """A process group, by what it says of this process."""

    def __init__(self, rank, size):
        self.rank, self.size = (lambda: rank), (lambda: size)


@pytest.fixture
def in_groups(monkeypatch):
    """This process is rank 4 of 6, and in the groups "0", of all, and "7", of ranks 4 and 5; one more is half made."""
    seven, half, default = object(), object(), Default(4, 6)
    world = types.SimpleNamespace(
        default_pg=default,
        pg_names={default: "0", seven: "7", half: "8"},
        pg_group_ranks={default: dict.fromkeys(range(6)), seven: {4: 0, 5: 1}},
    )
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", types.SimpleNamespace(_world=world))
    return world


def pending():
    return collectives.pending(THREAD, 4, 6)


def of(group, number, *, made, state="scheduled", pg_id=None, **more):
    pg_id = int(group) if pg_id is None else pg_id
    return entry("gloo:all_reduce", state, number=number, made=made, process_group=[group, ""], pg_id=pg_id, **more)


def status(**groups):
    return {
        name: {"last_enqueued_collective": str(begun), "last_completed_collective": str(done)}
        for name, (begun, done) in groups.items()
    }


def test_how_many_are_begun_and_done_by_group(monkeypatch):
    _install(monkeypatch, _dump_fr_trace_json={"pg_status": {**status(a=(13, 12), b=(6, 6)), "c": {}}})
    assert collectives.num_begun() == {"0/a": (13, 12), "0/b": (6, 6), "0/c": (0, 0)}
    _install(monkeypatch, _dump_fr_trace_json=b"not JSON")
    assert collectives.num_begun() == {}


@pytest.mark.usefixtures("in_groups")
class TestPending:
    def record(self, monkeypatch, *entries, **groups):
        _install(monkeypatch, _dump_fr_trace_json={"entries": list(entries), "pg_status": status(**groups)})

    def test_the_oldest_that_is_not_done_is_what_a_rank_waits_for(self, monkeypatch):
        entries = [
            of("0", 1, made=1, retired=True),
            of("7", 2, made=3),
            of("0", 2, made=4, state="completed"),
            of("7", 3, made=5, thread_id=str(THREAD)),
            of("0", 9, made=2, is_p2p=True),
        ]
        self.record(monkeypatch, *entries, x=(3, 1), y=(2, 2))
        found = pending()
        assert (found.group, found.number, found.name, found.inputs) == ("7", 2, "all_reduce", "BFloat16 (64, 10)")
        assert (found.sizes, found.members) == ((("BFloat16", 640),), (4, 5))
        assert (found.reached, found.is_whole) == ({"0": 2, "7": 3}, True)

    def test_what_another_thread_began_is_not_waited_for_but_begun(self, monkeypatch):
        own = of("0", 2, made=2, thread_id=THREAD)
        self.record(monkeypatch, of("7", 6, made=1, thread_id="5", thread_name="pt_save"), own)
        assert (pending().group, pending().reached) == ("0", {"0": 2, "7": 6})
        self.record(monkeypatch, of("7", 6, made=1, thread_id="5", thread_name="pt_autograd_0"), own)
        assert pending().group == "7"

    def test_one_left_behind_by_later_ones_that_are_done_is_not_waited_for(self, monkeypatch):
        self.record(monkeypatch, of("7", 2, made=1), of("0", 1, made=2, retired=True))
        assert pending() is None

    def test_what_a_group_that_was_destroyed_has_left_is_waited_for_by_nobody(self, monkeypatch):
        left = [of("7", 5, made=1, pg_id=2), of("3", 5, made=1), of("7", 1, made=2, pg_id=3, retired=True)]
        self.record(monkeypatch, *left)
        assert pending() is None
        self.record(monkeypatch, *left, of("7", 2, made=3, pg_id=3))
        assert (pending().number, pending().reached) == (2, {"7": 2})

    def test_a_group_that_is_being_made_has_no_members_yet(self, monkeypatch):
        self.record(monkeypatch, of("8", 1, made=1))
        assert pending().members == ()

    def test_where_a_groups_collectives_are_no_longer_kept_nobody_says_that_there_were_none(self, monkeypatch):
        self.record(monkeypatch, of("7", 2, made=1), x=(2, 1), y=(900, 900))
        assert not pending().is_whole

    def test_nothing_is_waited_for_where_all_is_done_or_nothing_recorded(self, monkeypatch):
        self.record(monkeypatch, of("0", 1, made=1, retired=True))
        assert pending() is None
        _install(monkeypatch)
        assert pending() is None

    @pytest.mark.parametrize("default", [None, Default(4, 5), Default(0, 6)])
    def test_a_process_group_that_is_not_the_launchs_has_other_ranks(self, monkeypatch, in_groups, default):
        self.record(monkeypatch, of("7", 2, made=1))
        assert pending() is not None
        in_groups.default_pg = default
        assert pending() is None

    def test_without_a_process_group_nothing_is_waited_for(self, monkeypatch):
        self.record(monkeypatch, of("7", 2, made=1))
        monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d")
        assert pending() is None


def test_the_latest_of_both_records_is_told(monkeypatch):
    nccl = {"entries": [entry(number=1), entry("nccl:broadcast", number=2, made=5)]}
    _install(monkeypatch, _dump_nccl_trace_json=nccl, _dump_fr_trace_json={"entries": [entry("gloo:barrier", made=3)]})
    assert collectives.last_collective().startswith("broadcast number 2")


def test_nothing_is_told_where_there_is_no_record(monkeypatch):
    _install(monkeypatch)
    assert collectives.last_collective() == ""
    _install(monkeypatch, _dump_nccl_trace_json={"entries": []}, _dump_fr_trace_json=b"not JSON")
    assert collectives.last_collective() == ""


def test_the_recorder_is_switched_on_by_the_name_that_this_torch_reads(monkeypatch):
    _install(monkeypatch, _dump_nccl_trace_json={})
    assert collectives.recorder_settings() == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "200"}
    _install(monkeypatch, _dump_fr_trace_json={})
    assert collectives.recorder_settings() == {"TORCH_FR_BUFFER_SIZE": "200"}


def test_ranks_on_cuda_have_it_on_unless_the_user_says_how(monkeypatch):
    _install(monkeypatch, _dump_fr_trace_json={})
    made = {}
    monkeypatch.setattr(surroundings, "set_environment", made.update)
    monkeypatch.setattr(surroundings.os, "chdir", lambda _: None)
    monkeypatch.setattr(surroundings, "_seed", lambda _: None)
    path, argv = list(sys.path), list(sys.argv)
    for device, given, wanted in [("cuda", {}, "200"), ("cuda", {"TORCH_FR_BUFFER_SIZE": "9"}, "9"), ("cpu", {}, None)]:
        made.clear()
        worn = types.SimpleNamespace(environment=given, directory="", path=path, argv=argv, sources={})
        surroundings.put_on(worn, World(device=device))
        assert made.get("TORCH_FR_BUFFER_SIZE") == wanted


@pytest.mark.slow
def test_a_rank_that_hangs_says_which_collective_it_waits_for(monkeypatch):
    monkeypatch.setitem(state.PATIENCE_S, "timeout", 10.0)  # this machine may be busy
    launch(print, num_processes=2, device="cpu")  # the limit is to be the ranks' own time, not the server's

    def train():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(64, 10), async_op=True)  # as on a GPU: it returns at once
            work.wait()
        else:
            import threading

            threading.Event().wait(60)

    with pytest.raises(RunTimeoutError) as caught:
        launch(train, num_processes=2, device="cpu", env={"TORCH_FR_BUFFER_SIZE": "20"}, timeout_s=5, stop_grace_s=0.1)
    lines = str(caught.value).splitlines()
    assert any(
        "its last collective was all_reduce number 2 of Float (64, 10), which is not done" in one for one in lines
    )
    assert any("its last collective was all_reduce number 1 of Float (1), which is done" in one for one in lines)
