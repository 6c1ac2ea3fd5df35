"""What a rank tells of its device's memory, by stand-ins for torch's modules: no such device is here."""

from __future__ import annotations

import sys
import types

import pytest

from notebook_launcher.core.events import DeviceMemory
from notebook_launcher.worker.device_memory import DeviceMemoryWatch


class Device:
    """As ``torch.cuda`` with two devices."""

    def __init__(self):
        self.initialized, self.reserved, self.num_looks = True, {0: 10, 1: 20}, 0

    def is_initialized(self):
        return self.initialized

    def memory_reserved(self, index):
        self.num_looks += 1
        return self.reserved[index]

    def get_device_properties(self, index):
        return types.SimpleNamespace(total_memory=100 + index)


@pytest.fixture
def device(monkeypatch):
    one = Device()
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=one))
    return one


def test_the_rank_s_own_device_is_looked_at_once_a_second_and_told_when_it_changed(device):
    now_s = [10.0]
    watch = DeviceMemoryWatch("cuda", 1, lambda: now_s[0])
    assert watch.news() == DeviceMemory(20, 101)
    device.reserved[1] = 30
    assert watch.news() is None
    now_s[0] += 1
    assert watch.news() == DeviceMemory(30, 101)
    now_s[0] += 1
    assert watch.news() is None
    assert device.num_looks == 3


def test_a_device_that_is_not_in_use_is_left_alone(device):
    device.initialized = False
    assert DeviceMemoryWatch("cuda", 0).news() is None
    assert device.num_looks == 0


def test_where_the_look_fails_nobody_looks_again(device):
    del device.reserved[1]
    now_s = [10.0]
    watch = DeviceMemoryWatch("cuda", 1, lambda: now_s[0])
    assert watch.news() is None
    device.reserved[1] = 20
    now_s[0] += 5
    assert watch.news() is None


def test_apple_s_devices_have_words_of_their_own(monkeypatch):
    mps = types.SimpleNamespace(driver_allocated_memory=lambda: 7, recommended_max_memory=lambda: 70)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(mps=mps))
    assert DeviceMemoryWatch("mps", 0).news() == DeviceMemory(7, 70)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_without_torch_or_a_device_there_is_nothing_to_tell(monkeypatch, kind):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert DeviceMemoryWatch(kind, 0).news() is None
