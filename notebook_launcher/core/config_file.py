"""Configuration files: Accelerate's YAML, read into a launch's options and written back with nothing lost.

``distributed_type``, ``use_cpu``, ``gpu_ids`` and the total ``num_processes`` are Accelerate's way to say device,
strategy, device ids and processes a machine. An option that was set and that Accelerate has no key for stands in a
section ``notebook_launcher``, which Accelerate refuses, as it does every key that it doesn't know: the section is
written only when there is such an option, and the head of the file says so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from notebook_launcher.core import parallelism
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.notices import warn
from notebook_launcher.core.registry import unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECTION = "notebook_launcher"

# distributed_type -> device, strategy; None where the type says nothing of it.
_TYPES: dict[str, tuple[str | None, str | None]] = {
    "NO": (None, None),
    "MULTI_CPU": ("cpu", "ddp"),
    "MULTI_GPU": ("cuda", "ddp"),
    "MULTI_XPU": ("xpu", "ddp"),
    "MPS": ("mps", None),
    "TPU": ("tpu", None),  # up to Accelerate 0.26
    "XLA": ("tpu", None),
    "FSDP": (None, "fsdp"),
    "DEEPSPEED": (None, "deepspeed"),
}
_NO_LAUNCHES = ("MULTI_NPU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_NEURON", "MEGATRON_LM")

_SAME = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "mixed_precision")
_STEPS = "gradient_accumulation_steps"
_NOT_SAID = -1  # Accelerate's num_processes where nobody chose
_TRANSLATED = {
    "compute_environment",
    "distributed_type",
    "use_cpu",
    "gpu_ids",
    "num_processes",
    _STEPS,
    _SECTION,
    *_SAME,
}

_NO: tuple[Any, ...] = (None, False, "no", "NO", "")
_NONE: tuple[Any, ...] = (None, [], {}, "")
# Accelerate's keys without a meaning here: they are kept, and named in a warning unless they hold Accelerate's default.
_NOTHING_ASKED: dict[str, tuple[Any, ...]] = {
    "debug": _NO,
    "downcast_bf16": _NO,
    "dynamo_backend": _NO,
    "enable_cpu_affinity": _NO,
    "rdzv_backend": (None, "static"),
    "tpu_use_cluster": _NO,
    "tpu_use_sudo": _NO,
    **dict.fromkeys(("command_file", "commands", "tpu_env", "tpu_name", "tpu_vm", "tpu_zone"), (*_NONE, [""])),
    **dict.fromkeys(("fp8_config", "ipex_config", "megatron_lm_config", "mpirun_config"), _NONE),
    "dynamo_config": (*_NONE, *({"dynamo_backend": name} for name in ("NO", "no", None))),
}
# Whatever they hold: a strategy reads its own section, the launch names the function, the main machine has an address.
_SILENT = ("deepspeed_config", "fsdp_config", "main_training_function", "parallelism_config", "same_network")

_HEAD_SECTION = "# Accelerate refuses this file: it has no keys for the options in the section notebook_launcher.\n"
_HEAD_AUTO = "# Accelerate has no word for device 'auto' and would start one process from this file.\n"


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options that the file sets, by name; every other key is under ``extra``.

    Warns once of keys that ask for something and have no meaning here. Raises ``ConfigError``, with the path, for a
    file that can't be read.
    """
    where = os.fspath(path)
    keys = _parsed(where)
    options = _options(keys, where)
    without = sorted(name for name, value in options.get("extra", {}).items() if _asks(name, value))
    if without:
        warn(f"{where}: without a meaning here, so without effect, but kept and written back: {', '.join(without)}.")
    return options


def _asks(name: str, value: Any) -> bool:
    """Whether a key that is kept asks for something, so that a person should hear that nothing comes of it."""
    return name not in _SILENT and value not in _NOTHING_ASKED.get(name, (None,))


def write(path: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
    """Write ``options``, those that aren't default, so that ``read`` gives just these back.

    Only a strategy that was left open comes back as ``ddp`` where Accelerate's word for several GPUs says so. Raises
    ``ConfigError``, with the path, where it can't be written.
    """
    where = os.fspath(path)
    options = {"num_machines": 1, "machine_rank": 0, **options}  # Accelerate's own files always say these
    keys = _keys(options)
    # What a reader would make of these keys decides what is left to say in our own section.
    told = _options(keys, where)
    names = {*options, *told} - {"extra"}
    rest = {name: options.get(name) for name in sorted(names) if options.get(name) != told.get(name)}
    if rest.get("strategy", "") is None:
        del rest["strategy"]
    head = ""
    if rest:
        keys[_SECTION] = rest
        head = _HEAD_SECTION
    elif keys["distributed_type"] == "NO" and "device" not in options and keys.get("num_processes", 1) > 1:
        head = _HEAD_AUTO
    try:
        text = head + yaml.safe_dump(keys, allow_unicode=True)
        Path(where).write_text(text, encoding="utf-8")
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} can't be written: the options hold what YAML can't say ({error}).") from None
    except OSError as error:
        raise ConfigError(f"{where} can't be written: {error.strerror or error}.") from None


def _parsed(where: str) -> dict[str, Any]:
    try:
        keys = yaml.safe_load(Path(where).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration file {where} (looked from {Path.cwd()}). Give the path of a YAML file, such as "
            "one made by LaunchConfig.save."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {where} can't be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration file {where} isn't plain YAML: {' '.join(str(error).split())}.") from None
    if keys is None:
        return {}
    if not isinstance(keys, dict):
        raise ConfigError(
            f"the configuration file {where} holds a {type(keys).__name__}: it takes names and values, such as "
            "'num_processes: 2'."
        )
    return {str(name): value for name, value in keys.items()}


# --- Accelerate's keys to options ------------------------------------------------------------------------------------


def _options(keys: Mapping[str, Any], where: str) -> dict[str, Any]:
    extra = {name: value for name, value in keys.items() if name not in _TRANSLATED}
    device, strategy = _device_and_strategy(keys, where)
    if strategy == "ddp" and parallelism.sizes(keys.get(parallelism.SECTION)):
        strategy = None  # several devices is all that Accelerate's word says; the sizes say how they are used
    options = {
        "device": device,
        "strategy": strategy,
        "num_processes": _num_processes(keys, where),
        "device_ids": _device_ids(keys.get("gpu_ids")),
        _STEPS: keys.get(_STEPS),
        **{name: keys.get(name) for name in _SAME},
    }
    if options["mixed_precision"] is False:  # YAML's reading of an unquoted no
        options["mixed_precision"] = "no"
    deepspeed = extra.get("deepspeed_config")
    if isinstance(deepspeed, dict) and type(deepspeed.get(_STEPS)) is int:
        options[_STEPS] = deepspeed[_STEPS]
        extra["deepspeed_config"] = {name: value for name, value in deepspeed.items() if name != _STEPS}
    options.update(_section(keys, where))
    told = {name: value for name, value in options.items() if value is not None}
    return {**told, "extra": extra} if extra else told


def _device_ids(value: Any) -> Any:
    """``all``, ``3`` or ``0,1``; whatever else it is, LaunchConfig says what is wrong with it."""
    if str(value).strip().lower() == "all":
        return None
    parts = [part.strip() for part in str(value).split(",")]
    return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else value


def _section(keys: Mapping[str, Any], where: str) -> dict[str, Any]:
    section = keys.get(_SECTION) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{_SECTION} in {where} holds {section!r}: it takes names of options and their values.")
    return section


def _device_and_strategy(keys: Mapping[str, Any], where: str) -> tuple[str | None, str | None]:
    place = keys.get("compute_environment") or "LOCAL_MACHINE"
    if place != "LOCAL_MACHINE":
        raise ConfigError(f"compute_environment in {where} is {place!r}: only LOCAL_MACHINE can be launched from here.")
    kind = str(keys.get("distributed_type") or "NO")  # an unquoted NO is False in YAML
    if kind in _NO_LAUNCHES:
        raise ConfigError(
            f"distributed_type in {where} is {kind!r}, which nothing launches in this version. Known: "
            f"{', '.join(_TYPES)}."
        )
    if kind not in _TYPES:
        raise ConfigError(f"{where}: {unknown_name('distributed_type', kind, _TYPES)}")
    use_cpu = keys.get("use_cpu") or False
    if not isinstance(use_cpu, bool):
        raise ConfigError(f"use_cpu in {where} is {use_cpu!r}: it takes true or false.")
    device, strategy = _TYPES[kind]
    return ("cpu" if use_cpu else device), strategy


def _num_processes(keys: Mapping[str, Any], where: str) -> Any:
    """Accelerate counts over all machines, we count on one."""
    total, num_machines = keys.get("num_processes"), keys.get("num_machines") or 1
    if total == _NOT_SAID:
        return None
    if type(total) is not int or type(num_machines) is not int or num_machines < 1:  # True is an int, too
        return total  # LaunchConfig says what is wrong with it
    if total % num_machines:
        raise ConfigError(
            f"{where}: num_processes is {total} over num_machines {num_machines}, and every machine runs equally many. "
            f"Make it a multiple of {num_machines}."
        )
    return total // num_machines


# --- options to Accelerate's keys ------------------------------------------------------------------------------------


def _keys(options: Mapping[str, Any]) -> dict[str, Any]:
    keys = dict(options.get("extra", {}))
    keys.pop(_SECTION, None)
    device, count, num_machines = options.get("device"), options.get("num_processes"), options["num_machines"]
    keys["compute_environment"] = "LOCAL_MACHINE"
    keys["distributed_type"] = _distributed_type(options)
    keys["use_cpu"] = device == "cpu"
    if count is not None:
        keys["num_processes"] = count * num_machines
    if options.get("device_ids"):
        keys["gpu_ids"] = ",".join(str(number) for number in options["device_ids"])
    elif device in {None, "cuda", "xpu"}:
        keys["gpu_ids"] = "all"
    keys.update({name: options[name] for name in _SAME if options.get(name) is not None})
    deepspeed = keys.get("deepspeed_config")
    if isinstance(deepspeed, dict) and _STEPS not in deepspeed and options.get(_STEPS) is not None:
        keys["deepspeed_config"] = {**deepspeed, _STEPS: options[_STEPS]}
    return keys


def _distributed_type(options: Mapping[str, Any]) -> str:
    """Accelerate's word; NO, which says nothing of device and strategy, where another one would say too much."""
    strategy, device = options.get("strategy"), options.get("device")
    if strategy in {"fsdp", "deepspeed"}:
        return str(strategy).upper()
    if device == "tpu":
        return "XLA"
    several = options.get("num_processes", 2) * options["num_machines"] > 1
    if device in {"cuda", "xpu"} and several:
        return {"cuda": "MULTI_GPU", "xpu": "MULTI_XPU"}[device]
    return "MULTI_CPU" if device == "cpu" and strategy == "ddp" and several else "NO"
