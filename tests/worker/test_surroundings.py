"""A worker in the notebook's surroundings: what is put on is put on in a child, so that the tests keep their own."""

from __future__ import annotations

import os
import sys
import types
import weakref
from pathlib import Path

import pytest
from child import in_child

from notebook_launcher.core.config import world as read_world
from notebook_launcher.core.events import Surroundings
from notebook_launcher.core.world import World
from notebook_launcher.worker import surroundings


def given(tmp_path, **changed):
    usual = {
        "environment": {"PATH": "/bin", "OWN": "1"},
        "directory": str(tmp_path),
        "path": ["/one", "/two"],
        "argv": ["notebook"],
        "sources": {},
    }
    return Surroundings(**{**usual, **changed})


def put_on(given_, look, **world):
    def child():
        surroundings.put_on(given_, World(**world))
        return look()

    return in_child(child)


def test_environment_directory_path_and_arguments_are_the_notebooks(tmp_path, monkeypatch):
    monkeypatch.setenv("STALE", "from the server's start")
    environment, directory, path, argv = put_on(
        given(tmp_path), lambda: [dict(os.environ), str(Path.cwd()), sys.path, sys.argv]
    )
    assert environment["OWN"] == "1"
    assert "STALE" not in environment
    assert directory == str(tmp_path)
    assert path == ["/one", "/two"]
    assert argv == ["notebook"]


def test_a_rank_knows_who_it_is_whatever_the_notebook_says(tmp_path):
    world = {
        "rank": 3,
        "world_size": 4,
        "local_rank": 1,
        "local_world_size": 2,
        "machine_rank": 1,
        "num_machines": 2,
        "main_port": 5,
        "launched": True,
        "device": "cpu",
        "num_threads": 1,
    }
    stale = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "64"}
    environment = put_on(given(tmp_path, environment=stale), lambda: dict(os.environ), **world)
    assert read_world(environment) == World(**world)


def test_gloo_stays_on_this_machine_unless_there_are_others(tmp_path):
    def interface():
        return os.environ.get("GLOO_SOCKET_IFNAME")

    assert put_on(given(tmp_path), interface) in ("lo", "lo0")
    assert put_on(given(tmp_path), interface, num_machines=2) is None
    own = given(tmp_path, environment={"GLOO_SOCKET_IFNAME": "eth7"})
    assert put_on(own, interface) == "eth7"


def test_only_differences_are_written(monkeypatch):
    """Each assignment is a call into the C library, and a notebook's environment has hundreds of names."""
    written = []
    monkeypatch.setattr(type(os.environ), "update", lambda _, changes: written.append(changes))
    monkeypatch.setattr(surroundings, "snapshot", lambda: {"SAME": "1", "OTHER": "1"})
    surroundings.set_environment({"SAME": "1", "OTHER": "2", "NEW": "3"})
    assert written == [{"OTHER": "2", "NEW": "3"}]


def test_cells_sources_are_known(tmp_path):
    import linecache

    name = "/tmp/ipykernel_1/1.py"  # noqa: S108
    line = put_on(given(tmp_path, sources={name: "a\nb\n"}), lambda: linecache.getline(name, 2))
    assert line == "b\n"


def test_threads_share_the_cores(tmp_path):
    import torch

    assert put_on(given(tmp_path), torch.get_num_threads, num_threads=1) == 1


def test_a_seed_seeds_every_generator(tmp_path):
    import random

    import numpy as np
    import torch

    def draw():
        return [random.random(), float(np.random.rand()), torch.rand(1).item()]  # noqa: NPY002, S311 - global ones

    first = put_on(given(tmp_path), draw, seed=7)
    assert put_on(given(tmp_path), draw, seed=7) == first
    assert put_on(given(tmp_path), draw, seed=2**32 - 1) != first
    unseeded = [put_on(given(tmp_path), draw), first]
    assert unseeded[0] != unseeded[1]


# --- devices, figures, process groups ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_rank_takes_its_own_device(monkeypatch, kind):
    chosen = []
    fake = types.SimpleNamespace(set_device=chosen.append)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(**{kind: fake}))
    surroundings.use_device(World(device=kind, local_rank=3))
    assert chosen == [3]


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_there_is_nothing_to_choose_on_the_others(monkeypatch, kind):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would raise
    surroundings.use_device(World(device=kind, local_rank=3))


def test_figures_that_were_left_open_are_shown(monkeypatch):
    flushed = []
    backend = types.SimpleNamespace(flush_figures=lambda: flushed.append(True))
    monkeypatch.setitem(sys.modules, "matplotlib_inline.backend_inline", backend)
    monkeypatch.setattr("IPython.core.interactiveshell.InteractiveShell.initialized", lambda: True)
    surroundings.show_figures()
    assert flushed == [True]
    monkeypatch.setattr("IPython.core.interactiveshell.InteractiveShell.initialized", lambda: False)
    surroundings.show_figures()
    assert flushed == [True]


def test_process_groups_are_left_where_there_are_any(monkeypatch):
    class Model:
        """In a reference cycle, as a wrapped one is, and so are the connections that it holds."""

    model = Model()
    model.itself, gone = model, weakref.ref(model)
    del model
    left = []
    fake = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: not left, destroy_process_group=lambda: left.append(True)
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)
    shut = []  # here they would be those to the kernel that the tests share
    monkeypatch.setattr(surroundings, "_shut_connections", lambda: shut.append(gone() is None))
    surroundings.leave_process_groups()
    surroundings.leave_process_groups()
    assert left == [True]
    assert shut == [True, True]
