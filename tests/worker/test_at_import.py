"""What waits for a module to be loaded: done once, after it, whatever loads it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from notebook_launcher.worker import at_import
from notebook_launcher.worker.at_import import once_loaded


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes modules that nothing has loaded yet; what was waiting or loaded goes afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(at_import, "_waiting", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def write(name, text):
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return name

    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_it_waits_until_the_module_has_been_loaded_and_happens_once(written):
    name, seen = written("later", "value = 7"), []
    once_loaded(name, lambda module: seen.append(module.value))
    assert seen == []
    importlib.import_module(name)
    assert seen == [7]
    importlib.reload(sys.modules[name])
    assert seen == [7]


def test_it_happens_now_for_one_that_is_loaded():
    seen = []
    once_loaded("sys", seen.append)
    assert seen == [sys]


def test_the_last_that_was_asked_for_counts(written):
    name, seen = written("later", ""), []
    once_loaded(name, lambda _: seen.append("first"))
    once_loaded(name, lambda _: seen.append("second"))
    importlib.import_module(name)
    assert seen == ["second"]


def test_one_in_a_package_that_another_loads(written):
    written("whole.__init__", "import whole.part\nfound = whole.part.value")
    written("whole.part", "value = 7")
    seen = []
    once_loaded("whole.part", lambda module: setattr(module, "value", 8))
    once_loaded("whole", lambda module: seen.append(module.found))
    importlib.import_module("whole")
    assert seen == [8]


def test_who_only_asks_whether_the_module_is_there_changes_nothing(written):
    name, seen = written("later", "value = 7"), []
    once_loaded(name, lambda module: seen.append(module.value))
    assert importlib.util.find_spec(name).origin.endswith("later.py")
    assert seen == []
    importlib.import_module(name)
    assert seen == [7]


def test_a_module_that_is_not_there_or_fails_is_what_it_is_without(written):
    seen = []
    once_loaded("not_there_at_all", seen.append)
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_there_at_all'"):
        importlib.import_module("not_there_at_all")
    once_loaded(written("fails", "1 / 0"), seen.append)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("fails")
    assert seen == []
