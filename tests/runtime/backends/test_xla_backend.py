"""The XLA backend and its strategies, over a torch_xla that is a fake; tests/xla has the real one."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path

import pytest
import torch

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.world import World
from notebook_launcher.runtime import backends, gather, models, randomness, storage, strategies
from notebook_launcher.runtime.backends import torch_devices
from notebook_launcher.runtime.plugins import DataLoaderConfiguration, Keywords
from notebook_launcher.runtime.process import DistributedType, Process
from notebook_launcher.runtime.strategies import single

FAKES = str(Path(__file__).resolve().parent.parent.parent / "fakes")
VARIABLES = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT")


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.syspath_prepend(FAKES)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(randomness, "_known", {})
    monkeypatch.setattr(models, "WRAPPERS", list(models.WRAPPERS))
    import torch_xla

    yield torch_xla
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_xla"]:
        del sys.modules[name]


def backend(**world):
    return backends.select(World(device="tpu", launched=True, **world), cpu=False)[0]


def process(num_processes=1, **world):
    world = {"world_size": num_processes, **world}
    return Process(World(device="tpu", **world), backend(**world), "")


def make(name, one):
    return strategies.create(name, one, Keywords(None))


def test_one_device(fake):
    one = backend()
    assert (one.device_type, one.device, one.distributed_type) == ("xla", torch.device("xla:0"), "XLA")
    assert one.refusals["fp16"] == "a TPU computes in bf16 and has no fp16"
    assert Process(World(world_size=2), one, "").distributed_type is DistributedType.XLA
    assert fake.calls == []


def test_without_torch_xla_the_error_says_how_to_install_it():
    with pytest.raises(ConfigError, match=r"device='tpu' needs torch_xla, .* pip install 'notebook-launcher\[tpu\]'"):
        backend()


@pytest.mark.usefixtures("fake")
def test_other_devices_never_load_it():
    torch_devices.cpu(World())
    backends.select(World(device="cpu"), cpu=False)
    assert "notebook_launcher.runtime.backends.xla" not in sys.modules or "torch_xla.runtime" not in sys.modules


def test_several_processes_of_torchrun_that_each_believe_to_be_alone_are_refused(fake, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(ConfigError, match="2 processes were launched, and torch_xla sees 1 in this run"):
        backends.select(World(device="tpu", world_size=2, local_world_size=2), cpu=False)


def test_threads_of_one_process_are_refused(fake, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    fake.runtime = __import__("torch_xla.runtime").runtime
    monkeypatch.setenv("FAKE_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="the 2 ranks are threads of one process here"):
        backend()


def test_a_script_may_choose_spmd_itself(fake):
    assert backend(strategy="spmd").strategies["spmd"] == "spmd"
    assert fake.calls == ["use_spmd"]


# --- random numbers, models, batches ---------------------------------------------------------------------------------


def test_random_numbers_are_kept_restored_and_seeded(fake):
    one = backend()
    fake.state.seed = 5
    kept = randomness.snapshot(one.device)
    assert kept["xla"] == 5
    fake.state.seed = 6
    randomness.restore(kept, one.device)
    assert fake.state.seed == 5
    randomness.set_seed(9)
    assert fake.state.seed == 9
    randomness.equalize(["xla"], one.device)
    assert fake.state.seed == 9


@pytest.mark.usefixtures("fake")
def test_a_model_moves_with_its_parameters_the_same_objects_and_tied_ones_tied():
    from notebook_launcher.runtime.backends import xla

    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[1].weight = net[0].weight
    before = list(net.parameters())
    moved = xla._move(net, device=torch.device("meta"))  # as foreign to the host as a TPU is
    assert all(one is other for one, other in zip(before, moved.parameters(), strict=True))
    assert moved[0].weight is moved[1].weight
    assert moved[0].weight.device.type == "meta"
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_a_batch_ends_the_step_before_and_is_split_where_it_comes_out_even(fake, monkeypatch):
    from notebook_launcher.runtime.backends import xla

    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    import torch_xla.distributed.spmd as xs

    batch = {"x": torch.zeros(8, 3), "y": torch.zeros(8), "odd": torch.zeros(6, 2), "one": torch.tensor(1.0), "t": "a"}
    put = xla._put_split(batch, device=torch.device("cpu"))
    assert fake.calls == ["sync"]
    assert xs.marks == {id(put["x"]): ("fsdp", None), id(put["y"]): ("fsdp",)}
    assert put["t"] == "a"


def test_what_the_process_group_has_no_way_for_goes_by_the_host(monkeypatch):
    def one(kind):
        return types.SimpleNamespace(device=types.SimpleNamespace(type=kind), cpu=lambda: "on the host")

    monkeypatch.setattr(gather.dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    assert gather._carried(one("xla")) == "on the host"
    assert [gather._carried(one(kind)).device.type for kind in ("cpu", "cuda")] == ["cpu", "cuda"]


# --- strategies ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("name", [None, "ddp", "single"])
def test_the_usual_names_mean_the_strategies_of_xla(name):
    assert make(name, process()).name == "xla"
    assert make(name, process(strategy="spmd")).name == "spmd"


@pytest.mark.usefixtures("fake")
def test_a_strategy_that_the_device_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"strategy='spmd' is not there for the device 'xla', which has single, ddp"):
        make("spmd", process())


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("name", ["fsdp", "deepspeed", "tp", "pp"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_what_spreads_a_model_elsewhere_is_refused(name, num_processes, monkeypatch):
    monkeypatch.setenv("FAKE_WORLD_SIZE", str(num_processes))
    with pytest.raises(ConfigError, match=f"strategy={name!r} is not there for the device 'xla'"):
        make(name, process(num_processes))


@pytest.mark.parametrize("name", ["xla", "spmd", "spmd_fsdp"])
def test_the_strategies_of_xla_are_refused_elsewhere(name):
    elsewhere = Process(World(), torch_devices.cpu(World()), "")
    with pytest.raises(ConfigError, match=f"strategy={name!r} is for device='tpu', and the device is 'cpu'"):
        make(name, elsewhere)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("name", ["xla", "spmd", "spmd_fsdp"])
def test_they_have_all_that_is_asked_of_a_strategy_and_place_models_as_the_backend_does(name):
    one = process(strategy=name)
    one = dataclasses.replace(one, backend=dataclasses.replace(one.backend, move=lambda model: ("moved", model)))
    strategy, net = make(name, one), torch.nn.Linear(2, 1)
    asked = {*strategies.Strategy.__annotations__, *vars(strategies.Strategy)}
    assert not [part for part in asked if not part.startswith("_") and not hasattr(strategy, part)]
    assert strategy.place(net) == ("moved", net)
    assert strategy.data_process is one
    assert strategy.trains_apart
    with pytest.raises(ConfigError, match="has weight on the device 'meta', without a value"):
        strategy.place(torch.nn.Linear(2, 1, device="meta"))
    strategy.forget()


@pytest.mark.parametrize("name", ["xla", "spmd", "spmd_fsdp"])
def test_another_strategy_goes_on_from_what_they_save(name, fake, tmp_path):
    def made():
        net = torch.nn.Linear(2, 1)
        return {"model": net}, {"optimizer": torch.optim.AdamW(net.parameters())}

    models_, optimizers = made()
    models_["model"](torch.ones(1, 2)).sum().backward()
    optimizers["optimizer"].step()
    strategy = make(name, process(strategy=name))
    fake.calls.clear()
    draft = storage.Draft(tmp_path / "state")
    draft.begin()
    strategy.save(draft, models_, optimizers, safe=True)
    assert fake.calls[0] == "sync"
    draft.commit({}, {})
    others, their_optimizers = made()
    single.load(draft.folder, others, their_optimizers, strict=True)()
    assert torch.equal(others["model"].weight, models_["model"].weight)
    state, expected = (next(iter(one["optimizer"].state.values())) for one in (their_optimizers, optimizers))
    assert torch.equal(state["exp_avg"], expected["exp_avg"])
    fake.calls.clear()
    strategy.load(draft.folder, *made(), strict=True)()
    assert fake.calls == ["sync"]


def test_several_replicas_are_all_needed_for_each_batch(fake, monkeypatch):
    monkeypatch.setenv("FAKE_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"even_batches=False .* with strategy='xla' all are needed"):
        strategies.create(None, process(2), Keywords(None), DataLoaderConfiguration(even_batches=False))


@pytest.fixture
def two_replicas(fake, monkeypatch):
    """The strategy of a process that is one of two, its model on the host; the other's gradients are the same."""
    monkeypatch.setenv("FAKE_WORLD_SIZE", "2")
    strategy = make("ddp", process(2))
    net = torch.nn.Linear(2, 1)
    assert strategy.wrap(net) is net
    assert fake.calls.pop() == ("broadcast", net)
    return strategy, net


def test_a_backward_averages_the_gradients(fake, two_replicas):
    strategy, net = two_replicas
    strategy.backward(net(torch.ones(1, 2)).sum())
    assert fake.calls == [("sum", 2, 0.5)]
    assert net.weight.grad.tolist() == [[1.0, 1.0]]


def test_within_a_group_they_stay_on_the_rank(fake, two_replicas):
    strategy, net = two_replicas
    apart = strategy.no_sync(net)
    for _ in range(2):
        with apart:
            strategy.backward(net(torch.ones(1, 2)).sum())
    assert fake.calls == []
    with apart, strategy.sync_in_backward(net):
        strategy.backward(net(torch.ones(1, 2)).sum())
    assert fake.calls == [("sum", 2, 0.5)]
    with apart:
        strategy.backward(net(torch.ones(1, 2)).sum())
    assert len(fake.calls) == 1


def test_one_replica_exchanges_nothing(fake):
    strategy, net = make(None, process()), torch.nn.Linear(2, 1)
    assert strategy.wrap(net) is net
    strategy.backward(net(torch.ones(1, 2)).sum())
    assert (strategy.no_sync(net), strategy.sync_in_backward(net), fake.calls) == (None, None, [])


def test_a_step_is_run_at_once(fake):
    net = torch.nn.Linear(1, 1, bias=False)
    net.weight.grad = torch.ones(1, 1)
    before = net.weight.item()
    make(None, process()).step(torch.optim.SGD(net.parameters(), lr=1.0), None)
    assert net.weight.item() == pytest.approx(before - 1)
    assert fake.calls == ["sync"]


@pytest.mark.usefixtures("fake")
def test_the_whole_state_is_in_host_memory_and_tied_there_too():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[1].weight = net[0].weight
    state = make(None, process()).full_state(net)
    assert state["0.weight"] is state["1.weight"]
    assert not state["0.weight"].requires_grad
    assert state.keys() == net.state_dict().keys()


def test_fsdp_wraps_splits_outputs_and_is_unwrapped(fake, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    import torch_xla.distributed.spmd as xs

    strategy = make("spmd_fsdp", process(strategy="spmd_fsdp"))
    net = torch.nn.Linear(3, 1)
    wrapped = strategy.wrap(net)
    assert models.unwrap(wrapped) is net
    assert wrapped.mesh.axis_names == ("fsdp",)
    even, odd = wrapped(torch.ones(4, 3)), wrapped(torch.ones(3, 3))
    assert xs.marks[id(even)] == ("fsdp", None)
    assert id(odd) not in xs.marks
    wrapped.shard_output(types.SimpleNamespace(), wrapped.mesh)  # what has no tensor is left alone
