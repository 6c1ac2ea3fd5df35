"""Sharded models need all ranks in each forward and step: uneven data works or is refused, nothing waits for ever."""

import contextlib
import importlib.util
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import (
    Accelerator,
    ConfigError,
    DataLoaderConfiguration,
    DeadlockError,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
)
from notebook_launcher.launcher.state import STANDING_S

pytestmark = pytest.mark.slow  # a single test may be quick, the file as a whole is not

NEEDS = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed"
)
KINDS = ("fsdp", pytest.param("zero 3", marks=NEEDS))
BATCH_SIZE = 2


def plugin(kind):
    if kind == "fsdp":
        return {"fsdp_plugin": FullyShardedDataParallelPlugin()}
    return {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)}


def prepared(kind):
    accelerator = Accelerator(cpu=True, **plugin(kind))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    return accelerator, *accelerator.prepare(model, optimizer)


def unequal(kind):
    """For each number of samples: how many batches each rank trains on, and how many predictions it gathers."""
    accelerator, model, optimizer = prepared(kind)
    found = []
    for num_samples in (1, 5, 6):
        data = TensorDataset(torch.arange(4.0 * num_samples).view(-1, 4))
        loader = accelerator.prepare(DataLoader(data, batch_size=BATCH_SIZE))
        num_batches, seen = 0, []
        for (x,) in loader:
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            num_batches += 1
        model.eval()
        with torch.inference_mode():
            for (x,) in loader:
                model(x)
                seen.append(accelerator.gather_for_metrics(x))
        model.train()
        found.append((num_batches, torch.cat(seen)[:, 0].tolist()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_data_of_its_own_takes_part_and_each_sample_counts_once(kind, on_ranks):
    for found in on_ranks(unequal, kind):
        for num_samples, (num_batches, seen) in zip((1, 5, 6), found, strict=True):
            assert num_batches == -(-num_samples // (2 * BATCH_SIZE))
            assert seen == [4.0 * number for number in range(num_samples)]


def evaluated_in_between(kind):
    """Losses of training with an evaluation before each step, in each mode."""
    found = []
    for mode in (None, torch.no_grad, torch.inference_mode):
        accelerator, model, optimizer = prepared(kind)
        x = torch.arange(8.0).view(2, 4) * (1 + accelerator.process_index)
        losses = []
        for _ in range(3):
            if mode is not None:
                model.eval()
                with mode():
                    for _ in range(2):
                        model(x)
                model.train()
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_in_any_mode_changes_nothing_of_the_training(kind, on_ranks):
    for plain, no_grad, inference in on_ranks(evaluated_in_between, kind):
        assert plain == no_grad == inference
        assert len(set(plain)) == 3


def generated(kind, ways):
    """As many forwards as the longest of all ranks' texts has words: who is done goes along until all are."""
    accelerator, model, _ = prepared(kind)
    x, num_forwards, own = torch.ones(1, 4), 0, 3 + 2 * accelerator.process_index
    with torch.inference_mode():
        while True:
            model(x)
            num_forwards += 1
            if ways == "together":
                if num_forwards < own:
                    accelerator.set_trigger()
                if not accelerator.check_trigger():
                    break
            elif num_forwards == own:
                break
    return num_forwards, accelerator.reduce(torch.ones(1)).item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_any_length_works_where_all_go_on_until_the_last_is_done(kind, on_ranks):
    assert on_ranks(generated, kind, "together") == [(5, 2.0)] * 2


def left_early(kind):
    accelerator, model, _ = prepared(kind)
    with torch.no_grad():
        for _ in range(1 + 3 * accelerator.process_index):
            model(torch.ones(1, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_has_returned_is_named_where_others_go_on(kind, on_ranks):
    with pytest.raises(RuntimeError, match="rank 1 of 2 waited for rank 0, which had returned: every rank must make"):
        on_ranks(left_early, kind)


RECORDED = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch records no collectives of gloo"
)


@RECORDED
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_one_rank_leaves_for_another_collective_ends_with_both_calls(kind, on_ranks):
    with pytest.raises(DeadlockError) as caught:
        on_ranks(generated, kind, "apart")
    first, zero, one, cure = str(caught.value).splitlines()
    assert first == "ranks 0, 1 wait for each other in different calls, which would be for ever:"
    assert zero.startswith("  rank 0: all_reduce number ")
    assert "of generated: return num_forwards, accelerator.reduce(torch.ones(1)).item()" in zero
    assert one.startswith("  rank 1: all_gather number ")
    assert "of generated: " in one
    assert "accelerator.set_trigger()" in cure


def with_a_subgroup():
    """Rank 0 goes to its pair first, rank 1 to all: neither comes to where the other is."""
    accelerator = Accelerator(cpu=True)
    pair = torch.distributed.new_group([0, 1])
    accelerator.wait_for_everyone()
    if accelerator.process_index == 0:
        torch.distributed.all_reduce(torch.ones(3), group=pair)
    torch.distributed.all_reduce(torch.ones(3))


@RECORDED
def test_ranks_in_different_process_groups_are_named_with_both(on_ranks):
    with pytest.raises(DeadlockError) as caught:
        on_ranks(with_a_subgroup)
    _, zero, one, _ = str(caught.value).splitlines()
    assert "torch.distributed.all_reduce(torch.ones(3), group=pair)" in zero
    assert "torch.distributed.all_reduce(torch.ones(3))" in one
    assert caught.value.run.status == "failed"
    assert "s: ranks 0, 1 wait for each other in different calls, which would be for ever" in repr(caught.value.run)


def late_by_more_than_the_limit():
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 0:
        threading.Event().wait(STANDING_S + 4)
    return accelerator.reduce(torch.ones(1)).item()


@RECORDED
def test_a_rank_that_only_comes_late_is_waited_for(on_ranks):
    assert on_ranks(late_by_more_than_the_limit) == [2.0, 2.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_one_rank_leaves_is_told_in_the_debug_mode(kind, on_ranks):
    with pytest.raises(RuntimeError) as caught:
        on_ranks(generated, kind, "apart", env={"ACCELERATE_DEBUG_MODE": "1"})
    text = str(caught.value)
    assert "the ranks are in different calls, where they would wait for ever" in text
    assert "rank 0: reduce" in text
    assert "rank 1: the forward of a sharded model" in text


def uneven(kind):
    texts = []
    config = DataLoaderConfiguration(even_batches=False)
    with pytest.raises(ConfigError) as caught:
        Accelerator(cpu=True, dataloader_config=config, **plugin(kind))
    texts.append(str(caught.value))
    accelerator, model, _ = prepared(kind)
    with pytest.raises(ConfigError) as caught, accelerator.join_uneven_inputs([model]):
        pass
    with contextlib.suppress(ConfigError), accelerator.join_uneven_inputs([nn.Linear(1, 1)]):
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_batches_are_refused_with_what_to_do(kind, on_ranks):
    name = "fsdp" if kind == "fsdp" else "deepspeed"
    for even, join in on_ranks(uneven, kind):
        assert "even_batches=False can give ranks different numbers of batches" in even
        assert f"strategy={name!r}" in even
        assert "join_uneven_inputs can't be with" in join
        assert name in join
        assert "even_batches=True, the default" in join


def alone():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    return accelerator.even_batches


def test_whole_models_may_have_uneven_batches(on_ranks):
    assert on_ranks(alone) == [False, False]
    assert on_ranks(alone, strategy="fsdp", num_processes=1) == [False]
