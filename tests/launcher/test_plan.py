"""The plan of a launch, from options and invented machines: nothing is touched, nothing is started."""

from __future__ import annotations

import importlib.util
import json

import pytest

from notebook_launcher.core.config import LaunchConfig
from notebook_launcher.core.cores import num_cores
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.events import DeviceRow
from notebook_launcher.core.strategies import DEVICE_OF, STRATEGIES
from notebook_launcher.launcher.plan import DEFAULT_ON_CPU, make_plan

CPU = DeviceRow("cpu", 4, ("4 cores",), precisions={"no": "", "bf16": "", "fp16": "a CPU emulates it"})
NO_CUDA = DeviceRow("cuda", 0, reason="this build of torch (2.13.0+cpu) has no CUDA")
NO_MPS = DeviceRow("mps", 0, reason="this build of torch (2.13.0+cpu) has no MPS")
NO_XPU = DeviceRow("xpu", 0, reason="torch sees no Intel GPU")
GPUS = DeviceRow("cuda", 8, ("H100",) * 8, (80 << 30,) * 8, {"no": "", "fp16": "", "bf16": ""})
OLD_GPUS = DeviceRow("cuda", 2, ("T4",) * 2, precisions={"no": "", "fp16": "", "bf16": "this GPU has no bf16 units"})
MPS = DeviceRow("mps", 1, ("Apple GPU",), precisions={"no": "", "fp16": "", "bf16": ""})
XPUS = DeviceRow("xpu", 2, ("Max 1550",) * 2, precisions={"no": "", "fp16": "", "bf16": ""})
LAPTOP = (NO_CUDA, NO_MPS, NO_XPU, CPU)


def plan(*rows, environment=None, **options):
    return make_plan(LaunchConfig(**options), lambda: rows or LAPTOP, environment=environment or {})


def refusal(*rows, environment=None, **options):
    with pytest.raises(ConfigError) as caught:
        plan(*rows, environment=environment, **options)
    return str(caught.value)


def test_auto_takes_every_gpu():
    made = plan(GPUS, NO_MPS, NO_XPU, CPU)
    assert made.device == "cuda"
    assert [world.rank for world in made.worlds] == list(range(8))
    assert [world.local_rank for world in made.worlds] == list(range(8))
    assert {(world.world_size, world.local_world_size, world.device) for world in made.worlds} == {(8, 8, "cuda")}
    assert made.headline == "8 processes · CUDA (NCCL) · fp32 · DDP"
    assert made.notes == ()
    assert made.environment == {}


def test_auto_prefers_cuda_then_xpu_then_mps_then_the_cpu():
    assert plan(CPU, MPS, XPUS, GPUS).device == "cuda"
    assert plan(CPU, MPS, XPUS, NO_CUDA).device == "xpu"
    assert plan(CPU, MPS, NO_XPU, NO_CUDA).device == "mps"
    assert plan(*LAPTOP).device == "cpu"


def test_on_the_cpu_two_processes_share_the_cores():
    made = plan(*LAPTOP)
    assert len(made.worlds) == DEFAULT_ON_CPU
    assert {world.num_threads for world in made.worlds} == {max(1, num_cores() // DEFAULT_ON_CPU)}
    assert made.headline == "2 processes · CPU (gloo) · fp32 · DDP"


def test_more_processes_than_cores_have_a_thread_each():
    assert {world.num_threads for world in plan(*LAPTOP, num_processes=num_cores() + 1).worlds} == {1}


def test_device_cpu_never_looks_at_the_devices():
    def look():
        pytest.fail("the look takes seconds, and the answer doesn't matter")

    assert make_plan(LaunchConfig(device="cpu"), look, environment={}).device == "cpu"


def test_choices_reach_every_rank_and_the_headline():
    made = plan(
        *LAPTOP,
        num_processes=1,
        mixed_precision="bf16",
        strategy="single",
        gradient_accumulation_steps=4,
        seed=7,
    )
    (world,) = made.worlds
    assert (world.mixed_precision, world.strategy, world.gradient_accumulation_steps, world.seed) == (
        "bf16",
        "single",
        4,
        7,
    )
    assert world.launched
    assert made.headline == "1 process · CPU (gloo) · bf16 · single · accumulation 4"


def test_what_nobody_said_stays_for_the_function_to_say():
    world = plan(*LAPTOP).worlds[0]
    assert (world.mixed_precision, world.strategy, world.gradient_accumulation_steps) == (None, None, None)


def test_several_machines_offset_the_ranks():
    options = {
        "num_machines": 3,
        "machine_rank": 2,
        "num_processes": 2,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29400,
    }
    made = plan(*LAPTOP, **options)
    assert [world.rank for world in made.worlds] == [4, 5]
    assert [world.local_rank for world in made.worlds] == [0, 1]
    world = made.worlds[1]
    assert (world.world_size, world.local_world_size, world.machine_rank, world.num_machines) == (6, 2, 2, 3)
    assert (world.main_address, world.main_port) == ("10.0.0.1", 29400)
    assert made.headline.startswith("6 processes")
    assert made.headline.endswith("machine 2 of 3")


# --- devices that are not there ---------------------------------------------------------------------------------------


def test_a_device_that_is_not_here_is_refused_with_the_reason_and_what_there_is():
    assert refusal(*LAPTOP, device="cuda") == (
        "device 'cuda' is not here: this build of torch (2.13.0+cpu) has no CUDA. This machine has: cpu."
    )
    assert "has no MPS. This machine has: cuda, cpu." in refusal(GPUS, NO_MPS, CPU, device="mps")


def test_tpus_are_not_supported_yet():
    text = refusal(*LAPTOP, device="tpu")
    assert "device 'tpu' is not supported yet: this version knows cuda, mps, xpu, cpu." in text
    assert "device='auto'" in text


@pytest.mark.parametrize("wanted", [9, 1000])
def test_more_processes_than_devices(wanted):
    text = refusal(GPUS, CPU, num_processes=wanted)
    assert f"num_processes={wanted} is more than the 8 CUDA devices to run on" in text
    assert "at most 8" in text
    assert "device='cpu'" in text


def test_an_apple_gpu_takes_one_process():
    assert len(plan(MPS, CPU).worlds) == 1
    assert refusal(MPS, CPU, num_processes=2) == (
        "num_processes=2 can't be on device='mps': an Apple GPU is one device, and torch can't exchange its tensors "
        "between processes. Leave num_processes out, or use device='cpu'."
    )
    options = {"num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 29400}
    assert "num_machines=2 can't be on device='mps'" in refusal(MPS, CPU, **options)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed", "tp", "pp"])
def test_a_model_is_not_spread_on_an_apple_gpu(strategy):
    assert refusal(MPS, CPU, strategy=strategy) == (
        f"strategy={strategy!r} is not there for device='mps', which has single, ddp. Use one of them, or another "
        "device."
    )


def test_too_many_processes_on_the_cpu(monkeypatch):
    monkeypatch.setattr("notebook_launcher.launcher.plan.num_cores", lambda: 2)
    assert len(plan(*LAPTOP, num_processes=64).worlds) == 64
    assert refusal(*LAPTOP, num_processes=65) == "num_processes=65 is too many for 2 cores: the limit is 64."


# --- device_ids -------------------------------------------------------------------------------------------------------


def test_device_ids_choose_what_the_ranks_see():
    made = plan(GPUS, CPU, device_ids=[5, 1])
    assert len(made.worlds) == 2
    assert made.environment == {"CUDA_VISIBLE_DEVICES": "5,1"}
    assert plan(XPUS, CPU, device_ids=[1]).environment == {"ZE_AFFINITY_MASK": "1"}


def test_device_ids_count_what_the_notebook_sees():
    three = DeviceRow("cuda", 3, precisions={})
    visible = {"CUDA_VISIBLE_DEVICES": "4, GPU-8a8b, 7"}
    made = plan(three, CPU, environment=visible, device_ids=[0, 2])
    assert made.environment == {"CUDA_VISIBLE_DEVICES": "4,7"}
    assert plan(three, CPU, environment=visible).environment == {}


def test_a_device_id_beyond_those_that_are_seen():
    text = refusal(GPUS, CPU, device_ids=[0, 8])
    assert "device_ids=[0, 8] names device 8, and the notebook sees 8 CUDA devices, numbered from 0" in text
    assert "up to 7" in text
    one = DeviceRow("cuda", 1, precisions={})
    text = refusal(one, CPU, environment={"CUDA_VISIBLE_DEVICES": "4"}, device_ids=[4])
    assert "names device 4, and the notebook sees 1 CUDA device, numbered from 0 (CUDA_VISIBLE_DEVICES=4)" in text
    assert "names device 1, and the notebook sees 1 MPS device" in refusal(MPS, CPU, device_ids=[1])


def test_devices_hidden_by_the_env_option_are_not_counted():
    two = DeviceRow("cuda", 2, precisions={})  # the look is by that environment
    made = plan(two, CPU, env={"CUDA_VISIBLE_DEVICES": "2,3"})
    assert len(made.worlds) == 2
    made = plan(two, CPU, env={"CUDA_VISIBLE_DEVICES": "2,3"}, device_ids=[1])
    assert made.environment == {"CUDA_VISIBLE_DEVICES": "3"}


UUIDS = ("6f11a9aa-0000-1111-2222-333344445555", "6f22b8bb-0000-1111-2222-333344445555", "A1-0000")
KNOWN = DeviceRow("cuda", 3, ("L4",) * 3, precisions={}, uuids=UUIDS)


def test_devices_by_uuid_as_nvidia_smi_shows_them_also_cut_short():
    wanted = [f"GPU-{UUIDS[1]}", "GPU-a1"]
    assert plan(KNOWN, CPU, device_ids=wanted).environment == {"CUDA_VISIBLE_DEVICES": "1,2"}
    made = plan(KNOWN, CPU, environment={"CUDA_VISIBLE_DEVICES": "7,5,6"}, device_ids="GPU-6f2,0")
    assert made.environment == {"CUDA_VISIBLE_DEVICES": "5,7"}
    assert len(made.worlds) == 2


def test_uuids_that_name_no_device_or_several():
    text = refusal(KNOWN, CPU, device_ids=["GPU-ff"])
    assert text.startswith(
        "device_ids names 'GPU-ff', which no device that the notebook sees has. It sees 0: GPU-6f11a9aa"
    )
    assert "'GPU-6f', which 2 devices have" in refusal(KNOWN, CPU, device_ids=["GPU-6f"])
    text = refusal(KNOWN, CPU, device_ids=[2, "GPU-a1"])
    assert text == ("device_ids=[2, 'GPU-a1'] names device 2 twice (2 and 'GPU-a1'): a device takes one process.")
    assert "torch tells no UUIDs of cuda devices: use numbers" in refusal(GPUS, CPU, device_ids=["GPU-6f"])


def test_what_is_no_uuid_is_refused_with_the_option():
    with pytest.raises(ConfigError, match=r"device_ids holds 'card', which can't be: .* or of GPUs' UUIDs"):
        LaunchConfig(device_ids=["card"])


def test_amds_own_variable_is_set_beside_nvidias_where_the_notebook_has_it():
    made = plan(GPUS, CPU, environment={"HIP_VISIBLE_DEVICES": "6,7"}, device_ids=[1])
    assert made.environment == {"HIP_VISIBLE_DEVICES": "7", "CUDA_VISIBLE_DEVICES": "1"}


def test_nccl_is_told_of_cards_that_cannot_reach_each_other():
    cards = DeviceRow("cuda", 3, ("RTX 4090",) * 3, precisions={}, no_peers=((0, 1), (0, 2)))
    made = plan(cards, CPU)
    assert made.environment == {"NCCL_P2P_DISABLE": "1"}
    (note,) = made.notes
    assert note == (
        "NCCL_P2P_DISABLE=1: devices 0 and 1 can't read each other's memory (nor can 1 other pair), so NCCL exchanges "
        "through the host's"
    )
    assert plan(cards, CPU, device_ids=[1, 2]).environment == {"CUDA_VISIBLE_DEVICES": "1,2"}  # these two can
    assert plan(cards, CPU, num_processes=1).environment == {}
    assert plan(cards, CPU, environment={"NCCL_P2P_DISABLE": "0"}).environment == {}  # somebody has said otherwise
    assert plan(cards, CPU, env={"NCCL_P2P_DISABLE": "0"}).environment == {"NCCL_P2P_DISABLE": "0"}


def test_an_apple_gpu_may_fall_back_to_the_cpu_unless_the_notebook_says_otherwise():
    assert plan(MPS, CPU).environment == {"PYTORCH_ENABLE_MPS_FALLBACK": "1"}
    assert plan(MPS, CPU, environment={"PYTORCH_ENABLE_MPS_FALLBACK": "0"}).environment == {}


def test_device_ids_on_a_machine_without_gpus():
    assert refusal(*LAPTOP, device_ids=[0]) == (
        "device_ids=[0] chooses GPUs, and device='auto' found none: this build of torch (2.13.0+cpu) has no CUDA. "
        "Leave device_ids out to run on the CPU."
    )


# --- precision and strategy -------------------------------------------------------------------------------------------


def test_fp16_where_auto_found_only_the_cpu():
    text = refusal(*LAPTOP, mixed_precision="fp16")
    assert text == (
        "mixed_precision='fp16' can't be used on cpu (the device chosen by device='auto', which found no other): "
        "a CPU emulates it. Use 'bf16' or 'no'."
    )
    assert plan(GPUS, CPU, mixed_precision="fp16").headline == "8 processes · CUDA (NCCL) · fp16 · DDP"


def test_bf16_on_gpus_that_lack_it():
    text = refusal(OLD_GPUS, CPU, mixed_precision="bf16")
    assert "on cuda (the device chosen by device='auto'): this GPU has no bf16 units. Use 'fp16' or 'no'." in text
    assert "(the device asked for)" in refusal(OLD_GPUS, CPU, device="cuda", mixed_precision="bf16")


@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_fp16_with_a_strategy_that_spreads_gradients_of_one_model(strategy):
    text = refusal(GPUS, CPU, strategy=strategy, mixed_precision="fp16")
    assert f"strategy={strategy!r} can't be together with mixed_precision='fp16', which scales losses" in text
    assert "Use mixed_precision='bf16'." in text
    mesh = {"parallelism_config": {f"{strategy}_size": 8}}
    assert refusal(GPUS, CPU, extra=mesh, mixed_precision="fp16") == text
    assert plan(GPUS, CPU, strategy=strategy, mixed_precision="fp16", num_processes=1).worlds


def test_every_strategy_in_the_table_is_accepted_and_others_get_the_nearest_name(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # what they need is installed
    for name in set(STRATEGIES.names) - set(DEVICE_OF):
        assert plan(*LAPTOP, strategy=name, num_processes=1).worlds[0].strategy == name
    text = refusal(*LAPTOP, strategy="ddb")
    assert "strategy 'ddb' is not known" in text
    assert "Did you mean 'ddp'?" in text


def test_a_strategy_whose_package_is_missing_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    text = refusal(*LAPTOP, strategy="deepspeed")
    assert "strategy='deepspeed' needs the package deepspeed, which is not installed" in text
    assert "pip install 'notebook-launcher[deepspeed]'" in text
    assert plan(*LAPTOP, strategy="fsdp").worlds


def test_sizes_of_a_mesh_go_to_the_ranks_and_must_fit_the_processes():
    mesh = {"parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 1}}
    assert plan(*LAPTOP, extra=mesh).worlds[1].parallelism_config == '{"tp_size": 2, "dp_shard_size": 1}'
    assert plan(*LAPTOP).worlds[0].parallelism_config is None
    text = refusal(*LAPTOP, extra=mesh, num_processes=3)
    assert "tp_size 2 = 2 processes, and the run has 3: launch 2" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"extra": {"parallelism_config": {"pp_size": 2, "tp_size": 2}}}, "asks for pp_size 2 and tp_size 2: a pipe"),
        ({"extra": {"parallelism_config": {"cp_size": 4}}}, "asks for cp_size 4, a way to spread a model that is not"),
        ({"strategy": "pp", "gradient_accumulation_steps": 3}, "'pp' can't be together with gradient_accumulation_st"),
        (
            {"extra": {"parallelism_config": {"pp_size": 2}}, "gradient_accumulation_steps": 3},
            "strategy='pp' can't be together with gradient_accumulation_steps=3",
        ),
    ],
    ids=range(4),
)
def test_what_cannot_be_with_a_mesh_is_refused_before_anything_starts(options, says):
    assert says in refusal(*LAPTOP, device="cpu", num_processes=4, **options)


def test_the_headline_names_what_the_mesh_asks_for():
    def headline(**sizes):
        return plan(*LAPTOP, device="cpu", num_processes=4, extra={"parallelism_config": sizes}).headline

    assert headline(tp_size=2).endswith("tensor parallel")
    assert headline(pp_size=4).endswith("pipeline parallel")
    assert headline(dp_shard_size=2, dp_replicate_size=2).endswith("FSDP")
    assert headline(dp_replicate_size=4).endswith("DDP")


def test_a_section_for_another_strategy_is_told():
    section = {"fsdp_config": {"fsdp_offload_params": True}, "deepspeed_config": {}}
    notes = plan(*LAPTOP, device="cpu", strategy="ddp", extra=section).notes
    assert notes[-1] == "fsdp_config has no effect: it is for strategy='fsdp', and this is 'ddp'"
    assert "no effect" not in str(plan(*LAPTOP, device="cpu", strategy="fsdp", extra=section).notes)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"fsdp_ofload_params": True},
            "fsdp_config key 'fsdp_ofload_params' is not known. Did you mean 'fsdp_offload_params'?",
        ),
        (
            {"fsdp_auto_wrap_policy": "SIZE_BASED"},
            "auto_wrap_policy 'SIZE_BASED' is not known. Did you mean 'SIZE_BASE",
        ),
        ({"fsdp_offload_params": "yess"}, "FSDP's cpu_offload='yess' is neither true nor false"),
        ({"fsdp_min_num_params": "many"}, "FSDP's min_num_params='many' is not a number of parameters; give a whole"),
        ({"fsdp_min_num_params": -1}, "FSDP's min_num_params=-1 is not a number of parameters"),
        (["fsdp_offload_params"], "fsdp_config=['fsdp_offload_params']: it takes names and values, such as"),
    ],
    ids=range(6),
)
def test_slips_in_the_section_of_a_strategy_are_found_before_anything_starts(section, says):
    assert says in refusal(*LAPTOP, strategy="fsdp", extra={"fsdp_config": section})
    assert plan(*LAPTOP, strategy="ddp", extra={"fsdp_config": section}).worlds, "it has no effect"


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"zero_stagee": 3}, "deepspeed_config has the key 'zero_stagee', which is not known"),
        ({"zero_stage": 4}, "zero_stage=4 is not known. Known: 0, 1, 2, 3."),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, "offload_param_device needs zero_stage=3"),
        ({"offload_optimizer_device": "tape"}, "offload_optimizer_device='tape' is not known"),
        ({"offload_optimizer_device": "nvme"}, "offload_optimizer_device='nvme' needs a folder"),
        ({"gradient_clipping": "much"}, "DeepSpeed's gradient_clipping='much' is not a number; give the largest norm"),
        ({"deepspeed_config_file": "nowhere.json"}, "hf_ds_config='nowhere.json' can't be read"),
        ({"deepspeed_config_file": {"zero_optimisation": {}}}, "has the key 'zero_optimisation', which is not known"),
        ({"deepspeed_config_file": {"zero_optimization": 3}}, "zero_optimization=3: it takes names and values"),
        (
            {"zero_stage": 2, "deepspeed_config_file": {"zero_optimization": {"stage": 3}}},
            "zero_stage=2 contradicts DeepSpeed's own configuration",
        ),
        (["zero_stage"], "deepspeed_config=['zero_stage']: it takes names and values, such as zero_stage: 3"),
    ],
    ids=range(11),
)
def test_slips_in_deepspeed_s_section_are_found_before_anything_starts(section, says):
    assert says in refusal(*LAPTOP, strategy="deepspeed", extra={"deepspeed_config": section})
    assert plan(*LAPTOP, strategy="ddp", extra={"deepspeed_config": section}).worlds, "it has no effect"


def test_a_section_of_deepspeed_without_slips_is_taken(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # it is installed
    section = {"zero_stage": 3, "offload_param_device": "cpu", "gradient_clipping": "auto", "zero3_init_flag": True}
    chosen = plan(*LAPTOP, strategy="deepspeed", extra={"deepspeed_config": section})
    assert json.loads(chosen.worlds[0].strategy_config) == section


def test_one_process_is_what_single_takes():
    text = refusal(*LAPTOP, strategy="single", num_processes=3)
    assert "strategy='single' with 3 processes would train 3 models apart" in text
    assert "'ddp'" in text


def test_the_ranks_share_the_cores_unless_the_user_says_how_many_threads():
    cores = num_cores()
    assert plan(*LAPTOP, num_processes=2).worlds[0].num_threads == max(1, cores // 2)
    assert plan(*LAPTOP, num_processes=2, env={"OMP_NUM_THREADS": "7"}).worlds[0].num_threads == 7
    assert plan(*LAPTOP, num_processes=2, environment={"OMP_NUM_THREADS": "5"}).worlds[0].num_threads == 5
    assert plan(*LAPTOP, num_processes=2, environment={"OMP_NUM_THREADS": "many"}).worlds[0].num_threads >= 1


def test_a_strategys_name_is_checked_before_the_devices_are_looked_at():
    def look():
        pytest.fail("a wrong name needs no look")

    with pytest.raises(ConfigError, match="strategy"):
        make_plan(LaunchConfig(strategy="zero4"), look, environment={})


# --- where options came from, secrets, nesting ------------------------------------------------------------------------


def test_the_notes_say_where_each_option_came_from():
    config = LaunchConfig.make(
        {"num_processes": 2}, environment={"ACCELERATE_MIXED_PRECISION": "bf16"}, device="cpu", seed=3
    )
    (note,) = make_plan(config, tuple, environment={}).notes
    assert note == (
        "options: num_processes=2 from argument, device='cpu' from argument, seed=3 from argument, "
        "mixed_precision='bf16' from environment variable ACCELERATE_MIXED_PRECISION"
    )


def test_a_refusal_names_where_the_option_came_from():
    config = LaunchConfig.make(
        environment={"ACCELERATE_MIXED_PRECISION": "fp16", "NOTEBOOK_LAUNCHER_DEVICE": "auto"}, num_processes=2
    )
    with pytest.raises(ConfigError) as caught:
        make_plan(config, lambda: LAPTOP, environment={})
    assert str(caught.value).endswith(
        "Use 'bf16' or 'no'. (device: environment variable NOTEBOOK_LAUNCHER_DEVICE; mixed_precision: environment "
        "variable ACCELERATE_MIXED_PRECISION)"
    )


def test_values_that_may_be_secrets_are_not_shown():
    made = plan(*LAPTOP, env={"HF_TOKEN": "hf_secret"})
    assert made.environment == {"HF_TOKEN": "hf_secret"}
    assert made.notes == ("options: env (HF_TOKEN) from argument",)


def test_a_launch_on_a_rank_is_refused():
    text = refusal(*LAPTOP, environment={"NOTEBOOK_LAUNCHER": "1", "RANK": "3"})
    assert "launch was called on rank 3 of a run" in text
    assert "Call the function itself" in text
