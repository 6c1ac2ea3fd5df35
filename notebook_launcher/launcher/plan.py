"""From options and the machine's devices to a plan: which device, how many ranks, who each of them is."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from notebook_launcher.core.config import snapshot
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.core.events import DeviceRow

_ACCELERATORS = ("cuda", "xpu", "mps")  # in the order in which "auto" prefers them
_BACKENDS = {"cuda": "NCCL", "xpu": "XCCL", "mps": "gloo", "cpu": "gloo"}
_NAMES = {"cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "cpu": "CPU"}
DEFAULT_ON_CPU = 2
_MAX_RANKS_PER_CORE = 32  # on the CPU; more is a slip of the finger


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a launch will do. ``worlds`` has one entry for each rank on this machine."""

    device: str
    worlds: tuple[World, ...]
    headline: str
    notes: tuple[str, ...]
    environment: dict[str, str]  # what is added to the notebook's


def make_plan(config: LaunchConfig, look: Callable[[], Sequence[DeviceRow]]) -> Plan:
    """Decide; raises ``ConfigError`` for what this machine can't do.

    ``look`` gives the machine's devices. It is asked only where the answer matters, since the first look takes seconds.
    """
    rows = {} if config.device == "cpu" else {row.kind: row for row in look()}
    device = _device(config, rows)
    row = rows.get(device)
    num_local = _num_local(config, device, row)
    _check_precision(config, device, row)
    cores = num_cores()
    worlds = tuple(
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
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            seed=config.seed,
            num_threads=max(1, cores // num_local),
            launched=True,
        )
        for local_rank in range(num_local)
    )
    headline = _headline(config, device, worlds[0].world_size)
    return Plan(device, worlds, headline, _notes(config), _environment(config, device))


def num_cores() -> int:
    """Cores that this process may use, which in a container is fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _device(config: LaunchConfig, rows: dict[str, DeviceRow]) -> str:
    if config.device == "cpu":
        return "cpu"
    if config.device == "auto":
        return next((kind for kind in _ACCELERATORS if kind in rows and rows[kind].num_devices), "cpu")
    row = rows.get(config.device)
    if row is None:
        raise ConfigError(
            f"device {config.device!r} is not supported yet: this version knows {', '.join(rows)}. Use device='auto'."
        )
    if not row.num_devices:
        have = ", ".join(kind for kind in rows if rows[kind].num_devices)
        raise ConfigError(f"device {config.device!r} is not here: {row.reason}. This machine has: {have}.")
    return config.device


def _num_local(config: LaunchConfig, device: str, row: DeviceRow | None) -> int:
    if device == "cpu":
        if config.device_ids is not None:
            raise ConfigError(f"device_ids={config.device_ids} chooses GPUs, and the device is cpu: leave it out.")
        asked = config.num_processes or DEFAULT_ON_CPU
        limit = _MAX_RANKS_PER_CORE * num_cores()
        if asked > limit:
            raise ConfigError(f"num_processes={asked} is too many for {num_cores()} cores: the limit is {limit}.")
        return asked
    num_devices = row.num_devices if row is not None else 0
    if config.device_ids is not None:
        num_devices = len(config.device_ids)
    asked = config.num_processes or num_devices
    if asked > num_devices:
        raise ConfigError(
            f"num_processes={asked} is more than the {num_devices} {_NAMES[device]} device(s) to run on, and each "
            f"process needs its own. Ask for at most {num_devices}, or use device='cpu'."
        )
    return asked


def _check_precision(config: LaunchConfig, device: str, row: DeviceRow | None) -> None:
    wanted = config.mixed_precision or "no"
    known = row.precisions if row is not None else {"fp16": "a CPU emulates it, slower and less exact than bf16"}
    reason = known.get(wanted, "")
    if reason:
        chosen = "asked for" if config.device == device else f"chosen, since device={config.device!r} found no other"
        others = " or ".join(repr(name) for name in ("bf16", "fp16", "no") if not known.get(name) and name != wanted)
        raise ConfigError(
            f"mixed_precision={wanted!r} can't be used on {device} (the device {chosen}): {reason}. Use {others}."
        )


def _environment(config: LaunchConfig, device: str) -> dict[str, str]:
    added = dict(config.env)
    if device == "cuda" and config.device_ids is not None:
        visible = snapshot().get("CUDA_VISIBLE_DEVICES", "")
        # Indices count what the notebook sees, which CUDA_VISIBLE_DEVICES may have narrowed already.
        names = [name.strip() for name in visible.split(",")] if visible else None
        added["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] if names else str(i) for i in config.device_ids)
    return added


def _headline(config: LaunchConfig, device: str, world_size: int) -> str:
    processes = f"{world_size} process" + ("es" if world_size > 1 else "")
    precision = config.mixed_precision if config.mixed_precision not in (None, "no") else "fp32"
    strategy = config.strategy or ("ddp" if world_size > 1 else "single")
    parts = [processes, f"{_NAMES[device]} ({_BACKENDS[device]})", precision, strategy]
    if config.gradient_accumulation_steps and config.gradient_accumulation_steps > 1:
        parts.append(f"accumulation {config.gradient_accumulation_steps}")
    if config.num_machines > 1:
        parts.append(f"machine {config.machine_rank} of {config.num_machines}")
    return " · ".join(parts)


def _notes(config: LaunchConfig) -> tuple[str, ...]:
    told = [f"{name}={getattr(config, name)!r} from {source}" for name, source in config.sources.items()]
    return (f"options: {', '.join(told)}",) if told else ()
