"""``estimate`` against what ranks hold after a step: weights, gradients, optimizer state; by strategy and precision."""

import functools
import importlib.util

import pytest
import torch
from torch import nn

from notebook_launcher import (
    Accelerator,
    ConfigError,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PipelineParallelPlugin,
    estimate,
    init_empty_weights,
)

pytestmark = pytest.mark.slow  # a single test may be quick, the file as a whole is not

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="the package deepspeed is not installed")
PARTS = ("weights", "gradients", "optimizer_state")
WIDTH = 330  # its square is more than DeepSpeed leaves whole in stage 3


class Net(nn.Module):
    """Odd sizes, tied weights, a frozen layer, a buffer."""

    _no_split_modules = ("Sequential",)
    tp_plan = {"first": "colwise", "last": "rowwise"}  # noqa: RUF012 - as transformers' models have it

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH, bias=False))
        self.frozen = nn.Linear(WIDTH, 50, bias=False).requires_grad_(requires_grad=False)
        self.again = nn.Linear(7, WIDTH, bias=False)
        self.again.weight = self.block[2].weight
        self.register_buffer("scale", torch.ones(50))

    def forward(self, x):
        x = self.last(self.first(x).tanh())
        return self.frozen(self.block(x)) * self.scale


def chain():
    """For pipelines: stages of different sizes, a frozen layer, a buffer."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 50), nn.Linear(50, 300), nn.Linear(300, WIDTH)]
    layers[2].requires_grad_(requires_grad=False)
    layers[4].register_buffer("scale", torch.ones(1000))
    return nn.Sequential(*layers)


class Traced(nn.Module):
    """A chain that is no ``nn.Sequential``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(chain())
        del self.layers[4].scale  # which tracing drops: nothing uses it

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class EightBit(torch.optim.Optimizer):
    """Whose state is of other types and shapes than its parameters."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):  # noqa: ARG002 - torch's
        for group in self.param_groups:
            for p in group["params"]:
                local = p.to_local() if hasattr(p, "to_local") else p
                self.state[p]["codes"] = torch.zeros_like(local, dtype=torch.uint8)
                self.state[p]["scales"] = torch.zeros(-(-local.numel() // 256), device=p.device)


def optimizer_of(model, kind):
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "groups":
        return torch.optim.SGD([{"params": trained[:2], "momentum": 0.9}, {"params": trained[2:]}], lr=0.1)
    classes = {"AdamW": torch.optim.AdamW, "EightBit": EightBit, "Adafactor": torch.optim.Adafactor}
    return classes[kind](trained)


def num_bytes(tensors):
    """Of their storages, each counted once."""
    local = [one.to_local() if hasattr(one, "to_local") else one for one in tensors if one is not None]
    local = [one for one in local if not one.is_meta]  # another rank's
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in local}
    return sum(storages.values())


def held(accelerator, kind, model):
    """Bytes of this rank after a step and another backward."""
    model, optimizer = accelerator.prepare(model, optimizer_of(model, kind))
    for is_last in (False, True):
        accelerator.pipeline_step(torch.ones(2, WIDTH), None)
        if not is_last:
            optimizer.step()
            optimizer.zero_grad()
    parameters = list(model.parameters())
    engine = getattr(model, "trained", None)
    if engine is None or engine.stage == 0:
        state = [v for values in optimizer.state.values() for v in values.values()]
        if engine is not None:
            state = [v for values in engine.engine.optimizer.state.values() for v in values.values()]
        gradients = [p.grad for p in parameters]
    else:
        zero = engine.engine.optimizer
        state = [v for values in zero.optimizer.state.values() for v in values.values()]
        state += getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_partitioned_groups_flat
        gradients = engine.collected()
        parameters += [getattr(p, "ds_tensor", None) for p in parameters]
    state = [v for v in state if isinstance(v, torch.Tensor)]
    return num_bytes([*parameters, *model.buffers()]), num_bytes(gradients), num_bytes(state)


def total(outputs, _):
    return outputs.sum()


def pipeline(**options):
    return PipelineParallelPlugin(loss_fn=total, **options)


def model_of(name):
    return chain() if name in PIPELINES else Net()


Fsdp = FullyShardedDataParallelPlugin
CASES = {
    "ddp": (2, {"strategy": "ddp"}, "AdamW"),
    "ddp, groups": (2, {"strategy": "ddp"}, "groups"),
    "ddp, other state": (2, {"strategy": "ddp"}, "EightBit"),
    "fsdp": (2, {"fsdp_plugin": Fsdp()}, "AdamW"),
    "fsdp in bf16": (2, {"fsdp_plugin": Fsdp(), "mixed_precision": "bf16"}, "AdamW"),
    "fsdp, offloaded": (2, {"fsdp_plugin": Fsdp(cpu_offload=True)}, "AdamW"),
    "fsdp, other state": (2, {"fsdp_plugin": Fsdp()}, "EightBit"),
    "fsdp of 3": (3, {"fsdp_plugin": Fsdp()}, "groups"),
    "hsdp": (4, {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}, "AdamW"),
    "tp": (2, {"parallelism_config": ParallelismConfig(tp_size=2)}, "AdamW"),
    "tp x fsdp": (4, {"parallelism_config": ParallelismConfig(tp_size=2, dp_shard_size=2)}, "AdamW"),
}
PIPELINES = {
    "pp": (2, {"parallelism_config": ParallelismConfig(pp_size=2)}, "AdamW"),
    "pp, interleaved": (2, {"strategy": "pp", "pipeline_plugin": pipeline(schedule="interleaved1f1b")}, "groups"),
    "pp, cut by name": (2, {"strategy": "pp", "pipeline_plugin": pipeline(split_points=["3"])}, "EightBit"),
    "pp x fsdp": (4, {"parallelism_config": ParallelismConfig(pp_size=2, dp_shard_size=2)}, "AdamW"),
    "pp x ddp": (4, {"parallelism_config": ParallelismConfig(pp_size=2, dp_replicate_size=2)}, "AdamW"),
}
CASES |= PIPELINES
ZERO = {
    "zero 0": (2, {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=0)}, "AdamW"),
    **{
        f"zero {stage} of {size}": (size, {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage)}, "AdamW")
        for stage, size in ((1, 2), (1, 3), (2, 2), (2, 3), (3, 2), (3, 3))
    },
    **{
        f"zero {stage} in bf16": (
            2,
            {
                "deepspeed_plugin": DeepSpeedPlugin(
                    hf_ds_config={"zero_optimization": {"stage": stage}, "bf16": {"enabled": "auto"}}
                ),
                "mixed_precision": "bf16",
            },
            "AdamW",
        )
        for stage in (1, 2, 3)
    },
    "zero 2, offloaded": (
        2,
        {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2, offload_optimizer_device="cpu")},
        "AdamW",
    ),
    "zero 3, groups": (2, {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)}, "groups"),
}


def measured(cases):
    found = {}
    for name, (_, options, kind) in cases.items():
        chosen = {"pipeline_plugin": pipeline(), **options}
        if chosen.pop("strategy", None) == "pp":
            chosen["parallelism_config"] = ParallelismConfig(pp_size=2)
        found[name] = held(Accelerator(cpu=True, **chosen), kind, model_of(name))
    return found


@functools.cache
def largest(on_ranks, num_processes, is_zero):
    cases = {name: case for name, case in (ZERO if is_zero else CASES).items() if case[0] == num_processes}
    ranks = on_ranks(measured, cases, num_processes=num_processes)
    return {name: max((one[name] for one in ranks), key=sum) for name in cases}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=needs_deepspeed) for name in ZERO)])
def test_it_is_within_five_percent_of_what_ranks_hold(name, on_ranks):
    num_processes, options, kind = {**CASES, **ZERO}[name]
    with init_empty_weights():
        model = model_of(name)
    got = estimate(model, optimizer_of(model, kind), num_processes=num_processes, **options)
    expected = largest(on_ranks, num_processes, name in ZERO)[name]
    assert [getattr(got, part) for part in PARTS] == pytest.approx(expected, rel=0.05), (name, got)
    assert got.total == pytest.approx(sum(expected), rel=0.05)


def test_optimizers_may_be_classes_and_names():
    with init_empty_weights():
        model = Net()
    by_instance = estimate(model, optimizer_of(model, "AdamW"))
    assert estimate(model, "adamw") == estimate(model, torch.optim.AdamW) == estimate(model) == by_instance
    assert estimate(model, "SGD").optimizer_state == 0
    assert estimate(model, EightBit).optimizer_state < by_instance.optimizer_state / 7


def test_a_pipeline_that_is_traced_is_like_one_of_modules():
    plugin = pipeline(split_points=["layers.3"], example=torch.ones(1, WIDTH))
    model = Traced()
    as_modules = estimate(nn.Sequential(*model.layers), pipeline_plugin=pipeline(split_points=["3"]), strategy="pp")
    assert estimate(model, torch.optim.AdamW(model.parameters()), "pp", pipeline_plugin=plugin) == as_modules
    with init_empty_weights():
        model = Traced()
    with pytest.raises(ConfigError, match="the Traced is on 'meta', and torch traces only a model with values"):
        estimate(model, strategy="pp", pipeline_plugin=plugin)


def test_an_optimizer_that_looks_at_values_is_tried_with_real_ones():
    model = Net()
    optimizer = optimizer_of(model, "Adafactor")
    got = estimate(model, optimizer, "ddp").optimizer_state
    assert not optimizer.state
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    assert got == num_bytes(v for values in optimizer.state.values() for v in values.values())


def test_its_text_is_for_people():
    with init_empty_weights():
        model = nn.Linear(1 << 15, 1 << 15, bias=False)
    assert repr(estimate(model, "AdamW", "fsdp", num_processes=8)) == (
        "2.0 GiB a rank (fsdp, 8 processes): weights 512.0 MiB, gradients 512.0 MiB, optimizer state 1.0 GiB"
    )
    assert repr(estimate(nn.Linear(2, 2), "SGD", "single", num_processes=1)) == (
        "48 B a rank (single, 1 process): weights 24 B, gradients 24 B, optimizer state 0 B"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": "AdamWW"}, "optimizer 'AdamWW' is not known. Did you mean 'AdamW'?"),
        ({"num_processes": 0}, "num_processes=0 is no number of processes"),
        ({"mixed_precision": "bf61"}, "mixed_precision 'bf61' is not known. Did you mean 'bf16'?"),
        ({"strategy": "zero"}, "strategy 'zero' is not known"),
        ({"optimizer": torch.optim.LBFGS}, "a step of LBFGS can't be tried, to see what state it keeps"),
        ({"parallelism_config": ParallelismConfig(dp_shard_size=3)}, "dp_shard 3 = 3, and the run has 2 processes"),
        (
            {"parallelism_config": ParallelismConfig(pp_size=2)},
            "strategy='pp' cuts an nn.Sequential between its modules, and Net is none",
        ),
        ({"strategy": "spmd_fsdp"}, "estimate can't say what strategy='spmd_fsdp' keeps on each rank"),
    ],
    ids=range(8),
)
def test_what_cannot_be_is_said(options, text):
    with pytest.raises(ConfigError, match="^" + text.replace("(", r"\(").replace("?", r"\?").replace(".", r"\.")):
        estimate(Net(), **options)


def test_what_is_no_model_has_no_estimate():
    with pytest.raises(TypeError, match=r"estimate takes a model, and was given .*Net.*, of type type"):
        estimate(Net)
