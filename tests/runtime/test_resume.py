"""A run that was interrupted goes on bit for bit as the one that was not, wherever that was and whatever it reads."""

import dataclasses
import os
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from notebook_launcher import Accelerator, ConfigError, skip_first_batches
from notebook_launcher.core.errors import CheckpointError
from notebook_launcher.runtime.backends import torch_devices
from notebook_launcher.runtime.plugins import DataLoaderConfiguration

given_cpu = torch_devices.cpu
NUM_SAMPLES = 22
BATCH_SIZE = 4
NUM_EPOCHS = 2


@pytest.fixture(autouse=True)
def _signal_handler_of_loaders():
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)  # torch sets one with the first loader that has workers


@pytest.fixture(autouse=True)
def _nothing_waits_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Augmented(Dataset):
    """Samples that are disturbed as they are read, from all the random numbers that there are."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(3) + random.random() + np.random.rand()  # noqa: NPY002, S311
        return torch.full((3,), float(index)) + noise.float() * 0.1


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        mine = range(NUM_SAMPLES) if info is None else range(info.id, NUM_SAMPLES, info.num_workers)
        return (Augmented()[index] for index in mine)


class Stateful(IterableDataset):
    """Goes on where its state says, and can't be read a second time."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def __iter__(self):
        stop = (self.position // NUM_SAMPLES + 1) * NUM_SAMPLES
        while self.position < stop:
            self.position += 1
            yield Augmented()[self.position - 1]


class NumpyOrder(Sampler):
    def __init__(self):
        self.order = None

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        yield from np.random.permutation(NUM_SAMPLES).tolist()  # noqa: NPY002


class Lazy(Sampler):
    """Draws each index when it is asked for, from the numbers that dropout draws from too."""

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        for _ in range(NUM_SAMPLES):
            yield int(torch.randint(NUM_SAMPLES, ()))


class OwnNumbers(Sampler):
    """Draws its order, as a whole and again as it goes, from random numbers of its own of every kind."""

    def __init__(self):
        self.numpy = np.random.default_rng(0)
        self.old = np.random.RandomState(1)
        self.python = random.Random(2)  # noqa: S311
        self.torch = torch.Generator().manual_seed(3)
        self.name = "own"

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        first = self.numpy.integers(NUM_SAMPLES) + self.old.randint(NUM_SAMPLES)
        for _ in range(NUM_SAMPLES):
            last = self.python.randrange(NUM_SAMPLES) + int(torch.randint(NUM_SAMPLES, (), generator=self.torch))
            yield int(first + last) % NUM_SAMPLES


class Counting(OwnNumbers):
    """Makes its order from a count of its passes."""

    def __init__(self):
        self.num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        return iter(np.random.default_rng(self.num_passes).permutation(NUM_SAMPLES).tolist())


class Late(OwnNumbers):
    """Makes its random numbers when it first needs them, and counts passes though it is told epochs."""

    def __init__(self):
        self.torch = self.python = None
        self.num_passes = np.int64(0)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.num_passes += 1
        if self.torch is None:
            self.torch, self.numpy = torch.Generator().manual_seed(3), np.random.default_rng(0)
            self.python, self.old = random.Random(2), np.random.RandomState(1)  # noqa: S311
        first = self.num_passes + 7 * self.epoch
        return (int(first + index) % NUM_SAMPLES for index in super().__iter__())


class OwnNoise(Augmented):
    def __init__(self):
        self.noise = np.random.default_rng(0)

    def __getitem__(self, index):
        return super().__getitem__(index) + self.noise.random(dtype=np.float32)


class Cached(Augmented):
    """Keeps what it has made, and counts that."""

    def __init__(self):
        self.noise, self.size = [], 0

    def __getitem__(self, index):
        while self.size <= index:
            self.noise.append(0.1 * self.size)
            self.size += 1
        return super().__getitem__(index) + self.noise[index]


class Buffered(IterableDataset):
    """Shuffles in a buffer, by random numbers of its own."""

    def __init__(self):
        self.order = random.Random(4)  # noqa: S311

    def __iter__(self):
        buffer = []
        for index in range(NUM_SAMPLES):
            buffer.append(torch.full((3,), float(index)))
            if len(buffer) > 5:
                yield buffer.pop(self.order.randrange(len(buffer)))
        yield from buffer


LOADERS = {
    "shuffle buffer": lambda: {"dataset": Buffered()},
    "numbers of its own": lambda: {"dataset": Augmented(), "sampler": OwnNumbers()},
    "late numbers": lambda: {"dataset": Augmented(), "sampler": Late()},
    "counting sampler": lambda: {"dataset": OwnNoise(), "sampler": Counting()},
    "cached": lambda: {"dataset": Cached(), "shuffle": True},
    "shuffled": lambda: {"dataset": Augmented(), "shuffle": True},
    "in order": lambda: {"dataset": Augmented()},
    "workers": lambda: {"dataset": Augmented(), "shuffle": True, "num_workers": 2},
    "generator": lambda: {"dataset": Augmented(), "shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "workers and generator": lambda: {**LOADERS["generator"](), "num_workers": 2},
    "sampler": lambda: {"dataset": Augmented(), "sampler": NumpyOrder()},
    "lazy sampler": lambda: {"dataset": Augmented(), "sampler": Lazy()},
    "lazy sampler and workers": lambda: {**LOADERS["lazy sampler"](), "num_workers": 1, "prefetch_factor": 1},
    "stream": lambda: {"dataset": Stream()},
    "stream and workers": lambda: {"dataset": Stream(), "num_workers": 2},
    "stateful stream": lambda: {"dataset": Stateful()},
    "distributed sampler": lambda: {
        "dataset": Augmented(),
        "sampler": DistributedSampler(Augmented(), num_replicas=2, rank=1),
    },
}
IN_PROCESS = [name for name in LOADERS if "workers" not in name]


class Count:
    """What a training script keeps by itself."""

    def __init__(self):
        self.epoch = self.step = 0

    def state_dict(self):
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state):
        self.epoch, self.step = state["epoch"], state["step"]


def seed_all(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


class Training:
    def __init__(self, loader, *, seed=1, precision="no", num_steps=1, **options):
        torch_devices.cpu = lambda world: dataclasses.replace(
            given_cpu(world), refusals=dict.fromkeys(("no", "fp16", "bf16"), "")
        )
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=num_steps, **options
        )
        seed_all(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        loader = DataLoader(**LOADERS[loader](), batch_size=BATCH_SIZE)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)
        self.losses = []

    def step(self, batch):
        with self.accelerator.accumulate(self.model):
            # The first is so large that fp16 overflows: the scale has a history.
            loss = self.model(batch).square().mean() * (1e4 if self.count.step == 0 else 1.0)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.count.step += 1
        self.losses.append(loss.item())

    def run(self, folder=None):
        """Train to the end, saving after every step that ends a group; return where the steps and epochs ended."""
        saved = []
        while self.count.epoch < NUM_EPOCHS:
            for batch in self.loader:
                self.step(batch)
                self.count.epoch += self.loader.end_of_dataloader
                if folder is not None and self.accelerator.sync_gradients:
                    saved.append(self.count.step)
                    self.accelerator.save_state(folder / str(self.count.step))
            if folder is not None:
                saved.append(f"epoch {self.count.epoch}")
                self.accelerator.save_state(folder / saved[-1])
        return saved

    def result(self):
        scalings = [one.state_dict() for one in self.accelerator._checkpoints._scalings()]
        weights = self.accelerator.get_state_dict(self.model)
        return (
            self.losses,
            # DDP gives rank 0's buffers to the others in each forward, so that those of others matter to nobody.
            [value.tolist() for name, value in weights.items() if self.accelerator.is_main_process or "2." not in name],
            self.scheduler.get_last_lr(),
            scalings + self.accelerator._accumulation.saved_scalings,
            [torch.rand(2).tolist(), random.random(), np.random.rand()],  # noqa: NPY002, S311
        )


def compare(folder, loader, **options):
    """Interrupted runs against the one that was not; returns the number of places at which a run may be interrupted.

    A shuffled loader is interrupted at each of them, others at some: the first and last step, and between.
    """
    whole = Training(loader, **options)
    whole.run()
    expected = whole.result()
    saving = Training(loader, **options)
    places = saving.run(folder)
    assert saving.result() == expected, "saving itself changes nothing"
    for place in places if loader == "shuffled" else places[:: len(places) // 3]:
        resumed = Training(loader, seed=99, **options)
        resumed.accelerator.load_state(folder / str(place))
        num_before = resumed.count.step
        resumed.run()
        losses, *rest = resumed.result()
        assert losses == expected[0][num_before:], f"losses after {place}"
        assert rest == list(expected[1:]), f"state after {place}"
    return len(places)


@pytest.mark.parametrize("loader", IN_PROCESS)
def test_a_run_interrupted_after_any_step_goes_on_as_if_it_was_not(loader, tmp_path):
    assert compare(tmp_path, loader) == (8 if loader == "distributed sampler" else 14)


@pytest.mark.parametrize(
    "loader", ["workers", "workers and generator", "lazy sampler and workers", "stream and workers"]
)
def test_loader_workers_draw_what_they_would_have(loader, tmp_path):
    assert compare(tmp_path, loader, num_steps=3) == 6


def test_loss_scale_and_groups_go_on(tmp_path):
    assert compare(tmp_path, "shuffled", precision="fp16", num_steps=4) == 6  # groups of 4 and 2


def ranks_compare(folder, loader, options):
    os.fsync = lambda _: None
    return compare(folder, loader, **options)


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        ("shuffled", {"num_steps": 2}),
        ("numbers of its own", {}),
        ("counting sampler", {}),
        ("late numbers", {}),
        ("stream", {}),
        ("stateful stream", {}),
        ("stateful stream", {"dataloader_config": DataLoaderConfiguration(dispatch_batches=False)}),
        ("stateful stream", {"split_batches": True}),
        ("stateful stream", {"dataloader_config": DataLoaderConfiguration(even_batches=False)}),
        ("stateful stream", {"dataloader_config": DataLoaderConfiguration(even_batches=False, dispatch_batches=False)}),
        ("workers", {"split_batches": True, "num_steps": 3}),
        ("lazy sampler", {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}),
    ],
)
def test_two_ranks_interrupted_go_on_as_if_they_were_not(on_ranks, loader, options, tmp_path):
    assert min(on_ranks(ranks_compare, tmp_path, loader, options)) >= 6


class Endless(Sampler):
    """Batches as numpy gives them, from the random numbers of the training."""

    def __iter__(self):
        while True:
            yield [np.int64(torch.randint(9999, ()))]


def read_endless(folder, place):
    """Samples and random numbers of some steps of an order that is drawn while training draws, after ``place``."""
    accelerator = Accelerator(cpu=True)
    seed_all(accelerator.process_index if place is None else 99)
    loader = accelerator.prepare(DataLoader(range(9999), batch_sampler=Endless()))
    if place is not None:
        accelerator.load_state(folder / str(place))
    found = []
    for number, batch in enumerate(loader, 1 + (place or 0)):
        found.append((number, accelerator.gather(batch).tolist(), torch.rand(()).item()))
        if place is None and number in {20, 33, 64}:
            accelerator.save_state(folder / str(number))
        if number == 100:
            return found
    raise AssertionError


def ranks_read_endless(folder):
    whole = read_endless(folder, None)
    return [read_endless(folder, place) == whole[place:] for place in (20, 33, 64)]


def test_what_two_ranks_have_drawn_ahead_of_an_endless_order_is_read(on_ranks, tmp_path):
    assert on_ranks(ranks_read_endless, tmp_path) == [[True] * 3] * 2


class Named(Dataset):
    def __getitem__(self, name):
        return name.value


@dataclasses.dataclass
class Name:
    value: int


class ByName(Sampler):
    def __len__(self):
        return 4

    def __iter__(self):
        return map(Name, range(4))


def test_indices_that_no_checkpoint_can_hold_are_drawn_again(tmp_path):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Named(), sampler=ByName(), batch_size=1))
    for _ in loader:
        accelerator.save_state(tmp_path / "saved")
        break
    accelerator, loader = resumed(tmp_path / "saved", DataLoader(Named(), sampler=ByName(), batch_size=1))
    assert listed(loader) == [[1], [2], [3]]


# --- where a loader is ------------------------------------------------------------------------------------------------


def plain(num_batches=6, **options):
    return DataLoader(range(num_batches * 2), batch_size=2, **options)


def interrupted(folder, loader, num_batches):
    """An accelerator and its loader, after ``num_batches`` of the second epoch, which were saved."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader)
    list(loader)
    for number, _ in enumerate(loader, 1):
        if number == num_batches:
            accelerator.save_state(folder)
            return accelerator, loader
    raise AssertionError


def listed(loader):
    return [batch.tolist() for batch in loader]


def epochs_of(loader, seed=3):
    torch.manual_seed(seed)
    loader = Accelerator(cpu=True).prepare(loader)
    return [listed(loader) for _ in range(3)]


def resumed(folder, loader):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader)
    accelerator.load_state(folder)
    return accelerator, loader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipping_counts_from_the_epoch_s_beginning(tmp_path, num_workers):
    epochs = epochs_of(plain(shuffle=True))
    torch.manual_seed(3)
    interrupted(tmp_path, plain(shuffle=True, num_workers=num_workers), 3)
    for num_skipped, set_epoch in ((3, False), (3, True), (1, True), (6, False), (9, False)):
        accelerator, loader = resumed(tmp_path, plain(shuffle=True, num_workers=num_workers))
        rest = accelerator.skip_first_batches(loader, num_skipped)
        if set_epoch:
            loader.set_epoch(1)
            rest.set_epoch(1)
        assert listed(rest) == epochs[1][num_skipped:]
        assert listed(loader) == epochs[2], "the rest was handed out already"


def test_a_skipped_pass_is_saved_with_its_true_place(tmp_path):
    epochs = epochs_of(plain(shuffle=True))
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(plain(shuffle=True))
    rest = skip_first_batches(loader, 2)
    assert accelerator.prepare(rest) is rest
    seen = []
    for batch in rest:
        seen.append(batch.tolist())
        if len(seen) == 2:
            accelerator.save_state(tmp_path)
            assert rest.batches_seen == loader.batches_seen == 4
        assert loader.end_of_dataloader == (len(seen) == 4)
    assert seen == epochs[0][2:]
    accelerator, loader = resumed(tmp_path, plain(shuffle=True))
    assert loader.batches_seen == 4
    assert listed(loader) == epochs[0][4:]
    assert loader.batches_seen == 0


def trained(folder, num_batches, *, is_skipped, stops=None):
    """The batches of the first epoch that were trained on, in a loop that skips by hand those it had before."""
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(torch.arange(12.0)[:, None], batch_size=2)
    )
    if num_batches:
        accelerator.load_state(folder)
    used = []
    for number, batch in enumerate(loader):
        if is_skipped(loader, number):
            continue
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        used.append(batch[0].item())
        if len(used) == stops:
            accelerator.save_state(folder)
            break
    return used


@pytest.mark.parametrize("num_batches", [2, 4])
def test_a_loop_that_skips_by_hand_what_load_state_skips_is_warned(tmp_path, num_batches):
    trained(tmp_path, 0, is_skipped=lambda *_: False, stops=num_batches)
    said = rf"after {num_batches} batches of the epoch, and of the next 2 none had a backward.*batches_seen"
    with pytest.warns(UserWarning, match=said) as warned:
        trained(tmp_path, num_batches, is_skipped=lambda _, number: number < num_batches)
    assert warned[0].filename == __file__
    rest = trained(tmp_path, num_batches, is_skipped=lambda loader, _: loader.batches_seen <= num_batches)
    assert rest == [2.0 * number for number in range(num_batches, 6)]


def test_batches_left_out_after_load_state_are_the_loop_s_own_business(tmp_path):
    trained(tmp_path, 0, is_skipped=lambda *_: False, stops=3)
    assert trained(tmp_path, 3, is_skipped=lambda _, number: number == 0) == [8.0, 10.0]


def test_another_epoch_begins_at_its_beginning(tmp_path):
    epochs = epochs_of(plain(shuffle=True))
    torch.manual_seed(3)
    interrupted(tmp_path, plain(shuffle=True), 3)
    _, loader = resumed(tmp_path, plain(shuffle=True))
    loader.set_epoch(2)
    assert listed(loader) == epochs[2]


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": True, "generator": torch.Generator()}])
@pytest.mark.parametrize("num_skipped", [None, 0, 2, 6])
def test_after_an_epoch_s_last_batch_comes_the_next_epoch(tmp_path, options, num_skipped):
    """For loops that find their epoch by their steps; one that skips all of the epoch that is over has it so."""
    if "generator" in options:
        options["generator"].manual_seed(4)
    epochs = epochs_of(plain(**options))
    if "generator" in options:
        options["generator"].manual_seed(4)
    torch.manual_seed(3)
    interrupted(tmp_path, plain(**options), 6)
    accelerator, loader = resumed(tmp_path, plain(**options))
    assert loader.batches_seen == 0
    accelerator.save_state(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        _, loader = resumed(folder, plain(**options))
        first = loader if num_skipped is None else skip_first_batches(loader, num_skipped)
        if num_skipped == 6:
            assert listed(first) == []
            first = loader
        assert listed(first) == epochs[2][{2: 2}.get(num_skipped, 0) :]


def test_an_epoch_that_is_over_and_named_has_no_rest(tmp_path):
    epochs = epochs_of(plain(shuffle=True))
    torch.manual_seed(3)
    interrupted(tmp_path, plain(shuffle=True), 6)
    _, loader = resumed(tmp_path, plain(shuffle=True))
    loader.set_epoch(1)
    assert listed(loader) == []
    assert listed(loader) == epochs[2]


def test_a_loop_that_was_left_is_not_gone_on_with(tmp_path):
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(plain(shuffle=True))
    for _ in loader:
        break
    accelerator.save_state(tmp_path)
    following = listed(loader)
    _, loader = resumed(tmp_path, plain(shuffle=True))
    assert loader.batches_seen == 0
    assert listed(loader) == following


def test_data_with_a_state_go_on_where_a_loop_that_was_left_has_brought_them(tmp_path):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Rewinding(), batch_size=1))
    for _ in loader:
        break
    accelerator.save_state(tmp_path)
    following = listed(loader)
    _, loader = resumed(tmp_path, DataLoader(Rewinding(), batch_size=1))
    assert listed(loader) == following


def left(folder, loader, how):
    """Save outside the loop, which was left after two batches; return the batches of that epoch."""
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader)
    try:
        for number, _ in enumerate(loader, 1):
            if number == 2:
                if how == "break":
                    break
                raise how
    except (KeyboardInterrupt, ValueError):
        accelerator.save_state(folder)
    else:
        accelerator.save_state(folder)
    return epochs_of(plain(shuffle=True))[0]


@pytest.mark.parametrize("how", [KeyboardInterrupt, ValueError])
def test_a_loop_that_an_exception_has_left_goes_on_where_it_is_handled(tmp_path, how):
    epoch = left(tmp_path, plain(shuffle=True), how)
    _, loader = resumed(tmp_path, plain(shuffle=True))
    assert loader.batches_seen == 2
    assert listed(loader) == epoch[2:]


def test_a_loop_that_was_left_goes_on_where_what_it_had_is_skipped(tmp_path):
    epoch = left(tmp_path, plain(shuffle=True), "break")
    _, loader = resumed(tmp_path, plain(shuffle=True))
    assert listed(skip_first_batches(loader, 2)) == epoch[2:]
    _, loader = resumed(tmp_path, plain(shuffle=True))
    loader.set_epoch(0)
    assert listed(loader) == epoch[2:]


def test_a_pass_of_before_loading_is_not_saved_again(tmp_path):
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(plain(shuffle=True))
    accelerator.save_state(tmp_path / "a")
    list(loader)
    for _ in loader:
        break
    accelerator.load_state(tmp_path / "a")
    accelerator.save_state(tmp_path / "b")
    _, loader = resumed(tmp_path / "b", plain(shuffle=True))
    assert listed(skip_first_batches(loader, 2)) == epochs_of(plain(shuffle=True))[0][2:]


def test_what_was_loaded_can_be_saved_before_it_goes_on(tmp_path):
    epochs = epochs_of(plain(shuffle=True))
    torch.manual_seed(3)
    interrupted(tmp_path / "a", plain(shuffle=True), 3)
    accelerator, _ = resumed(tmp_path / "a", plain(shuffle=True))
    accelerator.save_state(tmp_path / "b")
    _, loader = resumed(tmp_path / "b", plain(shuffle=True))
    assert listed(loader) == epochs[1][3:]


def test_a_loop_that_was_left_is_over_in_the_handler_of_an_earlier_exception_too(tmp_path):
    try:
        next(iter(()))
    except StopIteration:  # as where training begins again with a smaller batch
        left(tmp_path, plain(shuffle=True), "break")
    _, loader = resumed(tmp_path, plain(shuffle=True))
    assert loader.batches_seen == 0
    assert listed(loader) == epochs_of(plain(shuffle=True))[1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_that_counts_what_it_gives_is_skipped_exactly(tmp_path, num_workers):
    class Consuming(Counting):
        def __iter__(self):
            for _ in range(12):
                self.num_passes += 1
                yield self.num_passes % 12

    def loader():
        return DataLoader(torch.arange(12), sampler=Consuming(), batch_size=2, num_workers=num_workers)

    epochs = epochs_of(loader())
    torch.manual_seed(3)
    interrupted(tmp_path, loader(), 3)
    _, going_on = resumed(tmp_path, loader())
    assert listed(skip_first_batches(going_on, 3)) == epochs[1][3:]
    assert listed(going_on) == epochs[2]


def test_data_that_was_read_by_another_loader_since_goes_on_from_there(tmp_path):
    def loaders():
        data = OwnNoise()
        return DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4)

    def rest(folder=None):
        torch.manual_seed(3)
        accelerator = Accelerator(cpu=True)
        training, evaluation = accelerator.prepare(*loaders())
        if folder is not None and folder.exists():
            accelerator.load_state(folder)
        batches = iter(training)
        if not training.batches_seen:
            next(batches), next(batches)
            if folder is not None:
                accelerator.save_state(folder)
        else:
            batches = training
        return listed(evaluation), listed(batches)

    expected = rest(tmp_path / "a")
    assert rest(tmp_path / "a") == expected


def test_data_that_has_become_shorter_is_said(tmp_path):
    interrupted(tmp_path, plain(), 5)
    with pytest.warns(UserWarning, match="and now 8 samples in batches of 2"):
        _, loader = resumed(tmp_path, plain(num_batches=4))
    with pytest.raises(CheckpointError, match=r"after 5 batches of an epoch, and the data, a range, now has 4"):
        list(loader)


@pytest.mark.parametrize(
    ("options", "now"),
    [
        ({"num_batches": 8}, "16 samples in batches of 2 by 0 workers"),
        ({"num_workers": 1}, "12 samples in batches of 2 by 1 workers"),
    ],
)
def test_a_loader_that_reads_otherwise_is_said(tmp_path, options, now):
    interrupted(tmp_path, plain(), 3)
    with pytest.warns(UserWarning, match=f"loader 1 read 12 samples in batches of 2 by 0 workers, and now {now}"):
        _, loader = resumed(tmp_path, plain(**options))
    assert loader.batches_seen == 3


def test_a_loader_with_another_generator_is_refused(tmp_path):
    interrupted(tmp_path, plain(shuffle=True), 3)
    with pytest.raises(CheckpointError, match="of a loader with other generators than those of loader 1"):
        resumed(tmp_path, plain(shuffle=True, generator=torch.Generator()))


class Rewinding(Stateful):
    """Begins anew once it is at its end."""

    def __iter__(self):
        while self.position < 4:
            self.position += 1
            yield self.position
        self.position = 0


@pytest.mark.parametrize("num_batches", [3, 4])
def test_a_data_set_that_begins_anew_at_its_end_does_so_after_resuming_there(tmp_path, num_batches):
    interrupted(tmp_path, DataLoader(Rewinding(), batch_size=1), num_batches)
    _, loader = resumed(tmp_path, DataLoader(Rewinding(), batch_size=1))
    rest = [[[4]]] if num_batches == 3 else []
    assert [listed(loader) for _ in range(2)] == [*rest, [[1], [2], [3], [4]], [[1], [2], [3], [4]]][:2]


def test_data_that_is_read_in_order_is_skipped_by_reading():
    class Numbers(IterableDataset):
        def __iter__(self):
            return iter(range(8))

    loader = DataLoader(Numbers(), batch_size=2)
    prepared = Accelerator(cpu=True).prepare(loader)
    for one in (skip_first_batches(prepared, 3), skip_first_batches(loader, 3)):
        assert listed(one) == listed(one) == [[6, 7]]
    assert listed(Accelerator(cpu=True).prepare(skip_first_batches(loader, 1))) == [[2, 3], [4, 5], [6, 7]]


def test_a_plain_loader_is_skipped_without_reading():
    read = []

    class Noted(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            read.append(index)
            return index

    loader = DataLoader(Noted(), batch_size=2)
    rest = skip_first_batches(loader, 3)
    assert (listed(rest), read, len(rest), rest.batch_size) == ([[6, 7]], [6, 7], 1, 2)
    assert listed(Accelerator(cpu=True).prepare(rest)) == [[6, 7]]
    assert list(skip_first_batches(DataLoader(range(3), batch_size=None), 1)) == [1, 2]
    with pytest.raises(TypeError, match=r"takes a DataLoader, and was given \[1\]"):
        skip_first_batches([1], 1)


@pytest.mark.parametrize("num_batches", [-1, 1.5, "2"])
def test_a_number_of_batches_to_skip_that_is_none(num_batches):
    with pytest.raises(ConfigError, match=f"num_batches={num_batches!r} is no number of batches to skip; .* 0 or more"):
        skip_first_batches(DataLoader(range(3)), num_batches)


@pytest.mark.parametrize(("num_batches", "is_exact"), [(2, True), (6, False), (7, False)])
def test_workers_that_persist_are_said_to_draw_other_numbers_where_they_do(num_batches, is_exact, tmp_path, recwarn):
    def prepared():
        accelerator = Accelerator(cpu=True)
        options = {"num_workers": 1, "persistent_workers": True}
        return accelerator, accelerator.prepare(DataLoader(Augmented(), BATCH_SIZE, **options))

    def is_told():
        told = any("workers that persist had drawn" in str(one.message) for one in recwarn)
        recwarn.clear()
        return told

    torch.manual_seed(3)
    accelerator, loader = prepared()
    read = []
    while len(read) < 14:
        for batch in loader:
            read.append(batch.tolist())
            if len(read) == num_batches:
                accelerator.save_state(tmp_path)
    other, fresh = prepared()
    other.load_state(tmp_path)
    assert is_told() is not is_exact
    rest = read[num_batches:]
    assert (listed(fresh) == rest[: 6 - num_batches % 6]) is is_exact
    assert (listed(fresh) == rest[6 - num_batches % 6 :][:6]) is is_exact
    accelerator.load_state(tmp_path)
    assert is_told(), "its workers have gone on"


# --- other numbers of processes ---------------------------------------------------------------------------------------


def save_on_ranks(folder):
    torch.manual_seed(3)
    return interrupted(folder, plain(num_batches=12, shuffle=True), 3)[0].num_processes


def rest_on_ranks(folder):
    torch.manual_seed(9)
    if Accelerator(cpu=True).is_main_process:
        with pytest.warns(UserWarning, match=r"saved by 2 processes and is loaded by \d, which can't keep"):
            _, loader = resumed(folder, plain(num_batches=12, shuffle=True))
    else:
        _, loader = resumed(folder, plain(num_batches=12, shuffle=True))
    return listed(loader), listed(loader)


@pytest.mark.parametrize(("num_processes", "num_seen"), [(1, 6), (3, 6), (4, 4)])
def test_another_number_of_processes_goes_on_in_the_same_order(on_ranks, tmp_path, num_processes, num_seen):
    epochs = epochs_of(plain(num_batches=12, shuffle=True))
    on_ranks(save_on_ranks, tmp_path)
    found = on_ranks(rest_on_ranks, tmp_path, num_processes=num_processes)
    for number, expected in enumerate((epochs[1][num_seen:], epochs[2])):
        rounds = zip(*(passes[number] for passes in found), strict=True)
        assert [batch for round_ in rounds for batch in round_] == expected


def save_early_on_ranks(folder):
    torch.manual_seed(3)
    return interrupted(folder, plain(num_batches=12, shuffle=True), 1)[0].num_processes


def rest_after_saving_again(folder):
    """On one process, in batches as large as a step of two was; saved again before anything was read."""
    loader = plain(num_batches=12, shuffle=True)
    torch.manual_seed(9)
    with pytest.warns(UserWarning, match="saved by 2 processes"):
        accelerator, _ = resumed(folder, DataLoader(loader.dataset, 2 * loader.batch_size, shuffle=True))
    accelerator.save_state(folder / "again")
    _, again = resumed(folder / "again", DataLoader(loader.dataset, 2 * loader.batch_size, shuffle=True))
    return listed(again)


def test_what_another_number_of_processes_has_loaded_and_saved_again_reads_nothing_twice(on_ranks, tmp_path):
    epochs = epochs_of(plain(num_batches=12, shuffle=True))
    on_ranks(save_early_on_ranks, tmp_path)
    (found,) = on_ranks(rest_after_saving_again, tmp_path, num_processes=1)
    assert sum(found, []) == sum(epochs[1][2:], [])  # noqa: RUF017 - few
