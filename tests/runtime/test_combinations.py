"""What can't be together is refused by both names; what a launch chose by a mesh arrives; states show the plugin."""

import importlib.util
import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from notebook_launcher import (
    Accelerator,
    AcceleratorState,
    ConfigError,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    LocalSGD,
    ParallelismConfig,
)
from notebook_launcher.core import deepspeed_options
from notebook_launcher.core.world import World
from notebook_launcher.runtime import options, plugins

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed"
)


def chosen(world=None, **given):
    keywords = plugins.Keywords(None)
    return options.with_plugins(world or World(world_size=4), keywords, **given), keywords[ParallelismConfig]


@pytest.mark.parametrize(
    ("world", "given", "texts"),
    [
        (
            World(strategy="deepspeed"),
            {"parallelism_config": ParallelismConfig(dp_replicate_size=2)},
            (
                "strategy='deepspeed' can't be together with parallelism_config (dp_replicate_size 2)",
                "no part in tensor",
            ),
        ),
        (
            World(),
            {"deepspeed_plugin": DeepSpeedPlugin(), "parallelism_config": ParallelismConfig(tp_size=2)},
            ("ParallelismConfig(", "strategy='tp'", "its deepspeed_plugin chose strategy='deepspeed'"),
        ),
        (
            World(parallelism_config='{"tp_size": 2}'),
            {"deepspeed_plugin": DeepSpeedPlugin()},
            ("strategy='tp'", "strategy='deepspeed'"),
        ),
        (
            World(parallelism_config='{"tp_size": 2}'),
            {"parallelism_config": ParallelismConfig(tp_size=4)},
            ("parallelism_config.tp_size=4", "the launch, which chose parallelism_config.tp_size=2"),
        ),
    ],
    ids=range(4),
)
def test_an_accelerator_refuses_it_by_both_names(world, given, texts):
    with pytest.raises(ConfigError) as caught:
        chosen(world, **given)
    assert all(text in str(caught.value) for text in texts), str(caught.value)


def test_a_plugin_is_shown_as_it_was_written():
    given = {"deepspeed_plugin": DeepSpeedPlugin(), "fsdp_plugin": FullyShardedDataParallelPlugin(min_num_params=7)}
    with pytest.raises(ConfigError) as caught:
        chosen(**given)
    assert "(fsdp_plugin=FullyShardedDataParallelPlugin(min_num_params=7)) asks for" in str(caught.value)


def test_a_plan_that_is_no_mapping_is_refused():
    with pytest.raises(ConfigError, match=r"tp_plan=\['up'\]\): it takes patterns of names"):
        ParallelismConfig(tp_size=2, tp_plan=["up"])


def test_the_launchs_sizes_are_the_accelerators_and_a_plan_may_be_added():
    world = World(world_size=4, parallelism_config=json.dumps({"tp_size": 2, "dp_shard_size": 2}))
    found, config = chosen(world)
    assert (found.strategy, config.tp_size, config.dp_shard_size) == ("tp", 2, 2)
    found, config = chosen(world, parallelism_config=ParallelismConfig(tp_plan={"a": "colwise"}))
    assert (found.strategy, config.tp_size, config.tp_plan) == ("tp", 2, {"a": "colwise"})


class Net(nn.Sequential):
    tp_plan = {"0": "colwise", "1": "rowwise"}  # noqa: RUF012 - as transformers' models have it


def of_the_launch():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net(nn.Linear(4, 4), nn.Linear(4, 4)))
    return model[0].weight.to_local().shape


def test_a_mesh_of_the_file_is_that_of_the_ranks(on_ranks, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n"
        "parallelism_config:\n  parallelism_config_tp_size: 2\n  parallelism_config_dp_shard_size: 1\n"
    )
    assert on_ranks(of_the_launch, config=str(path)) == [(2, 4)] * 2


def local_sgd(**given):
    accelerator = Accelerator(cpu=True, **given)
    with pytest.raises(ConfigError) as caught:
        LocalSGD(accelerator, accelerator.prepare(Net(nn.Linear(4, 4), nn.Linear(4, 4))), 4)
    return str(caught.value)


def sharded_ways(with_deepspeed):
    ways = {
        "fsdp": {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        "tp": {"parallelism_config": ParallelismConfig(tp_size=2)},
    }
    if with_deepspeed:
        ways["deepspeed"] = {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1)}
    return {name: local_sgd(**given) for name, given in ways.items()}


@pytest.mark.parametrize("with_deepspeed", [False, pytest.param(True, marks=needs_deepspeed)])
def test_local_sgd_is_for_whole_models(with_deepspeed, on_ranks):
    for found in on_ranks(sharded_ways, with_deepspeed):
        for name, text in found.items():
            assert "LocalSGD has each rank train a whole model by itself" in text
            assert f"strategy={name!r} leaves each a part of the work: use strategy='ddp'" in text


def elsewhere(**given):
    accelerator = Accelerator(cpu=True, **given)
    model = Net(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4))
    with FakeTensorMode():  # as a GPU's would look
        model[0].weight = nn.Parameter(torch.empty(4, 4, device="cuda:1"))
    with pytest.raises(ConfigError) as caught:
        accelerator.prepare(model)
    return str(caught.value)


def all_elsewhere():
    return [
        elsewhere(fsdp_plugin=FullyShardedDataParallelPlugin()),
        elsewhere(parallelism_config=ParallelismConfig(tp_size=2)),
    ]


def test_a_model_on_another_device_is_not_sharded(on_ranks):
    for found in on_ranks(all_elsewhere):
        for text in found:
            assert "the Net that is to be sharded has 0.weight on the device 'cuda:1'" in text
            assert "this rank's device is 'cpu'" in text


def plugins_shown():
    found = []
    for given in ({}, {"fsdp_plugin": FullyShardedDataParallelPlugin(min_num_params=7)}):
        accelerator = Accelerator(cpu=True, **given)
        state = AcceleratorState()
        found.append((state.fsdp_plugin, state.deepspeed_plugin, accelerator.state.fsdp_plugin is state.fsdp_plugin))
    return found


def test_states_show_the_plugin_in_force(on_ranks):
    for (none, no_other, _), (shown, other, is_same) in on_ranks(plugins_shown):
        assert none is no_other is other is None
        assert shown.min_num_params == 7
        assert is_same
    assert AcceleratorState().fsdp_plugin is None


def zero_shown():
    accelerator = Accelerator(cpu=True)
    plugin = accelerator.state.deepspeed_plugin
    return plugin.zero_stage, plugin.gradient_clipping, accelerator.state.fsdp_plugin


@needs_deepspeed
def test_states_show_what_the_launch_added(on_ranks):
    section = {"deepspeed_config": {"gradient_clipping": 0.5}}
    assert on_ranks(zero_shown, strategy="deepspeed", extra=section) == [(2, 0.5, None)] * 2


def test_the_stage_in_force_is_told():
    own = {"zero_optimization": {"stage": 3}}
    assert deepspeed_options.with_section(DeepSpeedPlugin(), None).zero_stage == 2
    found = deepspeed_options.with_section(DeepSpeedPlugin(hf_ds_config=own), None)
    assert (found.zero_stage, found.deepspeed_config) == (3, own)
    assert deepspeed_options.with_section(DeepSpeedPlugin(hf_ds_config={"bf16": {}}), None).zero_stage == 0
