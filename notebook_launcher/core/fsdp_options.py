"""What FSDP is told: ``FullyShardedDataParallelPlugin``, Accelerate's ``fsdp_config`` and its variables ``FSDP_...``.

There is one FSDP here, the second. What the first alone has is translated, or named in a warning. The launcher looks
for slips in the section before anything starts.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import config, notices
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.registry import unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass
class FullyShardedDataParallelPlugin:
    """How models are sharded, by Accelerate's names; None leaves a field to the launch, and then to its default.

    ``auto_wrap_policy``: "transformer_based_wrap" gathers the blocks of the classes ``transformer_cls_names_to_wrap``
    (the model's ``_no_split_modules`` where that is None) one by one, "size_based_wrap" those of ``min_num_params``
    parameters, "no_wrap" the model as a whole; a function of a module says it of each. None is the first of them that
    was given something to go by.
    """

    fsdp_version: int | None = None  # makes no difference: always the second
    sharding_strategy: Any = None  # the first FSDP's word for reshard_after_forward and, with HYBRID_..., for a mesh
    reshard_after_forward: Any = None  # True: parameters are given back after forward, and gathered again for backward
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None  # torch's, or names of its fields; None: of the accelerator's precision
    auto_wrap_policy: Any = None
    cpu_offload: Any = None  # True: parameters, gradients and optimizer states are on the CPU
    ignored_modules: Any = None  # modules that every rank has in full, and whose gradients it does not exchange
    state_dict_type: Any = None  # what save_state writes: "SHARDED_STATE_DICT" or "FULL_STATE_DICT"
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool | None = None
    use_orig_params: bool | None = None
    param_init_fn: Any = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None  # blocks are computed again in backward
    cpu_ram_efficient_loading: bool | None = None  # makes no difference: other ranks' models may be on "meta"
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was made of it."""

    wrap: Any = None  # a policy's name, a function, or None
    class_names: tuple[str, ...] = ()
    min_num_params: int = 0
    reshard_after_forward: bool | None = None  # None is torch's own choice: all but the outermost
    offload: bool = False
    checkpoint_activations: bool = False
    saves_whole: bool = False
    replicates_machines: bool = False  # shards lie within a machine, and machines have replicas
    policy: Any = None
    ignored: tuple[Any, ...] = ()


_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_MIN_NUM_PARAMS = 100_000_000  # of torch's size_based_auto_wrap_policy
_OTHER_NAMES = {"transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap", "offload_params": "cpu_offload"}
_VARIABLES = {"transformer_cls_names_to_wrap": "TRANSFORMER_CLS_TO_WRAP", "cpu_offload": "OFFLOAD_PARAMS"}
# The first FSDP's, with the values that ask for nothing else than what the second does.
_FIRST_ONLY: dict[str, tuple[Any, ...]] = {
    "backward_prefetch": ("BACKWARD_PRE", "1"),
    "use_orig_params": (True,),
    "limit_all_gathers": (True,),
    "sync_module_states": (True,),
    "forward_prefetch": (False,),
    "param_init_fn": (),
    "state_dict_config": (),
    "optim_state_dict_config": (),
}


def settings(plugin: FullyShardedDataParallelPlugin, section: str | None) -> Settings:
    """The plugin's fields, else those of ``section`` (an ``fsdp_config``, as JSON), else the variables ``FSDP_...``.

    Warns, once, of what has no meaning here. Raises ``ConfigError`` for an unknown name or value.
    """
    told = _told(plugin, json.loads(section) if section else {})
    _warn(told)
    return _settings(told)


def check(section: Any) -> None:
    """Raise ``ConfigError`` for an unknown name or value in ``section``, an ``fsdp_config``."""
    if not isinstance(section, dict | None):
        raise ConfigError(f"fsdp_config={section!r}: it takes names and values, such as fsdp_offload_params: true")
    _settings(_told(FullyShardedDataParallelPlugin(), section or {}))


def _settings(told: Mapping[str, Any]) -> Settings:
    sharding = told["sharding_strategy"]
    reshard = told["reshard_after_forward"]
    if isinstance(reshard, str) and reshard.lower() not in _BOOLS:  # Accelerate's, for the first FSDP
        sharding, reshard = reshard, None
    sharding = _named("sharding_strategy", sharding, _STRATEGIES)
    if sharding == "NO_SHARD":
        raise ConfigError("sharding_strategy='NO_SHARD' shards nothing: use strategy='ddp', which is faster at that")
    names = told["transformer_cls_names_to_wrap"] or ()
    offload = told["cpu_offload"]
    wrap = told["auto_wrap_policy"]
    return Settings(
        wrap=wrap if callable(wrap) else _named("auto_wrap_policy", wrap, _WRAPS),
        class_names=tuple(one.strip() for one in names.split(",")) if isinstance(names, str) else tuple(names),
        min_num_params=_num_params(told["min_num_params"]),
        reshard_after_forward=_flag("reshard_after_forward", reshard, otherwise=_resharding(sharding)),
        offload=bool(_flag("cpu_offload", getattr(offload, "offload_params", offload), otherwise=False)),
        checkpoint_activations=bool(
            _flag("activation_checkpointing", told["activation_checkpointing"], otherwise=False)
        ),
        saves_whole=_named("state_dict_type", told["state_dict_type"], _STATES) == "FULL_STATE_DICT",
        replicates_machines=sharding is not None and sharding.startswith("HYBRID"),
        policy=told["mixed_precision_policy"],
        ignored=tuple(told["ignored_modules"] or ()),
    )


def size_limit(chosen: Settings) -> int:
    """Parameters from which on a module is a block of its own."""
    return chosen.min_num_params or _MIN_NUM_PARAMS


def _resharding(sharding: str | None) -> bool | None:
    return None if sharding is None else sharding in {"FULL_SHARD", "HYBRID_SHARD"}


def _told(plugin: FullyShardedDataParallelPlugin, section: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(plugin)]
    of_section: dict[str, Any] = {}
    for key, value in section.items():
        name = str(key).removeprefix("fsdp_") if key != "fsdp_version" else key
        name = _OTHER_NAMES.get(name, name)
        if name not in names:
            other = {name: key for key, name in _OTHER_NAMES.items()}
            raise unknown_name("fsdp_config key", key, [f"fsdp_{other.get(one, one)}" for one in names[1:]])
        of_section[name] = value
    environment = config.snapshot()
    told: dict[str, Any] = {}
    for name in names:
        variable = f"FSDP_{_VARIABLES.get(name, name.removeprefix('fsdp_').upper())}"
        candidates = (getattr(plugin, name), of_section.get(name), environment.get(variable) or None)
        told[name] = next((value for value in candidates if value is not None), None)
    return told


def _warn(told: Mapping[str, Any]) -> None:
    without = [f"{name}={told[name]!r}" for name, usual in _FIRST_ONLY.items() if not _asks_nothing(told[name], usual)]
    if str(told["fsdp_version"]) == "1":
        without.insert(0, "fsdp_version=1")
    if without:
        notices.warn(f"FSDP here is torch's second, fully_shard, for which this has no meaning: {', '.join(without)}.")


def _asks_nothing(value: Any, usual: tuple[Any, ...]) -> bool:
    plain = getattr(value, "name", value)
    if isinstance(plain, str):
        plain = _BOOLS.get(plain.lower(), plain.upper())
    return plain is None or plain in usual


_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _flag(name: str, value: Any, *, otherwise: bool | None) -> bool | None:
    if value is None:
        return otherwise
    found = value if isinstance(value, bool) else _BOOLS.get(str(value).lower())
    if found is None:
        raise ConfigError(f"FSDP's {name}={value!r} is neither true nor false")
    return found


def _num_params(value: Any) -> int:
    if value is None:
        return 0
    try:
        found = float(value)  # "1e8", as YAML reads it
    except (TypeError, ValueError):
        found = -1
    if found < 0 or not found.is_integer():
        raise ConfigError(
            f"FSDP's min_num_params={value!r} is not a number of parameters; give a whole number, such as 100000000"
        )
    return int(found)


def _named(argument: str, given: Any, known: tuple[str, ...]) -> str | None:
    """The name in ``known`` that ``given`` stands for: itself, in any case, its number from 1, or torch's member."""
    if given is None:
        return None
    name = str(getattr(given, "name", given)).upper()
    if name.isdecimal() and 0 < int(name) <= len(known):
        return known[int(name) - 1]
    if name not in known:
        raise unknown_name(argument, given, known)
    return name
