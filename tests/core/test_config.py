import inspect
import os
import pickle
import pydoc
import subprocess
import sys

import pytest

from notebook_launcher.core.config import LaunchConfig, field_rows, snapshot, world
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.world import World

EMPTY: dict[str, str] = {}


def make(*args, **options):
    return LaunchConfig.make(*args, environment=EMPTY, **options)


def complaint(*args, **options):
    with pytest.raises(ConfigError) as caught:
        make(*args, **options)
    return str(caught.value)


def test_every_option_has_a_one_line_description():
    rows = field_rows()
    assert {"device", "num_processes", "mixed_precision", "standby"} <= {row.name for row in rows}
    assert "extra" not in {row.name for row in rows}
    assert all(row.description.endswith(".") and "\n" not in row.description for row in rows)


def test_rows_say_what_an_option_takes():
    rows = {row.name: row for row in field_rows()}
    assert rows["mixed_precision"].choices == ("no", "fp16", "bf16")
    assert rows["mixed_precision"].optional
    assert rows["num_processes"].words == "a whole number from 1 to 1024"
    assert rows["stop_grace_s"].default == 5.0
    assert (rows["env"].kind, rows["env"].default) == ("pairs", {})
    assert rows["device_ids"].kind == "int list"


def test_text_becomes_the_option_s_type():
    config = make(num_processes="3", device_ids="0, 1,2", stop_grace_s="0.5", preload="numpy,os.path", device="CUDA")
    assert (config.num_processes, config.device_ids, config.stop_grace_s) == (3, [0, 1, 2], 0.5)
    assert (config.preload, config.device) == (["numpy", "os.path"], "cuda")
    assert make(device=" cpu\n", mixed_precision="BF16 ").mixed_precision == "bf16"
    assert make(device_ids="gpu-6F11").device_ids == ["gpu-6F11"]


def test_a_whole_number_of_another_library_counts():
    class Whole:
        def __index__(self):
            return 2

    assert make(num_processes=Whole()).num_processes == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_processes": 0}, ["num_processes=0", "from 1 to 1024"]),
        ({"num_processes": 100_000}, ["num_processes=100000", "from 1 to 1024"]),
        ({"num_processes": "four"}, ["num_processes='four'", "whole number"]),
        ({"num_processes": True}, ["num_processes=True", "whole number"]),
        ({"num_processes": 2.0}, ["num_processes=2.0", "whole number"]),
        ({"num_proceses": 2}, ["option 'num_proceses' is not known", "Did you mean 'num_processes'?"]),
        ({"device": "npu"}, ["device 'npu' is not known. %launcher devices says whether one is here, and nothing"]),
        ({"device": "ROCm"}, ["An AMD GPU is 'cuda'"]),
        ({"device": "xla"}, ["XLA's devices are 'tpu'"]),
        ({"device": "cuda:1"}, ["'cuda:1' is not known", "device_ids, such as device='cuda', device_ids=[1]."]),
        ({"device": "cuda:x"}, ["Did you mean 'cuda'?"]),
        ({"device": "cpu:0"}, ["'cpu:0' is not known. 'cpu' is written without a number. Known:"]),
        ({"device": "tpu:1"}, ["'tpu' is written without a number."]),
        ({"device": "gpu:1"}, ["A GPU is 'cuda' (NVIDIA and AMD)"]),
        ({"device": "nvidia"}, ["An NVIDIA GPU is 'cuda'."]),
        ({"device": "metal"}, ["An Apple GPU is 'mps'."]),
        ({"device": "intel"}, ["An Intel GPU is 'xpu'."]),
        ({"device_ids": "all"}, ["device_ids holds 'all'", "UUIDs, or None. Leave it out to use all."]),
        ({"mixed_precision": "bf16-mixed"}, ["That is 'bf16'."]),
        ({"mixed_precision": "float64"}, ["make the model of float64"]),
        ({"mixed_precision": "fp32"}, ["'fp32' is not known. That is 'no'. Known: no, fp16, bf16."]),
        ({"mixed_precision": "float16"}, ["That is 'fp16'."]),
        ({"num_proceses": None}, ["option 'num_proceses' is not known"]),
        ({"device": "cdua"}, ["device 'cdua'", "auto, cpu, cuda", "Did you mean 'cuda'?"]),
        ({"device": "gpu"}, ["device 'gpu'", "'cuda'", "'mps'"]),
        ({"mixed_precision": "fp8"}, ["mixed_precision 'fp8' is not known. Nothing computes in fp8", "no, fp16, bf16"]),
        ({"device_ids": []}, ["device_ids is empty"]),
        ({"device_ids": [0, -1]}, ["[0, -1]", "from 0"]),
        ({"device_ids": [0, "b"]}, ["device_ids holds 'b'", "whole numbers"]),
        ({"device_ids": "0,,1"}, ["device_ids='0,,1' can't be: a place beside a comma is empty", "out: '0,1'."]),
        ({"device_ids": "0, 1,"}, ["device_ids='0, 1,' can't be", "empty. Fill it in, or leave it out: '0,1'."]),
        ({"device_ids": ","}, ["device_ids=',' can't be: a place beside a comma is empty. Fill it in."]),
        ({"device_ids": [0, ""]}, ["device_ids holds '', which can't be", "whole numbers"]),
        ({"preload": "numpy,,os"}, ["preload='numpy,,os' can't be: a place beside a comma is empty"]),
        ({"device_ids": [0, 1, 1]}, ["device 1 twice"]),
        ({"device_ids": [0, 1], "num_processes": 3}, ["names 2 devices", "num_processes is 3"]),
        ({"device_ids": [0], "device": "cpu"}, ["device='cpu'", "Leave one of them out"]),
        ({"device": "mps", "num_processes": 2}, ["num_processes=2", "mps", "one process"]),
        ({"machine_rank": 1}, ["machine_rank=1", "num_machines=1"]),
        ({"num_machines": 2, "main_process_port": 2950}, ["num_machines=2 needs main_process_ip:"]),
        ({"main_process_port": 70_000}, ["main_process_port=70000", "65535"]),
        ({"env": {"A": 1}}, ["env holds 1", "both text"]),
        ({"env": {"A=B": "1"}}, ["'A=B'", "environment variable"]),
        ({"env": {"WORLD_SIZE": "2"}}, ["env can't set WORLD_SIZE", "use num_processes"]),
        ({"preload": ["a b"]}, ["'a b'", "module's name"]),
        ({"timeout_s": 0}, ["timeout_s=0", "greater than 0"]),
        ({"stop_grace_s": float("inf")}, ["stop_grace_s=inf", "of 0 or more"]),
        ({"stop_grace_s": True}, ["stop_grace_s=True", "a number"]),
        ({"seed": -1}, ["seed=-1", "from 0"]),
        ({"max_restarts": -1, "standby": -2}, ["max_restarts=-1", "standby=-2"]),
        ({"log_dir": 3}, ["log_dir=3", "text"]),
        ({"config": 3}, ["config=3", "YAML"]),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_it_takes(options, words):
    text = complaint(**options)
    for word in words:
        assert word in text, text
    assert "pydantic" not in text


def test_fp16_on_the_cpu_says_why_and_what_works():
    text = complaint(mixed_precision="fp16", device="cpu")
    assert "fp16" in text
    assert "'bf16'" in text
    assert "cpu" in text
    assert "gradients" in text


def test_a_constructor_s_mistake_is_a_config_error_too():
    with pytest.raises(ConfigError, match="num_processes=0"):
        LaunchConfig(num_processes=0)


def test_a_config_can_t_be_changed():
    config = make(seed=1)
    with pytest.raises(ConfigError, match=r"LaunchConfig\.make\(config, seed=2\)"):
        config.seed = 2
    assert config.seed == 1


def test_arguments_come_before_config_before_environment_before_defaults():
    environment = {
        "NOTEBOOK_LAUNCHER_SEED": "7",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "NOTEBOOK_LAUNCHER_OUTPUT": "main",
    }
    base = LaunchConfig(seed=1, mixed_precision="no")
    config = LaunchConfig.make(base, environment=environment, seed=2)
    assert (config.seed, config.mixed_precision, config.output, config.device) == (2, "no", "main", "auto")
    assert config.sources == {
        "seed": "argument",
        "mixed_precision": "argument",
        "output": "environment variable NOTEBOOK_LAUNCHER_OUTPUT",
    }


def test_none_counts_as_not_given():
    environment = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    config = LaunchConfig.make({"seed": None}, environment=environment, mixed_precision=None)
    assert (config.mixed_precision, config.gradient_accumulation_steps) == ("bf16", 4)
    assert "seed" not in config.sources


def test_accelerate_s_use_cpu_chooses_the_cpu_unless_a_device_was_named():
    assert LaunchConfig.make(environment={"ACCELERATE_USE_CPU": "true"}).device == "cpu"
    assert LaunchConfig.make(environment={"ACCELERATE_USE_CPU": "false"}).device == "auto"
    assert LaunchConfig.make(environment={"ACCELERATE_USE_CPU": "true"}, device="cuda").device == "cuda"
    assert LaunchConfig.make(environment={"ACCELERATE_USE_CPU": "1", "NOTEBOOK_LAUNCHER_DEVICE": "xpu"}).device == "xpu"


@pytest.mark.parametrize("word", ["on", "Y", "t", " TRUE "])
def test_accelerate_s_words_for_yes_and_no(word):
    made = LaunchConfig.make(environment={"ACCELERATE_USE_CPU": word, "ACCELERATE_USE_FSDP": "off"})
    assert (made.device, made.strategy) == ("cpu", None)
    assert world({"ACCELERATE_USE_CPU": word}).device == "cpu"


def test_what_is_neither_yes_nor_no_is_refused_here_and_on_a_rank():
    for read in (world, lambda environment: LaunchConfig.make(environment=environment)):
        with pytest.raises(ConfigError, match="ACCELERATE_USE_CPU is 'maybe', and it takes true or false: correct or"):
            read({"ACCELERATE_USE_CPU": "maybe"})


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_accelerate_s_strategy_is_known_before_the_launch_as_on_the_ranks(strategy):
    said = {f"ACCELERATE_USE_{strategy.upper()}": "true"}
    made = LaunchConfig.make(environment=said)
    assert made.strategy == world(said).strategy == strategy
    assert made.sources["strategy"] == f"environment variable ACCELERATE_USE_{strategy.upper()}"
    assert LaunchConfig.make(environment=said, strategy="ddp").strategy == "ddp"


@pytest.mark.parametrize("precision", ["fp8", "fp16"])
def test_a_mistake_in_the_environment_names_the_variable(precision):
    with pytest.raises(ConfigError, match="environment variable ACCELERATE_MIXED_PRECISION"):
        LaunchConfig.make(environment={"ACCELERATE_MIXED_PRECISION": precision}, device="cpu")


def test_the_process_s_own_environment_is_read(monkeypatch):
    monkeypatch.setenv("NOTEBOOK_LAUNCHER_SEED", "11")
    assert LaunchConfig.make().seed == 11
    assert snapshot()["NOTEBOOK_LAUNCHER_SEED"] == "11"


def test_a_snapshot_is_of_now(monkeypatch):
    monkeypatch.setenv("TEXT", "one")
    assert snapshot()["TEXT"] == "one"
    monkeypatch.setenv("TEXT", "two \udcff")
    assert snapshot()["TEXT"] == "two \udcff"
    assert snapshot() == dict(os.environ)
    monkeypatch.delenv("TEXT")
    assert "TEXT" not in snapshot()
    monkeypatch.setattr(os, "environ", {"ONLY": "1"})  # as mocks do
    assert snapshot() == {"ONLY": "1"}


def test_a_snapshot_is_a_copy(monkeypatch):
    monkeypatch.delenv("NOTEBOOK_LAUNCHER_SEED", raising=False)
    snapshot()["NOTEBOOK_LAUNCHER_SEED"] = "1"
    assert "NOTEBOOK_LAUNCHER_SEED" not in snapshot()


def test_equality_pickle_and_repr():
    config = make(seed=3, device="cpu")
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.sources == config.sources
    assert config == LaunchConfig.make({"device": "cpu"}, environment={"NOTEBOOK_LAUNCHER_SEED": "3"})
    assert config != make(seed=4, device="cpu")
    assert repr(config) == "LaunchConfig(device='cpu', seed=3)"
    assert eval(repr(config)) == config  # noqa: S307 - our own repr


def test_help_begins_with_what_each_option_is():
    text = pydoc.plain(pydoc.render_doc(LaunchConfig))
    lines = text.splitlines()
    assert max(len(line) for line in lines[:10]) < 500  # no types' innards
    for row in field_rows():
        place = next(index for index, line in enumerate(lines) if line.startswith(f" |      {row.name}: "))
        assert row.description in lines[place]
        assert place < 40
    assert list(inspect.signature(LaunchConfig).parameters) == [row.name for row in field_rows()]


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("NOTEBOOK_LAUNCHER_NUM_PROCESES", "Did you mean NOTEBOOK_LAUNCHER_NUM_PROCESSES?"),
        ("NOTEBOOK_LAUNCHER_ENV", "An option's variable is NOTEBOOK_LAUNCHER_<OPTION>."),
        ("NOTEBOOK_LAUNCHER_", "An option's variable is NOTEBOOK_LAUNCHER_<OPTION>."),
    ],
)
def test_a_variable_that_stands_for_no_option_is_told(variable, hint):
    with pytest.warns(UserWarning, match=f"{variable} stands for no option") as seen:
        config = LaunchConfig.make(environment={variable: "4"})
    assert hint in str(seen[0].message)
    assert seen[0].filename == __file__
    assert config == LaunchConfig()


def test_accelerate_s_variable_for_one_device_is_told_to_have_no_effect():
    with pytest.warns(UserWarning, match="ACCELERATE_TORCH_DEVICE has no effect: device and device_ids choose"):
        LaunchConfig.make(environment={"ACCELERATE_TORCH_DEVICE": "cuda:1"})


def test_variables_that_a_launch_sets_or_that_are_empty_are_no_mistakes():
    ours = World(strategy="ddp", seed=1, mixed_precision="no", gradient_accumulation_steps=1).environment()
    assert LaunchConfig.make(environment={**ours, "NOTEBOOK_LAUNCHER_OLD": ""}).strategy == "ddp"


def test_the_environment_part_loads_without_pydantic():
    code = "import sys, notebook_launcher.core.config; print('pydantic' in sys.modules, 'torch' in sys.modules)"
    seen = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert seen.split() == ["False", "False"]


# --- world -----------------------------------------------------------------------------------------------------------


def test_alone():
    assert world(EMPTY) == World()


def test_alone_with_choices():
    place = world({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true"})
    assert place == World(mixed_precision="bf16", device="cpu", strategy="fsdp")


@pytest.mark.parametrize(
    "place",
    [
        World(
            rank=3,
            world_size=4,
            local_rank=1,
            local_world_size=2,
            machine_rank=1,
            num_machines=2,
            main_address="10.0.0.1",
            main_port=4000,
            device="cpu",
            mixed_precision="bf16",
            strategy="ddp",
            gradient_accumulation_steps=4,
            seed=5,
            num_threads=2,
            debug=True,
            launched=True,
        ),
        World(main_port=4000, launched=True),
    ],
)
def test_a_launched_worker_reads_what_the_launcher_wrote(place):
    assert world(place.environment()) == place


def test_torchrun():
    variables = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
    }
    assert world(variables) == World(5, 8, 1, 4, 1, 2, "node0", 29500, num_threads=1)


def test_ranks_that_can_t_meet():
    with pytest.raises(ConfigError, match="MASTER_PORT is not"):
        world({"RANK": "0", "WORLD_SIZE": "2"})
    assert world({"RANK": "0", "WORLD_SIZE": "1"}) == World()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 can't be with WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 can't be with WORLD_SIZE=0"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"},
            "LOCAL_RANK=2",
        ),
    ],
)
def test_variables_that_contradict_one_another(variables, words):
    with pytest.raises(ConfigError) as caught:
        world(variables)
    assert words in str(caught.value)


SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_task_of_a_slurm_step():
    place = world(SLURM)
    assert place == World(4, 5, 1, 2, 1, 2, "gpu003", place.main_port)
    assert 1024 < place.main_port < 32768
    assert world({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).main_port == place.main_port
    assert world({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "5"}).main_address == "a"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a1,b2", "a1"), ("n[07,9-11]-ib,x", "n07-ib"), ("n[1-2],x", "n1"), ("", "127.0.0.1")],
)
def test_slurm_s_first_host(nodes, first):
    assert world({**SLURM, "SLURM_STEP_NODELIST": nodes}).main_address == first


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": ""},  # the batch script's own shell
        {"SLURM_STEP_ID": str(0xFFFFFFFB)},
        {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # salloc's shell
        {"SLURM_PTY_PORT": "40000"},  # srun --pty
        {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_shell_in_a_slurm_job_is_alone(changes):
    assert world({**SLURM, **changes}) == World()
