"""The states show the accelerator they are of, or the latest, or what the launch chose."""

import gc

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator, AcceleratorState, ConfigError, GradientState, PartialState
from notebook_launcher.runtime.plugins import GradientAccumulationPlugin


@pytest.fixture(autouse=True)
def _no_accelerator_is_left():
    gc.collect()


def test_each_accelerator_has_its_own_state_and_the_latest_is_everybodys():
    first, second = Accelerator(cpu=True, mixed_precision="bf16"), Accelerator(cpu=True)
    assert (first.state.mixed_precision, second.state.mixed_precision) == ("bf16", "no")
    assert AcceleratorState().mixed_precision == "no"
    third = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4)
    assert AcceleratorState().mixed_precision == AcceleratorState(mixed_precision="bf16").mixed_precision == "bf16"
    assert (GradientState().num_steps, first.gradient_state.num_steps) == (4, 1)
    assert third.gradient_state.plugin_kwargs == {"num_steps": 4, "sync_with_dataloader": True}


def test_a_state_made_before_the_accelerator_shows_it_too():
    state, gradients = AcceleratorState(cpu=True), GradientState()
    assert (state.mixed_precision, gradients.num_steps, gradients.sync_gradients) == ("no", 1, True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    assert (state.mixed_precision, gradients.num_steps) == ("bf16", 2)
    with accelerator.accumulate(torch.nn.Linear(1, 1)):
        assert not gradients.sync_gradients


def test_without_an_accelerator_the_launch_decides(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert AcceleratorState(cpu=True).mixed_precision == "bf16"


def test_a_precision_that_contradicts_the_accelerators_names_both():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(ConfigError, match=r"mixed_precision='no'.*mixed_precision='bf16'"):
        AcceleratorState(mixed_precision="no")
    assert accelerator.mixed_precision == "bf16"


def test_a_state_keeps_no_accelerator_alive():
    Accelerator(cpu=True, mixed_precision="bf16")
    gc.collect()
    assert AcceleratorState(cpu=True).mixed_precision == "no"


def test_the_gradient_state_follows_the_loader():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    state = GradientState()
    assert (state.in_dataloader, state.active_dataloader, state.end_of_dataloader) == (False, None, False)
    seen = [(state.active_dataloader is loader, state.end_of_dataloader, state.remainder) for _ in loader]
    assert seen == [(True, False, -1), (True, False, -1), (True, True, 1)]
    assert (state.in_dataloader, state.remainder) == (False, -1)


def test_the_gradient_state_tells_of_its_plugin_and_of_loaders_within_loaders():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False, sync_each_batch=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    state = accelerator.gradient_state
    assert (state.sync_with_dataloader, state.sync_each_batch, state.adjust_scheduler) == (False, True, True)
    outer, inner = accelerator.prepare(DataLoader(range(2)), DataLoader(range(2)))
    assert state.dataloader_references == [None]
    next(iter(inner))
    for _ in outer:
        assert state.dataloader_references == [None, outer]
        for _ in inner:
            assert state.dataloader_references == [None, outer, inner]
            assert state.active_dataloader is inner
        assert state.active_dataloader is outer


def test_code_that_resets_states_goes_on():
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def facts():
    state = PartialState()
    again = AcceleratorState()
    return state.process_index, again.num_processes, again.backend, again.initialized, again.debug, repr(again)


def test_a_state_joins_the_process_group(on_ranks):
    text = (
        "Distributed environment: MULTI_CPU  Backend: gloo\nNum processes: 2\nProcess index: {}\n"
        "Local process index: {}\nDevice: cpu\n\nMixed precision type: no\n"
    )
    assert on_ranks(facts) == [(rank, 2, "gloo", True, False, text.format(rank, rank)) for rank in (0, 1)]


def test_alone_there_is_no_backend():
    state = PartialState(cpu=True)
    assert (state.backend, state.num_processes, str(state.distributed_type)) == (None, 1, "NO")
    assert repr(state).startswith("Distributed environment: NO\n")
