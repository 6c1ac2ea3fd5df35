"""One checkpoint for all native strategies: whoever saved it, on however many ranks, any of them goes on from it."""

import functools
import itertools
import json
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import (
    Accelerator,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PipelineParallelPlugin,
)
from notebook_launcher.core.errors import CheckpointError
from notebook_launcher.runtime import shards, storage

GLOBAL_BATCH = 12
NUM_STEPS = 6
SAVED_AFTER = 3
TOLERANCE = 1e-6
PLAN = {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise"}


def fsdp(**options):
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**options)}


def sizes(**sizes):
    return {"parallelism_config": ParallelismConfig(**sizes, tp_plan=PLAN if "tp_size" in sizes else None)}


# By number of ranks and name: the accelerator's options, and those of save_state.
WAYS = {
    (4, "ddp"): ({}, {}),
    (4, "fsdp"): (fsdp(), {}),
    (4, "hsdp"): (sizes(dp_replicate_size=2, dp_shard_size=2), {"async_": True}),
    (4, "tp and fsdp"): (sizes(tp_size=2, dp_shard_size=2), {}),
    (4, "pp and fsdp"): (sizes(pp_size=2, dp_shard_size=2), {}),
    (4, "pp and ddp"): (sizes(pp_size=2, dp_replicate_size=2), {"async_": True}),
    (2, "ddp"): ({}, {"async_": True}),
    (2, "fsdp"): (fsdp(), {"async_": True}),
    (2, "fsdp, whole"): (fsdp(state_dict_type="FULL_STATE_DICT"), {}),
    (2, "fsdp, parts after all"): (fsdp(state_dict_type="FULL_STATE_DICT"), {"sharded": True}),
    (2, "tp"): (sizes(tp_size=2), {}),
    (2, "tp, whole"): (sizes(tp_size=2), {"sharded": False, "safe_serialization": False}),
    (2, "pp"): (sizes(pp_size=2), {}),
    (2, "pp, whole"): (sizes(pp_size=2), {"sharded": False}),
    (1, "single"): ({}, {}),
}
READERS = [way for way in WAYS if "," not in way[1]]


def net(seed):
    """With a frozen layer, a buffer, and sizes that don't divide."""
    torch.manual_seed(seed)
    widths = (6, 10, 6, 10, 6)
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])
    model[2].requires_grad_(requires_grad=False)
    model[6].register_buffer("seen", torch.rand(3))
    return model


def training(way, seed):
    plugin = PipelineParallelPlugin(num_microbatches=2, loss_fn=nn.functional.mse_loss)
    accelerator = Accelerator(cpu=True, pipeline_plugin=plugin, **WAYS[way][0])
    model = net(seed)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() > 1]
    biases = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 0.02}], lr=0.05 / seed)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(1)
    x = torch.randn(GLOBAL_BATCH * NUM_STEPS, 6)
    num_shares = accelerator._data_process.num_processes
    loader = DataLoader(TensorDataset(x, x.flip(1).sin()), batch_size=GLOBAL_BATCH // num_shares)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


def trained(way, folder, *, save):
    """Losses and weights of the steps after the save, by the one that saves or by another."""
    accelerator, model, optimizer, scheduler, loader = training(way, seed=1 if save else 2)
    if not save:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what another number of processes can't keep
            accelerator.load_state(folder)
    losses = []
    for x, y in loader:
        losses.append(accelerator.pipeline_step(x, y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if save and len(losses) == SAVED_AFTER:
            accelerator.save_state(folder, **WAYS[way][1])
    if save:
        losses = losses[SAVED_AFTER:]
        accelerator.wait_for_save()
        accelerator.save_model(model, f"{folder}-model")
    losses = accelerator.reduce(torch.stack(losses), "mean")
    return losses, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def folder_of(folder, way):
    return f"{folder}/{way[0]}-{way[1]}"


def ways_of(num_processes, ways=tuple(WAYS)):
    return [way for way in ways if way[0] == num_processes]


def write_all(folder, num_processes):
    return {way: trained(way, folder_of(folder, way), save=True) for way in ways_of(num_processes)}


def read_all(folder, num_processes, writers):
    return {
        (way, writer): trained(way, folder_of(folder, writer), save=False)
        for way in ways_of(num_processes, READERS)
        for writer in writers
    }


def write_and_read(folder, num_processes, others):
    written = write_all(folder, num_processes)
    return written, read_all(folder, num_processes, [*written, *others])


def on(on_ranks, num_processes, function, *args):
    if num_processes == 1:
        return [function(*args)]
    return on_ranks(function, *args, num_processes=num_processes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("states"))


@functools.cache
def everything(on_ranks, folder):
    """What each way got that saved, and each that went on from each, on rank 0 and on the last."""
    torch.set_num_threads(1)
    saved, read = {}, {}
    for num_processes in (1, 2, 4):
        others = list(saved)
        ranks = on(on_ranks, num_processes, write_and_read, folder, num_processes, others)
        saved |= ranks[0][0]
        read |= {pair: [rank[1][pair] for rank in (ranks[0], ranks[-1])] for pair in ranks[0][1]}
    for num_processes in (1, 2):
        others = [way for way in WAYS if way[0] > num_processes]
        ranks = on(on_ranks, num_processes, read_all, folder, num_processes, others)
        read |= {pair: [rank[pair] for rank in (ranks[0], ranks[-1])] for pair in ranks[0]}
    return saved, read


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("writer", WAYS, ids=str)
def test_every_way_goes_on_from_it(on_ranks, folder, writer):
    saved, read = everything(on_ranks, folder)
    losses, weights = saved[writer]
    for reader in READERS:
        tolerance = 0 if reader == writer else TOLERANCE
        for got, state in read[reader, writer]:
            assert got.shape == (NUM_STEPS - SAVED_AFTER,)
            assert torch.allclose(got, losses, rtol=0, atol=tolerance), reader
            assert state.keys() == weights.keys()
            for name, value in weights.items():
                assert torch.allclose(state[name], value, rtol=0, atol=tolerance), (reader, name)


@pytest.mark.slow
def test_a_model_is_saved_whole_and_alike_by_every_way(on_ranks, folder):
    everything(on_ranks, folder)
    files = {way: list(Path(f"{folder_of(folder, way)}-model").iterdir()) for way in WAYS}
    assert {path.name for found in files.values() for path in found} == {"model.safetensors"}
    expected = safetensors.torch.load_file(files[1, "single"][0])
    assert expected.keys() == net(0).state_dict().keys()
    for (path,) in files.values():
        state = safetensors.torch.load_file(path)
        assert list(state) == list(expected)
        assert all(torch.allclose(value, expected[name], rtol=0, atol=TOLERANCE) for name, value in state.items())


def files_of(folder, way):
    return {path.name for path in Path(folder_of(folder, way)).iterdir() if "model" in path.name or "opt" in path.name}


@pytest.mark.slow
def test_files_are_parts_or_whole_as_asked_for(on_ranks, folder):
    everything(on_ranks, folder)
    whole = {"model.safetensors", "optimizer.safetensors", "optimizer.bin"}
    parts = {f"{kind}.rank{rank}.safetensors" for kind in ("model", "optimizer") for rank in range(4)} | {
        "optimizer.bin"
    }
    of_two = {name for name in parts if "rank2" not in name and "rank3" not in name}
    assert (
        files_of(folder, (1, "single")) == files_of(folder, (4, "ddp")) == files_of(folder, (2, "fsdp, whole")) == whole
    )
    assert files_of(folder, (2, "fsdp")) == files_of(folder, (2, "fsdp, parts after all")) == of_two
    assert files_of(folder, (4, "tp and fsdp")) == files_of(folder, (4, "pp and fsdp")) == parts
    assert files_of(folder, (4, "pp and ddp")) == parts - {n for n in parts if "rank1" in n or "rank3" in n}, (
        "no replicas"
    )
    assert files_of(folder, (4, "hsdp")) == of_two, "no replicas"
    assert files_of(folder, (2, "tp, whole")) == whole - {"model.safetensors"} | {"pytorch_model.bin"}
    assert files_of(folder, (2, "pp, whole")) == of_two - {"model.rank0.safetensors", "model.rank1.safetensors"} | {
        "model.safetensors"
    }


@pytest.mark.slow
def test_parts_that_are_missing_are_told(on_ranks, folder, tmp_path):
    everything(on_ranks, folder)
    for path in Path(folder_of(folder, (2, "fsdp"))).iterdir():
        if path.name != "model.rank1.safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    accelerator, *_ = training((1, "single"), seed=2)
    with pytest.raises(CheckpointError, match=r"model.rank1.safetensors is missing"):
        accelerator.load_state(tmp_path)
    manifest = json.loads((tmp_path / "checkpoint.json").read_text())
    del manifest["files"]["model.rank1.safetensors"], manifest["crc32"]
    (tmp_path / "checkpoint.json").write_text(json.dumps(manifest | {"crc32": storage.crc_of(manifest)}))
    with pytest.raises(CheckpointError, match=r"is saved in parts, and \d+ numbers are in none"):
        accelerator.load_state(tmp_path)


def read_lean(folder, writers):
    """How many numbers this rank read of each checkpoint, and how many are its own."""
    found = {}
    for writer in writers:
        accelerator, model, optimizer, *_ = training((2, "fsdp"), seed=2)
        num_read = 0

        def reader(file, key, original=shards._reader):
            def read(wanted):
                nonlocal num_read
                part = original(file, key)(wanted)
                num_read += part.numel()
                return part

            return read

        with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patched.setattr(shards, "_reader", reader)
            accelerator.load_state(folder_of(folder, writer))
        moments = [value for one in optimizer.state.values() for value in one.values()]
        found[writer] = num_read, sum(shards.local(one).numel() for one in [*model.state_dict().values(), *moments])
    return found


@pytest.mark.slow
def test_a_rank_reads_only_its_part(on_ranks, folder):
    everything(on_ranks, folder)
    writers = [(1, "single"), (2, "ddp"), (2, "fsdp"), (2, "tp"), (4, "tp and fsdp"), (4, "hsdp")]
    total = {}
    for found in on_ranks(read_lean, folder, writers):
        for writer, (num_read, num_own) in found.items():
            assert num_read == num_own
            total[writer] = total.get(writer, 0) + num_read
    assert len(set(total.values())) == 1


def test_an_optimizer_s_state_goes_by_the_names_of_parameters(tmp_path):
    states = []
    for turned in (False, True):
        accelerator = Accelerator(cpu=True)
        model = net(1)
        order = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(order[::-1] if turned else order)
        model, optimizer = accelerator.prepare(model, optimizer)
        if turned:
            accelerator.load_state(tmp_path)
        else:
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            accelerator.save_state(tmp_path)
        states.append({name: optimizer.state.get(one) for name, one in model.named_parameters()})
    for name, values in states[0].items():
        assert (values is None) == (states[1][name] is None)
        for field, value in (values or {}).items():
            assert torch.equal(states[1][name][field], value), (name, field)


def test_an_optimizer_of_parameters_in_no_model_goes_by_their_order(tmp_path):
    accelerator = Accelerator(cpu=True)
    one, other = (torch.full((3,), value, requires_grad=True) for value in (1.0, 2.0))
    optimizer = accelerator.prepare(torch.optim.SGD([one, other], lr=0.1, momentum=0.9))
    (one.sum() + 2 * other.sum()).backward()
    optimizer.step()
    accelerator.save_state(tmp_path)
    for values in optimizer.state.values():
        values["momentum_buffer"].zero_()
    accelerator.load_state(tmp_path)
    assert [optimizer.state[tensor]["momentum_buffer"].tolist() for tensor in (one, other)] == [[1.0] * 3, [2.0] * 3]


# --- hooks ------------------------------------------------------------------------------------------------------------


def saved_through_hooks(folder, options):
    """What hooks were given, when only rank 0's takes weights away, and whether the weights came back."""
    accelerator = Accelerator(cpu=True, **options)
    model = net(seed=1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    given = []

    def step():
        accelerator.backward(model(torch.ones(2, 6)).sum())
        optimizer.step()
        optimizer.zero_grad()

    def save(models, weights, _):
        given.append((len(models), len(weights)))
        if accelerator.is_main_process and weights:
            weights.pop()

    def load(models, _):
        given.append(len(models))
        models.clear()

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    step()
    accelerator.save_state(folder)
    before = accelerator.get_state_dict(model)
    step()
    accelerator.load_state(folder)
    after = accelerator.get_state_dict(model)
    return given, all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("options", [fsdp(), sizes(tp_size=2), {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)}])
def test_hooks_decide_nothing_of_models_in_parts(on_ranks, tmp_path, options):
    """As scripts for Accelerate expect: one rank's hook took weights away, and the checkpoint could not be read."""
    assert on_ranks(saved_through_hooks, tmp_path, options) == [([(1, 0), 0], True)] * 2
