"""Every rank reads its own part of one order, whoever draws it and whatever the ranks' random numbers are."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from notebook_launcher import Accelerator
from notebook_launcher.runtime import sampling

NUM_SAMPLES = 12


class Shuffled(Sampler):
    """Draws as ``draw`` says; a custom sampler, as they are written every day."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        return iter(self.draw())


class OneByOne(Sampler):
    """Draws each index when it is asked for it, and has no length."""

    def __iter__(self):
        left = list(range(NUM_SAMPLES))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class Batches(Sampler):
    """A batch sampler."""

    def __len__(self):
        return NUM_SAMPLES // 2

    def __iter__(self):
        return iter(torch.randperm(NUM_SAMPLES).view(-1, 2).tolist())


SAMPLERS = {
    "torch": lambda: {"sampler": Shuffled(lambda: torch.randperm(NUM_SAMPLES).tolist())},
    "numpy": lambda: {"sampler": Shuffled(lambda: np.random.permutation(NUM_SAMPLES).tolist())},  # noqa: NPY002
    "random": lambda: {"sampler": Shuffled(lambda: random.sample(range(NUM_SAMPLES), NUM_SAMPLES))},
    "numpy, seeded by the system": lambda: {
        "sampler": Shuffled(lambda: np.random.default_rng().permutation(NUM_SAMPLES).tolist())
    },
    "one by one": lambda: {"sampler": OneByOne()},
    "a list": lambda: {"sampler": torch.randperm(NUM_SAMPLES).tolist()},
    "in a batch sampler": lambda: {"batch_sampler": BatchSampler(OneByOne(), 2, drop_last=False)},
    "a batch sampler": lambda: {"batch_sampler": Batches()},
    "shuffle=True": lambda: {"shuffle": True},
    "RandomSampler": lambda: {"sampler": RandomSampler(range(NUM_SAMPLES))},
    "SubsetRandomSampler": lambda: {"sampler": SubsetRandomSampler(range(NUM_SAMPLES))},
    "WeightedRandomSampler": lambda: {
        "sampler": WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES, replacement=False)
    },
}


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def loader_of(name):
    options = SAMPLERS[name]()
    return DataLoader(range(NUM_SAMPLES), **options, **({} if "batch_sampler" in options else {"batch_size": 2}))


def read_apart():
    """For each sampler two epochs of this rank's batches, the ranks having been seeded apart."""
    accelerator = Accelerator(cpu=True)
    seed(accelerator.process_index)
    loaders = {name: accelerator.prepare(loader_of(name)) for name in SAMPLERS}
    return {name: [[batch.tolist() for batch in loader] for _ in range(2)] for name, loader in loaders.items()}


def in_order(ranks, name, epoch):
    rounds = zip(*(rank[name][epoch] for rank in ranks), strict=True)
    return [index for round_ in rounds for part in round_ for index in part]


def test_ranks_with_different_random_numbers_read_every_sample_once(on_ranks):
    ranks = on_ranks(read_apart)
    for name in SAMPLERS:
        for epoch in range(2):
            assert sorted(in_order(ranks, name, epoch)) == list(range(NUM_SAMPLES)), (name, epoch)
        if name != "a list":
            assert in_order(ranks, name, 0) != in_order(ranks, name, 1), f"{name}: epochs do not differ"


def read_custom(name):
    accelerator = Accelerator(cpu=True)
    seed(5)
    loader = accelerator.prepare(loader_of(name))
    read = [batch.tolist() for batch in loader]
    return {name: [read]}, torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002, S311


@pytest.mark.parametrize("name", ["torch", "numpy", "random", "a batch sampler"])
def test_a_custom_order_is_that_of_plain_torch_and_so_are_the_numbers_after_it(on_ranks, name):
    seed(5)
    plain = [index for batch in loader_of(name) for index in batch.tolist()]
    after = torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002, S311
    ranks = on_ranks(read_custom, name)
    assert in_order([read for read, *_ in ranks], name, 0) == plain
    for _, *numbers in ranks:
        assert tuple(numbers) == after


class Broken(Sampler):
    def __len__(self):
        return 8

    def __iter__(self):
        yield from (0, 1, 2)
        raise LookupError("no index left")


def read_broken():
    accelerator = Accelerator(cpu=True)
    return [int(x) for x in accelerator.prepare(DataLoader(range(8), sampler=Broken()))]


def test_a_sampler_that_fails_is_the_run_s_error(on_ranks):
    with pytest.raises(LookupError, match="no index left"):
        on_ranks(read_broken)


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield int(torch.randint(1000, ()))


def read_endless():
    accelerator = Accelerator(cpu=True)
    seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(1000), sampler=Endless(), batch_size=2))
    both = []
    for step, batch in enumerate(loader):
        both.append(accelerator.gather(batch).tolist())
        if step == 100:  # past what is drawn ahead
            return both
    return None


def test_an_endless_sampler_is_drawn_as_it_is_read(on_ranks):
    first, second = on_ranks(read_endless)
    assert first == second
    assert len(first) == 101
    assert len({tuple(samples) for samples in first}) > 90, "a part of the order was read again"


def test_what_torch_draws_alike_needs_no_message():
    """There is no process group here to send one in."""
    for base in (RandomSampler(range(4)), BatchSampler(SubsetRandomSampler(range(4)), 4, drop_last=False)):
        drawn = next(sampling.agreed(iter(base), base))
        assert drawn in range(4) or sorted(drawn) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="process group"):
        next(sampling.agreed(iter(OneByOne()), OneByOne()))


class CountingEpochs(Sampler):
    """Draws at once, as a function of its epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 2

    def __iter__(self):
        return iter([[self.epoch, 0], [self.epoch, 1]])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_sampler_knows_its_epoch_before_it_is_asked(on_ranks, num_workers):
    def read():
        loader = Accelerator(cpu=True).prepare(
            DataLoader(range(9), batch_sampler=CountingEpochs(), num_workers=num_workers)
        )
        return [[batch.tolist() for batch in loader] for _ in range(3)]

    expected = [[[epoch, 0], [epoch, 1]] for epoch in range(3)]
    if not num_workers:
        assert read() == expected
    ranks = on_ranks(read)
    assert [[batch for rank in ranks for batch in rank[epoch]] for epoch in range(3)] == expected


NEVER_REPEATS = {"numpy, seeded by the system"}
BY_EPOCH = {"SubsetRandomSampler", "WeightedRandomSampler"}  # ours draws by (seed, epoch), so that set_epoch works


@pytest.mark.parametrize("name", sorted(set(SAMPLERS) - NEVER_REPEATS - BY_EPOCH))
def test_alone_a_sampler_reads_what_it_reads_in_plain_torch(name):
    found = []
    for prepare in (lambda loader: loader, Accelerator(cpu=True).prepare):
        seed(3)
        found.append([batch.tolist() for batch in prepare(loader_of(name))])
    assert found[0] == found[1]
