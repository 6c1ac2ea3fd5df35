"""What a rank draws while it reads data in its main process: apart from the other ranks, and from its own training."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from notebook_launcher import Accelerator, ConfigError, set_seed
from notebook_launcher.runtime.randomness import OwnStream


def draw():
    return torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002, S311


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


class Augmented(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(draw(), dtype=torch.float64)


def jitter(batch):
    return torch.stack(batch) + random.random()  # noqa: S311


def augmentations(options):
    """Two epochs of numbers that the data set drew, and those that the training draws after each."""
    accelerator = Accelerator(cpu=True)
    seed(0)
    loader = accelerator.prepare(DataLoader(Augmented(), batch_size=2, **options))
    drawn, training = [], []
    for _ in range(2):
        drawn += [number for batch in loader for number in batch.flatten().tolist()]
        training += draw()
    return drawn, training


@pytest.mark.parametrize("options", [{}, {"collate_fn": jitter}, {"num_workers": 1}])
def test_ranks_with_one_seed_augment_apart_and_train_alike(on_ranks, options):
    (first, first_training), (second, second_training) = on_ranks(augmentations, options)
    assert len(set(first)) == len(first) == 24
    assert not set(first) & set(second)
    assert first_training == second_training
    assert on_ranks(augmentations, options)[0] == (first, first_training), "it repeats"


def plain(options):
    seed(0)
    loader = DataLoader(Augmented(), batch_size=2, **options)
    drawn, training = [], []
    for _ in range(2):
        drawn += [number for batch in loader for number in batch.flatten().tolist()]
        training += draw()
    return drawn, training


def test_one_process_draws_what_plain_torch_draws():
    assert augmentations({}) == plain({})


def test_a_stream_goes_on_and_leaves_the_other_where_it_was():
    seed(1)
    expected = [draw(), draw()]
    seed(1)
    stream = OwnStream(draw, 7)
    found = [stream(), draw(), stream(), draw()]
    assert found[1::2] == expected
    seed(7)
    assert found[::2] == [draw(), draw()]


def test_a_function_that_draws_nothing_is_left_alone():
    seed(1)
    calls = []
    stream = OwnStream(lambda: calls.append(draw()) if calls else calls.append(None), 7)
    stream()
    stream()
    seed(1)
    assert calls == [None, draw()], "it drew from the process's own stream from the second call on"


@pytest.mark.parametrize("which", range(3))
def test_a_generator_that_was_not_drawn_from_is_left_alone(which):
    one = (lambda: torch.rand(()).item(), random.random, lambda: float(np.random.rand()))[which]  # noqa: NPY002
    seed(1)
    stream = OwnStream(one, 7)
    stream()
    found = stream(), *draw()
    seed(7)
    one()
    inside = one()
    seed(1)
    assert found == (inside, *draw())
    assert len(stream._generators) == 1


def test_an_error_puts_the_stream_back():
    seed(1)

    def fail():
        draw()
        raise KeyError

    with pytest.raises(KeyError):
        OwnStream(fail, 7)()
    found = draw()
    seed(1)
    assert found == draw()


def drawn_after(options):
    set_seed(5, **options)
    return draw()


def test_one_seed_for_every_stream(on_ranks):
    assert drawn_after({}) == drawn_after({})
    assert len(set(drawn_after({}))) == 3
    first, second = on_ranks(drawn_after, {"device_specific": True})
    assert first == drawn_after({})
    assert all(ours != theirs for ours, theirs in zip(first, second, strict=True))
    first, second = on_ranks(drawn_after, {})
    assert first == second


@pytest.mark.parametrize("seed", ["x", -1, 1.5, None, True])
def test_a_seed_is_a_number(seed):
    before = draw()
    set_seed(5)
    with pytest.raises(ConfigError, match=f"seed={seed!r} is no number of a stream of random numbers; give a whole"):
        set_seed(seed)
    assert draw() == drawn_after({}) != before  # nothing was touched
    with pytest.raises(ConfigError, match="deterministic='no' is neither True nor False"):
        set_seed(5, deterministic="no")
    set_seed(np.int64(5))
    assert draw() == drawn_after({})


def test_a_seed_may_ask_for_determinism():
    before = torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(5)
        assert torch.are_deterministic_algorithms_enabled() is before
        set_seed(5, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=before)
