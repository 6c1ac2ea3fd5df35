"""What a worker finds of TPUs, and how it makes itself ready for one; torch_xla is a fake."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path

import pytest

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.world import World
from notebook_launcher.worker import inspection, xla

FAKES = str(Path(__file__).resolve().parent.parent / "fakes")
VARIABLES = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT")


@pytest.fixture
def fake(monkeypatch):
    """A fresh fake torch_xla, and no chip."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_xla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(FAKES)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(xla, "_PCI", Path("/nowhere"))
    import torch_xla

    yield torch_xla
    atexit.unregister(torch_xla._prepare_to_exit)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_xla"]:
        del sys.modules[name]


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A card of Google's in the machine."""
    (tmp_path / "0000:00:04.0").mkdir()
    (tmp_path / "0000:00:04.0" / "vendor").write_text("0x1ae0\n")
    monkeypatch.setattr(xla, "_PCI", tmp_path)


def test_a_machine_without_torch_xla_says_how_to_install_it():
    assert xla.row().reason.startswith("torch_xla is not installed; pip install 'notebook-launcher[tpu]'")
    assert next(row for row in inspection.devices() if row.kind == "tpu") == xla.row()


@pytest.mark.usefixtures("fake")
def test_a_machine_without_a_chip():
    assert xla.row().reason == "no TPU chip is attached to this machine"


@pytest.mark.usefixtures("fake", "card")
def test_a_card_that_is_no_tpu():
    assert xla.row().reason == "no TPU chip is attached to this machine"


@pytest.mark.usefixtures("fake", "card")
def test_chips_and_what_they_can_do(monkeypatch):
    monkeypatch.setenv("FAKE_CHIPS", "4")
    monkeypatch.setenv("FAKE_VERSION", "5")
    row = xla.row()
    assert (row.num_devices, row.names[0], row.per_process, row.is_stand_in) == (4, "TPU v5", 1, False)
    assert row.precisions == {"no": "", "bf16": "", "fp16": "a TPU computes in bf16 and has no fp16"}
    monkeypatch.setenv("FAKE_VERSION", "3")
    assert (xla.row().num_devices, xla.row().per_process) == (8, 2)
    monkeypatch.delenv("FAKE_VERSION")
    assert (xla.row().num_devices, xla.row().names[0]) == (4, "TPU")


@pytest.mark.usefixtures("fake")
def test_the_cpu_stands_in_where_the_environment_says_so(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert xla.row().num_devices == 1
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    row = xla.row()
    assert (row.num_devices, row.names, row.per_process, row.is_stand_in) == (4, ("XLA on the CPU",) * 4, 4, True)


@pytest.mark.usefixtures("fake")
def test_other_hardware_of_xlas_is_not_a_tpu(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    assert xla.row().reason == "PJRT_DEVICE='NEURON' has XLA use other hardware; unset it, or set it to TPU"


@pytest.mark.usefixtures("fake")
def test_a_torch_xla_that_does_not_fit_torch_is_named_with_both_versions(monkeypatch):
    versions = {"torch_xla": "2.9.0", "torch": "2.13.0"}
    monkeypatch.setattr(xla.importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setitem(sys.modules, "torch_xla._internal.tpu", None)
    reason = xla.row().reason
    assert reason.startswith("torch_xla 2.9.0 can't be loaded beside torch 2.13.0 (")
    assert reason.endswith("each torch_xla needs the torch of its own number")


def test_without_torch_xla_a_module_of_it_is_an_error_that_says_how_to_install_it():
    with pytest.raises(ConfigError, match=r"torch_xla is not installed; pip install"):
        xla.module("torch_xla.runtime")


def test_a_process_that_has_used_a_device_is_refused(fake):
    fake.device()
    with pytest.raises(ConfigError, match="has used an XLA device before its run began"):
        xla.enter(World())


def test_what_the_import_has_set_is_set_again_and_the_end_is_torch_xlas(fake, monkeypatch):
    registered = []
    monkeypatch.setattr(xla.atexit, "register", registered.append)
    xla.set_up()
    assert fake.calls == ["flags"]
    assert registered == [fake._prepare_to_exit]


def test_a_rank_of_one_a_rank_of_several_and_one_for_all(fake, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    xla.enter(World(seed=3))
    assert fake.calls == ["flags", "singleprocess"]
    assert fake.state.seed == 3
    fake.calls.clear()
    xla.enter(World(strategy="spmd_fsdp"))
    assert fake.calls == ["flags", "use_spmd"]
    xla.enter(World(rank=1, world_size=2, local_rank=1, local_world_size=2))
    assert fake.runtime.global_ordinal() == 1


def test_without_a_seed_no_two_launches_draw_the_same(fake):
    xla.enter(World())
    first = fake.state.seed
    fake.state.initialized = False
    xla.enter(World())
    assert fake.state.seed not in {101, first}


def test_ranks_that_torch_xla_takes_for_one_each_are_refused(fake, monkeypatch):
    monkeypatch.setenv("FAKE_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="the launch has 2 processes, and torch_xla sees 1 in this run"):
        xla.enter(World(world_size=2, local_world_size=2))
