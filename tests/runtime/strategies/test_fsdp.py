"""FSDP against the same training by one process, on 2 and 4 ranks: numbers, checkpoints, and models of all kinds."""

import contextlib
import functools
import json
import types
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from notebook_launcher import (
    Accelerator,
    ConfigError,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    init_empty_weights,
)
from notebook_launcher.core import fsdp_options

pytestmark = pytest.mark.slow  # a single test may be quick, the file as a whole is not

GLOBAL_BATCH = 12
NUM_BATCHES = 10  # groups of 4, 4 and 2
MAX_NORM = 0.5
Plugin = FullyShardedDataParallelPlugin


class Block(nn.Module):
    def __init__(self, width=9):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.norm(self.inner(x).tanh())


class Net(nn.Module):
    """Blocks, weights that are tied across modules, a frozen layer, and a buffer."""

    _no_split_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(9, 9, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(9, 9, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(9, 9).requires_grad_(requires_grad=False)
        self.register_buffer("scale", torch.rand(9), persistent=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.frozen(x) * self.scale)


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
    placements: set


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def samples():
    torch.manual_seed(1)
    x = torch.randn(GLOBAL_BATCH * NUM_BATCHES, 9)
    return TensorDataset(x, x.flip(1).sin())


def optimizer_of(model, kind=torch.optim.AdamW):
    return kind([p for p in model.parameters() if p.requires_grad], lr=0.05)


def placements_of(model):
    return {one.placements for one in model.parameters() if isinstance(one, DTensor)}


def train(accelerator, model, optimizer, *, stream=False, num_batches=NUM_BATCHES, max_norm=MAX_NORM):
    scheduler = torch.optim.lr_scheduler.StepLR(getattr(optimizer, "optimizer", optimizer), step_size=2, gamma=0.8)
    data = Stream(samples()) if stream else samples()
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, norms = [], []
    for index, (x, y) in enumerate(loader):
        if index == num_batches:
            break
        with accelerator.accumulate(model):
            losses.append(nn.functional.mse_loss(model(x), y))
            accelerator.backward(losses[-1])
            norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
            if accelerator.sync_gradients:
                norms.append(norm.clone())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    mean = accelerator.reduce(torch.stack(losses).detach(), "mean")
    return Trace(mean, torch.stack(norms), accelerator.get_state_dict(model), placements_of(model))


def accelerator_of(num_steps=1, precision="no", **options):
    return Accelerator(cpu=True, gradient_accumulation_steps=num_steps, mixed_precision=precision, **options)


def ours(num_steps=1, precision="no", plugin=None, mesh=None, kind=torch.optim.AdamW, *, first=False, stream=False):
    accelerator = accelerator_of(num_steps, precision, fsdp_plugin=plugin, parallelism_config=mesh)
    model = net()
    if first:
        model = accelerator.prepare(model)
    return train(accelerator, model, optimizer_of(model, kind), stream=stream)


@functools.cache
def of_one_process(num_steps=1, precision="no", kind=torch.optim.AdamW):
    return ours(num_steps, precision, kind=kind)


def assert_close(got, expected, tolerance=1e-6):
    assert got.state.keys() == expected.state.keys()
    for one, other in [
        *zip(got[:2], expected[:2], strict=True),
        *((got.state[k], expected.state[k]) for k in got.state),
    ]:
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance), (one - other).abs().max()


# --- numbers ---------------------------------------------------------------------------------------------------------

VARIANTS = {
    "of the model's own choice": {},
    "as a whole": {"plugin": Plugin(auto_wrap_policy="NO_WRAP")},
    "by class": {"plugin": Plugin(transformer_cls_names_to_wrap=["Linear"])},
    "by size": {"plugin": Plugin(min_num_params=80)},
    "by a function": {"plugin": Plugin(auto_wrap_policy=lambda module: isinstance(module, nn.LayerNorm))},
    "kept after forward": {"plugin": Plugin(reshard_after_forward=False)},
    "given back after forward": {"plugin": Plugin(reshard_after_forward=True)},
    "offloaded": {"plugin": Plugin(cpu_offload=True)},
    "activations computed again": {"plugin": Plugin(activation_checkpointing=True)},
    "model prepared first": {"first": True},
    "a stream": {"stream": True},
    "SGD": {"kind": torch.optim.SGD},
}
OF_FOUR = {
    "all sharded": {},
    "two replicas": {"mesh": ParallelismConfig(dp_replicate_size=2)},
    "by both sizes": {"mesh": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2), "stream": True},
}


def all_variants(variants, num_steps):
    return {name: ours(num_steps, **options) for name, options in variants.items()}


@functools.cache
def results(on_ranks, num_processes, num_steps):
    variants = VARIANTS if num_processes == 2 else OF_FOUR
    return on_ranks(all_variants, variants, num_steps, num_processes=num_processes, strategy="fsdp")


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize(
    ("num_processes", "name"), [*((2, name) for name in VARIANTS), *((4, name) for name in OF_FOUR)], ids=str
)
def test_all_numbers_are_those_of_one_process_on_the_whole_batch(on_ranks, num_processes, name, num_steps):
    options = (VARIANTS if num_processes == 2 else OF_FOUR)[name]
    expected = of_one_process(num_steps, kind=options.get("kind", torch.optim.AdamW))
    for found in results(on_ranks, num_processes, num_steps):
        assert_close(found[name], expected)
        in_replicas = (Replicate(), Shard(0)) if "mesh" in options else (Shard(0),)
        assert found[name].placements == {in_replicas}


def by_hand(num_steps, precision):
    """Torch's FSDP as people write it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy} if precision == "bf16" else {}
    model = net()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = optimizer_of(model)
    rank, share = dist.get_rank(), GLOBAL_BATCH // dist.get_world_size()
    norms = []
    for index in range(NUM_BATCHES):
        start = index * GLOBAL_BATCH + rank * share
        x, y = samples()[start : start + share]
        is_last = (index + 1) % num_steps == 0 or index + 1 == NUM_BATCHES
        size = min(num_steps, NUM_BATCHES - index // num_steps * num_steps)
        model.set_requires_gradient_sync(is_last)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            predicted = model(x)
        (nn.functional.mse_loss(predicted.float(), y) / size).backward()
        if is_last:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor())
            optimizer.step()
            optimizer.zero_grad()
            if len(norms) % 2 == 0:
                optimizer.param_groups[0]["lr"] *= 0.8
    return torch.stack(norms), {name: value.full_tensor() for name, value in model.state_dict().items()}


def against_hand_written():
    """It is the plugin alone that chooses the strategy."""
    choices = [(steps, precision) for steps in (1, 4) for precision in ("no", "bf16")]
    return {choice: (ours(*choice, Plugin()), by_hand(*choice)) for choice in choices}


@functools.cache
def both(on_ranks):
    return on_ranks(against_hand_written)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_all_numbers_are_those_of_hand_written_fsdp(on_ranks, num_steps, precision):
    for found in both(on_ranks):
        got, (norms, state) = found[num_steps, precision]
        assert torch.allclose(got.norms, norms, rtol=1e-6)
        assert got.state.keys() == state.keys()
        assert all(value.dtype == torch.float32 for value in got.state.values())
        assert all(torch.allclose(got.state[name], state[name], atol=1e-6) for name in state)


def weighted():
    accelerator = accelerator_of(2)
    model = net()
    model, optimizer = accelerator.prepare(model, optimizer_of(model, torch.optim.SGD))
    loader = accelerator.prepare(DataLoader(samples(), batch_size=GLOBAL_BATCH // accelerator.num_processes))
    for x, y in loader:
        with torch.inference_mode():  # before training, too
            model(x)
        with accelerator.accumulate(model):
            kept = (x > 0).float()  # not as many on each rank
            loss = ((model(x) - y).square() * kept).sum()
            accelerator.backward(loss, num_items=kept.sum())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def test_losses_that_are_sums_are_weighted_by_all_ranks_items(on_ranks):
    expected = weighted()
    for found in on_ranks(weighted, strategy="fsdp"):
        assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in expected.items())


def test_bf16_computes_in_it(on_ranks):
    found, exact = both(on_ranks)[0][1, "bf16"][0].losses, of_one_process().losses
    assert not torch.equal(found, exact)
    assert torch.allclose(found, exact, rtol=0.05)


# --- models of all kinds ---------------------------------------------------------------------------------------------


class Shapes(NamedTuple):
    local: int
    full: int
    sharded_blocks: list
    is_tied: bool
    frozen: bool


def looked_at(plugin=None):
    accelerator = accelerator_of(fsdp_plugin=plugin)
    model = accelerator.prepare(net())
    parameters = list(model.parameters())
    blocks = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert all(isinstance(one, DTensor) for one in parameters)
    return Shapes(
        sum(one.to_local().numel() for one in parameters),
        sum(one.numel() for one in parameters),
        blocks,
        model.first.weight is model.last.weight,
        not model.frozen.weight.requires_grad,
    )


def from_rank0():
    """Rank 0 has the weights, the other nothing at all."""
    accelerator = accelerator_of()
    with init_empty_weights(include_buffers=True) if accelerator.process_index else contextlib.nullcontext():
        model = net()
    optimizer = optimizer_of(model)
    model = accelerator.prepare_model(model)
    is_tied = model.first.weight is model.last.weight
    return train(accelerator, model, optimizer), is_tied


def different_weights():
    accelerator = accelerator_of()
    model = accelerator.prepare(net(seed=accelerator.process_index))
    return accelerator.get_state_dict(model)


def two_models():
    """A frozen teacher, one of whom every rank has all, and two students with an optimizer each."""
    accelerator = accelerator_of(num_steps=2)
    teacher, whole = (net(5).requires_grad_(requires_grad=False) for _ in range(2))
    students = [net(1), net(2)]
    optimizers = [optimizer_of(one, torch.optim.SGD) for one in students]
    teacher, *prepared = accelerator.prepare(teacher, *students, *optimizers)
    students, optimizers = prepared[:2], prepared[2:]
    whole = accelerator.prepare_model(whole, evaluation_mode=True)
    torch.manual_seed(3)
    share = 8 // accelerator.num_processes
    start = accelerator.process_index * share
    for _ in range(4):
        x = torch.randn(8, 9)[start : start + share]
        for student, optimizer in zip(students, optimizers, strict=True):
            with accelerator.accumulate(student):
                loss = (student(x) - teacher(x) - whole(x)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return [accelerator.get_state_dict(one) for one in (teacher, whole, *students)]


def by_a_method():
    """Trained by a method of the model that is not its call, as README names it to torch."""
    accelerator = accelerator_of()
    model = net()
    model.loss_of = types.MethodType(lambda self, x: self.blocks[0](self.first(x)).square().mean(), model)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    if accelerator.num_processes > 1:
        register_fsdp_forward_method(model, "loss_of")
    torch.manual_seed(3)
    for x in torch.randn(3, 8, 9):
        accelerator.backward(model.loss_of(x))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def state_of_before():
    """An optimizer that has stepped before its model was sharded keeps its state."""
    accelerator = accelerator_of()
    model = net()
    optimizer = optimizer_of(model)
    model(torch.ones(1, 9)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return train(accelerator, model, optimizer)


def compiled():
    accelerator = accelerator_of()
    model = torch.compile(net(), backend="eager")
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    loss = model(torch.ones(2, 9)).sum()
    accelerator.backward(loss)
    optimizer.step()
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    return sorted(accelerator.get_state_dict(model)), isinstance(inner, Net), type(inner).__name__


def evaluated_in_between():
    """Evaluation leaves parameters sharded, so that groups and optimizers know them."""
    accelerator = accelerator_of(fsdp_plugin=Plugin(reshard_after_forward=False))
    model = net()
    optimizer = optimizer_of(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    kinds = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(torch.ones(2, 9))
        kinds.append(all(isinstance(one, DTensor) for one in model.parameters()))
    return kinds, train(accelerator, model, optimizer)


def left_in_the_middle():
    """A group whose loop was left is dropped, with what torch keeps of it out of sight."""
    accelerator = accelerator_of(4)
    model = net()
    optimizer = optimizer_of(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare(DataLoader(samples(), batch_size=2))
    for x, _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(100 * model(x).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        break
    return train(accelerator, model, optimizer)


def clipped_by_value():
    accelerator = accelerator_of()
    model = accelerator.prepare(net())
    extra = nn.Parameter(torch.ones(3))
    accelerator.backward(100 * model(torch.ones(2, 9)).square().sum() + extra.sum() * 5)
    norms = [accelerator.clip_grad_norm_([*model.parameters(), extra], 1e9, kind) for kind in (2, 1, float("inf"))]
    accelerator.clip_grad_value_([*model.parameters(), extra], 0.25)
    largest = accelerator.clip_grad_norm_([*model.parameters(), extra], 1e9, float("inf"))
    return norms, float(largest)


def refusals():
    texts = []
    for options in (
        {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=3)},
        {"fsdp_plugin": Plugin(sharding_strategy="NO_SHARD")},
        {"fsdp_plugin": Plugin(auto_wrap_policy="transformers")},
    ):
        with pytest.raises(ConfigError) as caught:
            accelerator_of(**options)
        texts.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        accelerator_of(fsdp_plugin=Plugin(transformer_cls_names_to_wrap="Blok")).prepare(net())
    texts.append(str(caught.value))
    with init_empty_weights():
        model = net()
    accelerator = accelerator_of()
    with pytest.raises(ConfigError) as caught:
        accelerator.prepare(model)
    texts.append(str(caught.value))
    with pytest.raises(ConfigError) as caught, accelerator.join_uneven_inputs([accelerator.prepare(net())]):
        pass
    return [*texts, str(caught.value), accelerator.distributed_type]


def prepared_after_its_optimizer():
    """Each in a call of its own, the optimizer first."""
    accelerator = accelerator_of()
    model = net()
    optimizer = accelerator.prepare(optimizer_of(model))
    return train(accelerator, accelerator.prepare(model), optimizer)


def evaluated_in_bf16():
    """In another precision it is a view of the model that is called."""
    accelerator = accelerator_of(precision="bf16")
    model = net()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    with torch.inference_mode():
        outputs = model(torch.ones(2, 9))
    is_sharded = all(isinstance(one, DTensor) for one in model.parameters())
    accelerator.backward(model(torch.ones(2, 9)).sum())
    optimizer.step()
    return outputs.dtype, is_sharded


def all_models():
    plugins = {
        None: None,
        "Linear": Plugin(transformer_cls_names_to_wrap="Linear,Block"),
        80: Plugin(min_num_params=80),
    }
    ways = (
        from_rank0,
        different_weights,
        two_models,
        by_a_method,
        state_of_before,
        compiled,
        evaluated_in_between,
        prepared_after_its_optimizer,
        evaluated_in_bf16,
        left_in_the_middle,
        clipped_by_value,
        refusals,
    )
    return {key: looked_at(plugin) for key, plugin in plugins.items()} | {way.__name__: way() for way in ways}


@functools.cache
def found_of_models(on_ranks):
    return on_ranks(all_models, strategy="fsdp")


def test_each_rank_has_its_part_and_blocks_are_as_chosen(on_ranks):
    ranks = found_of_models(on_ranks)
    full = sum(one.numel() for one in net().parameters())
    assert sum(one[None].local for one in ranks) == ranks[0][None].full == full
    assert max(one[None].local for one in ranks) < 0.6 * full
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert ranks[0][None].sharded_blocks == ["", *blocks]
    # The tied one stays with the whole: sharded alone it would not be tied any more.
    assert ranks[0]["Linear"].sharded_blocks == ["", *(n for b in blocks for n in (b, f"{b}.inner")), "frozen"]
    assert ranks[0][80].sharded_blocks == ["", *(f"{b}.inner" for b in blocks), "frozen"]
    assert all(one[key].is_tied and one[key].frozen for one in ranks for key in (None, "Linear", 80))


def test_ranks_without_weights_take_those_of_rank_0(on_ranks):
    for one in found_of_models(on_ranks):
        got, is_tied = one["from_rank0"]
        assert_close(got, of_one_process())
        assert is_tied
        assert all(torch.equal(value, net(0).state_dict()[name]) for name, value in one["different_weights"].items())


def test_several_models_frozen_ones_too(on_ranks):
    expected = two_models()
    for one in found_of_models(on_ranks):
        for got, other in zip(one["two_models"], expected, strict=True):
            assert all(torch.allclose(got[name], other[name], atol=1e-6) for name in other)


def test_a_method_that_torch_was_told_of_trains(on_ranks):
    expected = by_a_method()
    for one in found_of_models(on_ranks):
        assert all(torch.allclose(value, expected[name], atol=1e-6) for name, value in one["by_a_method"].items())
    assert not torch.equal(expected["blocks.0.inner.weight"], net().state_dict()["blocks.0.inner.weight"])


def test_an_optimizer_keeps_the_state_that_it_has(on_ranks):
    expected = state_of_before()
    for one in found_of_models(on_ranks):
        assert_close(one["state_of_before"], expected)


def test_names_are_those_of_the_users_module_when_it_was_compiled(on_ranks):
    assert all(one["compiled"] == (sorted(net().state_dict()), True, "Net") for one in found_of_models(on_ranks))


def test_evaluation_leaves_parameters_sharded(on_ranks):
    for one in found_of_models(on_ranks):
        kinds, trace = one["evaluated_in_between"]
        assert kinds == [True, True]
        assert_close(trace, of_one_process())


def test_an_optimizer_may_be_prepared_before_its_model(on_ranks):
    for one in found_of_models(on_ranks):
        assert_close(one["prepared_after_its_optimizer"], of_one_process())


def test_evaluation_in_bf16(on_ranks):
    assert all(one["evaluated_in_bf16"] == (torch.float32, True) for one in found_of_models(on_ranks))


def test_a_group_that_was_left_is_dropped(on_ranks):
    for one in found_of_models(on_ranks):
        assert_close(one["left_in_the_middle"], of_one_process(4))


def test_norms_of_any_kind_go_over_sharded_and_whole_gradients(on_ranks):
    norms, largest = clipped_by_value()
    for one in found_of_models(on_ranks):
        got, clipped = one["clipped_by_value"]
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(got, norms, strict=True))
        assert clipped == largest == 0.25


def test_what_cannot_be_is_refused_in_words(on_ranks):
    mesh, no_shard, policy, name, meta, join, kind = found_of_models(on_ranks)[0]["refusals"]
    assert "dp_replicate 2 x dp_shard 3 = 6, and the run has 2 processes" in mesh
    assert "use strategy='ddp'" in no_shard
    assert "TRANSFORMER_BASED_WRAP" in policy
    assert "'Blok' is not known. Did you mean 'Block'?" in name
    assert "on rank 0 has parameters on the device 'meta'" in meta
    assert "even_batches=True, the default" in join
    assert kind == DistributedType.FSDP


# --- options ---------------------------------------------------------------------------------------------------------


def test_accelerates_keys_are_translated():
    section = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Block,Other",
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_offload_params": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_activation_checkpointing": "true",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": False,
    }
    found = fsdp_options.settings(Plugin(), json.dumps(section))
    assert found == fsdp_options.Settings(
        wrap="TRANSFORMER_BASED_WRAP",
        class_names=("Block", "Other"),
        reshard_after_forward=False,
        offload=True,
        checkpoint_activations=True,
        saves_whole=True,
    )
    assert fsdp_options.settings(
        Plugin(sharding_strategy=1, cpu_offload=False), json.dumps(section)
    ).reshard_after_forward


def test_the_variables_of_accelerate_launch_are_read(monkeypatch):
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "1")
    found = fsdp_options.settings(Plugin(), None)
    assert (found.class_names, found.reshard_after_forward, found.offload) == (("Block",), False, True)


def test_what_only_the_first_fsdp_has_is_named():
    with pytest.warns(UserWarning, match=r"no meaning: backward_prefetch='BACKWARD_POST', use_orig_params=False\."):
        fsdp_options.settings(Plugin(backward_prefetch="BACKWARD_POST", use_orig_params=False), None)
    with pytest.raises(ConfigError, match=r"'fsdp_ofload_params' is not known. Did you mean 'fsdp_offload_params'"):
        fsdp_options.settings(Plugin(), '{"fsdp_ofload_params": true}')


def of_the_launch():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_the_launch_hands_on_its_section(on_ranks):
    section = {"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "LayerNorm"}}
    found = on_ranks(of_the_launch, strategy="fsdp", extra=section)
    assert found == [["", "blocks.0.norm", "blocks.1.norm", "blocks.2.norm"]] * 2
