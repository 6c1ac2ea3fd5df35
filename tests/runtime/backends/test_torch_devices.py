"""The devices that torch itself knows, at the seam: an invented torch.cuda, torch.xpu and Mac."""

from __future__ import annotations

import types

import pytest
import torch

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.world import World
from notebook_launcher.runtime.backends import select, torch_devices


@pytest.fixture
def cards(monkeypatch):
    """Two cards without bf16 units; a list of those that were made current."""
    current = []
    surface = {
        "device_count": lambda: 2,
        "set_device": current.append,
        "get_device_name": lambda _: "T4",
        "get_device_capability": lambda _: (7, 5),
    }
    for name, function in surface.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return current


def test_a_rank_has_its_own_card(cards):
    backend, why = select(World(rank=1, local_rank=1, world_size=2, local_world_size=2, device="cuda"), cpu=False)
    assert (backend.device_type, backend.device) == ("cuda", torch.device("cuda", 1))
    assert cards == [torch.device("cuda", 1)]
    assert backend.process_group == "cpu:gloo,cuda:nccl"
    assert why == "the launch chose device='cuda'"


@pytest.mark.usefixtures("cards")
def test_bf16_that_would_be_emulated_is_refused_on_the_rank_too(monkeypatch):
    assert "T4 has no bf16 units" in torch_devices.cuda(World(device="cuda")).refusals["bf16"]
    monkeypatch.setattr(torch.version, "hip", "6.2")  # AMD's capability follows other rules
    assert torch_devices.cuda(World(device="cuda")).refusals["bf16"] == ""


@pytest.mark.usefixtures("cards")
def test_a_rank_without_a_card_says_how_many_there_are():
    world = World(rank=2, local_rank=2, world_size=3, local_world_size=3, device="cuda")
    with pytest.raises(ConfigError, match="local rank 2 has no cuda device of its own: 2 can be seen here"):
        torch_devices.cuda(world)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_a_machine_without_the_device_that_was_named(monkeypatch, kind):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_device_module", lambda _: types.SimpleNamespace(device_count=lambda: 0))
    with pytest.raises(
        ConfigError, match=rf"device '{kind}' is not here: this torch \(.*\) sees none, and the command"
    ):
        select(World(device=kind), cpu=False)


@pytest.mark.parametrize(("word", "text"), [("gpu", "A GPU is 'cuda'"), ("npu", "nothing launches on them")])
def test_another_word_for_a_device_is_answered_with_ours(word, text):
    with pytest.raises(
        ConfigError, match=rf"device '{word}' is not known \(the launch chose device='{word}'\)"
    ) as caught:
        select(World(device=word), cpu=False)
    assert text in str(caught.value)
    assert "Did you mean" not in str(caught.value)


def test_an_intel_card(monkeypatch):
    properties = types.SimpleNamespace(name="Arc A770", has_bfloat16_conversions=False)
    surface = types.SimpleNamespace(
        device_count=lambda: 1, set_device=lambda _: None, get_device_properties=lambda _: properties
    )
    monkeypatch.setattr(torch, "xpu", surface)
    monkeypatch.setattr(torch, "get_device_module", lambda _: surface)
    backend = torch_devices.xpu(World(device="xpu"))
    assert backend.process_group == "cpu:gloo,xpu:xccl"
    assert "Arc A770 has no bf16 units" in backend.refusals["bf16"]


@pytest.mark.parametrize(
    ("chip", "macos", "version", "refused"),
    [
        ("Apple M3", "14.5", "2.13.0", set()),
        ("Apple M1 Max", "15.1", "2.13.0", {"bf16"}),
        ("Apple M3", "13.6", "2.13.0", {"bf16"}),
        ("Apple M4", "15.1", "2.7.1", {"fp16"}),
    ],
)
def test_a_mac_by_its_chip_its_system_and_torch(monkeypatch, chip, macos, version, refused):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch_devices.apple_chip, "name", lambda: chip)
    monkeypatch.setattr(torch_devices.platform, "mac_ver", lambda: (macos, ("", "", ""), ""))
    monkeypatch.setattr(torch, "__version__", version)
    backend = torch_devices.mps(World(device="mps"))
    assert {name for name, why in backend.refusals.items() if why} == refused
    assert (backend.device, backend.process_group) == (torch.device("mps"), "gloo")


def test_two_processes_on_a_mac_are_refused_on_the_rank_too():
    with pytest.raises(ConfigError, match="2 processes can't train on an Apple GPU"):
        torch_devices.mps(World(device="mps", world_size=2))
