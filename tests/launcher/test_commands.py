"""The commands of a launch: one a rank, with the notebook's surroundings and a socket that listens."""

from __future__ import annotations

import os
import pickle
import socket
import sys

import pytest

from notebook_launcher.core.config import LaunchConfig
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.shared_memory import pack, unpack
from notebook_launcher.launcher.commands import commands, pack_surroundings
from notebook_launcher.launcher.plan import make_plan

NOTHING = pack(b"", ())


def worlds(**options):
    return make_plan(LaunchConfig(device="cpu", **options), tuple, environment={}).worlds


def machines(rank, port=29511, address="127.0.0.1"):
    return worlds(num_machines=2, machine_rank=rank, main_process_ip=address, main_process_port=port)


def test_surroundings_are_the_notebooks_with_what_is_added(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OWN", "1")
    monkeypatch.setattr(sys, "path", ["/one"])
    given = pickle.loads(unpack(pack_surroundings({"cell": "x = 1"}, {"ADDED": "2"}))[0])
    assert given.environment == {**os.environ, "ADDED": "2"}
    assert given.directory == str(tmp_path)
    assert given.path == ["/one"]
    assert given.argv == sys.argv
    assert given.sources == {"cell": "x = 1"}


def test_a_working_directory_that_is_gone_is_a_clear_error(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="working directory has been removed"):
        pack_surroundings({}, {})


def test_all_ranks_meet_at_a_port_that_listens_already():
    with commands(worlds(num_processes=3), NOTHING, NOTHING, attempt=2) as ready:
        assert [one.world.rank for one in ready] == [0, 1, 2]
        assert {one.world.attempt for one in ready} == {2}
        (port,) = {one.world.main_port for one in ready}
        assert port > 0
        assert [one.store is not None for one in ready] == [True, False, False]
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass
    # The worker of rank 0 has a copy: it goes on listening when the launcher has let go.
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    ready[0].store.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


def test_each_attempt_meets_at_a_port_of_its_own():
    with commands(worlds(), NOTHING, NOTHING, 0) as first, commands(worlds(), NOTHING, NOTHING, 1) as second:
        assert first[0].world.main_port != second[0].world.main_port
        first[0].store.close()
        second[0].store.close()


def test_another_machine_makes_no_rendezvous():
    with commands(machines(1), NOTHING, NOTHING, 0) as ready:
        assert [one.store for one in ready] == [None, None]
        assert {one.world.main_port for one in ready} == {29511}


def test_a_port_that_is_taken_is_a_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"main_process_port={port}: can't listen there .*in use") as caught,
            commands(machines(0, port), NOTHING, NOTHING, 0),
        ):
            pass
    assert "a free port" in str(caught.value)


def test_an_address_of_another_machine_is_a_clear_error():
    with (
        pytest.raises(ConfigError, match=r"main_process_ip='192.0.2.1'.*address of this machine"),
        commands(machines(0, address="192.0.2.1"), NOTHING, NOTHING, 0),
    ):
        pass


def test_a_host_name_that_nobody_knows_is_a_clear_error():
    with (
        pytest.raises(ConfigError, match=r"main_process_ip='no-such-host.invalid'"),
        commands(machines(0, address="no-such-host.invalid"), NOTHING, NOTHING, 0),
    ):
        pass
