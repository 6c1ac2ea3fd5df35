"""What this machine can't do is one clear sentence, before a worker is so much as asked for."""

from __future__ import annotations

import pytest

from notebook_launcher import launch
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.events import DeviceRow
from notebook_launcher.core.precisions import DeviceFacts, refusals
from notebook_launcher.launcher import warm
from notebook_launcher.worker import inspection

CPU = DeviceRow("cpu", 2, ("2 cores",), precisions=refusals("cpu"))
T4 = DeviceRow("cuda", 2, ("T4", "T4"), precisions=refusals("cuda", DeviceFacts(name="T4", capability=(7, 5))))
MPS = DeviceRow("mps", 1, ("Apple M2 GPU",), precisions=refusals("mps"))


def sentence(monkeypatch, *rows, **options):
    def start(*_, **__):
        pytest.fail("a worker was asked for")

    if rows:
        monkeypatch.setattr(warm, "devices", lambda *_: rows)
    for name in ("take", "prepare"):
        monkeypatch.setattr(warm, name, start)
    with pytest.raises(ConfigError) as caught:
        launch(print, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_no_tpu_on_this_machine(monkeypatch):
    text = sentence(monkeypatch, device="tpu")
    assert text.startswith("device 'tpu' is not here: ")
    assert text.endswith("This machine has: cpu.")


def test_a_build_of_torch_without_cuda(monkeypatch):
    import torch

    if torch.backends.cuda.is_built():
        pytest.skip("this torch is a build with CUDA")
    assert sentence(monkeypatch, device="cuda") == (
        f"device 'cuda' is not here: this torch ({torch.__version__}) is a build without CUDA, which uses no GPU even "
        "where there is one; pytorch.org/get-started has the command that installs a build with it. This machine has: "
        "cpu."
    )


def test_more_processes_than_devices(monkeypatch):
    assert sentence(monkeypatch, T4, CPU, num_processes=3) == (
        "num_processes=3 is more than the 2 CUDA devices to run on, and each process needs its own. Ask for at most 2, "
        "or use device='cpu'."
    )


def test_fp16_on_a_cpu(monkeypatch):
    text = sentence(monkeypatch, CPU, mixed_precision="fp16")
    assert text.startswith(
        "mixed_precision='fp16' can't be used on cpu (the device chosen by device='auto', which found"
    )
    assert text.endswith("Use 'bf16' or 'no'.")
    assert "a cpu emulates fp16" in sentence(monkeypatch, device="cpu", mixed_precision="fp16")


def test_bf16_on_cards_that_would_emulate_it(monkeypatch):
    assert "T4 has no bf16 units (its compute capability is 7.5" in sentence(
        monkeypatch, T4, CPU, mixed_precision="bf16"
    )


def test_two_processes_on_an_apple_gpu(monkeypatch):
    text = sentence(monkeypatch, MPS, CPU, num_processes=2)
    assert "an Apple GPU is one device, and torch can't exchange its tensors between processes" in text
    assert "takes one process" in sentence(monkeypatch, MPS, CPU, device="mps", num_processes=2)


def test_these_are_the_workers_own_rows():
    assert {row.kind for row in inspection.devices()} >= {"cuda", "mps", "xpu", "tpu", "cpu"}
