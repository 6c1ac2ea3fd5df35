"""The command: its output, JSON, and the code that it ends with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import notebook_launcher
from notebook_launcher import cli
from notebook_launcher.core.errors import EngineError
from notebook_launcher.core.events import DeviceRow
from notebook_launcher.launcher.preflight import Check, Preflight

ROWS = (
    DeviceRow("cuda", 0, reason="the driver is missing"),
    DeviceRow("cpu", 2, ("2 cores",), precisions={"no": "", "fp16": "emulated", "bf16": ""}),
)
WELL = Preflight("2 processes", (Check("workers", ok=True, text="2 started"),), {"latency_us": 20.0})
ILL = Preflight("", (Check("options", ok=False, text="device 'cuda' is not here"),))


def run(*arguments):
    return CliRunner().invoke(cli.app, arguments)


@pytest.fixture
def found(monkeypatch):
    asked = []
    monkeypatch.setattr(cli.warm, "devices", lambda: ROWS)
    monkeypatch.setattr(cli.preflight, "check", lambda **options: asked.append(options) or WELL)
    return asked


def test_devices(found):
    done = run("devices")
    assert done.exit_code == 0
    assert "cuda: not here: the driver is missing" in done.output
    assert done.output.splitlines()[-1] == "auto takes cpu: 2 processes"


def test_devices_for_programs(found):
    assert json.loads(run("devices", "--json").output)["auto"] == {"device": "cpu", "num_processes": 2}


def test_what_is_well_ends_with_0(found):
    done = run("test", "--device", "cpu", "-n", "3", "--device-ids", "0,1")
    assert done.exit_code == 0, done.output
    assert found == [{"device": "cpu", "num_processes": 3, "device_ids": "0,1"}]
    assert "preflight: all is well" in done.output
    assert json.loads(run("test", "--json").output)["figures"] == {"latency_us": 20.0}


def test_the_magic_s_name_for_it_is_taken_too(found):
    done = run("check", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert found == [{"device": "cpu", "num_processes": None, "device_ids": None}]


def test_what_is_wrong_ends_with_1(monkeypatch):
    monkeypatch.setattr(cli.preflight, "check", lambda **_: ILL)
    done = run("test")
    assert done.exit_code == 1
    assert "preflight: something is wrong with options" in done.output
    done = run("test", "--json")
    assert done.exit_code == 1
    assert json.loads(done.output)["ok"] is False


@pytest.mark.parametrize("command", ["devices", "test"])
def test_an_interrupt_is_a_line_and_130(monkeypatch, command):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.warm, "devices", interrupted)
    monkeypatch.setattr(cli.preflight, "check", interrupted)
    done = run(command)
    assert (done.exit_code, done.output) == (130, "notebook-launcher: interrupted; what it had started is ended\n")


@pytest.fixture
def signals():
    """Has what an interrupt does as it was, after the test."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_command_that_cannot_begin_ends_with_2_and_a_line(monkeypatch, capsys, signals):
    def devices():
        raise EngineError("the fork server can't be started")

    monkeypatch.setattr(cli.warm, "devices", devices)
    monkeypatch.setattr("sys.argv", ["notebook-launcher", "devices"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "notebook-launcher: the fork server can't be started\n"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a second Ctrl-C stops nothing that is being ended


@pytest.mark.slow
def test_no_command_loads_torch_in_the_process_that_asks():
    code = (
        "import sys; from notebook_launcher import cli; from typer.testing import CliRunner\n"
        "for words in (['merge', '--help'], ['devices'], ['test', '--device', 'cpu']):\n"
        "    done = CliRunner().invoke(cli.app, words); print(done.exit_code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["0 False"] * 3, done.stderr


def test_help_names_the_commands():
    text = run("-h").output
    assert all(word in text for word in ("devices", "test", "merge"))


def test_what_is_given_to_merge_is_handed_on(monkeypatch):
    asked = []
    monkeypatch.setattr(notebook_launcher, "merge_checkpoint", lambda *given, **options: asked.append((given, options)))
    done = run("merge", "ck", "out")
    assert done.exit_code == 0, done.output
    assert done.output == "the weights of 'model' in ck are in out\n"
    assert run("merge", "ck", "out", "--model", "model_1", "--max-shard-size", "1GB", "--unsafe_serialization").output
    folders, whole = (Path("ck"), Path("out")), {"model": "model", "max_shard_size": "10GB", "safe_serialization": True}
    assert asked == [
        (folders, whole),
        (folders, {"model": "model_1", "max_shard_size": "1GB", "safe_serialization": False}),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out"], "nowhere holds no checkpoint: there is no such folder. Name a folder that save_state"),
        (["ck", "file/out"], "the weights in ck could not be written to file/out: [Errno 20] Not a directory"),
        (["ck", "ck"], "would replace files of the checkpoint that is there"),
        (["ck", "out", "--model", "model_1"], "holds no weights of 'model_1' that can be put together"),
        (["ck", "out", "--max-shard-size", "big"], "max_shard_size='big' is no size; give bytes, or a text such as"),
    ],
    ids=range(5),
)
def test_merge_says_what_is_wrong_in_a_line(arguments, message, tmp_path, monkeypatch, capsys, signals):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    accelerator = notebook_launcher.Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state("ck")
    monkeypatch.setattr("sys.argv", ["notebook-launcher", "merge", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_merged_weights_are_those_that_were_saved(tmp_path):
    accelerator = notebook_launcher.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "ck", sharded=True)
    assert run("merge", str(tmp_path / "ck"), str(tmp_path / "out")).exit_code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    state = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_command_is_installed_with_the_package():
    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"notebook-launcher": "notebook_launcher.cli:main"}
