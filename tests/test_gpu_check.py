"""The script for a machine with a GPU, run here on the CPU: its code works, and a check that fails hides no other."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_check.py"
ON_A_GPU_ONLY = {"chosen_by_uuid", "out_of_memory", "left_behind", "fp16_steps"}


@pytest.fixture
def script():
    found = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_check_runs_or_says_why_not(tmp_path):
    findings = tmp_path / "findings.json"
    command = [sys.executable, SCRIPT, "--device", "cpu", "--json", findings]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {one["name"]: one for one in json.loads(findings.read_text())}
    assert {name for name, one in told.items() if one["state"] == "ok"} >= {
        *("what_is_here", "after_the_notebook_used_it", "launch_latency", "preflight", "ddp"),
        *("fp32_steps", "bf16_steps", "checkpoint"),
    }
    assert all(told[name]["state"] == "skipped" and told[name]["text"] for name in ON_A_GPU_ONLY)
    assert len(done.stdout.splitlines()) == len(told) + 1
    assert json.loads(done.stdout.splitlines()[-1]) == list(told.values())


def test_a_check_that_fails_hides_no_other(script, monkeypatch, capsys):
    def fails(_):
        script.expect(False, "the sum is 0\nwhere 3 is right")  # noqa: FBT003 - what failed

    monkeypatch.setitem(script.CHECKS, "ddp", fails)
    monkeypatch.setitem(script.CHECKS, "zero", lambda device: (f"on {device}", {"ours_ms": 1.5}))
    failed, well = (script.found_by(name, "cuda") for name in ("ddp", "zero"))
    assert (failed.state, failed.text) == ("FAILED", "AssertionError: the sum is 0")
    assert script.told(well).endswith("s  on cuda; ours_ms 1.5")
    assert "the sum is 0" in capsys.readouterr().err


def test_a_full_cards_message_is_looked_at(script, monkeypatch):
    class OutOfMemoryError(RuntimeError):
        pass

    error = OutOfMemoryError("CUDA out of memory")
    error.add_note("rank 0 on cuda:0 (H200): other processes on the card hold 1 GiB\ntensors: batch (512, 3) float32")

    def run_one(*_, **__):
        raise error

    monkeypatch.setattr(script, "run_one", run_one)
    assert script.out_of_memory("cuda")[0].startswith("rank 0 on cuda:0 (H200)")
    error.__notes__.clear()
    with pytest.raises(AssertionError, match="its notes lack 'rank 0 on '"):
        script.out_of_memory("cuda")


@pytest.mark.parametrize(
    ("free", "message"), [([9, 5, 9], ""), ([9, 9, 9], "the rank held 0 MB"), ([9, 5, 8], "left behind")]
)
def test_the_cards_memory_is_compared(script, monkeypatch, free, message):
    from notebook_launcher.launcher import launch

    numbers = iter([one << 30 for one in free])
    run = types.SimpleNamespace(logs=lambda _: "holding", status="stopped", stop=lambda: None)
    monkeypatch.setattr(launch, "launch_payload", lambda *_, **__: run)
    monkeypatch.setattr(script, "one_operation", lambda _: 0.0)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (next(numbers), 0))
    if message:
        with pytest.raises(AssertionError, match=message):
            script.left_behind("cuda")
    else:
        assert script.left_behind("cuda")[1] == {"left_mb": 0.0}


def test_missing_packages_are_named_before_anything_starts():
    done = subprocess.run([sys.executable, "-S", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.startswith("These packages are missing: torch, ")
