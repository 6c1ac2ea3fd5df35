"""When ``scripts/test.py`` runs the tests of XLA, which take an environment of their own, and what it says when not."""

from __future__ import annotations

import importlib.util
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


FILES = (
    "notebook_launcher/runtime/backends/xla.py",
    "notebook_launcher/runtime/strategies/xla.py",
    "notebook_launcher/launcher/engines/xla.py",
    "tests/xla/test_launch.py",
)
OTHER = "notebook_launcher/runtime/backends/torch_devices.py"


@pytest.fixture
def passed(script, tmp_path, monkeypatch):
    """A copy in which the tests have passed; returns a function that writes one of its files."""

    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    for name in (*FILES, OTHER):
        write(name, "as it was")
    write(script.test_xla.RECORD, f"{script.test_xla.digest(tmp_path)}\n")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    return write


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_xlas_has_them_run(script, passed, name):
    passed(name, "changed")
    passed(OTHER, "changed since, as by any number of commits")
    assert script.xla(Path())
    assert script.ran == ["test_xla.py"]


def test_a_new_file_of_xlas_has_them_run(script, passed):
    passed("notebook_launcher/worker/xla_more.py", "")
    assert script.xla(Path())
    assert script.ran == ["test_xla.py"]


def test_they_are_skipped_where_nothing_of_xlas_has_changed_and_it_says_so(script, passed, capsys):
    passed(OTHER, "changed")
    assert script.xla(Path())
    assert script.ran == []
    told = capsys.readouterr().out
    assert "Skipped: XLA's files are those with which CI has passed; NOTEBOOK_LAUNCHER_TEST_XLA=1 runs" in told


def test_where_they_have_never_passed_they_run(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.xla(Path())
    assert script.ran == ["test_xla.py"]


def test_a_machine_that_could_not_load_it_is_told_why_they_are_skipped(script, passed, monkeypatch, capsys):
    passed(FILES[0], "changed")
    monkeypatch.setattr(script.test_xla, "library_problem", lambda: "no shared library")
    assert script.xla(Path())
    assert script.ran == []
    assert "Skipped: no shared library; NOTEBOOK_LAUNCHER_TEST_XLA=1 runs it" in capsys.readouterr().out


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Run ``scripts/test_xla.py`` in an empty copy, where pytest ends with ``code``; gives the script."""
    module = load("test_xla", monkeypatch)
    monkeypatch.setattr(module.environment, "ROOT", tmp_path)
    monkeypatch.setattr(module.environment, "ensure", lambda *_, **__: Path("python"))
    monkeypatch.setattr(module, "library_problem", lambda: "")
    (tmp_path / "tests" / "xla").mkdir(parents=True)

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["test_xla.py", *arguments])
        monkeypatch.setattr(module.subprocess, "call", lambda *_, **__: code)
        assert module.main() == code
        return module

    return run


@pytest.mark.parametrize(
    ("arguments", "code", "is_kept"), [(["--keep"], 0, True), ([], 0, False), (["--keep"], 1, False)]
)
def test_only_who_says_so_keeps_that_all_have_passed(runs, tmp_path, arguments, code, is_kept):
    assert runs(*arguments, code=code).have_passed(tmp_path) is is_kept


def test_a_part_of_them_is_not_kept_as_all(runs, tmp_path, capsys):
    with pytest.raises(SystemExit):
        runs("--keep", "-k", "spmd")
    assert "can't go with -k spmd, which goes to pytest" in capsys.readouterr().err
    assert not runs().have_passed(tmp_path)


def test_the_files_that_are_compared_are_there(monkeypatch):
    module = load("test_xla", monkeypatch)
    for pattern in module.FILES:
        assert list(SCRIPTS.parent.glob(pattern)), pattern


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
