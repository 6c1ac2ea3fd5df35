"""Ranks that don't do the same hear of it, and what they did."""

import logging

import pytest
import torch
import torch.distributed as dist

from notebook_launcher import Accelerator, PartialState, WorkerError
from notebook_launcher.runtime import agreement


@pytest.fixture
def debugging(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")


def told_of(*calls):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        agreement._refuse_differences(calls)
    return str(caught.value)


def test_ranks_in_the_same_place_share_a_line():
    told = told_of(
        ["gather", "line 3", ["['x'] float32 (2,)", "int64 ()"]],
        ["gather", "line 3", ["['x'] float32 (2,)", "int64 (1,)"]],
        ["gather", "line 3", ["['x'] float32 (2,)", "int64 ()"]],
    )
    assert "gather needs the same tensors" in told
    assert "\n  ranks 0, 2: int64 (), line 3\n  rank 1: int64 (1,), line 3\n" in told


def test_a_tensor_too_many_is_named():
    assert "rank 0: no tensor, here" in told_of(["reduce", "here", []], ["reduce", "there", ["float32 (1,)"]])


def test_calls_that_agree_pass():
    agreement._refuse_differences([["gather", "line 3", ["int64 ()"]], ["gather", "line 8", ["int64 ()"]]])


def other_shapes(call, as_dtype):
    accelerator = Accelerator(cpu=True)
    tensor = torch.ones(2 + accelerator.process_index * (not as_dtype), 3)
    if accelerator.is_main_process and as_dtype:
        tensor = tensor.long()
    function = getattr(accelerator, call, None) or getattr(__import__("notebook_launcher"), call)
    function({"x": [tensor]})


@pytest.mark.parametrize("call", ["gather", "reduce", "broadcast"])
@pytest.mark.parametrize("as_dtype", [False, True])
@pytest.mark.parametrize("debug", [False, True])
def test_shapes_and_dtypes_that_differ_are_told_by_rank_with_the_users_line(
    on_ranks, monkeypatch, call, as_dtype, debug
):
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", str(int(debug)))
    with pytest.raises(ValueError, match=f"{call} needs the same tensors") as caught:
        on_ranks(other_shapes, call, as_dtype)
    first, second = ("int64 (2, 3)", "float32 (2, 3)") if as_dtype else ("float32 (2, 3)", "float32 (3, 3)")
    for rank, shape in enumerate((first, second)):
        assert f"rank {rank}: ['x'][0] {shape}, line " in str(caught.value)
    assert 'function({"x": [tensor]})' in str(caught.value)


def different_calls(calls):
    accelerator = Accelerator(cpu=True)
    name, arguments = calls[accelerator.process_index]
    with accelerator.main_process_first():
        pass
    getattr(accelerator, name)(*arguments)


@pytest.mark.usefixtures("debugging")
def test_different_calls_are_told_by_rank(on_ranks):
    tensor = torch.ones(1)
    calls = [("gather", (tensor,)), ("wait_for_everyone", ()), ("gather", (tensor,))]
    with pytest.raises(RuntimeError, match="the ranks are in different calls") as caught:
        on_ranks(different_calls, calls, num_processes=3)
    assert "\n  ranks 0, 2: gather, line " in str(caught.value)
    assert "\n  rank 1: wait_for_everyone, line " in str(caught.value)


@pytest.fixture
def releasing(monkeypatch):
    """Ranks that have returned close their connections at once."""
    monkeypatch.setattr("notebook_launcher.launcher.state.RELEASE_S", 0.0)


def on_one_rank_only():
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(1))


@pytest.mark.usefixtures("debugging")
def test_a_rank_that_has_ended_is_named_at_once(on_ranks):
    with pytest.raises(
        RuntimeError, match=r"rank 0 waits in gather \(line \d+ of on_one_rank.*rank 1, which has ended"
    ):
        on_ranks(on_one_rank_only)


@pytest.mark.usefixtures("releasing")
def test_without_the_switch_the_launch_says_who_had_returned(on_ranks):
    with pytest.raises(WorkerError, match=r"rank 0 of 2 waited for rank 1, which had returned") as caught:
        on_ranks(on_one_rank_only)
    assert "accelerator.gather(torch.ones(1))" in str(caught.value)


def more_steps_on_one():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    for _ in range(1 + accelerator.process_index):
        accelerator.backward(model(torch.ones(1, 1)).sum())


@pytest.mark.usefixtures("releasing")
def test_a_rank_that_takes_more_steps_is_told(on_ranks):
    with pytest.raises(WorkerError, match=r"rank 1 of 2 waited for rank 0, which had returned"):
        on_ranks(more_steps_on_one)


def late():
    agreement._TELL_S, agreement._LIMIT_S = 0.0, 0.05
    state = PartialState()
    store = dist.distributed_c10d._get_default_store()
    if not state.is_main_process:
        store.wait(["told"])
        return None
    heard = []
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger(agreement.__name__).addHandler(listener)
    with pytest.raises(RuntimeError) as caught:
        state.wait_for_everyone()
    store.set("told", "")
    return heard, str(caught.value)


@pytest.mark.usefixtures("debugging")
def test_a_rank_that_is_late_is_named_and_then_given_up(on_ranks):
    (told, error), _ = on_ranks(late)
    assert len(told) == 1
    assert "rank 0 waits in wait_for_everyone (line " in told[0]
    assert "rank 1, which has not come for 0.05 s. Every rank must make the same calls" in error


def all_calls():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    tree = {"x": torch.ones(2), ("a", "key"): torch.tensor(rank)}
    for _ in range(3):
        with accelerator.main_process_first():
            pass
        gathered = accelerator.gather(tree)
        accelerator.gather_for_metrics(tree)
        accelerator.pad_across_processes(torch.ones(1 + rank))
        accelerator.reduce(tree)
        accelerator.check_trigger()
        accelerator.wait_for_everyone()
    return PartialState().debug, gathered["a", "key"].tolist()


@pytest.mark.usefixtures("debugging")
def test_calls_that_agree_go_on_as_ever(on_ranks):
    assert on_ranks(all_calls) == [(True, [0, 1])] * 2


def group_after_group():
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        pass
    accelerator.destroy_process_group()
    dist.init_process_group("gloo")
    Accelerator(cpu=True).wait_for_everyone()
    return agreement._Log.latest.number


@pytest.mark.usefixtures("debugging")
def test_a_later_process_group_counts_anew(on_ranks):
    assert on_ranks(group_after_group) == [1, 1]
