"""Names are imported on first use, and a wrong one is answered with the right ones."""

from __future__ import annotations

import sys

import pytest

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.registry import Registry, unknown_name


@pytest.fixture
def registry():
    return Registry("engine", {"local": "collections:OrderedDict", "ray": "no.such.module:Engine"})


def test_load_gives_what_the_name_stands_for(registry):
    from collections import OrderedDict

    assert registry.load("local") is OrderedDict


def test_a_name_is_guessed_in_any_case():
    assert "Did you mean 'fsdp'?" in str(unknown_name("strategy", "FSDP", ["fsdp", "ddp"]))


def test_nothing_is_imported_before_it_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("VALUE = 3")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry("engine", {"late": "imported_late:VALUE"})
    assert "imported_late" not in sys.modules
    assert registry.load("late") == 3
    del sys.modules["imported_late"]


def test_names_keep_their_order(registry):
    assert registry.names == ("local", "ray")


def test_an_unknown_name_guesses_before_it_lists_the_known(registry):
    with pytest.raises(ConfigError, match=r"engine 'locla' is not known\. Did you mean 'local'\? Known: local, ray\."):
        registry.load("locla")


def test_no_guess_where_nothing_is_near():
    assert str(unknown_name("option", "xyz", ["seed", "device"])) == "option 'xyz' is not known. Known: device, seed."


@pytest.mark.parametrize("name", [3, None, "", ("a",)])
def test_any_value_can_be_the_wrong_one(name):
    assert repr(name) in str(unknown_name("option", name, ["seed"]))


def test_a_module_that_is_missing_says_so(registry):
    with pytest.raises(ModuleNotFoundError, match="no"):
        registry.load("ray")
