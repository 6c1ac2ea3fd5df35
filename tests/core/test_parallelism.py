"""Sizes of a mesh: as a file and Accelerate's variables say them, and what a launch refuses of them."""

import json

import pytest

from notebook_launcher.core import config, parallelism
from notebook_launcher.core.errors import ConfigError


def test_sizes_are_found_by_accelerates_names_and_by_ours():
    section = {"parallelism_config_tp_size": 2, "dp_shard_size": 1, "parallelism_config_sp_backend": "deepspeed"}
    assert parallelism.sizes(section) == {"tp_size": 2, "dp_shard_size": 1}
    assert parallelism.sizes(None) == parallelism.sizes({"parallelism_config_tp_size": 1}) == {}


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (
            {"parallelism_config_tp_sice": 2},
            "'parallelism_config_tp_sice', which is not known. Did you mean parallelism_config_tp_size",
        ),
        (
            {"parallelism_config_tp_size": "2"},
            "parallelism_config_tp_size='2': it takes a number of processes, 1 or more",
        ),
        ({"tp_size": 0}, "tp_size=0: it takes"),
        ([2], "parallelism_config=.2.: it takes names and sizes"),
    ],
    ids=range(4),
)
def test_a_slip_is_named(section, text):
    with pytest.raises(ConfigError, match=text):
        parallelism.sizes(section)


@pytest.mark.parametrize(
    ("strategy", "sizes", "num_processes", "text"),
    [
        (
            "deepspeed",
            {"tp_size": 2},
            None,
            "strategy='deepspeed' can't be together with parallelism_config (tp_size 2)",
        ),
        (
            "single",
            {"pp_size": 2},
            1,
            "(pp_size 2): it is one process. Leave one of them out, or use strategy='fsdp', 'tp' or 'pp'.",
        ),
        (
            "xla",  # a TPU has none of those others
            {"tp_size": 2},
            None,
            "parallelism_config (tp_size 2): each TPU process keeps a whole model. Leave one of them out.",
        ),
        (
            "spmd",
            {"dp_shard_size": 2},
            None,
            "it is XLA that spreads what there is, over all TPU devices. Leave one of them out.",
        ),
        (
            None,
            {"tp_size": 2, "dp_shard_size": 3},
            4,
            "tp_size 2 x dp_shard_size 3 = 6 processes, and the run has 4: launch 6",
        ),
        ("tp", {"tp_size": 3}, 4, "tp_size 3 = 3 processes, and the run has 4: launch a multiple of 3"),
    ],
    ids=range(6),
)
def test_what_cannot_be_is_said_in_one_sentence(strategy, sizes, num_processes, text):
    assert text in parallelism.refuse(strategy, sizes, num_processes)


@pytest.mark.parametrize(
    ("strategy", "sizes", "num_processes"),
    [
        ("deepspeed", {"tp_size": 1}, 2),
        ("tp", {"tp_size": 2}, 4),
        (None, {"tp_size": 2, "dp_shard_size": 2}, 4),
        ("fsdp", {}, 3),
    ],
    ids=range(4),
)
def test_what_can_be_is_let_through(strategy, sizes, num_processes):
    assert parallelism.refuse(strategy, sizes, num_processes) is None


def test_ranks_find_them_in_the_environment():
    own = {"NOTEBOOK_LAUNCHER_PARALLELISM_CONFIG": json.dumps({"tp_size": 2})}
    accelerates = {"PARALLELISM_CONFIG_TP_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1"}
    assert config.world(own).parallelism_config == own["NOTEBOOK_LAUNCHER_PARALLELISM_CONFIG"]
    assert json.loads(config.world(accelerates).parallelism_config) == {"tp_size": 2, "dp_shard_size": 1}
    assert config.world({"PARALLELISM_CONFIG_TP_SIZE": "1"}).parallelism_config is None
