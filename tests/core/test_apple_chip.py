"""The name of a Mac's chip, from what its system tells."""

from __future__ import annotations

import types

from notebook_launcher.core import apple_chip


def test_the_system_tells_it(monkeypatch):
    told = types.SimpleNamespace(stdout="Apple M3 Max\n")
    monkeypatch.setattr(apple_chip.subprocess, "run", lambda *_, **__: told)
    assert apple_chip.name() == "Apple M3 Max"


def test_other_machines_have_none(monkeypatch):
    def none(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(apple_chip.subprocess, "run", none)
    assert apple_chip.name() == ""
