"""The mesh of a run's processes, and that those which hold parts of one model get the same data and random numbers."""

import functools
import types

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler, TensorDataset

from notebook_launcher import Accelerator, ConfigError, DataLoaderConfiguration, ParallelismConfig, PartialState
from notebook_launcher.runtime import gather, mesh


@pytest.mark.parametrize(
    ("given", "own", "num_processes", "expected"),
    [
        ({}, "dp_shard", 4, (1, 1, 4, 1)),
        ({"dp_replicate_size": 2}, "dp_shard", 4, (1, 2, 2, 1)),
        ({"tp_size": 2}, "tp", 8, (1, 1, 4, 2)),
        ({}, "tp", 4, (1, 1, 1, 4)),
        ({"dp_shard_size": 2}, "tp", 4, (1, 1, 2, 2)),
        ({}, "pp", 4, (4, 1, 1, 1)),
        ({"pp_size": 2, "tp_size": 2}, "pp", 4, (2, 1, 1, 2)),
    ],
)
def test_sizes_that_are_left_out_take_what_the_others_leave(given, own, num_processes, expected):
    assert tuple(ParallelismConfig(**given).sizes(num_processes, own).values()) == expected


@pytest.mark.parametrize(
    ("given", "num_processes", "text"),
    [
        (
            {"pp_size": 2, "dp_shard_size": 2, "tp_size": 2},
            4,
            "pp 2 x dp_shard 2 x tp 2 = 8, and the run has 4 processes",
        ),
        ({"tp_size": 3}, 2, "tp 3 = 3, and the run has 2 processes"),
        ({"dp_replicate_size": 2, "tp_size": 2}, 6, "dp_replicate 2 x tp 2 = 4, and the run has 6 processes"),
        ({"tp_size": 2}, 1, "tp 2 = 2, and the run has 1 process: make .* or launch 2 processes"),
    ],
)
def test_a_product_that_is_not_the_number_of_processes_is_written_out(given, num_processes, text):
    with pytest.raises(ConfigError, match=text):
        ParallelismConfig(**given).sizes(num_processes, "tp")


def test_one_process_is_refused_a_mesh_of_several():
    with pytest.raises(ConfigError, match="tp 2 = 2, and the run has 1 process:"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))


@pytest.mark.parametrize("size", [0, 1.5, True, "2", None])
def test_a_size_is_a_number_of_processes(size):
    with pytest.raises(ConfigError, match=r"ParallelismConfig\(tp_size=.*takes a number of processes, 1 or more"):
        ParallelismConfig(tp_size=size)


@pytest.mark.parametrize("name", ["cp_size", "sp_size", "ep_size"])
def test_what_is_not_here_is_refused(name):
    with pytest.raises(ConfigError, match=rf"ParallelismConfig\({name}=2\) asks for a way .* not here"):
        ParallelismConfig(**{name: 2})


# --- shares ----------------------------------------------------------------------------------------------------------


def shares_of(given, own):
    process = Accelerator(cpu=True)._process
    built = mesh.build(process, ParallelismConfig(**given), own)
    seen = mesh.data_process(process, built)
    same = gather.all_objects(process.rank, seen.twins) if seen.twins else [process.rank]
    return built.mesh_dim_names, seen.shares, seen.rank, gather.all_objects(process.rank, seen.group), same


def all_shares(cases):
    return [shares_of(*case) for case in cases]


SHARES = [
    (({"tp_size": 2}, "tp"), ("dp_shard", "tp"), (0, 0, 1, 1), [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
    (({"pp_size": 2}, "pp"), ("pp", "dp_shard"), (0, 1, 0, 1), [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
    (({"pp_size": 2, "tp_size": 2}, "pp"), ("pp", "tp"), (0, 0, 0, 0), [[0], [1], [2], [3]], [[0, 1, 2, 3]]),
    (({"dp_replicate_size": 2}, "dp_shard"), ("dp_replicate", "dp_shard"), (), [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
    (
        ({"dp_replicate_size": 2, "dp_shard_size": 1, "tp_size": 2}, "tp"),
        ("dp_replicate", "dp_shard", "tp"),
        (0, 0, 1, 1),
        [[0, 2], [1, 3]],
        [[0, 1], [2, 3]],
    ),
]


def test_ranks_in_one_place_of_the_data_dims_share(on_ranks):
    found = on_ranks(all_shares, [case for case, *_ in SHARES], num_processes=4)
    for rank, cases in enumerate(found):
        for (names, shares, own, group, same), (_, *expected) in zip(cases, SHARES, strict=True):
            assert [names, shares] == expected[:2]
            assert own == (shares[rank] if shares else rank)
            assert [group] == [one for one in expected[2] if rank in one]
            assert [same] == [one for one in expected[3] if rank in one]


# --- data ------------------------------------------------------------------------------------------------------------


class Drawn(Dataset):
    """Samples with a random number, as augmentation draws it."""

    def __init__(self, num=10):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item()])


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.tensor([float(index), torch.rand(()).item()]) for index in range(11))


class Own(SequentialSampler):
    """Draws an order that depends on the process's own random numbers."""

    def __iter__(self):
        return iter(torch.randperm(len(self.data_source)).tolist())


LOADERS = {
    "in order": lambda: DataLoader(Drawn(), batch_size=2),
    "shuffled": lambda: DataLoader(Drawn(), batch_size=2, shuffle=True),
    "by a sampler of one's own": lambda: DataLoader(Drawn(), batch_size=2, sampler=Own(Drawn())),
    "by workers": lambda: DataLoader(Drawn(), batch_size=2, num_workers=1),
    "a stream": lambda: DataLoader(Stream(), batch_size=2),
    "the last is short": lambda: DataLoader(Drawn(9), batch_size=2),
}
OPTIONS = {
    "": {},
    "split": {"split_batches": True},
    "dispatched": {"dispatch_batches": True},
    "uneven": {"even_batches": False},
}


def read(size):
    found = {}
    for option, more in OPTIONS.items():
        config = DataLoaderConfiguration(**more)
        parallelism = ParallelismConfig(tp_size=size)
        accelerator = Accelerator(cpu=True, parallelism_config=parallelism, dataloader_config=config)
        for name, make in LOADERS.items():
            torch.manual_seed(100 + accelerator.process_index)
            loader = accelerator.prepare(make())
            seen, kept = [], []
            for batch in loader:
                seen.append(batch.tolist())
                if option != "uneven":
                    kept += accelerator.gather_for_metrics(batch[:, 0]).tolist()
            found[name, option] = seen, kept, loader.total_batch_size, len(loader) if name != "a stream" else 0
    return found


@functools.cache
def all_read(on_ranks, size):
    return on_ranks(read, size, num_processes=4)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_a_model_read_the_same_and_the_run_each_sample_once(on_ranks, size, name, option):
    seen, kept, total, length = zip(*(one[name, option] for one in all_read(on_ranks, size)), strict=True)
    for rank in range(4):
        assert seen[rank] == seen[rank // size * size]
        assert length[rank] in {0, len(seen[rank])}
        assert total[rank] == (2 if option == "split" else 2 * 4 // size)
        num = {"a stream": 11, "the last is short": 9}.get(name, 10)
        once = kept[rank] or [sample[0] for each in range(0, 4, size) for batch in seen[each] for sample in batch]
        assert sorted(once) == list(range(num))
    if size == 2:
        assert seen[0] != seen[2]
        drawn = [sample[1] for batch in seen[0] + seen[2] for sample in batch]
        assert len(set(drawn)) >= 9  # augmentations are not those of another group


def everything_else():
    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(tp_size=2), scheduler_steps_per_process=True
    )
    found = types.SimpleNamespace()
    torch.manual_seed(accelerator.process_index)
    next(iter(accelerator.prepare(DataLoader(Drawn()))))
    found.random = torch.rand(3).tolist()
    with (
        accelerator.split_between_processes(list(range(5))) as piece,
        PartialState().split_between_processes([0, 1]) as one,
    ):
        found.piece = piece, one
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    scheduler.step()
    found.lr = scheduler.get_last_lr()
    found.texts = []
    data = TensorDataset(torch.zeros(8))
    for sampler in (DistributedSampler(data), DistributedSampler(data, 2, accelerator.process_index // 2)):
        try:
            loader = accelerator.prepare(DataLoader(data, sampler=sampler))
            found.texts.append(len(loader))
        except ConfigError as error:
            found.texts.append(str(error))
    found.gathered = accelerator.gather(torch.tensor(accelerator.process_index)).tolist()
    return found


@functools.cache
def all_else(on_ranks):
    return on_ranks(everything_else, num_processes=4)


def test_random_numbers_are_one_group_s_from_the_first_batch_on(on_ranks):
    first, second, third, fourth = [found.random for found in all_else(on_ranks)]
    assert first == second
    assert third == fourth
    assert first != third


def test_pieces_are_shared_out_among_the_groups(on_ranks):
    assert [found.piece for found in all_else(on_ranks)] == [([0, 1, 2], [0])] * 2 + [([3, 4], [1])] * 2


def test_schedulers_step_once_a_group_where_they_are_to_step_once_a_process(on_ranks):
    assert [found.lr for found in all_else(on_ranks)] == [[0.25]] * 4


def test_a_sampler_that_parts_a_group_is_refused(on_ranks):
    for rank, found in enumerate(all_else(on_ranks)):
        text, length = found.texts
        assert f"the DistributedSampler on rank {rank} reads share {rank} of 4" in text
        assert f"here share {rank // 2} of 2: leave the sampler out" in text
        assert length == 4


def test_gather_stays_that_of_all_ranks(on_ranks):
    assert [found.gathered for found in all_else(on_ranks)] == [[0, 1, 2, 3]] * 4
