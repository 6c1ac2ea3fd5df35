"""``notebook_launcher``: a notebook written for Accelerate changes its import line only."""

from __future__ import annotations

import inspect
import os

import pytest

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.launcher import accelerate_style
from notebook_launcher.launcher.accelerate_style import debug_launcher, notebook_launcher
from notebook_launcher.launcher.run import Run

# accelerate.notebook_launcher's parameters, in its order, with its defaults.
SIGNATURE = {
    "function": inspect.Parameter.empty,
    "args": (),
    "num_processes": None,
    "mixed_precision": "no",
    "use_port": "29500",
    "master_addr": "127.0.0.1",
    "node_rank": 0,
    "num_nodes": 1,
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_conf": None,
    "rdzv_id": "none",
    "max_restarts": 0,
    "monitor_interval": 0.1,
    "log_line_prefix_template": None,
}


@pytest.fixture
def options(monkeypatch):
    """What ``launch`` is called with, instead of a launch."""
    seen = {}
    monkeypatch.setattr(accelerate_style, "launch", lambda fn, args, **given: seen.update(given, fn=fn, args=args))
    return seen


def chosen(options):
    """Those that say something: an option that is None counts as not given."""
    return {name: value for name, value in options.items() if value is not None and name not in ("fn", "args")}


def test_the_signature_is_accelerates():
    parameters = inspect.signature(notebook_launcher).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == SIGNATURE
    assert list(parameters) == list(SIGNATURE)
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_a_launch_gives_a_run(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run = notebook_launcher(os.path.join, ("a", "b"), num_processes=2)
    assert isinstance(run, Run)
    assert run.results == ["a/b", "a/b"]


def test_no_precision_is_no_choice(options):
    notebook_launcher(len, ("ab",))
    assert options["fn"] is len
    assert options["args"] == ("ab",)
    assert chosen(options) == {"max_restarts": 0}


def test_what_is_asked_for_is_handed_over(options):
    notebook_launcher(len, ("ab",), 8, "bf16", max_restarts=2)
    assert chosen(options) == {"num_processes": 8, "mixed_precision": "bf16", "max_restarts": 2}


@pytest.mark.parametrize("port", ["29500", 29501, None, "", "whatever"])
def test_on_one_machine_the_port_is_ignored(options, port):
    notebook_launcher(len, use_port=port)
    assert chosen(options) == {"max_restarts": 0}


@pytest.mark.parametrize(("port", "expected"), [("29700", "29700"), (29701, 29701), (None, "29500"), ("", "29500")])
def test_several_machines(options, port, expected):
    notebook_launcher(len, num_nodes=2, node_rank=1, master_addr="10.0.0.1", use_port=port)
    assert chosen(options) == {
        "max_restarts": 0,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": expected,
    }


def test_a_machine_that_is_not_one_of_one_is_refused():
    with pytest.raises(ConfigError, match=r"machine_rank=3 can't be with num_machines=1"):
        notebook_launcher(len, ("ab",), node_rank=3)


@pytest.mark.parametrize(
    "wrong",
    [{"mixed_precision": "fp8"}, {"num_processes": 0}, {"num_nodes": 2, "use_port": "high"}, {"max_restarts": -1}],
)
def test_wrong_values_are_config_errors(wrong):
    with pytest.raises(ConfigError):
        notebook_launcher(len, ("ab",), **wrong)


@pytest.mark.parametrize(
    "elastic", [{"rdzv_backend": "c10d"}, {"rdzv_endpoint": "10.0.0.1:29400"}, {"rdzv_conf": {"timeout": 900}}]
)
def test_another_rendezvous_is_refused_with_what_to_give_instead(elastic):
    with pytest.raises(ConfigError, match=r"only the static rendezvous .* master_addr, use_port"):
        notebook_launcher(len, ("ab",), **elastic)


def test_what_has_no_meaning_here_is_accepted(options):
    notebook_launcher(len, ("ab",), monitor_interval=5, log_line_prefix_template="[${role_name}]", rdzv_id="job")
    assert chosen(options) == {"max_restarts": 0}


def test_debug_launcher_runs_on_the_cpu():
    run = debug_launcher(
        lambda extra: (os.environ["WORLD_SIZE"], os.environ["NOTEBOOK_LAUNCHER_DEVICE"], extra), ("x",)
    )
    assert list(run.results) == [("2", "cpu", "x")] * 2
