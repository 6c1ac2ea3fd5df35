"""The script for a machine with a GPU, run here on the CPU: its code works, and a check that fails hides no other."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

from notebook_launcher.core.errors import EngineError

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
    with pytest.raises(AssertionError, match="its notes lack 'rank 0 on cuda:'"):
        script.out_of_memory("cuda")


@pytest.mark.parametrize(
    ("free", "message"), [([9, 5, 9], ""), ([9, 9, 9], "the rank held 0 MB"), ([9, 5, 8], "left behind")]
)
def test_the_cards_memory_is_compared(script, monkeypatch, free, message):
    from notebook_launcher.launcher import launch

    numbers = iter([one << 30 for one in free])
    run = types.SimpleNamespace(logs=lambda _: "holding", status="running", kill=lambda: None)
    run.stop = lambda: vars(run).update(status="stopped")
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
    assert done.stdout.startswith(f"gpu_check can't run: {sys.executable} lacks torch>=2.6, ")
    assert done.stdout.endswith("pytorch.org/get-started has the command that installs torch for this GPU.\n")
    assert done.stderr == ""


def test_a_python_with_torch_only_is_told_the_two_lines_that_bring_the_rest(script, monkeypatch, capsys):
    lacking = script.lacking
    monkeypatch.setattr(script, "lacking", lambda: lacking(lambda name: name if name == "torch" else None))
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu_check.py", "--only", "ddp"])
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert script.main() == 2
    needed = "cloudpickle>=3.0", "numpy>=1.26", "psutil>=5.9", "pydantic>=2", "PyYAML>=6", "safetensors>=0.4"
    what, *lines = capsys.readouterr().out.splitlines()
    assert what.startswith(f"gpu_check can't run: /usr/bin/python3 lacks {', '.join(needed)}. These two lines bring ")
    assert lines == [
        f"    /usr/bin/python3 -m pip install --target build/gpu_check {' '.join(map(repr, needed))}",
        "    PYTHONPATH=build/gpu_check /usr/bin/python3 benchmarks/gpu_check.py --only ddp",
    ]


def test_a_package_that_is_too_old_is_lacking(script, monkeypatch):
    versions = {"torch": "2.10.1+cu126", "pydantic": "1.10.2"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert script.lacking(lambda name: name) == ["pydantic>=2 (1.10.2 is there)"]
    versions["torch"] = "2.5.1"
    assert "torch>=2.6 (2.5.1 is there)" in script.in_words(script.lacking(lambda name: name))


def test_where_nothing_can_be_checked_the_file_says_so_of_each_check(script, monkeypatch, capsys, tmp_path):
    findings = tmp_path / "findings.json"
    findings.write_text("of another day")
    monkeypatch.setattr(script, "lacking", lambda: ["torch>=2.6"])
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--only", "ddp", "zero", "--json", str(findings)])
    assert script.main() == 2
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(findings.read_text())
    assert [(one["name"], one["state"], one["text"]) for one in told] == [
        ("ddp", "skipped", line),
        ("zero", "skipped", line),
    ]


def test_a_file_that_can_t_be_written_is_told_before_the_checks(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--json", str(tmp_path / "none" / "findings.json")])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == 2
    assert "there is no folder" in capsys.readouterr().err


def test_workers_that_can_t_be_started_are_told_in_words(script, monkeypatch):
    from notebook_launcher.launcher import warm

    def fails():
        raise EngineError("no process can be started here")

    monkeypatch.setattr(warm, "devices", fails)
    assert script.why_not("cuda") == "gpu_check can't run: no process can be started here"


def test_it_needs_what_the_package_needs(script):
    project = tomllib.loads((SCRIPT.parent.parent / "pyproject.toml").read_text())["project"]
    assert set(script.NEEDED.values()) <= set(project["dependencies"])
    assert project["requires-python"] == f">={'.'.join(map(str, script.PYTHON))}"


def test_an_older_python_is_told_so(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert script.main() == 2
    assert capsys.readouterr().out.startswith("gpu_check can't run: it needs Python 3.11, and ")


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_told_so_in_one_sentence():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False, timeout=110)
    assert (done.returncode, done.stderr) == (2, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith("gpu_check has no cuda device to check: this torch (")
