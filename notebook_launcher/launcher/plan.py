"""From options and the machine's devices to a plan: which device, how many ranks, who each of them is."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from typing import TYPE_CHECKING

from notebook_launcher.core import parallelism
from notebook_launcher.core.config import snapshot
from notebook_launcher.core.cores import num_cores
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.precisions import refusals
from notebook_launcher.core.registry import unknown_name
from notebook_launcher.core.strategies import PACKAGES, STRATEGIES, WITHOUT_ACCUMULATION
from notebook_launcher.core.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.core.events import DeviceRow

_ACCELERATORS = ("cuda", "xpu", "mps")  # in the order in which "auto" prefers them
_BACKENDS = {"cuda": "NCCL", "xpu": "XCCL", "mps": "gloo", "cpu": "gloo"}
_NAMES = {"cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "cpu": "CPU"}
_STRATEGIES = {  # as people write them, where that is not the option's value
    "ddp": "DDP",
    "fsdp": "FSDP",
    "deepspeed": "DeepSpeed",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
}
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}  # which devices a process sees, by kind
DEFAULT_ON_CPU = 2
_MAX_RANKS_PER_CORE = 32  # on the CPU; more is a slip of the finger
_WITH_SECTION = ("fsdp", "deepspeed")  # strategies that a section of a configuration file is for
_NAMED_ONLY = ("env", "extra")  # options whose values may be secrets, or long


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a launch will do. ``worlds`` has one entry for each rank on this machine."""

    device: str
    worlds: tuple[World, ...]
    headline: str
    notes: tuple[str, ...]
    environment: dict[str, str]  # what is added to the notebook's


def make_plan(
    config: LaunchConfig, look: Callable[[], Sequence[DeviceRow]], *, environment: Mapping[str, str] | None = None
) -> Plan:
    """Decide; raises ``ConfigError`` for what this machine can't do.

    ``look`` gives the machine's devices. It is asked only where the answer matters, since the first look takes seconds.
    ``environment`` stands in for the notebook's.
    """
    environment = snapshot() if environment is None else environment
    _check_not_launched(environment)
    if config.strategy is not None and config.strategy not in STRATEGIES.names:
        raise unknown_name("strategy", config.strategy, STRATEGIES.names)
    rows = {} if config.device == "cpu" else {row.kind: row for row in look()}
    device = _device(config, rows)
    row = rows.get(device)
    visible = _visible(config, device, environment)
    num_local = _num_local(config, device, row, visible)
    _check_precision(config, device, row)
    _check_strategy(config, num_local)
    worlds = _worlds(config, device, num_local, {**environment, **config.env})
    added = dict(config.env)
    if config.device_ids is not None and device in _VISIBLE:
        # Indices count what the notebook sees, which the variable may have narrowed already.
        added[_VISIBLE[device]] = ",".join(visible[i] if visible else str(i) for i in config.device_ids)
    return Plan(device, worlds, _headline(config, device, worlds[0].world_size), _notes(config), added)


def _check_not_launched(environment: Mapping[str, str]) -> None:
    """Refuse a launch from a rank: each rank would start as many again, and all on the same devices."""
    if "NOTEBOOK_LAUNCHER" in environment:
        raise ConfigError(
            f"launch was called on rank {environment.get('RANK', '0')} of a run, which runs on every device already. "
            "Call the function itself there, and launch from the notebook only; a script that a rank starts may launch "
            "when it is started without the variable NOTEBOOK_LAUNCHER."
        )


def preferred_kind(rows: Mapping[str, DeviceRow]) -> str:
    """The kind of device that ``auto`` takes, of those that the machine has."""
    return next((kind for kind in _ACCELERATORS if kind in rows and rows[kind].num_devices), "cpu")


def _device(config: LaunchConfig, rows: Mapping[str, DeviceRow]) -> str:
    if config.device == "cpu":
        return "cpu"
    if config.device == "auto":
        return preferred_kind(rows)
    row = rows.get(config.device)
    if row is None:
        raise ConfigError(
            f"device {config.device!r} is not supported yet: this version knows {', '.join(rows)}. Use device='auto'."
        )
    if not row.num_devices:
        have = ", ".join(kind for kind in rows if rows[kind].num_devices)
        raise ConfigError(f"device {config.device!r} is not here: {row.reason}. This machine has: {have}.")
    return config.device


def _visible(config: LaunchConfig, device: str, environment: Mapping[str, str]) -> list[str]:
    """The devices by their names outside the run, where a variable narrows them; [] where none does."""
    text = {**environment, **config.env}.get(_VISIBLE.get(device, ""), "")
    return [name.strip() for name in text.split(",") if name.strip()]


def _num_local(config: LaunchConfig, device: str, row: DeviceRow | None, visible: Sequence[str]) -> int:
    if device == "cpu":
        return _num_on_cpu(config)
    num_devices = row.num_devices if row is not None else 0
    if _VISIBLE.get(device) in config.env:
        num_devices = len(visible)  # the look was without it
    if config.device_ids is not None:
        beyond = [number for number in config.device_ids if number >= num_devices]
        if beyond:
            raise ConfigError(
                f"device_ids={config.device_ids} names device {beyond[0]}, and the notebook sees {num_devices} "
                f"{_NAMES[device]} device{'s' * (num_devices != 1)}, numbered from 0"
                + (f" ({_VISIBLE[device]}={','.join(visible)})" if visible else "")
                + f". Use numbers up to {num_devices - 1}."
            )
        num_devices = len(config.device_ids)
    asked = config.num_processes or num_devices
    if asked > num_devices:
        raise ConfigError(
            f"num_processes={asked} is more than the {num_devices} {_NAMES[device]} device{'s' * (num_devices != 1)} "
            f"to run on, and each process needs its own. Ask for at most {num_devices}, or use device='cpu'."
        )
    return asked


def _num_on_cpu(config: LaunchConfig) -> int:
    if config.device_ids is not None:
        raise ConfigError(f"device_ids={config.device_ids} chooses GPUs, and the device is cpu: leave it out.")
    asked = config.num_processes or DEFAULT_ON_CPU
    limit = _MAX_RANKS_PER_CORE * num_cores()
    if asked > limit:
        raise ConfigError(f"num_processes={asked} is too many for {num_cores()} cores: the limit is {limit}.")
    return asked


def _check_precision(config: LaunchConfig, device: str, row: DeviceRow | None) -> None:
    wanted = config.mixed_precision or "no"
    known = row.precisions if row is not None else refusals(device)
    reason = known.get(wanted, "")
    if reason:
        chosen = "asked for" if config.device == device else f"chosen by device={config.device!r}"
        chosen += ", which found no other" if device == "cpu" else ""
        others = " or ".join(repr(name) for name in ("bf16", "fp16", "no") if not known.get(name) and name != wanted)
        raise ConfigError(
            f"mixed_precision={wanted!r} can't be used on {device} (the device {chosen}): {reason}. Use {others}."
        )


def _check_strategy(config: LaunchConfig, num_local: int) -> None:
    world_size = num_local * config.num_machines
    if config.strategy == "single" and world_size > 1:
        raise ConfigError(
            f"strategy='single' with {world_size} processes would train {world_size} models apart. "
            "Use num_processes=1, or strategy='ddp' to train one together."
        )
    mesh = parallelism.refuse(config.strategy, _mesh(config), world_size)
    if mesh:
        raise ConfigError(mesh)
    num_steps, name = config.gradient_accumulation_steps or 1, _strategy(config) or ""
    if num_steps > 1 and name in WITHOUT_ACCUMULATION and world_size > 1:
        raise ConfigError(
            f"strategy={name!r} can't be together with gradient_accumulation_steps={num_steps}: "
            f"{WITHOUT_ACCUMULATION[name]}. Leave it at 1, and give larger batches and more microbatches."
        )
    package = PACKAGES.get(config.strategy or "")
    name = (package or "").partition(">")[0]
    if package and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"strategy={config.strategy!r} needs the package {name}, which is not installed; it comes with the extra "
            f"{config.strategy}, pip install 'notebook-launcher[{config.strategy}]', or by itself: {sys.executable} -m "
            f"pip install '{package}'"
        )


def _mesh(config: LaunchConfig) -> dict[str, int]:
    return parallelism.sizes(config.extra.get(parallelism.SECTION))


def _strategy(config: LaunchConfig) -> str | None:
    return parallelism.strategy_of(_mesh(config), config.strategy)


def _num_threads(environment: Mapping[str, str], num_local: int) -> int:
    """What the user says, in the notebook or by ``env``; else the ranks share the cores."""
    said = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(said) if said.isdecimal() and int(said) > 0 else max(1, num_cores() // num_local)


def _worlds(config: LaunchConfig, device: str, num_local: int, environment: Mapping[str, str]) -> tuple[World, ...]:
    section = config.extra.get(f"{config.strategy}_config")
    mesh = _mesh(config)
    return tuple(
        World(
            rank=config.machine_rank * num_local + local_rank,
            world_size=num_local * config.num_machines,
            local_rank=local_rank,
            local_world_size=num_local,
            machine_rank=config.machine_rank,
            num_machines=config.num_machines,
            main_address=config.main_process_ip or "127.0.0.1",
            main_port=config.main_process_port or 0,
            device=device,
            mixed_precision=config.mixed_precision,
            strategy=config.strategy,
            strategy_config=json.dumps(section) if section else None,
            parallelism_config=json.dumps(mesh) if mesh else None,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            seed=config.seed,
            num_threads=_num_threads(environment, num_local),
            launched=True,
        )
        for local_rank in range(num_local)
    )


def _headline(config: LaunchConfig, device: str, world_size: int) -> str:
    processes = f"{world_size} process" + ("es" if world_size > 1 else "")
    precision = config.mixed_precision if config.mixed_precision not in (None, "no") else "fp32"
    strategy = _strategy(config) or ("ddp" if world_size > 1 else "single")
    parts = [processes, f"{_NAMES[device]} ({_BACKENDS[device]})", precision, _STRATEGIES.get(strategy, strategy)]
    if config.gradient_accumulation_steps and config.gradient_accumulation_steps > 1:
        parts.append(f"accumulation {config.gradient_accumulation_steps}")
    if config.num_machines > 1:
        parts.append(f"machine {config.machine_rank} of {config.num_machines}")
    return " · ".join(parts)


def _notes(config: LaunchConfig) -> tuple[str, ...]:
    told = [f"{text} from {config.sources[name]}" for name, text in chosen_options(config).items()]
    idle = [
        f"{name}_config has no effect: it is for strategy={name!r}, and this is {config.strategy or 'open'!r}"
        for name in _WITH_SECTION
        if config.extra.get(f"{name}_config") and name != config.strategy
    ]
    return (*([f"options: {', '.join(told)}"] if told else []), *idle)


def chosen_options(config: LaunchConfig) -> dict[str, str]:
    """What was chosen and is not the default, as a person would write it: ``{"seed": "seed=3"}``; secrets stay so."""
    fields = type(config).model_fields
    return {
        name: f"{name}{_shown(name, getattr(config, name))}"
        for name in config.sources
        if getattr(config, name) != fields[name].get_default(call_default_factory=True)
    }


def _shown(name: str, value: object) -> str:
    if name in _NAMED_ONLY and isinstance(value, dict):
        return f" ({', '.join(value)})" if value else ""
    return f"={value!r}"
