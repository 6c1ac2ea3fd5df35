"""Whole weights out of checkpoints in parts, on one process, with nothing executed."""

import pickle
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from notebook_launcher import (
    Accelerator,
    CheckpointError,
    ConfigError,
    FullyShardedDataParallelPlugin,
    launch,
    merge_checkpoint,
)


class Net(nn.Module):
    """Two layers that are tied, and sizes that don't divide."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 3)
        self.first_again = nn.Linear(5, 5, bias=False)
        self.first_again.weight = self.first.weight
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, x):
        return self.second(self.first_again(self.first(x)))


def save_on_ranks(folder):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model, second = accelerator.prepare(Net(), nn.Linear(4, 2))
    accelerator.save_state(f"{folder}/ours")
    assert isinstance(model.first.weight, DTensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/theirs/pytorch_model_fsdp_0")
    return accelerator.get_state_dict(model), accelerator.get_state_dict(second)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run = launch(save_on_ranks, (str(folder),), num_processes=3, device="cpu", timeout_s=60)
    return folder, *run.results[0]


def read(folder):
    state = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= safetensors.torch.load_file(path)
    return state


def same(state, expected):
    return all(torch.equal(value, expected[name]) for name, value in state.items())


@pytest.mark.parametrize("inside", ["ours", "theirs", "theirs/pytorch_model_fsdp_0"])
def test_weights_are_put_together(saved, inside, tmp_path):
    folder, expected, _ = saved
    merge_checkpoint(folder / inside, tmp_path)
    state = read(tmp_path)
    tied = set() if "theirs" in inside else {"first_again.weight"}  # kept once, but by torch
    assert state.keys() == expected.keys() - tied
    assert same(state, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_another_model_in_files_of_limited_size(saved, tmp_path):
    folder, _, expected = saved
    merge_checkpoint(folder / "ours", tmp_path, model="model_1", max_shard_size=32)
    assert same(read(tmp_path), expected)
    assert (tmp_path / "model.safetensors.index.json").exists()
    merge_checkpoint(folder / "ours", tmp_path / "b", model="model_1", safe_serialization=False)
    assert same(torch.load(tmp_path / "b" / "pytorch_model.bin", weights_only=True), expected)


def test_what_can_t_be_put_together_is_named(saved, tmp_path):
    folder, _, _ = saved
    with pytest.raises(CheckpointError, match=r"holds no weights of 'model_2' .*strategy='fsdp' .*DeepSpeed"):
        merge_checkpoint(folder / "ours", tmp_path, model="model_2")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: it has no checkpoint.json"):
        merge_checkpoint(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="would replace files of the checkpoint"):
        merge_checkpoint(folder / "ours", folder / "ours")


def damaged(saved, tmp_path):
    for path in (saved[0] / "theirs" / "pytorch_model_fsdp_0").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('it was executed')",)


def test_no_pickle_is_executed(saved, tmp_path):
    folder = damaged(saved, tmp_path)
    torch.save(Evil(), folder / "evil")
    evil = (folder / "evil").read_bytes()
    told = pickle.loads((folder / ".metadata").read_bytes())
    for where in told.storage_data.values():
        where.relative_path, where.offset, where.length = "evil", 0, len(evil)
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(CheckpointError, match=r"evil can't be read: Weights only load failed"):
        merge_checkpoint(folder, tmp_path / "out")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"asks for builtins\.exec, and nothing is executed"):
        merge_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_elsewhere_and_missing_parts_are_refused(saved, tmp_path):
    folder = damaged(saved, tmp_path)
    told = pickle.loads((folder / ".metadata").read_bytes())
    where = next(iter(told.storage_data.values()))
    where.relative_path = "../x.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(CheckpointError, match=r"names '\.\./x\.distcp', which is not in its folder"):
        merge_checkpoint(folder, tmp_path / "out")
    where.relative_path, where.transform_descriptors = "x.distcp", ["zip"]
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(CheckpointError, match=r"x\.distcp is compressed by \['zip'\]"):
        merge_checkpoint(folder, tmp_path / "out")
    where.transform_descriptors = None
    next(iter(told.state_dict_metadata.values())).chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(CheckpointError, match=r"numbers are in none|x\.distcp can't be read"):
        merge_checkpoint(folder, tmp_path / "out")
