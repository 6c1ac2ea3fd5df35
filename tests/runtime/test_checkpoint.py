"""What a checkpoint holds, how it is refused when it is not whole, and what is named and kept."""

import errno
import json
import pickle
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator, CheckpointError, ConfigError
from notebook_launcher.runtime import folders, storage
from notebook_launcher.runtime.plugins import ProjectConfiguration
from notebook_launcher.runtime.together import together

EXECUTED = []


class Value:
    """Something to register."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Parts:
    """A little of everything, all at ``value``."""

    def __init__(self, value=0.0, **options):
        self.accelerator = Accelerator(cpu=True, **options)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader = DataLoader(range(8), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.value = Value()
        self.accelerator.register_for_checkpointing(self.value)
        self.set(value)

    def set(self, value):
        nn.init.constant_(self.model.weight, value)
        self.optimizer.param_groups[0]["lr"] = value
        self.scheduler.scheduler.last_epoch = value
        self.value.value = value

    def values(self):
        weights = self.accelerator.get_state_dict(self.model)["weight"].unique().tolist()
        return [*weights, self.optimizer.param_groups[0]["lr"], self.scheduler.last_epoch, self.value.value]

    def all_at(self, value):
        return self.values() == [value] * 4


def saved(folder, value=1.0, **options):
    parts = Parts(value, **options)
    parts.accelerator.save_state(folder)
    return parts


def edit_manifest(folder, **facts):
    path = folder / "checkpoint.json"
    manifest = json.loads(path.read_text()) | facts
    for name in manifest["files"]:
        data = (folder / name).read_bytes() if (folder / name).exists() else b""
        manifest["files"][name] = [len(data), zlib.crc32(data)]
    del manifest["crc32"]
    path.write_text(json.dumps(manifest | {"crc32": storage.crc_of(manifest)}))


def files_of(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


FILES = [
    "checkpoint.json",
    "custom_checkpoint_0.pkl",
    "loaders_0.bin",
    "model.safetensors",
    "optimizer.bin",
    "random_states_0.pkl",
    "scheduler.bin",
]


def test_a_checkpoint_gives_back_everything(tmp_path):
    parts = Parts(1.0)
    assert parts.accelerator.save_state(tmp_path / "a") == str(tmp_path / "a")
    assert files_of(tmp_path) == [f"a/{name}" for name in FILES]
    drawn = [torch.rand(3).tolist(), random.random(), np.random.rand()]  # noqa: NPY002, S311
    parts.set(2.0)
    parts.accelerator.load_state(tmp_path / "a")
    assert parts.all_at(1.0)
    assert [torch.rand(3).tolist(), random.random(), np.random.rand()] == drawn  # noqa: NPY002, S311


def test_every_kind_of_numpy_s_generator_is_kept(tmp_path):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        parts = saved(tmp_path)
        drawn = np.random.rand()  # noqa: NPY002
        parts.accelerator.load_state(tmp_path)
        assert np.random.rand() == drawn  # noqa: NPY002
    finally:
        np.random.set_bit_generator(before)


def test_models_as_torch_saves_them(tmp_path):
    Parts(1.0).accelerator.save_state(tmp_path, safe_serialization=False)
    assert "pytorch_model.bin" in files_of(tmp_path)
    parts = Parts(2.0)
    parts.accelerator.load_state(tmp_path)
    assert parts.all_at(1.0)


def test_a_second_of_each_kind_has_a_number(tmp_path):
    def two(values):
        accelerator = Accelerator(cpu=True)
        models = [nn.Linear(1, 1) for _ in values]
        for model, value in zip(models, values, strict=True):
            nn.init.constant_(model.weight, value)
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=value) for model, value in zip(models, values, strict=True)
        ]
        accelerator.prepare(*models, *optimizers)
        return accelerator, lambda: [
            (m.weight.item(), o.param_groups[0]["lr"]) for m, o in zip(models, optimizers, strict=True)
        ]

    two([1.0, 2.0])[0].save_state(tmp_path)
    assert {"model_1.safetensors", "optimizer_1.bin"} <= set(files_of(tmp_path))
    accelerator, values = two([3.0, 4.0])
    accelerator.load_state(tmp_path)
    assert values() == [(1.0, 1.0), (2.0, 2.0)]


def test_tied_weights_are_kept_once_and_stay_tied(tmp_path):
    def tied():
        model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 50, bias=False))
        model[1].weight = model[0].weight
        return model

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(tied())
    accelerator.save_state(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 50 * 4 * 4 + 300
    other = Accelerator(cpu=True)
    loaded = other.prepare(tied())
    other.load_state(tmp_path)
    assert torch.equal(loaded[0].weight, model[0].weight)
    assert loaded[0].weight is loaded[1].weight


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=10),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chain": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_torch_s_schedulers_go_on(kind, tmp_path):
    def parts():
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        return accelerator, *accelerator.prepare(model, optimizer, SCHEDULERS[kind](optimizer))

    def steps(accelerator, model, optimizer, scheduler):
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step(1.0) if kind == "plateau" else scheduler.step()
        return optimizer.param_groups[0]["lr"]

    first = parts()
    steps(*first)
    first[0].save_state(tmp_path)
    second = parts()
    second[0].load_state(tmp_path)
    assert steps(*second) == steps(*first)


# --- what is not whole ------------------------------------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "is damaged: its content has changed": flip,
    "is damaged: .* bytes, not": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "is missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES[1:])
def test_a_damaged_file_is_refused_by_its_name_and_nothing_is_changed(name, damage, tmp_path):
    saved(tmp_path)
    DAMAGES[damage](tmp_path / name)
    parts = Parts(2.0)
    state = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=f"load_state failed: .*{name} {damage}"):
        parts.accelerator.load_state(tmp_path)
    assert parts.all_at(2.0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1', '{"files": {}}'])
def test_a_damaged_manifest_is_refused(text, tmp_path):
    saved(tmp_path)
    (tmp_path / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"checkpoint.json is damaged"):
        Parts().accelerator.load_state(tmp_path)


def test_a_manifest_that_was_changed_is_refused(tmp_path):
    saved(tmp_path)
    path = tmp_path / "checkpoint.json"
    text = path.read_text()
    for old, new in (('"num_processes": 1', '"num_processes": 0'), ('"iteration"', '"itdration"'), ('"no"', '"on"')):
        path.write_text(text.replace(old, new))
        with pytest.raises(CheckpointError, match=r"checkpoint.json is damaged: its content has changed"):
            Parts().accelerator.load_state(tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"checkpoint.json is damaged: RecursionError"):
        Parts().accelerator.load_state(tmp_path)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b"])
def test_a_manifest_can_t_ask_for_files_elsewhere(name, tmp_path):
    saved(tmp_path)
    edit_manifest(tmp_path, files={name: [0, 0]})
    with pytest.raises(CheckpointError, match=rf"checkpoint.json names '{name}', which is not in its folder"):
        Parts().accelerator.load_state(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    parts = Parts(2.0)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: it has no checkpoint.json"):
        parts.accelerator.load_state(tmp_path)
    with pytest.raises(CheckpointError, match="x holds no checkpoint: there is no such folder"):
        parts.accelerator.load_state(tmp_path / "x")
    saved(tmp_path)
    edit_manifest(tmp_path, format=7)
    with pytest.raises(CheckpointError, match="is of format 7, and this version reads 2"):
        parts.accelerator.load_state(tmp_path)


def test_random_numbers_can_be_left_as_they_are(tmp_path):
    saved(tmp_path)
    flip(tmp_path / "random_states_0.pkl")
    parts = Parts(2.0)
    state = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="skip_random_states=True leaves random numbers as they are"):
        parts.accelerator.load_state(tmp_path)
    parts.accelerator.load_state(tmp_path, skip_random_states=True)
    assert parts.all_at(1.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_random_numbers_that_are_missing_are_an_error(tmp_path):
    saved(tmp_path)
    path = tmp_path / "random_states_0.pkl"
    state = torch.load(path, weights_only=False)
    del state["python"]
    torch.save(state, path)
    edit_manifest(tmp_path)
    parts = Parts(2.0)
    with pytest.raises(CheckpointError, match=r"random_states_0.pkl lacks the state of the random numbers of python"):
        parts.accelerator.load_state(tmp_path)
    assert parts.all_at(2.0)


class Hostile:
    def __reduce__(self):
        return EXECUTED.append, ("executed",)


@pytest.mark.parametrize("form", ["torch", "pickle"])
@pytest.mark.parametrize("name", [*FILES[1:], "pytorch_model.bin"])
def test_no_pickle_is_executed(name, form, tmp_path):
    parts = Parts(1.0)
    parts.accelerator.save_state(tmp_path, safe_serialization=name != "pytorch_model.bin")
    with (tmp_path / name).open("wb") as file:
        if form == "torch":
            torch.save(Hostile(), file)
        else:
            pickle.dump(Hostile(), file)
    edit_manifest(tmp_path)
    parts.set(2.0)
    with pytest.raises(CheckpointError, match=f"{name} can't be read"):
        parts.accelerator.load_state(tmp_path)
    assert not EXECUTED
    assert parts.all_at(2.0)


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path):
    parts = saved(tmp_path)
    parts.value.value = random.Random(1)  # noqa: S311
    with pytest.raises(
        CheckpointError, match=r"custom_checkpoint_0.pkl would hold random.Random, which can't be loaded"
    ):
        parts.accelerator.save_state(tmp_path)
    parts.accelerator.load_state(tmp_path)
    assert parts.all_at(1.0)
    for value in (np.arange(3), np.float64(2.5), {"a": (1, None)}, torch.ones(2), "text"):
        parts.value.value = value
        parts.accelerator.save_state(tmp_path)
        parts.value.value = None
        parts.accelerator.load_state(tmp_path)
        assert str(parts.value.value) == str(value)


# --- what doesn't fit -------------------------------------------------------------------------------------------------


def accelerator_of(*things):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*things)
    return accelerator


def test_another_model_or_optimizer_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    accelerator_of(model, torch.optim.SGD(model.parameters(), lr=1.0)).save_state(tmp_path)
    with pytest.raises(CheckpointError, match=r"'weight' has the shape \(2, 2\) there, and \(2, 3\) in the model"):
        accelerator_of(nn.Linear(3, 2)).load_state(tmp_path)
    with pytest.raises(CheckpointError, match=r"a Sequential: it lacks \['0.bias', '0.weight'\], and has \['bias',"):
        accelerator_of(nn.Sequential(nn.Linear(2, 2))).load_state(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"optimizer, a PreparedOptimizer: .* have \[2\] parameters .*, and \[1\]"
    ):
        accelerator_of(model, torch.optim.SGD([model.weight], lr=1.0)).load_state(tmp_path)
    with pytest.raises(CheckpointError, match="holds 1 models, and this accelerator has 2"):
        accelerator_of(nn.Linear(2, 2), nn.Linear(2, 2)).load_state(tmp_path)
    with pytest.warns(UserWarning, match="of its 1 optimizers, only the 0 that this accelerator has are loaded"):
        accelerator_of(other := nn.Linear(2, 2)).load_state(tmp_path)
    assert torch.equal(other.weight, model.weight)


def test_not_strict_takes_what_there_is(tmp_path):
    model = nn.Linear(2, 2)
    accelerator_of(model).save_state(tmp_path)
    lesser = nn.Linear(2, 2, bias=False)
    accelerator_of(lesser).load_state(tmp_path, strict=False)
    assert torch.equal(lesser.weight, model.weight)


def test_another_strategy_is_refused_with_both_names(tmp_path):
    saved(tmp_path)
    edit_manifest(tmp_path, strategy="fsdp", layout="sharded")
    with pytest.raises(CheckpointError, match="saved with strategy='fsdp', and can't be loaded with strategy='single'"):
        Parts().accelerator.load_state(tmp_path)


def test_another_precision_is_said(tmp_path):
    saved(tmp_path, mixed_precision="bf16")
    with pytest.warns(UserWarning, match="saved with mixed_precision='bf16', not 'no'"):
        Parts().accelerator.load_state(tmp_path)


def test_what_has_no_state_can_t_be_registered():
    with pytest.raises(ConfigError, match=r"takes objects that have state_dict.*, and was given 3, 'x'"):
        Accelerator(cpu=True).register_for_checkpointing(Value(), 3, "x")


def test_keywords_of_torch_are_not_ignored(tmp_path):
    parts = saved(tmp_path)
    parts.accelerator.load_state(tmp_path, load_kwargs={"weights_only": True}, map_location="cpu")
    with pytest.raises(ConfigError, match=r"load_state\(weights_only=False\) is not supported"):
        parts.accelerator.load_state(tmp_path, load_kwargs={"weights_only": False})
    with pytest.raises(ConfigError, match=r"save_state\(exclude_frozen_parameters=True\) is not supported"):
        parts.accelerator.save_state(tmp_path, exclude_frozen_parameters=True)


def test_saving_within_a_group_says_what_is_lost(tmp_path):
    parts = Parts(1.0, gradient_accumulation_steps=2)
    for number, _ in enumerate(parts.loader):
        with parts.accelerator.accumulate(parts.model):
            parts.accelerator.backward(parts.model(torch.ones(1, 2)).sum())
        if number == 2:
            break
        if number == 1:
            parts.accelerator.save_state(tmp_path)
            continue
        with pytest.warns(UserWarning, match="within an accumulation group, and the gradients collected so far"):
            parts.accelerator.save_state(tmp_path)
    parts.accelerator.save_state(tmp_path)  # the loop was left, and with it the group
    parts.accelerator.load_state(tmp_path)
    assert not parts.model.weight.grad.any()


def interrupted():
    raise KeyboardInterrupt


def test_saving_where_an_exception_has_ended_a_group_says_what_is_lost(tmp_path):
    parts = Parts(1.0, gradient_accumulation_steps=2)
    try:
        for _ in parts.loader:
            with parts.accelerator.accumulate(parts.model):
                interrupted()
    except KeyboardInterrupt:
        with pytest.warns(UserWarning, match="within an accumulation group, and the gradients collected so far"):
            parts.accelerator.save_state(tmp_path)


class Kept:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2, dtype=[("step", "i8"), ("loss", "f4")]),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.timedelta64(3, "s"),
        np.array(["a", None], dtype=object),
    ],
)
def test_an_array_that_could_not_be_read_again_is_not_saved(tmp_path, value):
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Kept(value))
    with pytest.raises(CheckpointError, match=r"would hold numpy's .*have state_dict"):
        accelerator.save_state(tmp_path)


class Growing(nn.Module):
    """Keeps what torch lets a module keep beside its tensors: a tensor whose size changes."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(1)), torch.empty(0)

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


@pytest.mark.parametrize("safe", [True, False])
def test_a_module_s_extra_state_may_have_any_size(tmp_path, safe):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Growing())
    model.seen = torch.arange(3.0)
    accelerator.save_state(tmp_path, safe_serialization=safe)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Growing())
    accelerator.load_state(tmp_path)
    assert model.seen.tolist() == [0, 1, 2]


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_hooks_save_and_load_what_they_take(tmp_path):
    parts = Parts(1.0)

    def save(models, weights, output_dir):
        torch.save(weights.pop()["weight"], f"{output_dir}/own.pt")
        assert models == [parts.model]

    def load(models, input_dir):
        models.pop().weight.data.copy_(torch.load(f"{input_dir}/own.pt", weights_only=True))

    handles = [
        parts.accelerator.register_save_state_pre_hook(save),
        parts.accelerator.register_load_state_pre_hook(load),
    ]
    parts.accelerator.save_state(tmp_path)
    assert "own.pt" in files_of(tmp_path)
    assert "model.safetensors" not in files_of(tmp_path)
    parts.set(2.0)
    parts.accelerator.load_state(tmp_path)
    assert parts.all_at(1.0)
    flip(tmp_path / "own.pt")
    with pytest.raises(CheckpointError, match=r"own.pt is damaged"):
        parts.accelerator.load_state(tmp_path)
    for handle in handles:
        handle.remove()
    parts.accelerator.save_state(tmp_path)
    assert "own.pt" not in files_of(tmp_path)
    assert "model.safetensors" in files_of(tmp_path)


# --- folders ----------------------------------------------------------------------------------------------------------


def numbered(folder, **options):
    return ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)


def test_checkpoints_are_numbered_and_the_newest_is_loaded(tmp_path):
    parts = Parts(0.0, project_config=numbered(tmp_path))
    for value in (1.0, 2.0, 3.0):
        parts.set(value)
        assert parts.accelerator.save_iteration == value - 1
        parts.accelerator.save_state()
    home = tmp_path / "checkpoints"
    assert sorted(path.name for path in home.iterdir()) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    other = Parts(0.0, project_config=numbered(tmp_path))
    other.accelerator.load_state()
    assert other.all_at(3.0)
    assert other.accelerator.save_iteration == 3
    other.accelerator.load_state(home / "checkpoint_0")
    assert other.accelerator.save_iteration == 1
    assert other.accelerator.save_state() == str(home / "checkpoint_3"), "never in the place of another"


def test_the_newest_that_can_be_loaded_is_taken(tmp_path):
    parts = Parts(0.0, project_config=numbered(tmp_path))
    with pytest.raises(CheckpointError, match="checkpoints holds no checkpoint yet"):
        parts.accelerator.load_state()
    for value in (1.0, 2.0, 3.0):
        parts.set(value)
        parts.accelerator.save_state()
    flip(tmp_path / "checkpoints/checkpoint_2/optimizer.bin")
    (tmp_path / "checkpoints/checkpoint_1/checkpoint.json").unlink()
    with pytest.warns(UserWarning, match=r"takes .*checkpoint_0, the newest .*checkpoint_2/optimizer.bin is damaged"):
        parts.accelerator.load_state()
    assert parts.all_at(1.0)


def test_a_limit_removes_the_oldest(tmp_path):
    parts = Parts(0.0, project_config=numbered(tmp_path, total_limit=2))
    for value in range(4):
        parts.set(float(value))
        parts.accelerator.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]
    with pytest.raises(ConfigError, match="total_limit=0 is no number of checkpoints to keep"):
        ProjectConfiguration(tmp_path, total_limit=0)


def test_a_save_that_fails_removes_nothing(tmp_path):
    parts = Parts(1.0, project_config=numbered(tmp_path, total_limit=1))
    parts.accelerator.save_state()
    parts.value.value = object()
    with pytest.raises(CheckpointError):
        parts.accelerator.save_state()
    parts.accelerator.load_state()
    assert parts.all_at(1.0)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0"]


def test_without_a_folder_or_numbers_nothing_is_saved():
    accelerator = Accelerator(cpu=True)
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(ConfigError, match=rf"{call.__name__}\(\) was given no folder"):
            call()


def test_what_else_is_in_the_folder_stays_there(tmp_path):
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "events").write_text("kept")
    (folder / "model.safetensors").write_text("another program's")
    parts = saved(folder)
    (folder / "notes.txt").write_text("kept too")
    parts.set(2.0)
    parts.accelerator.save_state(folder)
    assert files_of(folder) == sorted([*FILES, "logs/events", "notes.txt"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    parts.accelerator.load_state(folder)
    assert parts.all_at(2.0)


def test_another_program_s_model_is_not_taken_for_the_checkpoint_s(tmp_path):
    parts = Parts(1.0)
    parts.accelerator.save_model(parts.model, tmp_path / "run")
    parts.set(2.0)
    parts.accelerator.save_state(tmp_path / "run", safe_serialization=False)
    parts.set(3.0)
    parts.accelerator.load_state(tmp_path / "run")
    assert parts.all_at(2.0)
    with pytest.raises(ConfigError, match="would replace files of the checkpoint that is there"):
        parts.accelerator.save_model(parts.model, tmp_path / "run", max_shard_size=1)
    parts.accelerator.load_state(tmp_path / "run")


def test_what_another_process_is_writing_is_left_alone(tmp_path):
    parts = Parts(1.0, project_config=numbered(tmp_path))
    parts.accelerator.save_state()
    draft = storage.Draft(tmp_path / "checkpoints" / "checkpoint_7")
    draft.begin()
    with pytest.raises(CheckpointError, match=r"another process is saving into .*\.checkpoint_7\.saving"):
        parts.accelerator.save_state(tmp_path / "checkpoints" / "checkpoint_7")
    parts.accelerator.save_state()
    assert draft.path.is_dir()
    draft.discard()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0", "checkpoint_1"]
    parts.accelerator.save_state(tmp_path / "checkpoints" / "checkpoint_7")


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path, monkeypatch):
    saved(tmp_path / "ck")
    others = [Parts(2.0), Parts(3.0)]
    parts = Parts(0.0)

    def replace_once(path, original=folders.crc):
        if len(others) == 2:
            others.pop(0).accelerator.save_state(tmp_path / "ck")
        return original(path)

    with monkeypatch.context() as patched:
        patched.setattr(folders, "crc", replace_once)
        parts.accelerator.load_state(tmp_path / "ck")
    assert parts.all_at(2.0), "not yet read: the new one is as good"
    parts.accelerator.register_load_state_pre_hook(lambda *_: others[0].accelerator.save_state(tmp_path / "ck"))
    with pytest.raises(CheckpointError, match="ck was replaced while it was read"):
        parts.accelerator.load_state(tmp_path / "ck")
    assert parts.all_at(2.0)


def test_a_folder_that_is_a_mount_is_refused(tmp_path, monkeypatch):
    parts, volume = Parts(1.0), tmp_path / "volume"
    volume.mkdir()
    told = "volume can't be replaced as a whole: something is mounted just there, .* Name a folder .*/volume/che"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_mount", lambda path: path == volume)
        with pytest.raises(CheckpointError, match=told):
            parts.accelerator.save_state(volume)
    assert list(tmp_path.iterdir()) == [volume]
    parts.accelerator.save_state(volume)
    parts.set(2.0)

    def rename(path, target):
        raise OSError(errno.EBUSY if path == volume else errno.EIO, "of the test")

    with monkeypatch.context() as patched:  # mounted from the file system that it is in: nothing shows it before
        patched.setattr(storage, "_exchange", lambda *_: False)
        patched.setattr(Path, "rename", rename)
        with pytest.raises(CheckpointError, match=told):
            parts.accelerator.save_state(volume)
    assert list(tmp_path.iterdir()) == [volume]
    parts.accelerator.load_state(volume)
    assert parts.all_at(1.0)


def test_folders_that_can_t_be_replaced_are_refused(tmp_path, monkeypatch):
    parts = Parts(1.0)
    with pytest.raises(CheckpointError, match="/ can't be replaced as a whole; name a folder in it"):
        parts.accelerator.save_state("/")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is a file; name a folder"):
        parts.accelerator.save_state(tmp_path / "file")
    with pytest.raises(CheckpointError, match="NotADirectoryError"):
        parts.accelerator.save_state(tmp_path / "file" / "below")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="holds the working directory"):
        parts.accelerator.save_state(".")
    parts.accelerator.save_state("below")
    (tmp_path / "link").symlink_to("below")
    parts.set(2.0)
    parts.accelerator.save_state("link")
    parts.accelerator.load_state("below")
    assert parts.all_at(2.0)


def test_a_working_directory_that_somebody_has_deleted_keeps_nothing_from_being_saved(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    parts = Parts(1.0)
    parts.accelerator.save_state(tmp_path / "state")
    parts.set(5.0)
    parts.accelerator.load_state(tmp_path / "state")
    assert parts.all_at(1.0)


def test_an_error_without_words_is_no_success():
    def refused():
        raise ConfigError

    with pytest.raises(CheckpointError, match="save_state failed: "):
        together("save_state", refused)


# --- several processes ------------------------------------------------------------------------------------------------


def save_apart(folder):
    parts = Parts(1.0)
    rank = parts.accelerator.process_index
    torch.manual_seed(rank)
    parts.value.value = float(rank + 1)
    parts.accelerator.save_state(folder)
    drawn = torch.rand(2).tolist()
    parts.set(5.0)
    torch.manual_seed(7)
    parts.accelerator.load_state(folder)
    return parts.all_at(1.0), torch.rand(2).tolist() == drawn, drawn


def test_every_rank_gets_its_random_numbers_and_rank_0_s_objects(on_ranks, tmp_path):
    results = on_ranks(save_apart, tmp_path)
    assert [result[:2] for result in results] == [(True, True)] * 2
    assert results[0][2] != results[1][2]
    assert {"random_states_0.pkl", "random_states_1.pkl", "loaders_0.bin", "loaders_1.bin"} <= set(files_of(tmp_path))
    parts = Parts(2.0)  # one process takes up what two have saved
    with pytest.warns(UserWarning, match="saved by 2 processes and is loaded by 1"):
        parts.accelerator.load_state(tmp_path)
    assert parts.all_at(1.0)


def fail_on_ranks(folder):
    parts = Parts(1.0)
    told = []
    parts.value.value = object() if parts.accelerator.is_main_process else 1.0
    for call, place in (
        (parts.accelerator.save_state, folder / "unsafe"),
        (parts.accelerator.save_state, folder / "file"),
        (parts.accelerator.load_state, folder / "nothing"),
    ):
        with pytest.raises(CheckpointError) as caught:
            call(place)
        told.append(str(caught.value))
    return told


def test_what_fails_on_one_rank_fails_on_all_with_the_same_words(on_ranks, tmp_path):
    (tmp_path / "file").write_text("")
    results = on_ranks(fail_on_ranks, tmp_path)
    assert results[0] == results[1]
    assert all("failed on rank 0: " in text for text in results[0])
    assert files_of(tmp_path) == ["file"]


class Broken(Value):
    """One that can't be loaded on rank 1."""

    def load_state_dict(self, state):
        self.value = state["value"]
        if torch.distributed.get_rank() == 1 and state["value"] == 1.0:
            raise KeyError("value")


def load_broken(folder):
    parts = Parts(1.0)
    second = Broken(1.0)
    parts.accelerator.register_for_checkpointing(second)
    parts.accelerator.save_state(folder)
    parts.set(2.0)
    second.value = 2.0
    with pytest.raises(CheckpointError) as caught:
        parts.accelerator.load_state(folder)
    return str(caught.value), parts.all_at(2.0), second.value


def test_an_object_that_can_t_be_loaded_on_one_rank_changes_nothing_on_any(on_ranks, tmp_path):
    for message, is_unchanged, value in on_ranks(load_broken, tmp_path):
        assert message == "load_state failed on rank 1: KeyError('value')"
        assert is_unchanged
        assert value == 2.0
