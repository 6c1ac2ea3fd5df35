"""XLA in a worker: what devices there are, and the process made ready for them. torch_xla is loaded on first need.

``torch_xla.launch`` would start processes of its own, from which neither output nor an interrupt's way is known. So the
fork server makes the one process a chip, and what ``launch`` does inside of it is done here, by the same functions of
torch_xla. They have no public name, which the pinned version (2.9) allows for.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import warnings
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.config import snapshot
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.events import DeviceRow
from notebook_launcher.core.precisions import refusals
from notebook_launcher.core.strategies import IN_ONE_PROCESS

if TYPE_CHECKING:
    from notebook_launcher.core.world import World

_GOOGLE = "0x1ae0"  # PCI's number of the maker; its network cards have it too
_PCI = pathlib.Path("/sys/bus/pci/devices")
_NO_CHIP = "no TPU chip is attached to this machine"
_INSTALL = "pip install 'notebook-launcher[tpu]' installs it with the torch that it needs"
# Set as torch_xla is imported, which a fork server did before this run's environment was put on.
_SETTINGS = ("_setup_default_env", "_setup_xla_flags", "_setup_tpu_vm_library_path")


def row() -> DeviceRow:
    """What TPU devices this machine has, as the environment says. XLA's runtime is not started."""
    environment = snapshot()
    kind = environment.get("PJRT_DEVICE", "TPU").partition("_")[0]
    reason = _why_none(kind)
    if reason:
        return DeviceRow("tpu", 0, reason=reason)
    if kind == "CPU":
        text = environment.get("CPU_NUM_DEVICES", "1")
        count = int(text) if text.isdecimal() else 1
        return _row("XLA on the CPU", count, per_process=count, is_stand_in=True)
    tpu = module("torch_xla._internal.tpu")
    chips = tpu.num_available_chips()
    try:
        version, cores = tpu.version(), tpu.num_logical_cores_per_chip()
    except Exception:  # noqa: BLE001 - asked of Google's metadata server, which not every machine can reach
        return _row("TPU", chips)
    return _row(f"TPU v{version}", chips * cores, per_process=cores)


def _why_none(kind: str) -> str:
    """Why there is no device, "" where there is; ``kind`` is what XLA is to run on."""
    if importlib.util.find_spec("torch_xla") is None:
        return f"torch_xla is not installed; {_INSTALL}"
    if kind not in {"TPU", "CPU"}:
        return f"PJRT_DEVICE={kind!r} has XLA use other hardware; unset it, or set it to TPU"
    if kind == "TPU" and not _maybe_chips():
        return _NO_CHIP
    try:
        tpu = module("torch_xla._internal.tpu")
    except ConfigError as error:
        return str(error)
    return _NO_CHIP if kind == "TPU" and not tpu.num_available_chips() else ""


def _row(name: str, count: int, *, per_process: int = 1, is_stand_in: bool = False) -> DeviceRow:
    return DeviceRow(
        "tpu",
        count,
        (name,) * count,
        precisions=refusals("tpu"),
        per_process=per_process,
        is_stand_in=is_stand_in,
    )


def _maybe_chips() -> bool:
    """Whether loading torch_xla, for seconds, is worth while to ask it."""
    for path in _PCI.glob("*/vendor"):
        try:
            if path.read_text().strip() == _GOOGLE:
                return True
        except OSError:
            continue
    return False


def module(name: str) -> Any:
    """A module of torch_xla's; raises ``ConfigError`` where it can't be loaded, with the likely reason."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        versions = {one: _version(one) for one in ("torch_xla", "torch")}
        if versions["torch_xla"] is None:
            raise ConfigError(f"torch_xla is not installed; {_INSTALL}") from error
        raise ConfigError(
            f"torch_xla {versions['torch_xla']} can't be loaded beside torch {versions['torch']} ({error}): each "
            "torch_xla needs the torch of its own number"
        ) from error


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def set_up() -> None:
    """Put on what torch_xla wants in the environment, and have it end as it should."""
    torch_xla = module("torch_xla")
    if torch_xla._XLAC._xla_runtime_is_initialized():  # noqa: SLF001
        raise ConfigError(
            "this process has used an XLA device before its run began: the notebook was forked (start_method='fork') "
            "after it had, or a preload module does. Leave out start_method, and use the device in the function only."
        )
    for name in _SETTINGS:
        getattr(torch_xla, name, lambda: None)()
    atexit.unregister(torch_xla._prepare_to_exit)  # noqa: SLF001
    atexit.register(torch_xla._prepare_to_exit)  # noqa: SLF001 - the fork server has forgotten it


def enter(world: World) -> None:
    """Make this process ``world.local_rank`` of its machine's, with a device of its own; by SPMD, with all of them.

    Raises ``ConfigError`` where torch_xla sees other processes than the launch has started.
    """
    set_up()
    runtime, pjrt = module("torch_xla.runtime"), module("torch_xla._internal.pjrt")
    if world.strategy in IN_ONE_PROCESS:
        runtime.use_spmd()
    elif world.local_world_size == 1:
        pjrt.initialize_singleprocess()
    else:
        pjrt.initialize_multiprocess(world.local_rank, world.local_world_size)
    check_size(world)
    seed(world)


def check_size(world: World) -> None:
    """Raise ``ConfigError``, with both numbers, where torch_xla sees another number of processes than was launched."""
    seen = module("torch_xla.runtime").world_size()
    if seen != world.world_size:
        raise ConfigError(
            f"the launch has {world.world_size} process{'es' * (world.world_size > 1)}, and torch_xla sees {seen} in "
            "this run, so they would not train one model together. Several processes can't share XLA on the CPU "
            "(PJRT_DEVICE=CPU): use one, with strategy='spmd' for several devices."
        )


def seed(world: World) -> None:
    """Seed the device's own random numbers, which torch's seed does not reach: else every launch has the same."""
    state = int.from_bytes(os.urandom(4), "big") if world.seed is None else world.seed
    module("torch_xla.core.xla_model").set_rng_state(state)
