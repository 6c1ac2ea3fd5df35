"""The table of devices, from invented machines: text and facts."""

from __future__ import annotations

import json

import pytest

from notebook_launcher.core.config import LaunchConfig
from notebook_launcher.core.events import DeviceRow
from notebook_launcher.launcher.device_choice import started_for
from notebook_launcher.launcher.device_table import device_table
from notebook_launcher.launcher.forkserver import server_environment
from notebook_launcher.launcher.plan import make_plan

CAN = {"no": "", "fp16": "", "bf16": ""}
CPU = DeviceRow("cpu", 2, ("2 cores",), precisions={"no": "", "fp16": "a CPU emulates it", "bf16": ""})
CARDS = DeviceRow("cuda", 2, ("RTX 4090",) * 2, (24 << 30,) * 2, CAN, uuids=("a", "b"), no_peers=((0, 1),))
NO_CUDA = DeviceRow("cuda", 0, reason="the driver is missing")
TPUS = DeviceRow("tpu", 8, ("TPU v5e",) * 8, precisions=CAN | {"fp16": "a TPU has no fp16"})
NO_TPU = DeviceRow("tpu", 0, reason="no TPU chip is attached to this machine")
STAND_IN = DeviceRow("tpu", 1, ("XLA on the CPU",), precisions=CAN, is_stand_in=True)
COLAB, KAGGLE = {"COLAB_RELEASE_TAG": "1"}, {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}
TPU_VARIABLES = {"TPU_NAME": "local", "XRT_TPU_CONFIG": "x", "TPU_ACCELERATOR_TYPE": "v3-8"}


def test_what_is_here_what_it_cannot_what_is_not_here_and_what_is_taken():
    assert device_table((CARDS, NO_TPU, CPU), {}).lines() == [
        "device  name      memory    precisions",
        "cuda:0  RTX 4090  24.0 GiB  fp32, fp16, bf16",
        "cuda:1  RTX 4090  24.0 GiB  fp32, fp16, bf16",
        "cpu     2 cores             fp32, bf16",
        "",
        "cuda: can't read each other's memory: 0 and 1",
        "cpu: no fp16: a CPU emulates it",
        "tpu: not here: no TPU chip is attached to this machine",
        "",
        "auto takes cuda: 2 processes, one a device",
    ]


def test_a_host_is_named_and_where_in_it_accelerators_are_chosen():
    assert device_table((NO_CUDA, CPU), COLAB).lines()[-2:] == [
        "auto takes cpu: 2 processes",
        "this is Google Colab; Runtime > Change runtime type gives a machine with a GPU or TPU",
    ]
    assert device_table((CARDS, CPU), KAGGLE).lines()[-1] == "this is Kaggle"


def test_the_same_for_programs():
    facts = device_table((CARDS, NO_TPU, CPU), COLAB).facts()
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["host"], facts["auto"]) == ("Google Colab", {"device": "cuda", "num_processes": 2})
    cuda, tpu, cpu = facts["devices"]
    assert (cuda["uuids"], cuda["memory_bytes"], cuda["reason"]) == (["a", "b"], [24 << 30] * 2, None)
    assert cuda["pairs_without_peer_access"] == [[0, 1]]
    assert tpu["reason"] == "no TPU chip is attached to this machine"
    assert (cpu["precisions"], cpu["refused_precisions"]) == (["no", "bf16"], {"fp16": "a CPU emulates it"})


def test_another_kinds_hardware_in_a_tpus_place_is_not_taken():
    assert device_table((STAND_IN, CPU), {}).auto == "cpu"


@pytest.mark.parametrize("host", [COLAB, KAGGLE, {}])
@pytest.mark.parametrize("variables", [TPU_VARIABLES, {}])
def test_hardware_tells_a_tpu_from_a_gpu_whatever_the_variables_say(host, variables):
    environment = host | variables
    assert device_table((CARDS, NO_TPU, CPU), environment).auto == "cuda"
    assert device_table((NO_CUDA, TPUS, CPU), environment).auto == "tpu"
    for rows, device, count in [((CARDS, NO_TPU, CPU), "cuda", 2), ((NO_CUDA, TPUS, CPU), "tpu", 8)]:
        plan = make_plan(LaunchConfig(), lambda rows=rows: rows, environment=environment)
        assert (plan.device, len(plan.worlds)) == (device, count)


@pytest.mark.parametrize("environment", [COLAB, KAGGLE, {}])
def test_no_host_changes_a_number_of_processes_that_was_asked_for(environment):
    one = DeviceRow("cuda", 1, ("T4",), precisions=CAN)
    with pytest.raises(ValueError, match="num_processes=8 is more than the 1 CUDA device to run on"):
        make_plan(LaunchConfig(num_processes=8), lambda: (one, CPU), environment=environment)
    for asked in (1, 2):
        plan = make_plan(LaunchConfig(num_processes=asked), lambda: (CARDS, CPU), environment=environment)
        assert len(plan.worlds) == asked


# --- a Mac's GPU ------------------------------------------------------------------------------------------------------


def test_a_process_on_an_apple_gpu_begins_with_a_new_interpreter_unless_somebody_says_otherwise():
    assert started_for(LaunchConfig(), "mps").start_method == "spawn"
    assert started_for(LaunchConfig(start_method="forkserver"), "mps").start_method == "forkserver"
    for device in ("cpu", "cuda", "tpu", "xpu"):
        assert started_for(LaunchConfig(), device).start_method == "forkserver"


def test_on_a_mac_the_server_is_told_to_fall_back_before_it_loads_torch():
    name = "PYTORCH_ENABLE_MPS_FALLBACK"
    assert server_environment({"A": "1"}, "darwin") == {"A": "1", name: "1"}
    assert server_environment({name: "0"}, "darwin") == {name: "0"}
    assert server_environment({"A": "1"}, "linux") == {"A": "1"}
