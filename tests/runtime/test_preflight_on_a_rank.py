"""What a rank measures, alone and with values that come out wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from notebook_launcher.core.precisions import refusals
from notebook_launcher.core.world import World
from notebook_launcher.runtime import preflight
from notebook_launcher.runtime.backends import Backend
from notebook_launcher.runtime.process import Process

CPU = Backend("cpu", torch.device("cpu"), "gloo", "MULTI_CPU", refusals("cpu"))
THREE = Process(World(rank=1, world_size=3), CPU, "")


def reduce_to(value):
    return lambda tensor: tensor.fill_(value)


@pytest.mark.parametrize("name", ["no", "bf16"])
def test_a_right_sum(monkeypatch, name):
    monkeypatch.setattr(dist, "all_reduce", reduce_to(1 + 2 + 3))
    assert preflight._try(name, THREE, torch.device("cpu")) == ""


def test_a_wrong_sum(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", reduce_to(0))
    text = preflight._try("no", THREE, torch.device("cpu"))
    assert text == "the sum over the ranks came out as 0 where 6 is right"


def test_a_wrong_product(monkeypatch):
    monkeypatch.setattr(preflight, "_SIDE", 4)
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda one, _: one)
    assert preflight._try("no", THREE, torch.device("cpu")) == "a product of matrices of ones has 1 where 4 is right"


@pytest.mark.parametrize(
    ("device", "group", "way"),
    [
        ("cuda:1", "cpu:gloo,cuda:nccl", "cuda:1"),
        ("mps", "gloo", "cpu"),
        ("xla:0", "cpu:gloo", "cpu"),
        ("cpu", "gloo", "cpu"),
    ],
)
def test_where_tensors_are_reduced(device, group, way):
    one = Process(World(), Backend(device.partition(":")[0], torch.device(device), group, "", {}), "")
    assert preflight._way(one) == torch.device(way)


def test_a_devices_time_is_taken_once_it_is_done(monkeypatch):
    assert preflight._waiting(torch.device("cpu"))() is None
    assert preflight._waiting(torch.device("cuda")) is torch.accelerator.synchronize
