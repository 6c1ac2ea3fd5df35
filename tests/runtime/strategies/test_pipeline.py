"""Pipeline parallel against the same training by one process, on 2 and 4 ranks: numbers, checkpoints, refusals."""

import functools
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import (
    Accelerator,
    ConfigError,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PipelineParallelPlugin,
)
from notebook_launcher.runtime import models, pipelining, precision

pytestmark = pytest.mark.slow  # a single test may be quick, the file as a whole is not

GLOBAL_BATCH = 12
NUM_STEPS = 20
MAX_NORM = 0.5
Plugin = PipelineParallelPlugin
mse = nn.functional.mse_loss


class Block(nn.Module):
    def __init__(self, width=9):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.norm(self.inner(x).tanh())


def net(seed=0):
    """Eight modules, one of them frozen, one without parameters, the last with a buffer."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(9, 9), nn.GELU(), Block(), Block(), nn.Linear(9, 9), Block(), Block(), nn.Linear(9, 9)
    )
    model[4].requires_grad_(requires_grad=False)
    model[7].register_buffer("seen", torch.rand(9))
    return model


def samples(num=GLOBAL_BATCH * NUM_STEPS):
    torch.manual_seed(1)
    x = torch.randn(num, 9)
    return TensorDataset(x, x.flip(1).sin())


class Trace(NamedTuple):
    losses: torch.Tensor
    norms: torch.Tensor
    state: dict
    rates: list


def accelerator_of(plugin=None, precision="no", fsdp=None, **sizes):
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        fsdp_plugin=fsdp,
        parallelism_config=ParallelismConfig(**sizes) if sizes else None,
        pipeline_plugin=plugin or Plugin(loss_fn=mse, num_microbatches=4),
    )


def parts(accelerator, model=None, kind=torch.optim.AdamW, data=None):
    model = model or net()
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.8)
    loader = DataLoader(data or samples(), batch_size=GLOBAL_BATCH // accelerator._data_process.num_processes)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def train(accelerator, model, optimizer, loader, scheduler):
    losses, norms = [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            losses.append(accelerator.pipeline_step(x, y))
            norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).clone())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    mean = accelerator.reduce(torch.stack(losses), "mean")
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return Trace(mean, torch.stack(norms), state, scheduler.get_last_lr())


def ours(plugin=None, precision="no", kind=torch.optim.AdamW, **sizes):
    accelerator = accelerator_of(plugin, precision, **sizes)
    return train(accelerator, *parts(accelerator, kind=kind))


@functools.cache
def of_one_process(kind=torch.optim.AdamW, precision="no"):
    return ours(kind=kind, precision=precision)


def assert_close(got, expected, tolerance=1e-5):
    assert got.state.keys() == expected.state.keys()
    assert got.rates == expected.rates
    pairs = [*zip(got[:2], expected[:2], strict=True), *((got.state[k], expected.state[k]) for k in got.state)]
    for one, other in pairs:
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance), (one - other).abs().max()


SCHEDULES = {name: Plugin(name, 4, loss_fn=mse) for name in ("gpipe", "1f1b", "interleaved1f1b")}
OF_TWO = {
    **{name: {"plugin": plugin, "pp_size": 2} for name, plugin in SCHEDULES.items()},
    "SGD": {"kind": torch.optim.SGD, "pp_size": 2},
}
OF_FOUR = {
    **{name: {"plugin": plugin, "pp_size": 4} for name, plugin in SCHEDULES.items()},
    **{f"{name} twice": {"plugin": plugin, "pp_size": 2, "dp_replicate_size": 2} for name, plugin in SCHEDULES.items()},
    **{f"{name} sharded": {"plugin": plugin, "pp_size": 2, "dp_shard_size": 2} for name, plugin in SCHEDULES.items()},
    "SGD": {"kind": torch.optim.SGD, "pp_size": 2, "dp_replicate_size": 2},
    "offloaded": {"fsdp": FullyShardedDataParallelPlugin(cpu_offload=True), "pp_size": 2, "dp_shard_size": 2},
}


def optimizer_first():
    accelerator = accelerator_of(pp_size=2, dp_shard_size=2)
    model = net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.8)
    optimizer = accelerator.prepare(optimizer)
    model = accelerator.prepare(model)
    loader, scheduler = accelerator.prepare(DataLoader(samples(), batch_size=GLOBAL_BATCH // 2), scheduler)
    return train(accelerator, model, optimizer, loader, scheduler)


def test_an_optimizer_may_be_prepared_before_its_model(on_ranks):
    for got in on_ranks(optimizer_first, num_processes=4):
        assert_close(got, of_one_process())


def all_variants(variants):
    return {name: ours(**options) for name, options in variants.items()}


@functools.cache
def results(on_ranks, num_processes):
    return on_ranks(all_variants, OF_TWO if num_processes == 2 else OF_FOUR, num_processes=num_processes)


@pytest.mark.parametrize(
    ("num_processes", "name"), [*((2, name) for name in OF_TWO), *((4, name) for name in OF_FOUR)], ids=str
)
def test_all_numbers_are_those_of_one_process_on_the_whole_batch(on_ranks, num_processes, name):
    options = (OF_TWO if num_processes == 2 else OF_FOUR)[name]
    expected = of_one_process(options.get("kind", torch.optim.AdamW))
    for found in results(on_ranks, num_processes):
        assert_close(found[name], expected)


def placed(**sizes):
    accelerator = accelerator_of(**sizes)
    model, optimizer, loader, _ = parts(accelerator)
    x, y = next(iter(loader))
    accelerator.pipeline_step(x, y)
    optimizer.step()
    own = {name for name, one in model.module.named_parameters() if not one.is_meta}
    held = {id(one): name for name, one in model.module.named_parameters()}
    trained = {held[id(one)] for one in optimizer.state}
    others_have_gradients = any(one.grad is not None for one in model.parameters() if one.is_meta)
    return own, trained, others_have_gradients, sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"pp_size": 2, "dp_shard_size": 2}], ids=str)
def test_each_rank_keeps_its_stages_and_trains_them_alone(on_ranks, sizes):
    model = net()
    found = on_ranks(functools.partial(placed, **sizes), num_processes=2 * sizes.get("dp_shard_size", 1))
    names = {name for name, _ in model.named_parameters()}
    assert found[0][0] | found[-1][0] == names
    assert not found[0][0] & found[-1][0]
    for own, trained, others_have_gradients, count in found:
        assert own
        assert trained == {name for name in own if model.get_parameter(name).requires_grad}
        assert not others_have_gradients
        assert count == sum(one.numel() for one in model.parameters())


# --- batches and evaluation ------------------------------------------------------------------------------------------


def short_ones(sizes=(12, 7, 1, 10), schedule="1f1b", **options):
    """Batches of these sizes."""
    accelerator = accelerator_of(Plugin(schedule, 4, loss_fn=mse), **options)
    x, y = samples(sum(sizes)).tensors
    model, optimizer, _, _ = parts(accelerator)
    losses = []
    for pair in zip(x.split(sizes), y.split(sizes), strict=True):
        losses.append(accelerator.pipeline_step(*pair))
        optimizer.step()
        optimizer.zero_grad()
    assert not losses[0].requires_grad
    assert losses[0].shape == ()
    return Trace(torch.stack(losses), torch.zeros(1), accelerator.get_state_dict(model), [])


def all_short_ones():
    return {name: short_ones(schedule=name, pp_size=2) for name in SCHEDULES}


@functools.cache
def short_results(on_ranks):
    return on_ranks(all_short_ones)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_batch_of_any_size_weighs_each_sample_alike(on_ranks, schedule):
    expected = short_ones()
    for found in short_results(on_ranks):
        assert_close(found[schedule], expected)


def many_shapes(**sizes):
    """Sequences of ten lengths, each twice."""
    accelerator = accelerator_of(**sizes)
    model = accelerator.prepare(net())
    torch.manual_seed(3)
    batches = [torch.randn(4, length, 9) for length in [*range(1, 11), *range(1, 11)]]
    losses = [accelerator.pipeline_step(x, x.sin(), training=False) for x in batches]
    return torch.stack(losses), len(getattr(model, "_known", ()))


def test_batches_may_be_of_many_shapes_and_few_are_remembered(on_ranks):
    expected, _ = many_shapes()
    for losses, num_known in on_ranks(functools.partial(many_shapes, pp_size=2)):
        assert torch.allclose(losses, expected, atol=1e-6)
        assert num_known == 8


class Counting(nn.Module):
    """A batch norm whose outputs are a dictionary."""

    def __init__(self, width=9):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return {"x": self.norm(x["x"]), "rest": (x["rest"][0] + 1,)}


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.inner = nn.Linear(9, 9)

    def forward(self, x):
        return {"x": self.dropout(self.inner(x)).T.contiguous().T, "rest": (torch.zeros(len(x), dtype=torch.int64),)}


def with_nested_outputs(**sizes):
    """Dictionaries go from stage to stage, and come out at the end; the first forward of a shape leaves no trace."""
    torch.manual_seed(0)
    accelerator = accelerator_of(Plugin(num_microbatches=2, loss_fn=lambda out, y: mse(out["x"], y["y"])), **sizes)
    model = nn.Sequential(First(), Counting(), Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = samples(8).tensors
    loss = accelerator.pipeline_step(x, {"y": y})
    draw = torch.rand(1)
    counts = accelerator.get_state_dict(model)["2.norm.num_batches_tracked"]
    model.eval()
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    outputs = accelerator.pipeline_forward(x)
    evaluated = accelerator.pipeline_step(x, {"y": y}, training=False)
    after = [one.grad for one in model.parameters() if one.grad is not None]
    same = all(torch.equal(one, other) for one, other in zip(gradients, after, strict=True))
    return loss, draw, counts, outputs, evaluated, mse(outputs["x"], y), same


def drawn_after(num_dropouts):
    samples(8)
    for _ in range(num_dropouts):
        nn.functional.dropout(torch.ones(4, 9))
    return torch.rand(1)


def test_outputs_of_any_nesting_and_evaluation_without_gradients(on_ranks):
    ranks = on_ranks(functools.partial(with_nested_outputs, pp_size=2))
    for loss, draw, counts, outputs, evaluated, by_hand, same in ranks:
        assert loss == ranks[0][0]
        assert counts == 2  # a microbatch each
        assert draw == drawn_after(2 if draw is ranks[0][1] else 0)
        assert outputs["x"].shape == (8, 9)
        assert not outputs["x"].requires_grad
        assert torch.equal(outputs["rest"][0], torch.full((8,), 2))
        assert torch.allclose(evaluated, by_hand)
        assert evaluated == ranks[0][4]
        assert same
    one = with_nested_outputs()  # the same functions without a pipeline
    assert one[3].keys() == ranks[0][3].keys()
    assert torch.allclose(one[4], one[5])


def other_batches(kind, *, sharded=False):
    sizes = {"dp_shard_size": 2} if sharded else {}
    accelerator = accelerator_of(pp_size=2, **sizes)
    parts(accelerator)
    rank = accelerator.process_index
    x, y = samples(16).tensors
    if kind == "size":
        x, y = x[: 8 - rank], y[: 8 - rank]
    if kind == "shape" and rank:
        y = y[:, :8]
    accelerator.pipeline_step(x, y)


@pytest.mark.parametrize(
    ("kind", "sharded", "says"),
    [
        ("size", False, "batches of 7 and of 8 samples"),
        ("size", True, "batches of (5|6|7) and of (7|8) samples"),
        ("shape", False, "differ in shape or dtype"),
    ],
)
def test_ranks_with_other_batches_are_told_so_before_they_wait(on_ranks, kind, sharded, says):
    with pytest.raises(ConfigError, match=says):
        on_ranks(functools.partial(other_batches, kind, sharded=sharded), num_processes=4 if sharded else 2)


def uneven_pipelines():
    """A step on 5 samples in one pipeline and on 7 in the other; and what join_uneven_inputs says."""
    accelerator = accelerator_of(pp_size=2, dp_replicate_size=2)
    model, optimizer, _, _ = parts(accelerator, kind=torch.optim.SGD)
    share = slice(0, 5) if accelerator._data_process.rank == 0 else slice(5, 12)
    x, y = samples(12).tensors
    loss = accelerator.pipeline_step(x[share], y[share])
    optimizer.step()
    with pytest.raises(ConfigError) as caught, accelerator.join_uneven_inputs([model]):
        pass
    return loss, accelerator.get_state_dict(model), str(caught.value)


def test_pipelines_may_have_batches_of_different_sizes(on_ranks):
    model, (x, y) = net(), samples(12).tensors
    losses = [mse(model(x[:5]), y[:5]), mse(model(x[5:]), y[5:])]
    (sum(losses) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    for rank, (loss, state, text) in enumerate(on_ranks(uneven_pipelines, num_processes=4)):
        assert torch.allclose(loss, losses[rank % 2], atol=1e-6)  # the second rank of each stage has other data
        assert all(torch.allclose(state[key], value, atol=1e-6) for key, value in model.state_dict().items())
        assert "join_uneven_inputs" in text
        assert "even_batches=True" in text


# --- models and optimizers of all kinds ------------------------------------------------------------------------------


def of_a_kind(kind, **sizes):
    """Three steps of what is made in another way than the others."""
    accelerator = accelerator_of(Plugin(loss_fn=mse) if kind == "as many microbatches as stages" else None, **sizes)
    rank = accelerator.process_index
    model = net(rank if kind == "other values on other ranks" else 0)
    if kind == "on meta elsewhere" and rank:
        model = model.to("meta")
    frozen = {"first stage frozen": model[:4], "last stage frozen": model[3:]}.get(kind)
    if frozen is not None:
        frozen.requires_grad_(requires_grad=False)
    if kind == "model first":
        model = accelerator.prepare(model)
    inner = accelerator.unwrap_model(model)
    groups = [{"params": inner[7].parameters(), "lr": 0.02}, {"params": inner[:4].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    if kind == "an optimizer that has stepped":
        x, y = samples(6).tensors
        mse(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = samples(36).tensors
    losses = []
    for pair in zip(x.split(12), y.split(12), strict=True):
        losses.append(accelerator.pipeline_step(*pair))
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return Trace(torch.stack(losses), torch.zeros(1), accelerator.get_state_dict(model), [])


KINDS = [
    "an optimizer that has stepped",
    "as many microbatches as stages",
    "first stage frozen",
    "last stage frozen",
    "model first",
    "on meta elsewhere",
    "other values on other ranks",
]


def all_kinds(**sizes):
    return {kind: of_a_kind(kind, **sizes) for kind in KINDS}


@functools.cache
def kinds(on_ranks, *, sharded):
    if sharded:
        return on_ranks(functools.partial(all_kinds, pp_size=2, dp_shard_size=2), num_processes=4)
    return on_ranks(all_kinds, strategy="pp")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_models_and_optimizers_of_all_kinds(on_ranks, kind, sharded):
    expected = of_a_kind(kind)
    for found in kinds(on_ranks, sharded=sharded):
        assert_close(found[kind], expected)


def alone():
    return of_a_kind("model first"), refused_alone()


def refused_alone():
    with pytest.raises(ConfigError) as caught:
        accelerator_of(pp_size=2)
    return str(caught.value)


def test_one_process_needs_no_pipeline(on_ranks):
    one_thread = {"OMP_NUM_THREADS": "1"}  # as here: two add up in another order
    ((found, text),) = on_ranks(alone, num_processes=1, strategy="pp", env=one_thread)
    assert_close(found, of_a_kind("model first"), 0)
    assert "pp 2" in text
    assert "1 process" in text


# --- precision -------------------------------------------------------------------------------------------------------


def in_bf16():
    return ours(precision="bf16", pp_size=2)


def test_bf16_computes_in_it(on_ranks):
    expected, exact = of_one_process(precision="bf16"), of_one_process()
    for found in on_ranks(in_bf16):
        assert torch.allclose(found.losses, expected.losses, rtol=0.05)
        off, rounded = (found.losses - expected.losses)[0].abs(), (exact.losses - expected.losses)[0].abs()
        assert off < rounded / 10
        assert all(value.dtype == torch.float32 for value in found.state.values())


# --- resuming --------------------------------------------------------------------------------------------------------


def half_then_resume(folder, **sizes):
    """The losses and the weights of a run, and those of one that went on after 10 of the 20 steps."""
    runs = []
    for stops, resumes in ((None, False), (10, False), (None, True)):
        accelerator = accelerator_of(Plugin("1f1b", 4, loss_fn=mse), **sizes)
        model, optimizer, loader, scheduler = parts(accelerator, net(int(resumes)))
        if resumes:
            accelerator.load_state(folder)
        losses = []
        for x, y in loader:
            losses.append(accelerator.pipeline_step(x, y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if stops == loader.batches_seen:
                accelerator.save_state(folder)
                break
        runs.append((losses, accelerator.get_state_dict(model)))
    (all_losses, state), _, (later, resumed) = runs
    return all_losses[10:] == later and all(torch.equal(state[key], resumed[key]) for key in state), state


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"pp_size": 2, "dp_shard_size": 2}], ids=str)
def test_a_run_that_resumes_is_bit_equal(on_ranks, tmp_path, sizes):
    run = functools.partial(half_then_resume, str(tmp_path / "state"), **sizes)
    for is_equal, state in on_ranks(run, num_processes=2 * sizes.get("dp_shard_size", 1)):
        assert is_equal
        assert all(not value.is_meta for value in state.values())


def resumed_in_part(folder, stage, sharded, **sizes):
    """The losses of a run that trains one of two stages, and of one that goes on after 2 of its 4 steps."""
    x, y = samples(48).tensors
    pairs = list(zip(x.split(12), y.split(12), strict=True))
    runs = []
    for resumes in (False, True):
        accelerator = accelerator_of(**sizes)
        model = net(int(resumes))
        trained, fixed = (model[:4], model[4:]) if stage == 0 else (model[4:], model[:4])
        fixed.requires_grad_(requires_grad=False)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
        model, optimizer = accelerator.prepare(model, optimizer)
        if resumes:
            accelerator.load_state(folder)
        losses = []
        for number, pair in enumerate(pairs[2:] if resumes else pairs):
            if number == 2:
                accelerator.save_state(folder, sharded=sharded)
            losses.append(accelerator.pipeline_step(*pair))
            optimizer.step()
            optimizer.zero_grad()
        runs.append((losses, len(optimizer.state)))
    (losses, num_states), (resumed, num_resumed) = runs
    return losses[2:] == resumed, num_states, num_resumed


@pytest.mark.parametrize("sharded", [None, False])
@pytest.mark.parametrize("stage", [0, 1])
def test_an_optimizer_of_one_stage_is_saved_by_all_ranks(on_ranks, tmp_path, stage, sharded):
    run = functools.partial(resumed_in_part, str(tmp_path / "state"), stage, sharded, pp_size=2)
    found = on_ranks(run)
    assert [is_equal for is_equal, _, _ in found] == [True, True]
    assert [now == before for _, before, now in found] == [True, True]
    assert sum(before > 0 for _, before, _ in found) == 1


def saved_halfway(folder, **sizes):
    accelerator = accelerator_of(**sizes)
    _, optimizer, loader, scheduler = parts(accelerator)
    for x, y in loader:
        accelerator.pipeline_step(x, y)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if loader.batches_seen == 10:
            accelerator.save_state(folder)


def from_halfway(folder, **sizes):
    """The rest of the run, as the weights that it ends with."""
    accelerator = accelerator_of(**sizes)
    model, optimizer, loader, scheduler = parts(accelerator, net(1))
    accelerator.load_state(folder)
    return train(accelerator, model, optimizer, loader, scheduler)


def test_checkpoints_cross_to_one_process_and_back(on_ranks, tmp_path):
    folder, other, two = str(tmp_path / "of two"), str(tmp_path / "of one"), {"pp_size": 2}
    on_ranks(functools.partial(saved_halfway, folder, **two))
    with pytest.warns(UserWarning, match="saved by 2 processes"):
        expected = from_halfway(folder)
    saved_halfway(other)
    for place in (folder, other):
        for found in on_ranks(functools.partial(from_halfway, place, **two)):
            assert_close(found, expected)


# --- what can't be ---------------------------------------------------------------------------------------------------


def refusals(**sizes):
    """By what was asked for, what the error says."""
    found = {}

    def tried(name, function):
        try:
            function()
        except (ConfigError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    accelerator = accelerator_of(**sizes)
    model, _, loader, _ = parts(accelerator)
    x, y = next(iter(loader))
    tried("called", lambda: model(x))
    tried("backward", lambda: accelerator.backward(torch.zeros((), requires_grad=True)))
    tried("no_sync", lambda: accelerator.no_sync(model).__enter__())
    accelerator.gradient_accumulation_steps = 2
    tried("accumulate", lambda: accelerator.accumulate(model).__enter__())
    tried(
        "steps",
        lambda: Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=ParallelismConfig(**sizes)),
    )
    tried("product", lambda: accelerator_of(pp_size=3))
    tried("tp", lambda: accelerator_of(pp_size=2, tp_size=2))
    tried("no loss_fn", lambda: prepared(Plugin()).pipeline_step(x, y))
    tried("odd points", lambda: prepared(Plugin("interleaved1f1b", split_points=[3, 4])))
    tried("few microbatches", lambda: prepared(Plugin(num_microbatches=1)))
    tried("odd microbatches", lambda: prepared(Plugin("interleaved1f1b", num_microbatches=5)))
    half = models.autocast_view(net(), precision.Precision("fp16", "cpu"))
    tried("fp16", lambda: accelerator._strategy.wrap(half))
    tied = net()
    tied[7].weight = tied[0].weight
    tried("tied", lambda: prepared(model=tied))
    with torch.device("meta"):
        empty = net()
    tried("meta", lambda: prepared(model=empty))
    two = prepared()
    two.prepare(net())
    tried("two models", lambda: two.pipeline_step(x, y))
    return found


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(9, 9)

    def forward(self, x):
        return {"x": self.inner(x), "name": "a text"}


def prepared(plugin=None, model=None):
    accelerator = accelerator_of(plugin, pp_size=2)
    accelerator.prepare(net() if model is None else model)
    return accelerator


@functools.cache
def refused(on_ranks):
    return on_ranks(functools.partial(refusals, pp_size=2))


@pytest.mark.parametrize(
    ("case", "words"),
    {
        "called": ("Sequential was called", "accelerator.pipeline_step", "pipeline_forward"),
        "backward": ("accelerator.backward was called", "pipeline_step"),
        "no_sync": ("strategy='pp'", "num_microbatches"),
        "accumulate": ("strategy='pp'", "accumulate", "num_microbatches"),
        "steps": ("strategy='pp'", "gradient_accumulation_steps", "num_microbatches"),
        "product": ("pp 3", "2 processes"),
        "tp": ("pp_size 2 and tp_size 2", "not tensor parallel"),
        "no loss_fn": ("loss_fn", "PipelineParallelPlugin(loss_fn=...)"),
        "odd points": ("make 3 stages", "2 ranks", "4, 6"),
        "few microbatches": ("num_microbatches=1", "2 stages"),
        "odd microbatches": ("num_microbatches=5", "2 ranks"),
        "fp16": ("mixed_precision='fp16'", "strategy='pp'", "bf16"),
        "tied": ("'0.weight' and '7.weight'", "stages 0 and 1", "split_points"),
        "meta": ("rank 0", "'meta'"),
        "two models": ("2 models", "model=..."),
    }.items(),
    ids=str,
)
def test_what_can_not_be_is_refused_in_words(on_ranks, case, words):
    for found in refused(on_ranks):
        assert found[case].startswith("ConfigError")
        assert all(word in found[case] for word in words), found[case]


@pytest.mark.parametrize(
    ("case", "words"),
    [("loss_fn", ("shape (3,)", "0-d")), ("no tensor", ("Texts", "'a text'", "split_points"))],
)
def test_what_only_one_stage_can_see_ends_the_run(on_ranks, case, words):
    with pytest.raises(ConfigError) as caught:
        on_ranks(functools.partial(one_refusal, case))
    assert all(word in str(caught.value) for word in words)


def one_refusal(case):
    x, y = samples(12).tensors
    if case == "loss_fn":
        prepared(Plugin(num_microbatches=4, loss_fn=lambda out, y: (out - y).sum(1))).pipeline_step(x, y)
    prepared(Plugin(loss_fn=mse), nn.Sequential(Texts(), nn.Linear(9, 9))).pipeline_step(x, y)


@pytest.mark.parametrize("options", [{"schedule": "2f2b"}, {"num_microbatches": 0}, {"num_microbatches": 2.0}], ids=str)
def test_a_plugin_refuses_what_it_does_not_know(options):
    with pytest.raises(ConfigError, match=str(next(iter(options)))):
        Plugin(**options)


class Failing(nn.Module):
    def __init__(self, when):
        super().__init__()
        self.inner = nn.Linear(9, 9)
        self.when, self.count = when, 0

    def forward(self, x):
        self.count += 1
        if self.count == self.when:
            raise ZeroDivisionError("the third forward of this stage")
        return self.inner(x)


def one_stage_fails(place, schedule):
    accelerator = accelerator_of(Plugin(schedule, 4, loss_fn=mse), pp_size=2)
    model = net()
    model[place] = Failing(3)
    model, *_ = parts(accelerator, model)
    for x, y in DataLoader(samples(), batch_size=12):
        accelerator.pipeline_step(x, y)


@pytest.mark.parametrize("place", [0, 7])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_error_on_one_stage_ends_the_run_with_that_error(on_ranks, place, schedule):
    with pytest.raises(ZeroDivisionError, match="the third forward of this stage"):
        on_ranks(one_stage_fails, place, schedule)


# --- cutting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "num_parts", "bounds"),
    [
        ([5, 5, 5, 5], 2, [0, 2, 4]),
        ([9, 1, 1, 1], 2, [0, 1, 4]),
        ([1, 1, 1, 9], 2, [0, 3, 4]),
        ([9, 0, 0, 0], 3, [0, 2, 3, 4]),
        ([0, 0, 0], 3, [0, 1, 2, 3]),
        ([3, 3, 3, 3, 3, 3, 3], 3, [0, 3, 6, 7]),
    ],
)
def test_stages_are_as_even_as_the_modules_allow(sizes, num_parts, bounds):
    assert pipelining._even(sizes, num_parts) == bounds


class Only(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(9, 9)


class Overriding(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + x


@pytest.mark.parametrize(
    ("model", "num_stages", "begins", "words"),
    [
        (Only(), 2, None, ("nn.Sequential", "Only", "split_points", "example")),
        (Overriding(nn.Linear(9, 9), nn.Linear(9, 9)), 2, None, ("Overriding is none",)),
        (nn.Sequential(nn.Linear(9, 9)), 2, None, ("1 modules", "2 stages")),
        (net(), 2, ["nine"], ("'nine'", "'7'")),
        (net(), 2, [0], ("[0]", "after the first")),
        (net(), 4, [4, 3, 5], ("[4, 3, 5]", "order")),
        (net(), 2, [3, 4], ("3 stages", "takes 2")),
    ],
)
def test_what_can_not_be_cut_is_refused(model, num_stages, begins, words):
    with pytest.raises(ConfigError) as caught:
        pipelining.cut(model, num_stages, begins)
    assert all(word in str(caught.value) for word in words), caught.value


def test_split_points_begin_stages():
    model = net()
    cut = pipelining.cut(model, 3, [2, "6"])
    assert [list(dict(stage.named_children())) for stage in cut] == [["0", "1"], ["2", "3", "4", "5"], ["6", "7"]]
    assert cut[1].get_submodule("3") is model[3]


@pytest.mark.parametrize(
    ("num_samples", "valid", "expected"),
    [
        (12, {4}, [(4, 3)]),
        (7, {3}, [(3, 2), (1, 1)]),
        (1, {1}, [(1, 1)]),
        (3, {3}, [(3, 1)]),
        (10, {2}, [(2, 3), (1, 3), (1, 1)]),
    ],
)
def test_a_batch_is_cut_into_schedules_of_equal_microbatches(num_samples, valid, expected):
    assert pipelining.runs(num_samples, 4, valid.__contains__) == expected


# --- tracing ---------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """No sequence of modules; its first parameters come last; a shape of its own making."""

    def __init__(self, *, skips=False):
        super().__init__()
        self.head = nn.Linear(9, 9)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("scale", torch.rand(9))
        self.skips = skips

    def forward(self, x):
        start = x
        for layer in self.layers:
            x = layer(x) * self.scale
        if self.skips:
            x = x + start
        return self.head(x.view(x.shape[0], 3, 3).flatten(1))


def traced_steps(*, sharded=False, **sizes):
    torch.manual_seed(0)
    plugin = Plugin(split_points=["layers.2"], example=torch.randn(3, 9), loss_fn=mse)
    if sharded:
        sizes |= {"dp_shard_size": 2}
    accelerator = accelerator_of(plugin, **sizes)
    torch.manual_seed(2)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms = [], []
    for size in (12, 7, 1):
        x, y = samples(size).tensors
        losses.append(accelerator.pipeline_step(x, y))
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).clone())
        optimizer.step()
        optimizer.zero_grad()
    outputs = accelerator.pipeline_forward(x)
    return Trace(torch.stack(losses), torch.stack(norms), accelerator.get_state_dict(model), []), outputs


@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_is_traced_and_cut_at_split_points(on_ranks, sharded):
    expected, outputs = traced_steps()
    found = on_ranks(functools.partial(traced_steps, pp_size=2, sharded=sharded), num_processes=4 if sharded else 2)
    for one, given in found:
        assert_close(one, expected)
        assert torch.allclose(given, outputs, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (Network(skips=True), {}, "stage 1 takes .*skip connections"),
        (Network(), {"split_points": ["layers.9"]}, "split_points for Network: 'layers.9'"),
    ],
)
def test_what_tracing_can_not_cut_is_refused(model, options, words):
    with pytest.raises(ConfigError, match=words):
        pipelining.cut(model, 2, options.get("split_points", ["layers.2"]), torch.randn(3, 9))


def test_a_traced_model_has_no_number_of_microbatches():
    with pytest.raises(ConfigError, match="as large as its example"):
        Plugin(num_microbatches=2, example=torch.randn(3, 9))
