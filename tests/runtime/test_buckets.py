"""DDP on three ranks and more goes on bit for bit: a sum's rounding depends on where in its bucket a gradient lies."""

import json

import pytest
import torch
from torch import nn

from notebook_launcher import Accelerator, DistributedDataParallelKwargs
from notebook_launcher.runtime import buckets, storage

NUM_STEPS = 6
PLACES = (1, 2, 4)  # torch arranges its buckets between the first step and the second


class Crossed(nn.Module):
    """Its gradients arrive in another order than its parameters are registered in; long enough for a ring's pieces."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(96, 8)
        self.first = nn.Linear(16, 96)
        self.norm = nn.BatchNorm1d(96)
        self.middle = nn.Linear(96, 96)

    def forward(self, x):
        return self.last(self.middle(self.norm(self.first(x)).relu()).relu())


class Training:
    def __init__(self, *, num_accumulated=1, seed=1, model=Crossed, **options):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_accumulated, **options)
        torch.manual_seed(seed)
        model = model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.num_accumulated = num_accumulated
        self.generator = torch.Generator()

    def step(self, number):
        for micro in range(self.num_accumulated):
            self.generator.manual_seed(1000 * number + 10 * micro + self.accelerator.process_index)
            x = torch.randn(8, 16, generator=self.generator)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(x).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()

    def weights(self):
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def different(some, others):
    """The names of those that are not equal bit for bit, with how far they are apart."""
    return {
        name: (value - others[name]).abs().max().item()
        for name, value in some.items()
        if not torch.equal(value, others[name])
    }


def whole_run(folder, **options):
    whole = Training(**options)
    for number in range(1, NUM_STEPS + 1):
        whole.step(number)
        if number in PLACES:
            whole.accelerator.save_state(folder / str(number))
    return whole.weights()


def differences(folder, **options):
    expected = whole_run(folder, **options)
    found = {}
    for place in PLACES:
        resumed = Training(seed=9, **options)
        resumed.accelerator.load_state(folder / str(place))
        for number in range(place + 1, NUM_STEPS + 1):
            resumed.step(number)
        found[place] = different(resumed.weights(), expected)
    return found


def of_ranks(folder, num_accumulated, ddp_options):
    handlers = [DistributedDataParallelKwargs(**ddp_options)]
    return differences(folder, num_accumulated=num_accumulated, kwargs_handlers=handlers)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [3, 4])
@pytest.mark.parametrize(
    ("num_accumulated", "ddp_options"),
    [
        (1, {}),
        (2, {}),
        (1, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.02}),  # several buckets
        (1, {"find_unused_parameters": True}),  # never arranged anew
    ],
)
def test_a_run_of_many_ranks_goes_on_bit_for_bit(on_ranks, num_processes, num_accumulated, ddp_options, tmp_path):
    found = on_ranks(of_ranks, tmp_path, num_accumulated, ddp_options, num_processes=num_processes)
    assert found == [{place: {} for place in PLACES}] * num_processes


# --- what it leaves alone ---------------------------------------------------------------------------------------------


def parameters_of(training):
    return dict(training.accelerator.unwrap_model(training.model).named_parameters())


def listeners(training):
    return [name for name, one in parameters_of(training).items() if one._post_accumulate_grad_hooks]


def saved_after_a_step(folder, **options):
    training = Training(**options)
    with training.model.no_sync():
        training.accelerator.backward(training.model(torch.ones(8, 16)).sum())
    training.optimizer.zero_grad()
    assert len(listeners(training)) == len(parameters_of(training)), "nothing was exchanged yet"
    training.accelerator.save_state(folder / "before")
    training.step(1)
    assert listeners(training) == [], "the first backward was all it listened to"
    training.accelerator.save_state(folder / "after")
    return training


def resumes_quietly(folder):
    """What the load of a checkpoint leaves as it was; returns the files of two."""
    trained = saved_after_a_step(folder)
    resumed = Training(seed=9)
    for number, one in enumerate(parameters_of(resumed).values()):
        one.grad = torch.full_like(one, float(number))
    resumed.accelerator.load_state(folder / "after")
    drawn = torch.rand(3)
    trained.accelerator.load_state(folder / "after")
    assert torch.equal(drawn, torch.rand(3))
    for number, one in enumerate(parameters_of(resumed).values()):
        assert torch.equal(one.grad, torch.full_like(one, float(number)))
    assert different(resumed.weights(), trained.weights()) == {}
    assert listeners(resumed) == []
    resumed.accelerator.save_state(folder / "again")
    names = ("before", "after", "again")
    return [
        json.loads((folder / name / buckets.FILE).read_text()) if (folder / name / buckets.FILE).exists() else None
        for name in names
    ]


def test_loading_leaves_gradients_random_numbers_and_weights_as_they_are(on_ranks, tmp_path):
    before, after, again = on_ranks(resumes_quietly, tmp_path, num_processes=3)[0]
    assert before is None
    assert after == again
    assert after["num_processes"] == 3
    order = after["orders"]["model"]
    assert sorted(order) == sorted(name for name, _ in Crossed().named_parameters())
    assert order.index("last.weight") < order.index("middle.weight") < order.index("first.weight")


def as_of_earlier(folder):
    """Make of a checkpoint one of a version that kept no order."""
    facts = storage.manifest(folder)
    del facts["files"][buckets.FILE]
    (folder / buckets.FILE).unlink()
    (folder / storage.MANIFEST).write_text(json.dumps(facts | {"crc32": storage.crc_of(facts)}))


def goes_on_without(folder, case):
    """Load where zeros must not, or can't, be sent around, and train on."""
    saved_after_a_step(folder)
    resumed = Training(seed=9)
    called = []
    if case == "of an earlier version":
        if resumed.accelerator.is_main_process:
            as_of_earlier(folder / "after")
        resumed.accelerator.wait_for_everyone()
    elif case == "a hook on one rank":
        if resumed.accelerator.process_index == 1:
            parameters_of(resumed)["middle.weight"].register_post_accumulate_grad_hook(called.append)
    elif case == "a hook on gradients":
        parameters_of(resumed)["middle.weight"].register_hook(called.append)
    elif case == "trained before":
        resumed.step(7)
    elif case == "a communication hook":
        resumed.model.register_comm_hook(None, lambda _, bucket: called.append(bucket))
    elif case == "another model":
        order = json.loads((folder / "after" / buckets.FILE).read_text())["orders"]["model"]
        assert not resumed.accelerator._strategy._arrivals[resumed.model].can_replay(order[1:])
    resumed.accelerator.load_state(folder / "after")
    assert called == []
    if case != "a communication hook":
        resumed.step(2)
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "of an earlier version",
        "a hook on one rank",
        "a hook on gradients",
        "trained before",
        "a communication hook",
        "another model",
    ],
)
def test_where_no_order_can_be_taken_up_the_run_goes_on_in_its_own(on_ranks, case, tmp_path):
    assert on_ranks(goes_on_without, tmp_path, case) == [True, True]


def saves(folder):
    saved_after_a_step(folder)
    return True


def loads(folder):
    resumed = Training(seed=9)
    resumed.accelerator.load_state(folder / "after")
    return len(listeners(resumed))


@pytest.mark.filterwarnings("ignore:load_state of")
def test_another_number_of_ranks_has_an_order_of_its_own(on_ranks, tmp_path):
    on_ranks(saves, tmp_path)
    assert on_ranks(loads, tmp_path, num_processes=3) == [len(list(Crossed().parameters()))] * 3
