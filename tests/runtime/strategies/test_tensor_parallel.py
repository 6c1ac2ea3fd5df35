"""Tensor parallel against the same training by one process, on 2 and 4 ranks, alone and with FSDP over its groups."""

import functools
import math
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from notebook_launcher import (
    Accelerator,
    ConfigError,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    init_empty_weights,
)
from notebook_launcher.runtime import models, precision, shards, tensor_plan

pytestmark = pytest.mark.slow  # a single test may be quick, the file as a whole is not

GLOBAL_BATCH = 4
NUM_BATCHES = 21  # groups of 4, and of 1
LENGTH = 5  # no multiple of the ranks
MAX_NORM = 0.5
WORDS = 12


class Attention(nn.Module):
    head_dim = 2

    def __init__(self, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.ModuleList(nn.Linear(8, num_heads * self.head_dim, bias=False) for _ in range(3))
        self.out = nn.Linear(num_heads * self.head_dim, 8)

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in self.qkv)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A language model with tied embeddings, a frozen layer, a layer that every rank has whole, and a buffer."""

    _no_split_modules = ("Block",)
    _tp_plan = {  # noqa: RUF012 - in transformers' words
        "blocks.*.attention.qkv.*": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.norm": "sequence_parallel",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_rep",
        "frozen": "rowwise_rep",
    }

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(1))
        self.whole = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(8))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.whole(self.frozen(x) * self.scale))


def torch_styles():
    """Activations between the split layers are parts of a sequence, as in torch's tutorial."""
    to_whole = {"input_layouts": Shard(1), "desired_input_layouts": Replicate(), "use_local_output": True}
    to_parts = {"output_layouts": Shard(1), "use_local_output": False}
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), **to_parts),
        "blocks.*.attention": PrepareModuleInput(**to_whole),
        "blocks.*.attention.qkv.*": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(**to_parts),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(**to_parts),
        "frozen": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


class Stream(IterableDataset):
    """Nobody knows how long it is."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[index] for index in range(len(self.dataset)))


class Trace(NamedTuple):
    losses: torch.Tensor
    norms: torch.Tensor
    state: dict
    placements: dict
    whole_gradients: list


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def samples(num=GLOBAL_BATCH * NUM_BATCHES):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (num, LENGTH), generator=generator)
    return TensorDataset(ids, (ids * 5 + 1) % WORDS)


def optimizer_of(model, kind=torch.optim.AdamW):
    return kind([p for p in model.parameters() if p.requires_grad], lr=0.01)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def accelerator_of(num_steps=1, plugin=None, **mesh):
    config = ParallelismConfig(**mesh) if mesh else None
    return Accelerator(
        cpu=True,
        split_batches=True,
        gradient_accumulation_steps=num_steps,
        parallelism_config=config,
        fsdp_plugin=plugin,
    )


def train(accelerator, model, optimizer, *, stream=False, shuffle=False, num_batches=NUM_BATCHES):
    scheduler = torch.optim.lr_scheduler.StepLR(getattr(optimizer, "optimizer", optimizer), step_size=2, gamma=0.9)
    data = Stream(samples()) if stream else samples()
    torch.manual_seed(5)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH, shuffle=shuffle)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, norms, gradients = [], [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            losses.append(loss_of(model, x, y))
            accelerator.backward(losses[-1])
            norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            if accelerator.sync_gradients:
                norms.append(norm.clone())
                gradients.extend(
                    [p.grad.clone() for p in model.parameters() if type(p) is nn.Parameter and p.requires_grad]
                )
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if len(losses) == num_batches:
            break
    mean = accelerator.reduce(torch.stack(losses).detach(), "mean")
    placements = {name: one.placements for name, one in model.named_parameters() if isinstance(one, DTensor)}
    return Trace(mean, torch.stack(norms), accelerator.get_state_dict(model), placements, gradients)


def ours(num_steps=1, *, kind=torch.optim.AdamW, first=False, elsewhere=None, stream=False, plugin=None, **mesh):
    accelerator = accelerator_of(num_steps, plugin, **mesh)
    model = net(accelerator.process_index if elsewhere == "other weights" else 0)
    if elsewhere == "meta" and accelerator.process_index:
        with init_empty_weights(include_buffers=True):
            model = Net()
    if first:
        model = accelerator.prepare(model)
    return train(accelerator, model, optimizer_of(model, kind), stream=stream)


@functools.cache
def of_one_process(num_steps=1, kind=torch.optim.AdamW):
    return ours(num_steps, kind=kind)


def assert_close(got, expected, tolerance=1e-5):
    assert got.state.keys() == expected.state.keys()
    pairs = [*zip(got[:2], expected[:2], strict=True), *((got.state[k], expected.state[k]) for k in got.state)]
    for one, other in pairs:
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance), (one - other).abs().max()


# --- numbers ---------------------------------------------------------------------------------------------------------

PAIRS = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
OF_TWO = {
    "the model's own plan": {},
    "SGD": {"tp_plan": PAIRS, "kind": torch.optim.SGD},
    "torch's styles": {"tp_plan": torch_styles()},
    "groups of 4": {"num_steps": 4},
    "groups of 4, torch's styles": {"tp_plan": torch_styles(), "num_steps": 4},
    "other weights elsewhere": {
        "tp_plan": {"embed": "colwise_rep", "whole": "rowwise_split_input"},
        "elsewhere": "other weights",
        "first": True,
    },
    "no weights elsewhere": {"elsewhere": "meta", "stream": True},
}
AS_A_WHOLE = FullyShardedDataParallelPlugin(auto_wrap_policy="NO_WRAP")
OF_FOUR = {
    "tp 4": {"elsewhere": "other weights"},
    "tp 2 x dp_shard 2": {"tp_size": 2},
    "groups of 4": {"tp_size": 2, "num_steps": 4},
    "no weights elsewhere": {"tp_size": 2, "dp_shard_size": 2, "stream": True, "elsewhere": "meta"},
    "dp_replicate 2 x tp 2": {"tp_size": 2, "dp_shard_size": 1, "dp_replicate_size": 2},
    "SGD": {"tp_size": 2, "kind": torch.optim.SGD, "plugin": AS_A_WHOLE, "elsewhere": "other weights"},
}


def all_variants(variants):
    return {name: ours(**options) for name, options in variants.items()}


@functools.cache
def results(on_ranks, num_processes):
    variants = OF_TWO if num_processes == 2 else OF_FOUR
    return on_ranks(all_variants, variants, num_processes=num_processes, strategy="tp")


@pytest.mark.parametrize(
    ("num_processes", "name"), [*((2, name) for name in OF_TWO), *((4, name) for name in OF_FOUR)], ids=str
)
def test_all_numbers_are_those_of_one_process_on_the_whole_batch(on_ranks, num_processes, name):
    options = (OF_TWO if num_processes == 2 else OF_FOUR)[name]
    expected = of_one_process(options.get("num_steps", 1), options.get("kind", torch.optim.AdamW))
    found = results(on_ranks, num_processes)
    for each in found:
        assert_close(each[name], expected)
    whole = [each[name].whole_gradients for each in found]
    for one in whole:  # to the last bit
        assert all(torch.equal(a, b) for a, b in zip(one, whole[0], strict=True))


def test_modules_are_split_as_the_plan_says(on_ranks):
    rows, columns, whole = (Shard(0),), (Shard(1),), (Replicate(),)
    found = results(on_ranks, 2)[1]["the model's own plan"].placements
    assert found["blocks.0.attention.qkv.1.weight"] == found["blocks.0.up.bias"] == rows
    assert found["blocks.0.down.weight"] == found["frozen.weight"] == columns
    assert found["blocks.0.norm.weight"] == found["blocks.0.down.bias"] == whole
    assert found["embed.weight"] == rows  # tied to the head
    assert "whole.weight" not in found
    assert results(on_ranks, 2)[0]["other weights elsewhere"].placements["embed.weight"] == columns
    both = results(on_ranks, 4)[2]["tp 2 x dp_shard 2"].placements
    assert both["blocks.0.down.weight"] == (Shard(0), Shard(1))
    assert both["whole.weight"] == (Shard(0),)


def test_a_plan_s_parts_have_memory_of_their_own(on_ranks):
    assert on_ranks(spare_bytes, strategy="tp") == [0, 0]


def spare_bytes():
    model = accelerator_of(tp_plan=PAIRS).prepare(net())
    locals_ = [one.to_local() for one in model.parameters() if isinstance(one, DTensor)]
    return sum(one.untyped_storage().nbytes() - one.nbytes for one in locals_)


# --- what a loop does besides ----------------------------------------------------------------------------------------


def besides():
    """On 4 ranks, two groups of two."""
    accelerator = accelerator_of(tp_size=2)
    model = accelerator.prepare(net())
    ends = {}
    loader = accelerator.prepare(DataLoader(samples(11), batch_size=4))
    with torch.inference_mode():
        scored = [accelerator.gather_for_metrics((model(x).argmax(-1), x)) for x, _ in loader]
    ends["words"], ends["read"] = (torch.cat(column) for column in zip(*scored, strict=True))
    grown = torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(4):
            grown = torch.cat([grown, model(grown)[:, -1:].argmax(-1)], 1)
    ends["grown"] = grown
    x, y = samples(4)[:]
    with accelerator.no_sync(model):
        accelerator.backward(loss_of(model, x, y))
    accelerator.backward(loss_of(model, x, y))
    norms = [accelerator.clip_grad_norm_(model.parameters(), 1e9, kind) for kind in (2, 1, math.inf)]
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    ends["norms"] = [*norms, accelerator.clip_grad_norm_(model.parameters(), 1e9, math.inf)]
    return ends


@functools.cache
def all_besides(on_ranks, num_processes):
    return on_ranks(besides_and_more, num_processes=num_processes, strategy="tp")


def besides_and_more():
    return besides() | {"dropped": dropped(), "items": by_items()}


def dropped():
    accelerator = accelerator_of(tp_size=2)
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 8))
    model = accelerator_of(tp_size=2, tp_plan={"2": "colwise_rep"}).prepare(model)
    first = model(torch.ones(2, 4))
    torch.manual_seed(accelerator.process_index)
    (batch,) = next(iter(accelerator.prepare(DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4))))
    return torch.cat([first, model(batch)]).tolist()


def by_items():
    accelerator = accelerator_of(2, tp_size=2)
    model = net()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    loader = accelerator.prepare(DataLoader(samples(16), batch_size=4))
    for x, y in loader:
        with accelerator.accumulate(model):
            kept = y < WORDS // 2  # not as many on each rank
            each = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
            accelerator.backward((each * kept.flatten()).sum(), num_items=kept.sum())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def test_evaluation_has_each_sample_once_in_inference_mode(on_ranks):
    with torch.inference_mode():
        x = samples(11)[:][0]
        expected = net()(x).argmax(-1)
    for found in all_besides(on_ranks, 4):
        assert torch.equal(found["read"], x)
        assert torch.equal(found["words"], expected)


def test_a_loop_that_generates_gives_the_same_words_everywhere(on_ranks):
    first, *others = [found["grown"] for found in all_besides(on_ranks, 4)]
    assert first.shape == (1, 5)
    assert all(torch.equal(first, other) for other in others)


def test_norms_of_every_kind_are_those_of_the_whole_gradients(on_ranks):
    model = net()
    for _ in range(2):
        loss_of(model, *samples(4)[:]).backward()
    expected = [nn.utils.clip_grad_norm_(model.parameters(), 1e9, kind) for kind in (2, 1, math.inf)]
    for found in all_besides(on_ranks, 4):
        assert torch.allclose(torch.stack(found["norms"][:3]), torch.stack(expected), rtol=1e-5)
        assert found["norms"][3] == pytest.approx(1e-3)


def test_ranks_of_one_group_drop_the_same(on_ranks):
    first, second, third, fourth = [found["dropped"] for found in all_besides(on_ranks, 4)]
    assert first == second
    assert third == fourth
    assert first != third


def test_losses_that_are_sums_are_weighted_over_the_groups(on_ranks):
    model = net()
    optimizer = optimizer_of(model)
    for start in (0, 8):
        x, y = samples(16)[start : start + 8]
        kept = (y < WORDS // 2).flatten()
        each = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        ((each * kept).sum() / kept.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in all_besides(on_ranks, 4):
        assert all(torch.allclose(found["items"][name], value, atol=1e-5) for name, value in model.state_dict().items())


# --- states ----------------------------------------------------------------------------------------------------------


def saved_and_resumed(folder, mesh):
    traces = []
    for part in ("all", "rest"):
        accelerator = accelerator_of(**mesh)
        model = net(9 if part == "rest" else 0)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        loader = accelerator.prepare(DataLoader(samples(), batch_size=GLOBAL_BATCH, shuffle=True))
        if part == "rest":
            accelerator.load_state(folder)
        losses = []
        for x, y in loader:
            losses.append(loss_of(model, x, y))
            accelerator.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
            if part == "all" and len(losses) == 8:
                accelerator.save_state(folder)
        traces.append((torch.stack(losses).detach()[-NUM_BATCHES + 8 :], accelerator.get_state_dict(model)))
    return traces


@pytest.mark.parametrize(("num_processes", "mesh"), [(2, {}), (4, {"tp_size": 2})], ids=str)
def test_a_run_goes_on_to_the_last_bit(on_ranks, tmp_path, num_processes, mesh):
    for (losses, state), (again, state_again) in on_ranks(
        saved_and_resumed, str(tmp_path / "state"), mesh, num_processes=num_processes, strategy="tp"
    ):
        assert len(losses) == len(again) == NUM_BATCHES - 8
        assert torch.equal(losses, again)
        assert all(torch.equal(state[name], state_again[name]) for name in state)


def taken_up(folder, mesh, *, save=False):
    """States of a model and its optimizer, whole."""
    accelerator = accelerator_of(**mesh)
    model = net(0 if save else 9)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    if save:
        x, y = samples(4)[:]
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
        accelerator.save_state(folder)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of random numbers of another number of processes
            accelerator.load_state(folder)
    states = optimizer.state_dict()["state"].values()
    moments = [shards.whole(values[key]) for values in states for key in sorted(values)]
    return accelerator.get_state_dict(model), moments


def test_states_are_taken_up_by_other_strategies_and_numbers_of_ranks(on_ranks, tmp_path):
    folder = str(tmp_path / "state")
    expected = on_ranks(functools.partial(taken_up, save=True), folder, {"tp_size": 2}, num_processes=4, strategy="tp")
    for found in (
        on_ranks(taken_up, folder, {}, strategy="tp"),
        on_ranks(taken_up, folder, {}, strategy="fsdp"),
        on_ranks(taken_up, folder, {}, strategy="ddp"),
        [taken_up(folder, {})],
    ):
        for one in found:
            assert all(torch.equal(one[0][name], value) for name, value in expected[0][0].items())
            assert all(torch.equal(a, b) for a, b in zip(one[1], expected[0][1], strict=True))


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(model, size=2, **options):
    with pytest.raises(ConfigError) as caught:
        tensor_plan.splits(model, options.get("tp_plan"), size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "options", "parts"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), {}, ["tp_size=2", "Sequential", "none of its own", "tp_plan={"]),
        (net, {"tp_plan": {"layers.*.up": "colwise"}}, ["'layers.*.up'", "no module of the Net", "embed, blocks"]),
        (net, {"tp_plan": {"*.up": "colwise"}}, ["'*.up'", "one part of a name"]),
        (net, {"tp_plan": {"blocks.*.up": "column"}}, ["'column' is not known", "colwise"]),
        (net, {"tp_plan": {"blocks.*.up": 3}}, ["3 for 'blocks.0.up'", "ParallelStyle"]),
        (
            net,
            {"tp_plan": {"blocks.*.norm": "colwise"}},
            ["'blocks.0.norm', a LayerNorm", "splits nn.Linear"],
        ),
        (net, {"size": 3, "tp_plan": PAIRS}, ["'blocks.0.up', a Linear, has 16 outputs", "tp_size=3"]),
        (net, {"size": 5, "tp_plan": {"embed": "rowwise"}}, ["'embed', a Embedding, has 12 embeddings", "tp_size=5"]),
        (
            lambda: nn.ModuleDict({"attention": Attention(num_heads=3)}),
            {"tp_plan": {"attention.qkv.*": "colwise", "attention.out": "rowwise"}},
            ["'attention', a Attention, has num_heads=3", "tp_size=2"],
        ),
        (net, {"tp_plan": {"embed": "colwise", "head": "colwise_rep"}}, ["'embed' and 'head'", "one weight"]),
    ],
)
def test_a_plan_that_can_not_be_says_why(make, options, parts):
    text = refused(make(), **options)
    assert all(part in text for part in parts), text


def test_a_model_s_own_plan_may_name_what_it_lacks_with_a_warning():
    model = net()
    model._tp_plan = {**Net._tp_plan, "blocks.*.experts": "colwise"}
    with pytest.warns(UserWarning, match=r"blocks\.\*\.experts is the name of no module of the Net"):
        tensor_plan.splits(model, None, 2)


def refusals():
    texts = []
    for options in (
        {"parallelism_config": ParallelismConfig(tp_size=3)},
        {"parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2)},
        {"parallelism_config": ParallelismConfig(tp_size=2), "deepspeed_plugin": DeepSpeedPlugin()},
    ):
        with pytest.raises(ConfigError) as caught:
            Accelerator(cpu=True, **options)
        texts.append(str(caught.value))
    with init_empty_weights():
        model = Net()
    with pytest.raises(ConfigError) as caught:
        accelerator_of(tp_size=2).prepare(model)
    texts.append(str(caught.value))
    half = models.autocast_view(net(), precision.Precision("fp16", "cpu"))
    with pytest.raises(ConfigError) as caught:
        accelerator_of(tp_size=2)._strategy.wrap(half)
    return [*texts, str(caught.value)]


def test_what_can_not_be_together_is_refused_in_words(on_ranks):
    for product, both, zero, meta, half in on_ranks(refusals):
        assert "tp 3 = 3, and the run has 2 processes" in product
        assert "dp_shard 2 x tp 2 = 4, and the run has 2 processes" in both
        assert "strategy='tp'" in zero
        assert "strategy='deepspeed'" in zero
        assert "on rank 0 has parameters on the device 'meta'" in meta
        assert "mixed_precision='fp16'" in half
        assert "strategy='tp'" in half


@pytest.mark.parametrize("launched", [None, "ddp", "fsdp", "tp"])
def test_the_size_alone_chooses_it_and_goes_with_what_it_does_as_well(on_ranks, launched):
    options = {} if launched is None else {"strategy": launched}
    assert on_ranks(chosen, **options) == [((Shard(0),), False)] * 2


def chosen():
    model = accelerator_of(tp_size=2).prepare(net())
    return model.blocks[0].up.weight.placements, isinstance(model, FSDPModule)


def uneven():
    accelerator = accelerator_of(tp_size=2)
    model = accelerator.prepare(net())
    with pytest.raises(ConfigError) as caught, accelerator.join_uneven_inputs([model]):
        pass
    return str(caught.value)


def test_groups_that_average_need_as_many_batches(on_ranks):
    assert all("join_uneven_inputs can't be with strategy='tp'" in text for text in on_ranks(uneven, num_processes=4))


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(input=x)


def called_by_keyword():
    model = accelerator_of(tp_size=2, tp_plan={"norm": "sequence"}).prepare(ByKeyword())
    with pytest.raises(ConfigError) as caught:
        model(torch.ones(1, 2, 4))
    return str(caught.value)


def test_a_part_of_a_sequence_is_taken_of_what_is_given_by_position(on_ranks):
    for text in on_ranks(called_by_keyword):
        assert "tp_plan has 'sequence' for a LayerNorm, which was called with keywords only" in text
