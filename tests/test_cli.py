"""The command: its output, JSON, and the code that it ends with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

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
def test_neither_command_loads_torch_in_the_process_that_asks():
    code = (
        "import sys; from notebook_launcher import cli; from typer.testing import CliRunner\n"
        "for words in (['devices'], ['test', '--device', 'cpu']):\n"
        "    done = CliRunner().invoke(cli.app, words); print(done.exit_code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["0 False", "0 False"], done.stderr


def test_help_names_the_commands():
    text = run("-h").output
    assert "devices" in text
    assert "test" in text


def test_the_command_is_installed_with_the_package():
    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"notebook-launcher": "notebook_launcher.cli:main"}
