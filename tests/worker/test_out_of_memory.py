"""What is said of a device that is full, from an invented torch: the figures, and the tensors that were at hand."""

from __future__ import annotations

import types

import pytest
import torch

from notebook_launcher.worker import failure, out_of_memory

GIB = 1 << 30


class FullError(RuntimeError):
    """Stands in for torch.OutOfMemoryError."""


def surface(**more):
    return types.SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 1,
        mem_get_info=lambda _: (GIB // 2, 24 * GIB),
        memory_allocated=lambda _: 9 * GIB,
        memory_reserved=lambda _: 10 * GIB,
        get_device_properties=lambda _: types.SimpleNamespace(name="RTX 4090"),
        **more,
    )


def fake_torch(**more):
    idle = types.SimpleNamespace(is_initialized=lambda: False)
    mps = types.SimpleNamespace(
        driver_allocated_memory=lambda: 8 * GIB,
        current_allocated_memory=lambda: 7 * GIB,
        recommended_max_memory=lambda: 11 * GIB,
    )
    own = {"cuda": surface(), "xpu": idle, "mps": mps, "Tensor": torch.Tensor, "nn": torch.nn}
    return types.SimpleNamespace(OutOfMemoryError=FullError, **own | more)


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setitem(out_of_memory.sys.modules, "torch", fake_torch())
    monkeypatch.setenv("RANK", "3")


def caught(function, *args):
    try:
        function(*args)
    except RuntimeError as error:
        return error
    raise AssertionError("nothing was raised")


def forward(inputs, weight):
    hidden = [inputs, inputs.double()]  # noqa: F841 - looked for in the frame
    raise FullError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def train(batch):
    forward(batch["inputs"], torch.nn.Parameter(torch.ones(2)))


BATCH = {"inputs": torch.zeros(512, 3), "labels": torch.zeros(512, dtype=torch.int64), "name": "a"}


@pytest.mark.usefixtures("card")
def test_it_names_the_rank_its_use_the_others_and_the_batch():
    told = out_of_memory.explain(caught(train, BATCH)).splitlines()
    assert told[0] == (
        "rank 3 on cuda:1 (RTX 4090, 24.00 GiB) holds 10.00 GiB, 9.00 GiB of it in tensors; other processes on the "
        "card, and CUDA itself, hold 13.50 GiB; 0.50 GiB is free"
    )
    assert told[-2:] == [
        "tensors in train: batch['inputs'] (512, 3) float32, batch['labels'] (512,) int64",
        "tensors in forward: inputs (512, 3) float32, hidden[0] (512, 3) float32, hidden[1] (512, 3) float64",
    ]


@pytest.mark.usefixtures("card")
def test_the_report_of_the_failure_has_it_as_a_note():
    error = caught(train, BATCH)
    text = failure.describe(error).traceback_text
    assert "FullError: CUDA out of memory" in text
    assert "other processes on the card" in text
    assert error.__notes__ == [out_of_memory.explain(error)]


@pytest.mark.usefixtures("card")
def test_many_tensors_are_counted():
    def step():
        a = b = c = d = e = f = g = h = torch.zeros(1)  # noqa: F841 - looked for in the frame
        raise FullError

    assert out_of_memory.explain(caught(step)).endswith("f (1,) float32 and 2 more")


def test_an_intel_card(monkeypatch):
    idle = types.SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(out_of_memory.sys.modules, "torch", fake_torch(cuda=idle, xpu=surface()))
    assert "on xpu:1 (RTX 4090" in out_of_memory.explain(caught(train, BATCH))


@pytest.mark.usefixtures("card")
def test_an_apple_gpu():
    def step(inputs):
        raise RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)")

    told = out_of_memory.explain(caught(step, torch.zeros(2, 2))).splitlines()
    assert (
        told[0] == "rank 3 holds 8.00 GiB of the 11.00 GiB that macOS recommends for the GPU, 7.00 GiB of it in tensors"
    )
    assert told[-1] == "tensors in step: inputs (2, 2) float32"


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    "error", [RuntimeError(), RuntimeError("out of cheese"), ValueError("MPS backend out of memory")]
)
def test_other_errors_get_nothing(error):
    assert out_of_memory.explain(error) == ""
    assert not hasattr(error, "__notes__")


def test_figures_that_cannot_be_had_hide_no_error(monkeypatch):
    broken = types.SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(out_of_memory.sys.modules, "torch", fake_torch(cuda=broken))
    told = out_of_memory.explain(caught(train, BATCH))
    assert told == "(nothing more can be said of the memory: AttributeError)"
