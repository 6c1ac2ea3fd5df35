"""From options and the machine's devices to a plan: which device, how many ranks, who each of them is."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from typing import TYPE_CHECKING

from notebook_launcher.core import deepspeed_options, fsdp_options, parallelism
from notebook_launcher.core.config import snapshot
from notebook_launcher.core.cores import num_cores
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.precisions import refusals
from notebook_launcher.core.registry import unknown_name
from notebook_launcher.core.strategies import (
    DEVICE_OF,
    IN_ONE_PROCESS,
    ON_DEVICE,
    PACKAGES,
    STRATEGIES,
    WITHOUT_ACCUMULATION,
    WITHOUT_FP16,
)
from notebook_launcher.core.world import World
from notebook_launcher.launcher.device_choice import narrowed, numbers, peer_settings, visibility
from notebook_launcher.launcher.engines import ENGINE_OF, ENGINES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.core.events import DeviceRow

_ACCELERATORS = ("cuda", "tpu", "xpu", "mps")  # in the order in which "auto" prefers them
_BACKENDS = {"cuda": "NCCL", "tpu": "XLA", "xpu": "XCCL", "mps": "gloo", "cpu": "gloo"}
_NAMES = {"cuda": "CUDA", "tpu": "TPU", "xpu": "XPU", "mps": "MPS", "cpu": "CPU"}
_DEFAULTS = {  # variables, where nobody has said otherwise
    "tpu": {"PJRT_DEVICE": "TPU", "TF_CPP_MIN_LOG_LEVEL": "2"},
    "mps": {"PYTORCH_ENABLE_MPS_FALLBACK": "1"},  # what has no kernel there runs on the CPU
}
# Which devices a process sees, by kind. Of several the first that is set holds; the last is there for all makers.
_VISIBLE = {"cuda": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "xpu": ("ZE_AFFINITY_MASK",)}
_WHOLE = ("tpu",)  # kinds of which a launch has one device or all
_ALONE = ("mps",)  # kinds for one process
_CHECKS = {"fsdp": fsdp_options.check, "deepspeed": deepspeed_options.check}  # of the strategy's section in a file
_STRATEGIES = {  # as people write them, where that is not the option's value
    "ddp": "DDP",
    "fsdp": "FSDP",
    "deepspeed": "DeepSpeed",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
}
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
    engine: str = "local"


def make_plan(
    config: LaunchConfig, look: Callable[[], Sequence[DeviceRow]], *, environment: Mapping[str, str] | None = None
) -> Plan:
    """Decide; raises ``ConfigError`` for what this machine can't do.

    ``look`` gives the machine's devices. It is asked only where the answer matters, since the first look takes seconds.
    ``environment`` stands in for the notebook's.
    """
    environment = snapshot() if environment is None else environment
    try:
        return _decided(config, look, environment)
    except ConfigError as error:
        from notebook_launcher.core.options import origin  # pydantic comes with it, which the extension has no time for

        text = str(error)
        told = origin(config.sources, *(name for name in config.sources if re.search(rf"\b{name}\b", text)))
        if not told:
            raise
        raise ConfigError(text + told) from None


def _decided(config: LaunchConfig, look: Callable[[], Sequence[DeviceRow]], environment: Mapping[str, str]) -> Plan:
    _check_not_launched(environment)
    if config.strategy is not None and config.strategy not in STRATEGIES.names:
        raise unknown_name("strategy", config.strategy, STRATEGIES.names)
    rows = {} if config.device == "cpu" else {row.kind: row for row in look()}
    device = _device(config, rows)
    row = rows.get(device)
    engine = _engine(config, device)
    chosen = _chosen(config, device, row, {**environment, **config.env})
    num_local = _num_on_cpu(config, rows) if device == "cpu" else _num_local(config, device, row, chosen)
    _check_precision(config, device, row)
    _check_strategy(config, device, num_local)
    worlds = _worlds(config, device, num_local, {**environment, **config.env})
    added = {name: text for name, text in _DEFAULTS.get(device, {}).items() if name not in environment} | config.env
    if chosen is not None and device in _VISIBLE:
        added |= visibility(_VISIBLE[device], chosen, {**environment, **config.env})
    peers, told = peer_settings(row, range(num_local) if chosen is None else chosen, {**environment, **added})
    headline, notes = _headline(config, device, worlds[0].world_size), (*_notes(config), *told)
    return Plan(device, worlds, headline, notes, added | peers, engine)


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
    found = (kind for kind in _ACCELERATORS if kind in rows and rows[kind].num_devices and not rows[kind].is_stand_in)
    return next(found, "cpu")


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


def _engine(config: LaunchConfig, device: str) -> str:
    """Where the processes come from: as asked, where that goes with the device, else as the device has it."""
    needed = ENGINE_OF.get(device)
    if "engine" not in config.sources:
        return needed or config.engine
    wrong = config.engine != needed if needed is not None else config.engine in ENGINE_OF.values()
    if wrong and config.engine in ENGINES.names:
        raise ConfigError(
            f"engine={config.engine!r} doesn't start processes for the device {device!r}, which takes "
            f"engine={needed or 'local'!r}. Leave engine out."
        )
    return config.engine


def _chosen(
    config: LaunchConfig, device: str, row: DeviceRow | None, environment: Mapping[str, str]
) -> list[int] | None:
    """``device_ids`` as numbers of what the notebook sees; None where all are taken, or the kind has no choice."""
    if config.device_ids is None or row is None or device in _WHOLE or device == "cpu":
        return None
    found = numbers(config.device_ids, row)
    beyond = [number for number in found if number >= row.num_devices]
    if beyond:
        raise ConfigError(
            f"device_ids={config.device_ids} names device {beyond[0]}, and the notebook sees {row.num_devices} "
            f"{_NAMES[device]} device{'s' * (row.num_devices != 1)}, numbered from 0"
            + narrowed(_VISIBLE.get(device, ()), environment)
            + f". Use numbers up to {row.num_devices - 1}."
        )
    return found


def _num_local(config: LaunchConfig, device: str, row: DeviceRow | None, chosen: Sequence[int] | None) -> int:
    num_devices = row.num_devices if row is not None else 0
    if device in _WHOLE:
        return _num_of_whole(config, device, num_devices)
    if device in _ALONE:
        return _num_alone(config, device)
    num_devices = num_devices if chosen is None else len(chosen)
    asked = config.num_processes or num_devices
    if asked > num_devices:
        raise ConfigError(
            f"num_processes={asked} is more than the {num_devices} {_NAMES[device]} device{'s' * (num_devices != 1)} "
            f"to run on, and each process needs its own. Ask for at most {num_devices}, or use device='cpu'."
        )
    return asked


def _num_alone(config: LaunchConfig, device: str) -> int:
    for name, asked in {"num_processes": config.num_processes or 1, "num_machines": config.num_machines}.items():
        if asked > 1:
            raise ConfigError(
                f"{name}={asked} can't be on device={device!r}: an Apple GPU is one device, and torch can't exchange "
                f"its tensors between processes. Leave {name} out, or use device='cpu'."
            )
    return 1


def _num_of_whole(config: LaunchConfig, device: str, num_devices: int) -> int:
    """Where a launch has one device, or all, or by its strategy one process for all."""
    name = _NAMES[device]
    if config.device_ids is not None:
        raise ConfigError(f"device_ids={config.device_ids} chooses GPUs, and a {name} launch takes all: leave it out.")
    if config.num_machines > 1:
        raise ConfigError(f"num_machines={config.num_machines} can't be with {name}s yet: launch on one machine.")
    if config.strategy in IN_ONE_PROCESS:
        if (config.num_processes or 1) != 1:
            raise ConfigError(
                f"strategy={config.strategy!r} drives all {num_devices} {name} devices from one process, and "
                f"num_processes is {config.num_processes}. Leave num_processes out."
            )
        return 1
    asked = config.num_processes or num_devices
    if asked not in {1, num_devices}:
        raise ConfigError(
            f"num_processes={asked} can't be on {num_devices} {name} device{'s' * (num_devices != 1)}: torch_xla runs "
            f"one process, or one for each of them. Use {' or '.join(map(str, sorted({1, num_devices})))}."
        )
    return asked


def _num_on_cpu(config: LaunchConfig, rows: Mapping[str, DeviceRow]) -> int:
    if config.device_ids is not None:  # with device="auto": LaunchConfig refuses it with "cpu"
        reason = f": {rows['cuda'].reason}" if "cuda" in rows and rows["cuda"].reason else ""
        raise ConfigError(
            f"device_ids={config.device_ids} chooses GPUs, and device='auto' found none{reason}. Leave device_ids out "
            "to run on the CPU."
        )
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


def _check_strategy(config: LaunchConfig, device: str, num_local: int) -> None:
    wanted = DEVICE_OF.get(config.strategy or "", device)
    if wanted != device:
        raise ConfigError(
            f"strategy={config.strategy!r} is for device={wanted!r}, and the device is {device!r}. Use another "
            f"strategy, or device={wanted!r}."
        )
    known, name = ON_DEVICE.get(device), _strategy(config)
    if known and name not in {None, *known}:
        raise ConfigError(
            f"strategy={name!r} is not there for device={device!r}, which has {', '.join(known)}. Use one of them, or "
            "another device."
        )
    world_size = num_local * config.num_machines
    if config.strategy == "single" and world_size > 1:
        raise ConfigError(
            f"strategy='single' with {world_size} processes would train {world_size} models apart. "
            "Use num_processes=1, or strategy='ddp' to train one together."
        )
    mesh = parallelism.refuse(config.strategy, _mesh(config), world_size)
    if mesh:
        raise ConfigError(mesh)
    num_steps = config.gradient_accumulation_steps or 1
    if num_steps > 1 and name in WITHOUT_ACCUMULATION and world_size > 1:
        raise ConfigError(
            f"strategy={name!r} can't be together with gradient_accumulation_steps={num_steps}: "
            f"{WITHOUT_ACCUMULATION[name]}. Leave it at 1, and give larger batches and more microbatches."
        )
    if config.mixed_precision == "fp16" and name in WITHOUT_FP16 and world_size > 1:
        raise ConfigError(
            f"strategy={name!r} can't be together with mixed_precision='fp16', which scales losses by what all "
            f"gradients look like: {WITHOUT_FP16[name]}. Use mixed_precision='bf16'."
        )
    if config.strategy in _CHECKS:
        _CHECKS[config.strategy](config.extra.get(f"{config.strategy}_config"))
    package = PACKAGES.get(config.strategy or "")
    module = (package or "").partition(">")[0]
    if package and importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"strategy={config.strategy!r} needs the package {module}, which is not installed; it comes with the extra "
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
