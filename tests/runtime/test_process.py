import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from notebook_launcher import Accelerator, ConfigError
from notebook_launcher.core.world import World
from notebook_launcher.runtime import backends, process, strategies
from notebook_launcher.runtime.plugins import Keywords

LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NOTEBOOK_LAUNCHER")


def make_group_by_hand(store, *, forget=(), rank=None):
    """As PyTorch's tutorial does, which is handed its rank and knows of no variables."""
    here = int(os.environ["RANK"])
    for variable in forget:
        os.environ.pop(variable, None)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=here if rank is None else rank, world_size=2)


def in_a_group_of_ones_own(store, forget):
    make_group_by_hand(store, forget=forget)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    found = (
        accelerator.process_index,
        accelerator.num_processes,
        accelerator.local_process_index,
        accelerator.is_local_main_process,
        str(accelerator.distributed_type),
        type(model).__name__,
        accelerator.gather(torch.tensor(accelerator.process_index)).tolist(),
    )
    accelerator.wait_for_everyone()
    return found


@pytest.mark.parametrize("forget", [LAUNCH, ("RANK", "WORLD_SIZE", "NOTEBOOK_LAUNCHER"), ()])
def test_rank_and_size_are_those_of_the_group_that_is_there(on_ranks, tmp_path, forget):
    rest = ("MULTI_CPU", "DistributedModel", [0, 1])
    found = on_ranks(in_a_group_of_ones_own, tmp_path / "store", forget)
    assert found == [(0, 2, 0, True, *rest), (1, 2, 1, False, *rest)]


def swapped(store):
    make_group_by_hand(store, rank=1 - int(os.environ["RANK"]))
    with pytest.raises(ConfigError) as caught:
        Accelerator(cpu=True)
    return str(caught.value)


def test_a_group_that_contradicts_the_launch_is_refused(on_ranks, tmp_path):
    first, second = on_ranks(swapped, tmp_path / "store")
    assert "rank 1 of 2" in first
    assert "rank 0 of 2" in first
    assert "init_process_group()" in first
    assert second.index("rank 0 of 2") < second.index("rank 1 of 2")


def test_single_is_refused_where_there_are_several():
    backend, why = backends.select(World(device="cpu"), cpu=False)
    with pytest.raises(ConfigError, match=r"strategy='single'.*this run has 2.*'ddp'"):
        strategies.create("single", process.Process(World(world_size=2, rank=1), backend, why), Keywords(None))


@pytest.mark.parametrize("name", [None, "ddp", "single"])
def test_one_process_needs_no_strategy(name):
    backend, why = backends.select(World(device="cpu"), cpu=False)
    assert strategies.create(name, process.Process(World(), backend, why), Keywords(None)).name == "single"


def test_an_apple_gpu_is_for_one_process():
    with pytest.raises(ConfigError, match=r"2 processes can't train on an Apple GPU.*num_processes=1"):
        process.place(World(device="mps", world_size=2, local_world_size=2))


def test_an_apple_gpu_serves_one(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert process.place(World(device="mps")).distributed_type == "NO"
