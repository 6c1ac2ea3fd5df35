"""Model files as transformers reads them, and files that appear whole."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from notebook_launcher import Accelerator, CheckpointError, ConfigError
from notebook_launcher.runtime import weights


def model_of(num_layers=3):
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_layers)))


def test_a_small_model_is_one_file(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model_of())
    accelerator.save_model(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("safe", "stem", "suffix"), [(True, "model", "safetensors"), (False, "pytorch_model", "bin")])
def test_a_large_model_is_split_and_indexed(safe, stem, suffix, tmp_path):
    accelerator = Accelerator(cpu=True)
    model = model_of()
    accelerator.save_model(model, tmp_path, max_shard_size="1200B", safe_serialization=safe)
    names = [f"{stem}-{number:05}-of-00003.{suffix}" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, f"{stem}.{suffix}.index.json"]
    index = json.loads((tmp_path / f"{stem}.{suffix}.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    for name, value in model.state_dict().items():
        path = tmp_path / index["weight_map"][name]
        found = load_file(path) if safe else torch.load(path, weights_only=True)
        assert torch.equal(found[name], value)
    accelerator.save_model(model, tmp_path, safe_serialization=safe)
    assert [path.name for path in tmp_path.iterdir()] == [f"{stem}.{suffix}"], "files of the larger set are gone"


def test_tied_and_odd_tensors(tmp_path):
    model = nn.Module()
    model.embedding = nn.Embedding(4, 2)
    model.head = nn.Linear(2, 4, bias=False)
    model.head.weight = model.embedding.weight
    whole = torch.arange(6.0)
    buffers = {
        "view": whole[2:4],
        "turned": whole.view(2, 3).T,
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 2),
        "flag": torch.tensor([True, False]),
        "brief": torch.ones(3, dtype=torch.bfloat16),
    }
    for name, value in buffers.items():
        model.register_buffer(name, value)
    Accelerator(cpu=True).save_model(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {"embedding.weight", *buffers}
    for name, value in buffers.items():
        assert torch.equal(found[name], value)
        assert found[name].dtype == value.dtype


def test_what_safetensors_can_t_hold_is_said(tmp_path):
    model = nn.Module()
    model.register_buffer("wave", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"'wave' in the model's state, a torch.complex64, can't be in a safetensors"):
        Accelerator(cpu=True).save_model(model, tmp_path)
    Accelerator(cpu=True).save_model(model, tmp_path, safe_serialization=False)
    assert torch.load(tmp_path / "pytorch_model.bin", weights_only=True)["wave"].dtype == torch.complex64


def test_the_name_that_safetensors_has_taken_is_said(tmp_path):
    model = nn.Linear(1, 1)
    model.register_buffer("__metadata__", torch.ones(2))
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    told = (
        "'__metadata__' in the model's state, a name that the format has taken, can't be in a safetensors .* pass safe"
    )
    with pytest.raises(ConfigError, match=told):
        accelerator.save_model(prepared, tmp_path)
    with pytest.raises(CheckpointError, match=told):
        accelerator.save_state(tmp_path / "checkpoint")
    accelerator.save_state(tmp_path / "checkpoint", safe_serialization=False)
    model.get_buffer("__metadata__").zero_()
    accelerator.load_state(tmp_path / "checkpoint")
    assert model.get_buffer("__metadata__").tolist() == [1, 1]


@pytest.mark.parametrize(("size", "expected"), [(7, 7), ("10GB", 10**10), ("1.5 kb", 1500), ("2GiB", 2**31), ("3", 3)])
def test_sizes(size, expected):
    assert weights.num_bytes(size) == expected


@pytest.mark.parametrize("size", ["many", "GB", "1XB", "-3MB"])
def test_sizes_that_are_none(size):
    with pytest.raises(ConfigError, match=f"max_shard_size='{size}' is no size"):
        weights.num_bytes(size)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    accelerator = Accelerator(cpu=True)
    path = tmp_path / "sub" / "thing.pt"
    accelerator.save({"a": 1, "model": nn.Linear(1, 1)}, path)
    assert torch.load(path, weights_only=False)["a"] == 1
    with pytest.raises(AttributeError):
        accelerator.save(lambda: None, path)
    assert [one.name for one in path.parent.iterdir()] == ["thing.pt"]
    assert torch.load(path, weights_only=False)["a"] == 1
    accelerator.save({"a": torch.ones(2)}, tmp_path / "thing.safetensors", safe_serialization=True)
    assert load_file(tmp_path / "thing.safetensors")["a"].tolist() == [1, 1]


def only_rank_0(folder):
    accelerator = Accelerator(cpu=True)
    accelerator.save(accelerator.process_index, folder / "rank.pt")
    model = accelerator.prepare(model_of())
    accelerator.save_model(model, folder)
    return list(accelerator.get_state_dict(model))


def test_rank_0_writes_the_names_of_the_module_itself(on_ranks, tmp_path):
    names = on_ranks(only_rank_0, tmp_path)[1]
    assert names == list(model_of().state_dict())
    assert load_file(tmp_path / "model.safetensors").keys() == set(names)
    assert torch.load(tmp_path / "rank.pt", weights_only=True) == 0
