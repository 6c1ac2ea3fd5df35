"""DeepSpeed's ZeRO against DDP: the same losses, norms and weights, whatever is spread; and what it can't is said."""

import contextlib
import copy
import functools
import gc
import importlib.util
import json
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from notebook_launcher import Accelerator, merge_checkpoint
from notebook_launcher.core import deepspeed_options
from notebook_launcher.core.deepspeed_options import DeepSpeedPlugin
from notebook_launcher.core.errors import CheckpointError, ConfigError
from notebook_launcher.runtime import options, plugins, zero_checkpoint, zero_config
from notebook_launcher.runtime.stand_ins import DummyOptim, DummyScheduler
from notebook_launcher.runtime.strategies import deepspeed

pytestmark = pytest.mark.slow  # a single test may be quick, the file as a whole is not

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(
    not HAS_DEEPSPEED, reason="the package deepspeed is not installed: pip install 'notebook-launcher[deepspeed]'"
)
STAGES = (0, 1, 2, 3)
MICRO_BATCHES = 7  # a rank's: groups of 3, 3 and 1
NUM_STEPS = 3
TOLERANCE = 1e-6


@pytest.fixture
def on_ranks(on_ranks):
    """With DeepSpeed loaded before the ranks are made: each would import it, for seconds."""
    return functools.partial(on_ranks, preload=["deepspeed"])


class Stream(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[index] for index in range(len(self.dataset)))


def pieces(kind="AdamW"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    if kind == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    elif kind == "plain SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(4 * MICRO_BATCHES, 5)
    return model, optimizer, TensorDataset(x, x.sum(1, keepdim=True).sin())


def accelerator(stage, num_steps=NUM_STEPS, **chosen):
    """Under DDP where ``stage`` is None."""
    plugin = None if stage is None else DeepSpeedPlugin(zero_stage=stage, **chosen)
    return Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=num_steps)


def weights(acc, model):
    return torch.cat([value.reshape(-1) for value in acc.get_state_dict(model).values()]).clone()


def largest_difference(one, other):
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True) if a is not None and a.numel())


def train(stage, *, num_steps=NUM_STEPS, clip=None, kind="AdamW", stream=False, items=False, value=None, **chosen):
    acc = accelerator(stage, num_steps, **chosen)
    model, optimizer, dataset = pieces(kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
    loader = DataLoader(Stream(dataset) if stream else dataset, batch_size=2)
    model, optimizer, scheduler = acc.prepare(model, optimizer, scheduler)
    loader = acc.prepare(loader)
    losses, norms = [], []
    for number, (x, y) in enumerate(loader):
        with acc.accumulate(model):
            if items:
                loss = (model(x) - y).square()[: 1 + number % 2].sum()
                acc.backward(loss, num_items=1 + number % 2)
            else:
                loss = nn.functional.mse_loss(model(x), y)
                acc.backward(loss)
            if clip is not None:
                norm = acc.clip_grad_norm_(model.parameters(), clip)
                norms += [norm] if acc.sync_gradients else []
            if value is not None:
                acc.clip_grad_value_(model.parameters(), value)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms) if norms else None, weights(acc, model)


VARIANTS = {
    "each micro-batch a step": {"num_steps": 1},
    "groups": {},
    "SGD": {"kind": "SGD"},
    "clipped": {"clip": 0.3},
    "norm only": {"clip": float("inf")},
    "clipped by value": {"value": 0.05},
    "clipped SGD of an unknown length": {"clip": 0.3, "kind": "SGD", "stream": True},
    "numbers of items": {"items": True, "kind": "SGD"},
}


def compare_all():
    found = {}
    for name, variant in VARIANTS.items():
        expected = train(None, **variant)
        for stage in STAGES:
            found[name, stage] = largest_difference(train(stage, **variant), expected)
        for stage in (2, 3):
            place = {"offload_optimizer_device": "cpu"}
            found[name, f"{stage} offloaded"] = largest_difference(train(stage, **variant, **place), expected)
        found[name, "3 all offloaded"] = largest_difference(
            train(3, **variant, **place, offload_param_device="cpu"), expected
        )
    return found


@needs_deepspeed
def test_every_stage_trains_as_ddp_does(on_ranks):
    for found in on_ranks(compare_all):
        assert len(found) == len(VARIANTS) * 7
        assert {key: worst for key, worst in found.items() if not worst <= TOLERANCE} == {}


def shape_of_training():
    found = {}
    for stage in (1, 2, 3):
        acc = accelerator(stage, 1)
        model, optimizer, _ = pieces()
        model, prepared = acc.prepare(model, optimizer)
        acc.backward(model(torch.ones(2, 5)).sum())
        prepared.step()
        trained = model.trained.engine.optimizer.optimizer
        state = sum(v.numel() for s in trained.state.values() for v in s.values() if v.numel() > 1)
        found[stage] = state, sum(p.numel() for p in model.parameters())
    return found


@needs_deepspeed
def test_what_a_stage_spreads_is_spread(on_ranks):
    whole = 5 * 8 + 8 + 8 + 1
    for found in on_ranks(shape_of_training):
        for stage, (state, held) in found.items():
            assert state < 1.2 * whole, f"stage {stage} keeps the whole of two moments"
            assert held == (0 if stage == 3 else whole) or stage == 3


def several_models():
    found = []
    for stage in (None, *STAGES):
        torch.manual_seed(0)
        acc = accelerator(stage, 1)
        frozen = nn.Linear(3, 4).requires_grad_(requires_grad=False)
        generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        of_generator = torch.optim.AdamW(generator.parameters(), lr=0.05)
        of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
        frozen, generator, critic, of_generator, of_critic = acc.prepare(
            frozen, generator, critic, of_generator, of_critic
        )
        for step in range(4):
            x = torch.full((2, 3), 0.1 * (step + acc.process_index))
            acc.backward(critic(generator(frozen(x)).detach()).mean())
            of_critic.step()
            of_critic.zero_grad()
            acc.backward(-critic(generator(frozen(x))).mean())
            of_generator.step()
            of_generator.zero_grad()
            of_critic.zero_grad()
        found.append((weights(acc, generator), weights(acc, critic), weights(acc, frozen)))
    return [largest_difference(one, found[0]) for one in found[1:]]


@needs_deepspeed
def test_two_models_with_two_optimizers_and_a_frozen_one(on_ranks):
    for worst in on_ranks(several_models):
        assert max(worst) <= TOLERANCE


def two_backwards():
    """Both forwards before both backwards, and one whose gradients are thrown away."""
    found = []
    for stage in (None, *STAGES):
        acc = accelerator(stage, 1)
        model, optimizer, dataset = pieces()
        model, optimizer = acc.prepare(model, optimizer)
        x, y = dataset[4 * acc.process_index : 4 * acc.process_index + 4]
        for _ in range(2):
            acc.backward(model(x).sum())
            optimizer.zero_grad()
            first, second = nn.functional.mse_loss(model(x), y), model(x).square().mean()
            if stage is None:  # DDP allows no more than one backward after two forwards
                acc.backward(first + second)
            else:
                acc.backward(first)
                acc.backward(second)
            optimizer.step()
            optimizer.zero_grad()
        found.append((weights(acc, model),))
    return [largest_difference(one, found[0]) for one in found[1:]]


@needs_deepspeed
def test_several_backwards_add_up_until_the_step(on_ranks):
    for worst in on_ranks(two_backwards):
        assert max(worst) <= TOLERANCE


def resumed(folder, stage, **chosen):
    """Losses of three steps: after saving, and after loading what was saved then."""

    seeds = [2, 1]  # what is loaded is another layer

    def made():
        acc = accelerator(stage, 1, **chosen)
        torch.manual_seed(seeds.pop())
        frozen = nn.Linear(5, 5).requires_grad_(requires_grad=False)
        model, optimizer, dataset = pieces()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return acc, dataset, *acc.prepare(frozen, model, optimizer, scheduler)

    def steps(acc, dataset, frozen, model, optimizer, scheduler):
        losses = []
        for number in range(3):
            x, y = dataset[2 * (number + acc.process_index) : 2 * (number + acc.process_index) + 4]
            loss = nn.functional.mse_loss(model(frozen(x)), y)
            acc.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first = made()
    steps(*first)
    first[0].save_state(folder, async_=stage in {0, 2})
    expected = steps(*first)
    second = made()
    first[0].wait_for_save()
    second[0].load_state(folder)
    again = steps(*second)
    first[0].load_state(folder)
    return expected, again, steps(*first), weights(first[0], first[3])


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_goes_on_as_if_it_had_never_stopped(stage, on_ranks, tmp_path):
    for expected, again, in_place, _ in on_ranks(resumed, str(tmp_path / "ck"), stage):
        assert again == expected
        assert in_place == expected


def saved_whole(folder):
    found = []
    for stage in (None, *STAGES):
        acc = accelerator(stage, 1)
        model, optimizer, _ = pieces()
        model, optimizer = acc.prepare(model, optimizer)
        acc.save_model(model, f"{folder}/{stage}")
        acc.wait_for_everyone()
        found.append(sorted(acc.get_state_dict(model)))
    return found


@needs_deepspeed
def test_a_model_is_saved_whole_from_every_stage(on_ranks, tmp_path):
    for names in on_ranks(saved_whole, str(tmp_path)):
        assert all(one == names[0] for one in names)
    files = [(tmp_path / str(stage) / "model.safetensors").read_bytes() for stage in (None, *STAGES)]
    assert all(one == files[0] for one in files)


def load_only(folder, stage):
    acc = accelerator(stage, 1)
    frozen = nn.Linear(5, 5).requires_grad_(requires_grad=False)
    model, optimizer, _ = pieces()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    acc.prepare(frozen, model, optimizer, scheduler)
    acc.load_state(folder)


@needs_deepspeed
def test_what_does_not_fit_is_refused_with_the_way(on_ranks, tmp_path):
    folder = str(tmp_path / "ck")
    on_ranks(resumed, folder, 2)
    with pytest.raises(CheckpointError, match="ZeRO stage 2, and this run has 1"):
        on_ranks(load_only, folder, 1)
    with pytest.raises(CheckpointError, match=r"saved by 2 processes, and this run has 1(.|\n)*ds_to_universal"):
        on_ranks(load_only, folder, 2, num_processes=1)
    with pytest.raises(CheckpointError, match="strategy='deepspeed', and can't be loaded with strategy='ddp'"):
        on_ranks(load_only, folder, None)
    with pytest.raises(
        CheckpointError, match=r"holds no weights of 'model_1' .*strategy='deepspeed' .*as many processes"
    ):
        merge_checkpoint(folder, tmp_path / "merged", model="model_1")
    on_ranks(resumed, folder, None)
    with pytest.raises(CheckpointError, match="strategy='ddp', and can't be loaded with strategy='deepspeed'"):
        on_ranks(load_only, folder, 2)


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('it was executed')",)


@needs_deepspeed
def test_a_pickle_is_never_executed(on_ranks, tmp_path):
    from notebook_launcher.runtime import zero_checkpoint

    torch.save({"optimizer_state_dict": Evil()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="can't be read without executing pickle"):
        on_ranks(zero_checkpoint.read, tmp_path / "x.pt", num_processes=1)


CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


def from_configuration(path):
    acc = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=path))
    model, _, _ = pieces()
    optimizer = DummyOptim(model.parameters(), lr=0.1, weight_decay=0.02)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=4)
    model, optimizer, scheduler = acc.prepare(model, optimizer, scheduler)
    rates = []
    for _ in range(5):
        acc.backward(model(torch.ones(2, 5)).square().sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    engine = model.trained.engine
    return rates, type(engine.basic_optimizer).__name__, engine.basic_optimizer.param_groups[0]["weight_decay"]


@needs_deepspeed
def test_the_configuration_may_define_optimizer_and_scheduler(on_ranks, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    for rates, kind, decay in on_ranks(from_configuration, str(tmp_path / "ds.json")):
        assert kind == "AdamW"
        assert decay == 0.02
        assert rates == sorted(rates)
        assert rates[-1] == pytest.approx(0.1)


def from_the_launch():
    acc = Accelerator()
    model, optimizer, _ = pieces()
    model, optimizer = acc.prepare(model, optimizer)  # no loader, no batch size
    acc.backward(model(torch.ones(2, 5)).sum())
    optimizer.step()
    return model.trained.stage, model.trained.clipping, acc.gradient_accumulation_steps


@needs_deepspeed
def test_the_launch_chooses_it_with_the_section_of_its_file(on_ranks, tmp_path, capfd):
    (tmp_path / "c.yaml").write_text(
        "distributed_type: DEEPSPEED\nuse_cpu: true\nnum_processes: 2\n"
        "deepspeed_config:\n  zero_stage: 1\n  gradient_clipping: 0.5\n  offload_param_device: none\n"
    )
    assert on_ranks(from_the_launch, config=str(tmp_path / "c.yaml"), output="all") == [(1, 0.5, 1)] * 2
    assert on_ranks(from_the_launch, strategy="deepspeed", gradient_accumulation_steps=2) == [(2, 0.0, 2)] * 2
    said = [line for line in "".join(capfd.readouterr()).splitlines() if line.startswith("[")]
    assert said == []  # DeepSpeed is quiet


@needs_deepspeed
def test_one_process_will_do(on_ranks):
    assert on_ranks(from_the_launch, strategy="deepspeed", num_processes=1) == [(2, 0.0, 1)]


def initialized_spread():
    import deepspeed

    acc = accelerator(3, 1)
    torch.manual_seed(0)
    with deepspeed.zero.Init(
        config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    ):
        model = nn.Linear(4, 4)
    held = model.weight.numel()
    model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
    acc.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return held, acc.get_state_dict(model)["weight"].shape


@needs_deepspeed
def test_a_model_made_under_zero_init_is_taken(on_ranks):
    assert on_ranks(initialized_spread) == [(0, (4, 4))] * 2


def in_bf16(stage, own):
    given = {"zero_optimization": {"stage": stage}} | ({"bf16": {"enabled": "auto"}} if own else {})
    acc = Accelerator(cpu=True, mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=given))
    model, optimizer, dataset = pieces()
    model, optimizer = acc.prepare(model, optimizer)
    x, y = dataset[:8]
    losses = []
    for _ in range(6):
        loss = nn.functional.mse_loss(model(x), y)
        acc.backward(loss)
        norm = acc.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0] > losses[-1], bool(norm > 0), next(acc.unwrap_model(model).parameters()).dtype


@needs_deepspeed
@pytest.mark.parametrize("own", [False, True])
def test_bf16_by_autocast_or_with_weights_in_bf16(own, on_ranks):
    dtype = torch.bfloat16 if own else torch.float32
    for found in on_ranks(lambda: [in_bf16(stage, own) for stage in (1, 2, 3)]):
        assert found == [(True, True, dtype)] * 3


# --- what can't be ---------------------------------------------------------------------------------------------------


def refusals():
    """Messages, by what was tried."""
    told = {}

    @contextlib.contextmanager
    def trying(name):
        with pytest.raises((ConfigError, RuntimeError)) as caught:
            yield
        told[name] = str(caught.value)

    acc = accelerator(2, 1)
    model, optimizer, _ = pieces()
    model, optimizer = acc.prepare(model, optimizer)
    x = torch.ones(2, 5)
    with trying("second optimizer"):
        acc.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    acc.backward(model(x).sum())
    with trying("a part"):
        acc.clip_grad_norm_([next(iter(model.parameters()))], 1.0)
    with trying("another norm"):
        acc.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    acc.clip_grad_norm_(model.parameters(), 1.0)
    with trying("late"):
        acc.backward(model(x).sum())
    with trying("closure"):
        optimizer.step(lambda: None)
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with trying("two models"):
        accelerator(2).prepare(one, other, torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1))
    with trying("compiled"):
        wrong = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3), mixed_precision="bf16")
        wrong.prepare(torch.compile(one), torch.optim.SGD(one.parameters(), lr=0.1))
    with trying("pydantic"):
        given = {"zero_optimization": {"stage": 2, "overlap_com": True}}
        wrong = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=given))
        wrong.prepare(one, torch.optim.SGD(one.parameters(), lr=0.1))
    return told


@needs_deepspeed
def test_what_an_engine_cannot_do_is_said(on_ranks):
    expected = {
        "second optimizer": "Sequential has an optimizer, and SGD is a second one",
        "a part": "was given 1 of the 4 parameters of one model",
        "another norm": "clips by the 2-norm only",
        "late": "before the step",
        "closure": "given a closure",
        "two models": "trains 2 models (Linear, Linear)",
        "compiled": "a Linear that torch.compile has wrapped, and ZeRO stage 3",
        "pydantic": "overlap_com",
    }
    for told in on_ranks(refusals):
        assert {name: part for name, part in expected.items() if part not in told.get(name, "")} == {}


def built(plugin, precision="no", **more):
    return zero_config.build(plugin, precision, 2, nn.Linear(2, 2), on_cpu=True, **more)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"hf_ds_config": {"zero_optimisation": {}}}, "'zero_optimisation', which is not known.*'zero_optimization'"),
        ({"zero_stage": 4}, "zero_stage=4 is not known"),
        ({"zero_stage": 2, "hf_ds_config": {"zero_optimization": {"stage": 3}}}, "contradicts.*stage=3"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, "needs zero_stage=3"),
        ({"offload_optimizer_device": "tape"}, "'tape' is not known"),
        ({"offload_optimizer_device": "nvme"}, "needs a folder"),
        ({"hf_ds_config": {"fp16": {"enabled": True}}}, "fp16.enabled.*a cpu emulates fp16"),
        ({"hf_ds_config": {"bf16": {"enabled": True}}}, "needs zero_stage 1, 2 or 3"),
        (
            {
                "hf_ds_config": {
                    "train_batch_size": 9,
                    "train_micro_batch_size_per_gpu": 2,
                    "gradient_accumulation_steps": 2,
                }
            },
            "train_batch_size=9, and.* is 8",
        ),
    ],
)
def test_a_wrong_configuration_is_named(chosen, message):
    with pytest.raises(ConfigError, match=message):
        built(DeepSpeedPlugin(**chosen))


def test_fp16_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="mixed_precision='fp16' can't be used with strategy='deepspeed': a cpu"):
        built(DeepSpeedPlugin(), "fp16")


def test_an_auto_that_nobody_knows_is_named():
    config = built(
        DeepSpeedPlugin(hf_ds_config={"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": "auto"}}})
    )
    config["scheduler"]["params"]["cycle_max_lr"] = "auto"
    config["communication_data_type"] = "auto"
    with pytest.raises(ConfigError, match="communication_data_type='auto', and nothing here knows"):
        zero_config.fill_optimizer(config, 0.1, {}, None, None)


def test_the_section_of_a_launch_fills_what_the_plugin_leaves_open():
    section = json.dumps({"zero_stage": 3, "gradient_clipping": 1.0, "deepspeed_multinode_launcher": "standard"})
    plugin = deepspeed_options.with_section(DeepSpeedPlugin(zero_stage=1), section)
    assert (plugin.zero_stage, plugin.gradient_clipping) == (1, 1.0)
    with pytest.raises(ConfigError, match=r"'zero_stagee', which is not known.*'zero_stage'"):
        deepspeed_options.with_section(DeepSpeedPlugin(), json.dumps({"zero_stagee": 3}))


def test_a_plugin_reads_its_file_and_is_of_one_mind(tmp_path):
    (tmp_path / "ds.json").write_text('{"gradient_accumulation_steps": 4}')
    assert DeepSpeedPlugin(hf_ds_config=tmp_path / "ds.json").gradient_accumulation_steps == 4
    with pytest.raises(ConfigError, match="can't be read"):
        DeepSpeedPlugin(hf_ds_config=str(tmp_path / "no.json"))
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=2.*contradicts"):
        DeepSpeedPlugin(hf_ds_config=str(tmp_path / "ds.json"), gradient_accumulation_steps=2)


def test_a_plugin_chooses_strategy_and_steps():
    from notebook_launcher.core.world import World

    plugin = DeepSpeedPlugin(gradient_accumulation_steps=4)
    world = options.with_plugins(World(), plugins.Keywords(None), deepspeed_plugin=plugin)
    assert (world.strategy, world.gradient_accumulation_steps) == ("deepspeed", 4)
    with pytest.raises(ConfigError, match="strategy='deepspeed', and the launch chose strategy='ddp'"):
        options.with_plugins(World(strategy="ddp"), plugins.Keywords(None), deepspeed_plugin=plugin)
    with pytest.raises(ConfigError, match="give a DeepSpeedPlugin"):
        Accelerator(deepspeed_plugin="x")


@pytest.mark.skipif(HAS_DEEPSPEED, reason="deepspeed is installed")
def test_a_missing_package_is_named_with_the_command(on_ranks):
    with pytest.raises(ConfigError, match=r"pip install 'deepspeed>=0.19' torch=="):
        on_ranks(accelerator, 2)


def exchanges_of_a_clipped_step():
    """How often stage 0 exchanges: where the step follows the clipping, and where gradients came in between."""
    acc = accelerator(0, 1)
    model, optimizer, _ = pieces()
    model, prepared = acc.prepare(model, optimizer)
    engine = model.trained.engine
    calls, found = [], []
    exchange = engine.buffered_allreduce_fallback
    engine.buffered_allreduce_fallback = lambda *args, **kwargs: [calls.append(1), exchange(*args, **kwargs)]
    for is_last in (True, True, False):
        acc.backward(model(torch.ones(2, 5) * (1 + acc.process_index)).sum())
        acc.clip_grad_norm_(model.parameters(), 0.1)
        if not is_last:
            acc.backward(model(torch.ones(2, 5) * (1 + acc.process_index)).sum())
        prepared.step()
        prepared.zero_grad()
        found.append(len(calls))
        calls.clear()
    return found, weights(acc, model)


@needs_deepspeed
def test_whole_gradients_that_were_clipped_are_not_exchanged_again(on_ranks):
    one, other = on_ranks(exchanges_of_a_clipped_step)
    assert one[0] == other[0] == [1, 1, 2]
    assert torch.equal(one[1], other[1])


def trained_and_freed(stage):
    acc = accelerator(stage, num_steps=1)
    model, optimizer, _ = pieces()
    given = weakref.ref(model)
    model, optimizer = acc.prepare(model, optimizer)
    acc.backward(model(torch.ones(2, 5)).sum())
    optimizer.step()
    model, optimizer = acc.free_memory(model, optimizer)
    gc.collect()
    return given() is not None


def all_freed():
    return [trained_and_freed(stage) for stage in STAGES]


@needs_deepspeed
def test_free_memory_frees_the_model(on_ranks):
    assert on_ranks(all_freed) == [[False] * 4] * 2


def two_networks(stage):
    """What both have learned from losses of several forwards each, and of each other's."""
    acc = accelerator(stage, num_steps=1)
    torch.manual_seed(0)
    maker, judge = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, size)) for size in (4, 1))
    made, judged = (torch.optim.SGD(one.parameters(), 0.1) for one in (maker, judge))
    maker, judge, made, judged = acc.prepare(maker, judge, made, judged)
    torch.manual_seed(acc.process_index)
    for _ in range(3):
        false = maker(torch.randn(4, 4))
        acc.backward((judge(torch.randn(4, 4)) - 1).square().mean() + judge(false.detach()).square().mean())
        judged.step()
        judged.zero_grad()
        acc.backward((judge(false) - 1).square().mean())
        made.step()
        made.zero_grad()
        judged.zero_grad()
    return torch.cat([weights(acc, maker), weights(acc, judge)])


def all_pairs():
    return [two_networks(stage) for stage in (None, *STAGES)]


@needs_deepspeed
def test_a_loss_may_be_of_several_forwards(on_ranks):
    for expected, *found in on_ranks(all_pairs):
        for stage, one in zip(STAGES, found, strict=True):
            assert largest_difference([one], [expected]) < TOLERANCE, stage


def without_values(stage):
    acc = accelerator(stage)
    with pytest.raises(ConfigError) as caught:
        acc.prepare(nn.Linear(2, 2, device="meta"))
    return str(caught.value)


def test_a_model_without_values_is_refused(on_ranks):
    stages = (None, 2) if HAS_DEEPSPEED else (None,)
    for stage in stages:
        for text in on_ranks(without_values, stage):
            assert "the Linear has weight on the device 'meta', without a value" in text


@needs_deepspeed
def test_an_unknown_stage_is_refused_at_once():
    with pytest.raises(ConfigError, match="zero_stage=9 is not known"):
        deepspeed_options.with_section(DeepSpeedPlugin(), '{"zero_stage": 9}')


def measurements_of_a_clipped_step():
    """How often a step measures the norm: clipped, and clipped with gradients that were changed after that."""
    found = {}
    for stage in (1, 2, 3):
        acc = accelerator(stage, 1)
        model, optimizer, _ = pieces()
        model, prepared = acc.prepare(model, optimizer)
        zero, calls, counts = model.trained.engine.optimizer, [], []
        measure = zero.get_grad_norm_direct
        zero.get_grad_norm_direct = lambda *args, m=measure, c=calls, **kwargs: [c.append(1), m(*args, **kwargs)][1]
        for changed in (False, True):
            acc.backward(model(torch.ones(2, 5)).sum())
            acc.clip_grad_norm_(model.parameters(), 0.1)
            if changed:
                acc.clip_grad_value_(model.parameters(), 0.01)
            prepared.step()
            prepared.zero_grad()
            counts.append(len(calls))
            calls.clear()
        found[stage] = counts
    return found


@needs_deepspeed
def test_a_norm_is_measured_once_for_clipping_and_step(on_ranks):
    for found in on_ranks(measurements_of_a_clipped_step):
        for once, twice in found.values():
            assert twice == 2 * once > 0


def test_files_of_as_many_ranks_without_one_s_own_are_refused_by_name(tmp_path):
    place = tmp_path / "model.deepspeed"
    place.mkdir()
    (place / "zero_pp_rank_7_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"model.deepspeed lacks the share of rank 0, \*zero_pp_rank_0_"):
        zero_checkpoint.check(2, tmp_path, "model", types.SimpleNamespace(num_processes=1, rank=0))


def test_an_engine_that_is_made_within_an_unfinished_micro_batch_is_not_told_of_its_end():
    model = types.SimpleNamespace(trained=None)
    context = deepspeed._Collecting(model)
    with context:
        model.trained = types.SimpleNamespace(num_collecting=0)
    assert model.trained.num_collecting == 0
    with context:
        assert model.trained.num_collecting == 1
    assert model.trained.num_collecting == 0


def frozen_for_some(stage, groups, kind, **chosen):
    """How far from plain torch a model is, after steps on groups of backwards during which some of it was frozen.

    A backward is named by what is frozen: "" nothing, "all", "part", "part until the step"; or "inputs", whose
    gradients alone are computed.
    """
    acc = accelerator(stage, 1, **chosen)
    model, optimizer, _ = pieces(kind)
    plain, stepped, _ = pieces(kind)
    model, optimizer = acc.prepare(model, optimizer)
    both = ((acc.unwrap_model(model), acc.unwrap_model(model)[0]), (plain, plain[0]))

    def train_all():
        for whole, _ in both:
            whole.requires_grad_(requires_grad=True)

    for group in groups:
        for frozen in group:
            for whole, part in both:
                one = part if "part" in frozen else whole
                one.requires_grad_(requires_grad=frozen in {"", "inputs"})
            shares = torch.randn(acc.num_processes, 4, 5, requires_grad=True)  # of each rank, the same on all
            if frozen == "inputs":
                torch.autograd.grad(model(shares[acc.process_index]).sum(), shares)
            else:
                acc.backward(model(shares[acc.process_index]).square().mean())
                plain(shares).square().mean().backward()
            if frozen != "part until the step":
                train_all()
        for one in (optimizer, stepped):
            one.step()
            one.zero_grad()
        train_all()
    expected = torch.cat([value.detach().reshape(-1) for value in plain.parameters()])
    return largest_difference([weights(acc, model)], [expected])


FREEZINGS = {
    "within a group": [["", "all"], ["all", ""], [""]],
    "between steps": [[""], ["all", "", "all"], ["all", "", "all"]],
    "a step without gradients": [[""], ["all"], [""]],
    "a part": [[""], ["part"], [""], ["part", ""], ["", "part"], [""]],
    "a part during the step": [[""], ["", "part until the step"], [""], ["part until the step"], [""]],
    "gradients of inputs": [[""], ["inputs", ""], ["", "inputs"], [""]],
}


def all_freezings():
    """With an optimizer to which no gradient and one of zeros is the same, as DeepSpeed has no other."""
    places = [(stage, {}) for stage in STAGES] + [(stage, {"offload_optimizer_device": "cpu"}) for stage in (2, 3)]
    return {
        (name, stage, *chosen): frozen_for_some(stage, groups, "plain SGD", **chosen)
        for name, groups in FREEZINGS.items()
        for stage, chosen in places
    } | {
        (name, stage, "AdamW"): frozen_for_some(stage, FREEZINGS[name], "AdamW")
        for name in ("within a group", "between steps")
        for stage in STAGES
    }


@needs_deepspeed
def test_what_is_frozen_for_some_backwards_is_trained_as_plain_torch_does(on_ranks):
    for found in on_ranks(all_freezings):
        assert len(found) == 6 * 6 + 2 * 4
        assert {key: worst for key, worst in found.items() if not worst <= TOLERANCE} == {}


def with_a_frozen_judge(stage):
    """What both have learned where the judge is frozen while the maker's loss goes through it."""
    acc = accelerator(stage, num_steps=1)
    torch.manual_seed(0)
    maker, judge = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, size)) for size in (4, 1))
    made, judged = (torch.optim.SGD(one.parameters(), 0.1) for one in (maker, judge))
    plain = copy.deepcopy(maker), copy.deepcopy(judge)
    steps = [torch.optim.SGD(one.parameters(), 0.1) for one in plain]
    maker, judge, made, judged = acc.prepare(maker, judge, made, judged)
    for _ in range(4):
        x = torch.randn(acc.num_processes, 4, 4)
        kinds = ((maker, judge, made, judged, x[acc.process_index]), (*plain, *steps, x))
        for makes, judges, step_made, step_judged, own in kinds:
            (judges(own) - 1).square().mean().backward()
            step_judged.step()
            step_judged.zero_grad()
            judges.requires_grad_(requires_grad=False)
            judges(makes(own)).square().mean().backward()
            acc.clip_grad_norm_(makes.parameters(), 0.5)
            step_made.step()
            step_made.zero_grad()
            judges.requires_grad_(requires_grad=True)
    expected = [torch.cat([value.detach().reshape(-1) for value in one.parameters()]) for one in plain]
    return largest_difference([weights(acc, maker), weights(acc, judge)], expected)


def all_frozen_judges():
    return {stage: with_a_frozen_judge(stage) for stage in STAGES}


@needs_deepspeed
def test_one_backward_trains_one_engine_through_another_that_is_frozen(on_ranks):
    for found in on_ranks(all_frozen_judges):
        assert {stage: worst for stage, worst in found.items() if not worst <= TOLERANCE} == {}


def unfrozen_later(stage):
    """What is said to the unfreezing, and how much the weights have changed by the next step."""
    acc = accelerator(stage, 1)
    model, optimizer, _ = pieces("plain SGD")
    model[0].requires_grad_(requires_grad=False)
    model, optimizer = acc.prepare(model, optimizer)
    x = torch.ones(2, 5)
    acc.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    acc.unwrap_model(model).requires_grad_(requires_grad=True)
    before = acc.get_state_dict(model)["0.weight"].clone()
    told = ""
    try:
        acc.backward(model(x).sum())
    except ConfigError as error:
        told = str(error)
    else:
        optimizer.step()
    return told, float((acc.get_state_dict(model)["0.weight"] - before).abs().max())


def all_unfrozen():
    return {stage: unfrozen_later(stage) for stage in STAGES}


@needs_deepspeed
def test_what_an_engine_has_no_place_for_is_named_when_it_is_unfrozen(on_ranks):
    for found in on_ranks(all_unfrozen):
        told, change = found.pop(0)
        assert (told, change > 0) == ("", True)
        for stage, (told, _) in found.items():
            assert told.startswith("0.weight and 1 other parameters were frozen when they were prepared")
            assert f"ZeRO stage {stage} has no place" in told
            assert "use zero_stage=0" in told


def backwards_of_one_forward(stage, kind):
    """How far from plain torch a model is after steps on two backwards through one forward, or what is said to it."""
    acc = accelerator(stage, 1)
    model, optimizer, _ = pieces("SGD")
    plain, stepped, _ = pieces("SGD")
    model, optimizer = acc.prepare(model, optimizer)
    try:
        for _ in range(3):
            shares = torch.randn(acc.num_processes, 4, 5, requires_grad=True)
            for one, x in ((plain, shares), (model, shares[acc.process_index])):
                y = one(x)
                if kind == "two losses":
                    y.square().mean().backward(retain_graph=True)
                    y.abs().mean().backward()
                else:
                    (of_x,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                    (y.square().mean() + of_x.exp().mean()).backward()
            for one in (optimizer, stepped):
                one.step()
                one.zero_grad()
    except RuntimeError as error:
        return str(error)
    expected = torch.cat([value.detach().reshape(-1) for value in plain.parameters()])
    return largest_difference([weights(acc, model)], [expected])


def all_of_one_forward():
    return {
        (stage, kind): backwards_of_one_forward(stage, kind) for stage in STAGES for kind in ("two losses", "slope")
    }


@needs_deepspeed
def test_two_backwards_through_one_forward_train_as_in_plain_torch_or_it_is_said_why_not(on_ranks):
    for found in on_ranks(all_of_one_forward):
        said = found.pop((3, "two losses"))
        assert said.startswith("There was a second backward through one forward, and ZeRO stage 3 has given")
        assert "Add the losses up and call backward once" in said
        assert found.pop((3, "slope")).startswith("There was a backward with create_graph=True, and ZeRO stage 3")
        assert len(found) == 6
        assert {key: worst for key, worst in found.items() if not worst <= TOLERANCE} == {}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, _, _ = pieces()

    def forward(self, x):
        return self.layers(x)

    def whole(self, x):
        return self(x).square().mean()

    def layered(self, x):
        return self.layers(x).square().mean()


def past_the_call(stage):
    """How far from plain torch groups of micro-batches take a model whose loss its methods give; or what is said."""
    acc = accelerator(stage, 2)
    torch.manual_seed(1)
    batches = torch.randn(6, acc.num_processes, 4, 5)
    plain, model = Encoder(), Encoder()
    stepped = torch.optim.SGD(plain.parameters(), lr=0.05)
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    ways = ("layered", "whole", "__call__")
    try:
        for number, batch in enumerate(batches):
            with acc.accumulate(model):
                found = getattr(model, ways[number % 3])(batch[acc.process_index])
                acc.backward(found.square().mean() if found.ndim else found)
                optimizer.step()
                optimizer.zero_grad()
            (plain(batch).square().mean() / 2).backward()
            if number % 2:
                stepped.step()
                stepped.zero_grad()
    except RuntimeError as error:
        return str(error)
    expected = torch.cat([value.detach().reshape(-1) for value in plain.parameters()])
    return largest_difference([weights(acc, model)], [expected])


def all_past_the_call():
    return {stage: past_the_call(stage) for stage in STAGES}


@needs_deepspeed
def test_a_loss_from_another_method_of_the_model_trains_it_or_it_is_said_why_not(on_ranks):
    for found in on_ranks(all_past_the_call):
        said = found.pop(3)
        assert said.startswith("backward was given a loss that doesn't come from calling the model")
        assert "use zero_stage=2 or lower" in said
        assert {stage: worst for stage, worst in found.items() if not worst <= TOLERANCE} == {}
