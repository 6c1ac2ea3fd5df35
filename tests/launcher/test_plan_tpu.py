"""The plan of a launch on TPUs, with invented machines."""

from __future__ import annotations

import pytest

from notebook_launcher.core.config import LaunchConfig
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.events import DeviceRow
from notebook_launcher.core.precisions import refusals
from notebook_launcher.launcher.plan import make_plan

CPU = DeviceRow("cpu", 4, ("4 cores",), precisions=refusals("cpu"))
NO_TPU = DeviceRow("tpu", 0, reason="no TPU chip is attached to this machine")
TPUS = DeviceRow("tpu", 8, ("TPU v5",) * 8, precisions=refusals("tpu"))
STAND_IN = DeviceRow("tpu", 4, ("XLA on the CPU",) * 4, precisions=refusals("tpu"), per_process=4, is_stand_in=True)


def plan(*rows, environment=None, **options):
    return make_plan(LaunchConfig(**options), lambda: (*rows, CPU), environment=environment or {})


def refusal(*rows, **options):
    with pytest.raises(ConfigError) as caught:
        plan(*rows, **options)
    return str(caught.value)


def test_every_device_has_a_rank_and_the_engine_is_xlas():
    made = plan(TPUS, device="tpu")
    assert [(world.rank, world.world_size, world.device) for world in made.worlds] == [(r, 8, "tpu") for r in range(8)]
    assert made.headline == "8 processes · TPU (XLA) · fp32 · DDP"
    assert made.engine == "xla"
    assert made.environment == {"PJRT_DEVICE": "TPU", "TF_CPP_MIN_LOG_LEVEL": "2"}


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed", "tp", "pp"])
def test_strategies_that_tpus_do_not_have_are_refused_before_anything_starts(strategy):
    assert refusal(TPUS, device="tpu", strategy=strategy) == (
        f"strategy={strategy!r} is not there for device='tpu', which has single, ddp, xla, spmd, spmd_fsdp. Use one of "
        "them, or another device."
    )


def test_a_mesh_is_refused_too():
    mesh = {"parallelism_config": {"parallelism_config_tp_size": 2}}
    assert "strategy='tp' is not there for device='tpu'" in refusal(TPUS, device="tpu", extra=mesh)
    assert "strategy='spmd' can't be together with parallelism_config (tp_size 2): it is XLA that spreads" in refusal(
        TPUS, device="tpu", strategy="spmd", extra=mesh
    )


def test_what_the_notebook_or_the_options_say_of_xla_stands():
    said = {"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "0"}
    assert plan(STAND_IN, device="tpu", environment=said).environment == {}
    assert plan(STAND_IN, device="tpu", env=said).environment == said


def test_auto_takes_tpus_but_not_what_stands_in_for_them():
    assert plan(TPUS).device == "tpu"
    assert plan(STAND_IN).device == "cpu"
    assert plan(STAND_IN).engine == "local"
    assert plan(STAND_IN, device="tpu").device == "tpu"


@pytest.mark.parametrize("strategy", ["spmd", "spmd_fsdp"])
def test_spmd_is_one_process_for_all(strategy):
    made = plan(TPUS, device="tpu", strategy=strategy)
    assert len(made.worlds) == 1
    assert made.headline == f"1 process · TPU (XLA) · fp32 · {strategy}"
    assert refusal(TPUS, device="tpu", strategy=strategy, num_processes=8) == (
        f"strategy={strategy!r} drives all 8 TPU devices from one process, and num_processes is 8. "
        "Leave num_processes out."
    )
    assert "strategy='spmd' is for device='tpu', and the device is 'cpu'" in refusal(NO_TPU, strategy="spmd")


def test_one_device_or_all():
    assert len(plan(TPUS, device="tpu", num_processes=1).worlds) == 1
    assert refusal(TPUS, device="tpu", num_processes=3) == (
        "num_processes=3 can't be on 8 TPU devices: torch_xla runs one process, or one for each of them. Use 1 or 8."
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device_ids": [0]}, "device_ids=[0] chooses GPUs, and a TPU launch takes all: leave it out."),
        (
            {"num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 9},
            "num_machines=2 can't be with TPUs yet: launch on one machine.",
        ),
        (
            {"engine": "local"},
            "engine='local' doesn't start processes for the device 'tpu', which takes engine='xla'. Leave engine out.",
        ),
        (
            {"mixed_precision": "fp16"},
            (
                "mixed_precision='fp16' can't be used on tpu (the device asked for): a TPU computes in bf16 and has no "
                "fp16. Use 'bf16' or 'no'."
            ),
        ),
    ],
)
def test_what_can_not_be_on_tpus(options, text):
    assert refusal(TPUS, device="tpu", **options) == text


def test_the_engine_of_xla_is_for_tpus_only():
    assert "engine='xla' doesn't start processes for the device 'cpu'" in refusal(NO_TPU, engine="xla")
    assert plan(TPUS, device="tpu", engine="xla").engine == "xla"


def test_a_machine_without():
    assert refusal(NO_TPU, device="tpu") == (
        "device 'tpu' is not here: no TPU chip is attached to this machine. This machine has: cpu."
    )
