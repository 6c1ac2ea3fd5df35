"""Tests that need torch_xla, which has an environment of its own: ``python3 scripts/test_xla.py``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import leaks
import pytest

collect_ignore_glob = ["test_*.py"]
if importlib.util.find_spec("torch_xla"):
    collect_ignore_glob = []
    # torch 2.9 makes a folder as it is loaded, and a kernel that is killed leaves it. Only here: this file is read in
    # every run of the tests.
    leaks._LASTING_FILES += ("tmp",)


@pytest.fixture
def on_xla(monkeypatch):
    """Launches a function on so many devices of XLA on the CPU."""
    from notebook_launcher import launch

    def run(function, *args, num_devices=1, **options):
        environment = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_devices)}
        return launch(function, args, device="tpu", env=environment, **options)

    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # where ranks find the training
    return run
