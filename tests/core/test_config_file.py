import inspect
import warnings

import pytest
import yaml

from notebook_launcher.core.config import LaunchConfig
from notebook_launcher.core.errors import ConfigError

# As `accelerate config` writes it.
TWO_GPUS = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: 0,1
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""

DEEPSPEED = """
deepspeed_config:
  gradient_accumulation_steps: 4
  zero_stage: 2
distributed_type: DEEPSPEED
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29500
mixed_precision: no
num_machines: 2
num_processes: 8
"""


# What Accelerate 1.15 takes in its file; another key makes it refuse the file.
ACCELERATES_KEYS = {
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes"),
    *("machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
    *("same_network", "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config"),
    *("fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name"),
    *("tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config"),
}


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


def test_accelerate_s_file_becomes_options_without_a_word(written):
    path = written(TWO_GPUS)
    config = LaunchConfig.load(path)
    assert (config.device, config.strategy, config.num_processes) == ("cuda", "ddp", 2)
    assert (config.device_ids, config.mixed_precision, config.num_machines) == ([0, 1], "bf16", 1)
    assert config.sources["mixed_precision"] == f"file {path}"
    assert config.extra["rdzv_backend"] == "static"


def test_processes_are_counted_per_machine_and_steps_are_found_in_deepspeed_s_section(written):
    config = LaunchConfig.load(written(DEEPSPEED))
    assert (config.num_processes, config.machine_rank, config.strategy) == (4, 1, "deepspeed")
    assert (config.gradient_accumulation_steps, config.mixed_precision) == (4, "no")
    assert (config.main_process_ip, config.main_process_port) == ("10.0.0.1", 29500)


@pytest.mark.parametrize(
    ("text", "device", "strategy"),
    [
        ("distributed_type: 'NO'", "auto", None),
        ("distributed_type: NO", "auto", None),
        ("distributed_type: NO\nuse_cpu: true", "cpu", None),
        ("distributed_type: MULTI_CPU", "cpu", "ddp"),
        ("distributed_type: MULTI_GPU\nuse_cpu: true", "cpu", "ddp"),
        ("distributed_type: MULTI_XPU", "xpu", "ddp"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}", "auto", "fsdp"),
        ("distributed_type: XLA", "tpu", None),
        ("distributed_type: MPS", "mps", None),
        ("", "auto", None),
    ],
)
def test_distributed_type_says_device_and_strategy(written, text, device, strategy):
    config = LaunchConfig.load(written(text))
    assert (config.device, config.strategy) == (device, strategy)


def test_unknown_keys_are_named_once_kept_and_written_back(written, tmp_path):
    path = written("num_processes: 2\nwarp: 9\nholodeck: {size: [1, 2]}\n")
    with pytest.warns(UserWarning, match=r"without effect.*: holodeck, warp\.") as seen:
        config = LaunchConfig.load(path)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    config.save(tmp_path / "again.yaml")
    keys = yaml.safe_load((tmp_path / "again.yaml").read_text())
    assert (keys["warp"], keys["holodeck"]) == (9, {"size": [1, 2]})


@pytest.mark.parametrize(
    ("key", "default", "other"),
    [
        ("dynamo_config", "{}", "{dynamo_backend: INDUCTOR}"),
        ("dynamo_config", "{dynamo_backend: 'NO'}", "{dynamo_backend: EAGER}"),
        ("downcast_bf16", "'no'", "'yes'"),
        ("downcast_bf16", "no", "yes"),
        ("enable_cpu_affinity", "false", "true"),
        ("debug", "false", "true"),
        ("rdzv_backend", "static", "c10d"),
        ("tpu_env", "[]", "[A=1]"),
        ("megatron_lm_config", "{}", "{tp_degree: 2}"),
    ],
)
def test_accelerate_s_keys_that_ask_for_something_without_a_meaning_here_are_named(written, key, default, other):
    assert key in LaunchConfig.load(written(f"{key}: {default}")).extra
    with pytest.warns(UserWarning, match=f"without effect.*: {key}\\."):
        LaunchConfig.load(written(f"{key}: {other}"))


def test_the_warning_points_at_the_line_that_named_the_file(written):
    path = written("warp: 9")
    with pytest.warns(UserWarning, match="warp") as seen:
        LaunchConfig.make(path, environment={})
    assert (seen[0].filename, seen[0].lineno) == (__file__, inspect.currentframe().f_lineno - 1)


@pytest.mark.parametrize("text", [TWO_GPUS, TWO_GPUS.replace("MULTI_GPU", "'NO'").replace("0,1", "all"), DEEPSPEED])
def test_every_key_of_accelerate_s_file_survives(written, tmp_path, text):
    LaunchConfig.load(written(text)).save(tmp_path / "again.yaml")
    before, after = yaml.safe_load(text), yaml.safe_load((tmp_path / "again.yaml").read_text())
    if before["mixed_precision"] is False:
        before["mixed_precision"] = "no"
    assert {key: after.get(key) for key in before} == before
    assert set(after) <= ACCELERATES_KEYS


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_processes": 2},
        {"num_processes": 4, "mixed_precision": "bf16", "num_machines": 2, "machine_rank": 1},
        {"device": "cpu"},
        {"device": "cpu", "num_processes": 4},
        {"device": "cpu", "num_processes": 4, "strategy": "ddp"},
        {"device": "cuda"},
        {"device": "cuda", "num_processes": 2},
        {"device": "cuda", "device_ids": [2, 3]},
        {"device": "xpu", "num_processes": 2, "strategy": "ddp"},
        {"device": "tpu", "num_processes": 8},
        {"strategy": "fsdp", "num_processes": 2},
    ],
)
def test_accelerate_takes_the_file_where_it_has_a_key_for_each_option(tmp_path, options):
    if "num_machines" in options:
        options = {**options, "main_process_ip": "10.0.0.1", "main_process_port": 2000}
    config = LaunchConfig(**options)
    config.save(tmp_path / "c.yaml")
    assert set(yaml.safe_load((tmp_path / "c.yaml").read_text())) <= ACCELERATES_KEYS
    again = LaunchConfig.load(tmp_path / "c.yaml")
    if config.device in {"cuda", "xpu"}:  # several GPUs are ddp in Accelerate's words
        config = LaunchConfig.make(config, environment={}, strategy="ddp")
    assert again == config


@pytest.mark.parametrize(
    ("options", "head"),
    [
        ({"device": "cuda", "num_processes": 2}, "compute_environment"),
        ({"num_processes": 2}, "# Accelerate has no word for device 'auto'"),
        ({"num_processes": 2, "seed": 3}, "# Accelerate refuses this file"),
        ({"device": "cuda", "num_processes": 1}, "# Accelerate refuses this file"),
    ],
)
def test_the_file_s_head_says_what_accelerate_would_do(tmp_path, options, head):
    LaunchConfig(**options).save(tmp_path / "c.yaml")
    text = (tmp_path / "c.yaml").read_text()
    assert text.startswith(head)
    assert None not in yaml.safe_load(text).get("notebook_launcher", {}).values()
    assert LaunchConfig.load(tmp_path / "c.yaml").num_processes == options["num_processes"]


@pytest.mark.parametrize(
    "text", [TWO_GPUS, DEEPSPEED, "warp: 9", "gpu_ids: 3", "gpu_ids: all", "gpu_ids: ALL", "distributed_type: TPU"]
)
def test_load_save_load_is_equal(written, tmp_path, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        config = LaunchConfig.load(written(text))
        config.save(tmp_path / "again.yaml")
        assert LaunchConfig.load(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "mps", "tpu", "xpu"])
@pytest.mark.parametrize("num_processes", [None, 1, 4])
@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp", "deepspeed", "single"])
def test_save_load_is_equal_whatever_was_chosen(tmp_path, device, num_processes, strategy):
    if device == "mps" and num_processes == 4:
        num_processes = 1
    config = LaunchConfig(
        device=device,
        num_processes=num_processes,
        strategy=strategy,
        gradient_accumulation_steps=2,
        extra={"deepspeed_config": {"zero_stage": 1}},
    )
    config.save(tmp_path / "c.yaml")
    if strategy is None and device in {"cuda", "xpu"} and num_processes != 1:
        config = LaunchConfig.make(config, environment={}, strategy="ddp")  # as Accelerate's word for several says
    assert LaunchConfig.load(tmp_path / "c.yaml") == config


def test_every_option_is_saved(tmp_path):
    config = LaunchConfig(
        device="cuda",
        num_processes=2,
        device_ids=[3, 1],
        mixed_precision="bf16",
        strategy="ddp",
        gradient_accumulation_steps=2,
        engine="ray",
        num_machines=2,
        machine_rank=1,
        main_process_ip="10.0.0.1",
        main_process_port=2000,
        start_method="spawn",
        env={"A": "1"},
        preload=["numpy"],
        output="main",
        log_dir="logs",
        stop_grace_s=1.5,
        timeout_s=60,
        max_restarts=1,
        seed=0,
        standby=0,
    )
    assert set(config.sources) | {"extra"} == set(type(config).model_fields)
    config.save(tmp_path / "c.yaml")
    assert LaunchConfig.load(tmp_path / "c.yaml") == config
    assert yaml.safe_load((tmp_path / "c.yaml").read_text())["num_processes"] == 4


def test_what_accelerate_can_say_is_said_in_its_keys_alone(tmp_path):
    LaunchConfig(device="cuda", num_processes=2, strategy="ddp", mixed_precision="bf16").save(tmp_path / "c.yaml")
    assert yaml.safe_load((tmp_path / "c.yaml").read_text()) == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "gpu_ids": "all",
        "machine_rank": 0,
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": False,
    }


def test_steps_changed_after_loading_are_written_where_accelerate_reads_them(written, tmp_path):
    config = LaunchConfig.make(LaunchConfig.load(written(DEEPSPEED)), environment={}, gradient_accumulation_steps=8)
    config.save(tmp_path / "c.yaml")
    assert yaml.safe_load((tmp_path / "c.yaml").read_text())["deepspeed_config"]["gradient_accumulation_steps"] == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n- 2", "holds a list"),
        ("a: [", "isn't plain YAML"),
        ("a: !!python/object/apply:os.getcwd []", "isn't plain YAML"),
        ("num_processes: 3\nnum_machines: 2", "Make it a multiple of 2"),
        ("num_processes: two", "num_processes='two'"),
        ("num_processes: true", "num_processes=True"),
        ("mixed_precision: fp8", "mixed_precision 'fp8' is not known"),
        ("use_cpu: maybe", "use_cpu"),
        ("use_cpu: true\nmixed_precision: fp16", "fp16"),
        ("gpu_ids: first", "device_ids"),
        ("gpu_ids: 0,,1", "a place beside a comma is empty"),
        ("distributed_type: MULTI_GUP", "Did you mean 'MULTI_GPU'?"),
        ("distributed_type: [1]", "distributed_type"),
        ("distributed_type: MULTI_NPU", "is 'MULTI_NPU', which nothing launches in this version. Known: NO, MULTI_CPU"),
        ("compute_environment: AMAZON_SAGEMAKER", "AMAZON_SAGEMAKER"),
        ("notebook_launcher: 3", "notebook_launcher"),
        ("notebook_launcher: {sed: 3}", "Did you mean 'seed'?"),
    ],
)
def test_a_bad_file_is_named(written, text, words):
    path = written(text)
    with pytest.raises(ConfigError) as caught:
        LaunchConfig.load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        LaunchConfig.make(str(tmp_path / "nothing.yaml"))
    with pytest.raises(ConfigError, match="can't be read"):
        LaunchConfig.load(tmp_path)


def test_what_can_t_be_written_is_said(tmp_path):
    with pytest.raises(ConfigError, match="can't be written"):
        LaunchConfig().save(tmp_path / "missing" / "c.yaml")
    with pytest.raises(ConfigError, match="what YAML can't say"):
        LaunchConfig(extra={"a": object()}).save(tmp_path / "c.yaml")
    assert not (tmp_path / "c.yaml").exists()


MESH = """distributed_type: MULTI_GPU
num_processes: 4
parallelism_config:
  parallelism_config_cp_comm_strategy: allgather
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""


def test_accelerates_sizes_of_a_mesh_are_read_and_written_back(written, tmp_path, recwarn):
    config = LaunchConfig.load(written(MESH))
    assert config.strategy is None  # MULTI_GPU says only that there are several
    config.save(tmp_path / "again.yaml")
    assert LaunchConfig.load(tmp_path / "again.yaml") == config
    section = yaml.safe_load(MESH)["parallelism_config"]
    assert yaml.safe_load((tmp_path / "again.yaml").read_text())["parallelism_config"] == section
    assert not recwarn.list


def test_zero_with_a_mesh_is_refused_by_both_names(written):
    text = MESH.replace("MULTI_GPU", "DEEPSPEED")
    with pytest.raises(
        ConfigError, match=r"strategy='deepspeed' can't be together with parallelism_config \(dp_shard_size"
    ):
        LaunchConfig.load(written(text))
