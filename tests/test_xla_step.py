"""When ``scripts/test.py`` runs the tests of XLA, which take an environment of their own, and what it says when not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(monkeypatch):
    """The script, with what it would run kept in ``ran``."""
    module = load("test", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["test.py"])
    monkeypatch.delenv(module.environment.ASKS_FOR_XLA, raising=False)
    monkeypatch.setattr(module.test_xla, "library_problem", lambda: "")
    module.ran = []
    monkeypatch.setattr(module, "run", lambda command: module.ran.append(Path(command[-1]).name) or True)
    return module


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit; commits what is written there."""

    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    def commit(name):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
        git("add", ".")
        git("commit", "-q", "-m", name)
        return tmp_path

    git("init", "-q")
    commit("README.md")
    return commit


@pytest.mark.parametrize(
    ("name", "ran"),
    [
        ("notebook_launcher/runtime/backends/xla.py", ["test_xla.py"]),
        ("notebook_launcher/runtime/strategies/xla.py", ["test_xla.py"]),
        ("notebook_launcher/launcher/engines/xla.py", ["test_xla.py"]),
        ("notebook_launcher/runtime/backends/torch_devices.py", []),
    ],
)
def test_a_commit_on_xla_has_them_run(script, repository, monkeypatch, capsys, name, ran):
    monkeypatch.setattr(script, "ROOT", repository(name))
    assert script.xla(Path())
    assert script.ran == ran
    assert (
        "Skipped: the last commit changed nothing of XLA's; NOTEBOOK_LAUNCHER_TEST_XLA=1" in capsys.readouterr().out
    ) != (bool(ran))


def test_a_machine_that_could_not_load_it_is_told_why_they_are_skipped(script, repository, monkeypatch, capsys):
    monkeypatch.setattr(script, "ROOT", repository("notebook_launcher/runtime/backends/xla.py"))
    monkeypatch.setattr(script.test_xla, "library_problem", lambda: "no shared library")
    assert script.xla(Path())
    assert script.ran == []
    assert "Skipped: no shared library; NOTEBOOK_LAUNCHER_TEST_XLA=1 runs it" in capsys.readouterr().out


def test_without_a_history_they_are_skipped_and_it_says_why(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert script.xla(Path())
    assert script.ran == []
    assert "Skipped: git can't tell what the last commit changed" in capsys.readouterr().out


def test_whoever_asks_gets_them(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setenv("NOTEBOOK_LAUNCHER_TEST_XLA", "1")
    assert script.xla(Path())
    monkeypatch.delenv("NOTEBOOK_LAUNCHER_TEST_XLA")
    monkeypatch.setattr(sys, "argv", ["test.py", "xla"])
    assert script.xla(Path())
    assert script.ran == ["test_xla.py"] * 2


def test_the_variable_does_not_reach_the_tests_where_a_launch_would_warn_of_it(script, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_LAUNCHER_TEST_XLA", "1")
    assert "NOTEBOOK_LAUNCHER_TEST_XLA" not in script.environment.clean_variables()


def test_a_python_without_its_shared_library_is_told_before_gigabytes_are_installed(monkeypatch):
    script = load("test_xla", monkeypatch)

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(script.ctypes, "CDLL", missing)
    assert "apt install libpython3." in script.library_problem()
