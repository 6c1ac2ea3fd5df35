"""SPMD over four devices of XLA on the CPU: one process trains as plain torch does, its work split."""

from __future__ import annotations

import pytest
import training

NUM_DEVICES = 4
STRATEGIES = ("spmd", "spmd_fsdp")


def train(folder=None):
    import torch_xla
    import training

    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    net, optimizer, loader = training.prepared(accelerator)
    inputs, _ = next(iter(loader))
    marks = [torch_xla._XLAC._get_xla_sharding_spec(one) for one in (inputs, net[0].weight)]
    losses = training.steps(accelerator, net, optimizer, loader)
    if folder:
        accelerator.save_state(folder)
    return losses, accelerator.get_state_dict(net), marks, type(accelerator.unwrap_model(net)).__name__


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_four_devices_train_as_plain_torch(on_xla, strategy):
    run = on_xla(train, num_devices=NUM_DEVICES, strategy=strategy)
    losses, state, (of_inputs, of_weight), name = run.result
    plain_losses, plain_state = training.plain()
    assert losses == pytest.approx(plain_losses, abs=1e-6)
    assert training.difference(state, plain_state) <= 1e-6
    assert of_inputs == "{devices=[4,1]0,1,2,3}"  # each device has a quarter of the batch
    assert ("devices=[4,1]" in of_weight) == (strategy == "spmd_fsdp")
    assert name == "Sequential"
    assert run.logs(0) == ""  # torch's warning of FSDPv2's hooks among what is not there


def resume(folder, num_before):
    """Train a little, save, train on; then from the same checkpoint again, and from a fresh model."""
    import training

    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    net, optimizer, loader = training.prepared(accelerator)
    batches = iter(loader)
    losses = training.steps(accelerator, net, optimizer, batches, num_before)
    accelerator.save_state(folder)
    losses += training.steps(accelerator, net, optimizer, batches)
    unbroken = losses[num_before:], accelerator.get_state_dict(net)
    other = Accelerator()
    net, optimizer, loader = training.prepared(other)
    other.load_state(folder)
    marks = training.marks(net)
    return unbroken, (training.steps(other, net, optimizer, loader), other.get_state_dict(net)), marks


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(on_xla, tmp_path, strategy):
    run = on_xla(resume, str(tmp_path / "state"), 2, num_devices=NUM_DEVICES, strategy=strategy)
    (losses, state), (resumed_losses, resumed_state), marks = run.result
    assert resumed_losses == pytest.approx(losses, abs=1e-7)
    assert training.difference(state, resumed_state) <= 1e-7
    assert any("devices=" in mark for mark in marks) == (strategy == "spmd_fsdp")


def load(folder):
    import training

    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    net, *_ = training.prepared(accelerator)
    accelerator.load_state(folder, skip_random_states=True)
    return accelerator.get_state_dict(net)


def test_a_checkpoint_goes_from_one_strategy_to_another_and_to_the_cpu(on_xla, tmp_path):
    from notebook_launcher import launch

    folder = str(tmp_path / "state")
    _, state, *_ = on_xla(train, folder, num_devices=NUM_DEVICES, strategy="spmd_fsdp").result
    on_cpu = launch(load, (folder,), device="cpu", num_processes=1).result
    by_spmd = on_xla(load, folder, num_devices=2, strategy="spmd").result
    assert training.difference(state, on_cpu) == training.difference(state, by_spmd) == 0


def save(folder):
    import pathlib

    import torch

    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    one, other = (torch.full((2,), value, device=accelerator.device) for value in (1.0, 2.0))
    accelerator.save({"one": one, "held": [other]}, pathlib.Path(folder, "plain.pt"))
    accelerator.save({"one": one, "other": other}, pathlib.Path(folder, "safe.safetensors"), safe_serialization=True)
    accelerator.save_model(accelerator.prepare(torch.nn.Linear(4, 4)), folder)


def test_what_is_saved_can_be_read_anywhere(on_xla, tmp_path):
    import torch
    from safetensors.torch import load_file

    on_xla(save, str(tmp_path), num_devices=NUM_DEVICES, strategy="spmd_fsdp")
    plain = torch.load(tmp_path / "plain.pt")
    assert (plain["one"].tolist(), plain["held"][0].tolist()) == ([1.0, 1.0], [2.0, 2.0])
    assert load_file(tmp_path / "safe.safetensors")["other"].tolist() == [2.0, 2.0]
    assert load_file(tmp_path / "model.safetensors")["weight"].shape == (4, 4)


def accumulate():
    import torch
    import training
    from torch import nn

    from notebook_launcher import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    net, optimizer, loader = training.prepared(accelerator)
    for inputs, targets in loader:
        with accelerator.accumulate(net):
            accelerator.backward(nn.functional.cross_entropy(net(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics(net(inputs)) for inputs, _ in loader]
    return accelerator.get_state_dict(net), torch.cat(found).cpu()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_and_evaluation_are_those_of_the_cpu(on_xla, strategy):
    from notebook_launcher import launch

    state, found = on_xla(accumulate, num_devices=NUM_DEVICES, strategy=strategy).result
    expected_state, expected = launch(accumulate, device="cpu", num_processes=1).result
    assert training.difference(state, expected_state) <= 1e-6
    assert (found - expected).abs().max() <= 1e-5
