import dataclasses
import datetime as dt
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator, ConfigError
from notebook_launcher.core.precisions import PRECISIONS
from notebook_launcher.runtime import backends, precision
from notebook_launcher.runtime.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    Keywords,
    ProfileKwargs,
    ProjectConfiguration,
)


def test_names_and_defaults_are_accelerates():
    assert dataclasses.asdict(DataLoaderConfiguration()) == {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": False,
        "data_seed": None,
        "non_blocking": False,
        "use_stateful_dataloader": False,
    }
    assert dataclasses.asdict(GradientAccumulationPlugin()) == {
        "num_steps": None,
        "adjust_scheduler": True,
        "sync_with_dataloader": True,
        "sync_each_batch": False,
    }
    assert dataclasses.asdict(GradScalerKwargs())["init_scale"] == 65536.0
    assert dataclasses.asdict(DistributedDataParallelKwargs())["bucket_cap_mb"] == 25


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"dataloader_config": {}}, ["dataloader_config={}", "DataLoaderConfiguration"]),
        ({"gradient_accumulation_plugin": 4}, ["gradient_accumulation_plugin=4", "GradientAccumulationPlugin"]),
        ({"project_config": "here"}, ["project_config='here'", "ProjectConfiguration"]),
        ({"kwargs_handlers": ["x"]}, ["kwargs_handlers holds 'x'", "AutocastKwargs"]),
        (
            {"kwargs_handlers": [GradScalerKwargs(init_scale=2.0), GradScalerKwargs(init_scale=4.0)]},
            ["two of a kind", "GradScalerKwargs(init_scale=2.0", "init_scale=4.0"],
        ),
        (
            {"split_batches": True, "dataloader_config": DataLoaderConfiguration()},
            ["split_batches=True", "split_batches=False"],
        ),
        (
            {
                "gradient_accumulation_steps": 2,
                "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3),
            },
            ["gradient_accumulation_steps=2", "plugin, which chose", "steps=3"],
        ),
        (
            {"project_dir": "one", "project_config": ProjectConfiguration(project_dir="two")},
            ["project_dir='one'", "project_dir='two'"],
        ),
        ({"rng_types": "torhc"}, ["rng_types 'torhc'", "Did you mean 'torch'"]),
        ({"rng_types": 3}, ["rng_types '3' is not known"]),
        ({"rng_types": ["torhc"]}, ["rng_types 'torhc'", "Did you mean 'torch'"]),
        ({"dynamo_backend": "inducter"}, ["dynamo_backend 'inducter'", "Did you mean 'inductor'"]),
    ],
)
def test_what_can_not_be_names_both_values(arguments, parts):
    with pytest.raises(ConfigError) as caught:
        Accelerator(cpu=True, **arguments)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"), [("torch", ("torch",)), (["torch", "cuda"], ("torch", "cuda")), (None, ())]
)
def test_one_random_stream_or_several(given, expected):
    assert Accelerator(cpu=True, rng_types=given)._rng_types == expected


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DataLoaderConfiguration, "split_batches"),
        (DataLoaderConfiguration, "dispatch_batches"),
        (GradientAccumulationPlugin, "sync_each_batch"),
        (ProjectConfiguration, "automatic_checkpoint_naming"),
        (DistributedDataParallelKwargs, "static_graph"),
        (GradScalerKwargs, "enabled"),
        (AutocastKwargs, "cache_enabled"),
        (ProfileKwargs, "with_stack"),
    ],
)
def test_a_word_is_no_flag(kind, name):
    with pytest.raises(ConfigError, match=f"^{name}='no' is neither True nor False"):
        kind(**{name: "no"})


@pytest.mark.parametrize(
    ("name", "value", "error", "told"),
    [
        ("iteration", -3, ConfigError, "iteration=-3 is no number of a checkpoint; give a whole number, 0 or more"),
        ("total_limit", 1.5, ConfigError, "total_limit=1.5 is no number of checkpoints to keep"),
        ("total_limit", "2", ConfigError, "total_limit='2' is no number of checkpoints to keep"),
        ("total_limit", -1, ConfigError, "total_limit=-1 is no number of checkpoints to keep"),
        ("project_dir", 3, TypeError, "project_dir takes a folder's path, and was given 3"),
        ("logging_dir", 3, TypeError, "logging_dir takes a folder's path, and was given 3"),
    ],
)
def test_what_a_project_can_not_be(name, value, error, told):
    with pytest.raises(error, match=told):
        ProjectConfiguration(**{name: value})


_A_SCHEDULE = {"wait": 1, "warmup": 1, "active": 1}


@pytest.mark.parametrize(
    ("kind", "name", "values", "error", "told"),
    [
        (DataLoaderConfiguration, "data_seed", ["x", -1, True, 1.5], ConfigError, "=.* is no number of an order"),
        (GradScalerKwargs, "init_scale", [0, -1, float("nan"), float("inf"), "x"], ConfigError, "between 0 and inf"),
        (GradScalerKwargs, "growth_factor", [1, 0.5, None], ConfigError, "between 1 and inf; give one, such as 2.0"),
        (GradScalerKwargs, "backoff_factor", [0, 1, 2, "x"], ConfigError, "between 0 and 1; give one, such as 0.5"),
        (GradScalerKwargs, "growth_interval", [0, -1, 1.5, "x"], ConfigError, "=.* is no number of steps"),
        (DistributedDataParallelKwargs, "bucket_cap_mb", ["x", 0, -1], ConfigError, "between 0 and inf"),
        (InitProcessGroupKwargs, "timeout", [3], TypeError, r"datetime.timedelta\(seconds=3\), and was given 3"),
        (InitProcessGroupKwargs, "timeout", ["x"], TypeError, r"such as datetime.timedelta\(seconds=1800\), and was"),
        (ProfileKwargs, "activities", [["cpi"]], ConfigError, "activity 'cpi' .* Did you mean 'cpu'"),
        (ProfileKwargs, "activities", ["cpu", 3], TypeError, "takes a list, such as .*, and was given"),
        (ProfileKwargs, "schedule_option", [3, [1], {"wait": 1}], ConfigError, "is no schedule; give numbers of steps"),
        (ProfileKwargs, "schedule_option", [_A_SCHEDULE | {"repeet": 1}], ConfigError, "Did you mean 'repeat'"),
        (ProfileKwargs, "schedule_option", [_A_SCHEDULE | {"wait": "1"}], ConfigError, "wait='1' is no number of st"),
        (ProfileKwargs, "schedule_option", [_A_SCHEDULE | {"active": 0}], ConfigError, "active=0 is no number of st"),
        (ProfileKwargs, "on_trace_ready", [3], TypeError, "takes a function, and was given 3"),
        (ProfileKwargs, "output_trace_dir", [3], TypeError, "takes a folder's path, and was given 3"),
    ],
)
def test_what_options_can_not_be(kind, name, values, error, told):
    for value in values:
        with pytest.raises(error, match=told):
            kind(**{name: value})


def test_what_options_can_be():
    assert DataLoaderConfiguration(data_seed=np.int64(3)).data_seed == 3
    assert DistributedDataParallelKwargs(bucket_cap_mb=0.001).bucket_cap_mb == 0.001
    assert DistributedDataParallelKwargs(bucket_cap_mb=None).bucket_cap_mb is None  # torch's own
    assert ProfileKwargs(activities=("CPU",), schedule_option={"wait": 0, "warmup": 1, "active": 1}).build()


def test_a_project_dir_that_is_none():
    with pytest.raises(TypeError, match="project_dir takes a folder's path, and was given 3"):
        Accelerator(cpu=True, project_dir=3)


@pytest.mark.parametrize(
    ("told", "argument", "expected"), [("EAGER", None, True), ("NO", None, False), ("eager", "no", False)]
)
def test_models_are_compiled_as_accelerates_variable_says(monkeypatch, told, argument, expected):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", told)
    prepared = Accelerator(cpu=True, dynamo_backend=argument).prepare(nn.Linear(1, 1))
    assert hasattr(prepared, "_orig_mod") is expected


def test_a_slip_in_accelerates_variable_is_told_by_its_name(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTER")
    with pytest.raises(ConfigError, match=r"ACCELERATE_DYNAMO_BACKEND 'inducter' .* Did you mean 'inductor'"):
        Accelerator(cpu=True)


@pytest.mark.parametrize("hook", [{"comm_hook": "fp17"}, {"comm_wrapper": "power_sgd"}])
def test_a_hook_that_is_none(hook):
    (name,) = hook
    with pytest.raises(ConfigError, match=f"{name} '{hook[name]}' is not known"):
        DistributedDataParallelKwargs(**hook)


@pytest.mark.parametrize("project_dir", ["project", None])
def test_a_project_stays_where_it_was_when_the_working_directory_changes(project_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project = ProjectConfiguration(automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_dir=project_dir, project_config=project)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    home = tmp_path / (project_dir or "")
    assert accelerator.project_dir == str(home)
    assert accelerator.logging_dir == (str(home) if project_dir else None)
    assert accelerator.save_state() == str(home / "checkpoints" / "checkpoint_0")
    accelerator.load_state()
    assert Accelerator(cpu=True, project_dir=home, project_config=project).project_dir == str(home)


def test_configurations_are_in_force():
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3),
        project_config=ProjectConfiguration(logging_dir="logs"),
        project_dir="project",
    )
    assert (accelerator.split_batches, accelerator.even_batches) == (True, False)
    assert accelerator.gradient_accumulation_steps == 3
    here = Path.cwd()
    assert (accelerator.project_dir, accelerator.logging_dir) == (str(here / "project"), str(here / "logs"))
    assert Accelerator(cpu=True, project_dir="project").logging_dir == str(here / "project")
    assert Accelerator(cpu=True, split_batches=True).split_batches


def test_a_plugin_and_the_launch_that_differ(on_ranks):
    def differing(num_steps):
        plugin = GradientAccumulationPlugin(num_steps=num_steps)
        return Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps

    options = {"num_processes": 1, "gradient_accumulation_steps": 3}
    assert on_ranks(differing, None, **options) == [3]
    with pytest.raises(ConfigError, match=r"=1\) contradicts the launch.*=3"):
        on_ranks(differing, 1, **options)


def test_the_scaler_is_made_as_it_was_asked_for():
    backend, why = backends.BACKENDS.load("cpu")(None), "of the test"
    able = dataclasses.replace(backend, refusals=dict.fromkeys(PRECISIONS, ""))
    keywords = Keywords([GradScalerKwargs(init_scale=8.0, growth_interval=1)])
    scaling = precision.choose("fp16", able, why, keywords).new_scaling()
    assert scaling.scale(torch.ones(())).item() == 8.0
    unscaled = precision.choose("fp16", able, why, Keywords([GradScalerKwargs(enabled=False)]))
    assert unscaled.new_scaling() is None


def test_half_weights_can_not_be_trained_under_fp16():
    fp16 = precision.Precision("fp16", "cpu")
    model = nn.Linear(1, 1).half()
    with pytest.raises(ConfigError, match=r"float16.*2 of Linear are \(weight, bias\)"):
        fp16.check(model)
    fp16.check(model.requires_grad_(requires_grad=False))
    fp16.check(nn.Linear(1, 1))
    precision.Precision("bf16", "cpu").check(nn.Linear(1, 1).half())


def test_autocast_can_be_switched_off():
    model = nn.Linear(1, 1)
    seen = []
    model.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    for handlers in ([], [AutocastKwargs(enabled=False)]):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers)
        accelerator.prepare(model)(torch.ones(1, 1))
        with accelerator.autocast():
            model(torch.ones(1, 1))
    assert seen == [torch.bfloat16] * 2 + [torch.float32] * 2
    with Accelerator(cpu=True, mixed_precision="bf16").autocast(AutocastKwargs(enabled=False)):
        assert model(torch.ones(1, 1)).dtype == torch.float32


def group_timeouts():
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=dt.timedelta(seconds=77))])
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    records = []
    logger = logging.getLogger("notebook_launcher.runtime.process")
    logger.addFilter(lambda record: records.append(record.getMessage()))
    Accelerator(cpu=True)
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=dt.timedelta(seconds=78))])
    return timeout.total_seconds(), records


def test_the_process_group_is_made_once_as_it_was_asked_for(on_ranks):
    for seconds, records in on_ranks(group_timeouts):
        assert seconds == 77
        assert len(records) == 1
        assert "made before" in records[0]
        assert "seconds=78" in records[0]


def reduced(hook, wrapper, options):
    """The gradient that two ranks agree on, of one that bf16 and fp16 can't hold."""
    keywords = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper, comm_state_option=options)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[keywords])
    given = nn.Linear(2, 2, bias=False)
    model = accelerator.prepare(given)
    for _ in range(3):
        given.weight.grad = None
        accelerator.backward((model(torch.ones(1, 2)) * (1.001 + 0.002 * accelerator.process_index)).sum())
    return given.weight.grad.flatten().tolist()


@pytest.mark.parametrize(
    ("hook", "wrapper", "options", "expected"),
    [
        (DDPCommunicationHookType.NO, "no", {}, 1.002),
        ("fp16", "no", {}, "half"),
        ("no", "fp16", {}, "half"),
        ("power_sgd", "no", {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1}, 1.002),
        ("power_sgd", "fp16", {"start_powerSGD_iter": 9}, "half"),
    ],
)
def test_communication_hooks_compress_gradients(on_ranks, hook, wrapper, options, expected):
    first, second = on_ranks(reduced, hook, wrapper, options)
    assert first == second
    if expected == 1.002:
        assert first == pytest.approx([1.002] * 4, abs=1e-6)
    else:
        assert first != pytest.approx([1.002] * 4, abs=1e-6), "nothing was compressed"
        assert first == pytest.approx([1.002] * 4, abs=1e-3)


def made(hook):
    Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**hook)])


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        ({"comm_hook": DDPCommunicationHookType.BF16}, "comm_hook='bf16'.*on cpu.*Use 'fp16', 'power_sgd' or 'no'"),
        ({"comm_wrapper": "bf16"}, "comm_wrapper='bf16'.*on cpu.*Use 'fp16' or 'no'"),
        ({"comm_hook": "batched_power_sgd"}, r"comm_hook='batched_power_sgd'.*fails as soon as .*Use 'power_sgd'"),
    ],
)
def test_a_hook_that_torch_would_fail_with_is_refused_before_a_model_is_there(on_ranks, hook, told):
    with pytest.raises(ConfigError, match=told):
        on_ranks(made, hook)


def wrapped_options():
    keywords = DistributedDataParallelKwargs(
        find_unused_parameters=True, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=keywords)
    model = accelerator.prepare(nn.Linear(1, 1))
    return model.find_unused_parameters, model.gradient_as_bucket_view, model.broadcast_buffers


def test_ddp_is_made_as_it_was_asked_for(on_ranks):
    assert on_ranks(wrapped_options) == [(True, True, False)] * 2


def profiled(folder, options):
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(output_trace_dir=folder, **options)])
    with accelerator.profile() as profiler:
        for _ in range(4):
            torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.step()
    with accelerator.profile(ProfileKwargs()) as other:
        torch.ones(1)
    return len(other.events()) > 0


@pytest.mark.parametrize(
    "options", [{}, {"activities": ["cpu"], "schedule_option": {"wait": 1, "warmup": 1, "active": 2}}]
)
def test_each_rank_writes_a_trace(on_ranks, tmp_path, options):
    assert on_ranks(profiled, str(tmp_path / "new"), options) == [True, True]
    for rank in range(2):
        trace = json.loads((tmp_path / "new" / f"profile_{rank}.json").read_text())
        assert any(event.get("name") == "aten::matmul" for event in trace["traceEvents"])


def drawn(rng_types):
    accelerator = Accelerator(cpu=True, rng_types=rng_types)
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(4)))
    list(loader)
    return torch.rand(1).item()


def test_random_streams_are_made_equal_where_asked(on_ranks):
    first, second = on_ranks(drawn, ["torch", "generator", "cuda"])
    assert first == second
    first, second = on_ranks(drawn, ["generator"])
    assert first != second


def collected(**options):
    """By micro-batch: whether the ranks' gradients are equal, and whether the group ends."""
    plugin = GradientAccumulationPlugin(num_steps=2, **options)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    given = nn.Linear(1, 1, bias=False)
    model, loader = accelerator.prepare(given, DataLoader(torch.arange(1.0, 7.0).view(6, 1)))
    seen = []
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            seen.append((given.weight.grad.item(), accelerator.sync_gradients))
            if accelerator.sync_gradients:
                given.weight.grad = None
    return seen


def test_gradients_are_exchanged_in_each_micro_batch_where_asked(on_ranks):
    apart = on_ranks(collected)
    assert apart == [[(0.5, False), (2.5, True), (5.5, True)], [(1.0, False), (2.5, True), (5.5, True)]]
    assert on_ranks(lambda: collected(sync_each_batch=True)) == [[(0.75, False), (2.5, True), (5.5, True)]] * 2


def test_a_group_may_go_on_past_the_end_of_the_data():
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(torch.ones(3, 1)))
    syncs = []
    for _ in range(2):
        for _x in loader:
            with accelerator.accumulate(model):
                syncs.append(accelerator.sync_gradients)
    assert syncs == [False, False, False, True, False, False]


def trained_compiled(backend):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dynamo_backend=backend, gradient_accumulation_steps=2, mixed_precision="bf16")
    given = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1))
    for x in torch.randn(4, 2, 8, 3)[:, accelerator.process_index % 2]:
        with accelerator.accumulate(model):
            outputs = model(x)
            accelerator.backward(outputs.pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert outputs.dtype == torch.float32
    assert accelerator.unwrap_model(model) is given
    assert accelerator.prepare(model) is model
    return type(model).__name__, nn.utils.parameters_to_vector(given.parameters()).detach()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_prepared_model_is_compiled_where_asked(on_ranks, num_processes):
    compiled = on_ranks(trained_compiled, "EAGER", num_processes=num_processes)
    plain = on_ranks(trained_compiled, "no", num_processes=num_processes)
    for (kind, weights), (plain_kind, expected) in zip(compiled, plain, strict=True):
        assert (kind, plain_kind != "OptimizedModule") == ("OptimizedModule", True)
        assert torch.allclose(weights, expected, atol=1e-5)
