"""Sizes of a mesh as Accelerate's file and variables say them, and what can't be with them, known before a launch."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.registry import nearest
from notebook_launcher.core.strategies import DEVICE_OF, INSIDE, WITHOUT_MESH

if TYPE_CHECKING:
    from collections.abc import Mapping

SECTION = "parallelism_config"
_PREFIX = f"{SECTION}_"
_BY_SIZE = {"pp_size": "pp", "tp_size": "tp", "dp_shard_size": "fsdp"}  # the first that is larger than 1
NOT_HERE = ("cp_size", "sp_size", "ep_size")
_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "pp_size", *NOT_HERE)


def sizes(section: Any) -> dict[str, int]:
    """The sizes that the section of a configuration file says, by ``ParallelismConfig``'s names.

    Those that Accelerate writes for what was not asked for, 1, are left out where no other asks for anything. Raises
    ``ConfigError`` for a key or value that isn't known.
    """
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ConfigError(f"{SECTION}={section!r}: it takes names and sizes, such as {_PREFIX}tp_size: 2")
    found: dict[str, int] = {}
    for key, value in section.items():
        name = str(key).removeprefix(_PREFIX)
        if name.startswith(("cp_", "sp_")) and name not in _SIZES:
            continue  # how those exchange, which nothing here does
        if name not in _SIZES:
            near = nearest(name, _SIZES)
            guess = f" Did you mean {_PREFIX}{near}?" if near else ""
            raise ConfigError(f"{SECTION} has the key {key!r}, which is not known.{guess}")
        if type(value) is not int or value < 1:
            raise ConfigError(f"{SECTION} has {key}={value!r}: it takes a number of processes, 1 or more")
        found[name] = value
    return found if math.prod(found.values()) > 1 else {}


def of_environment(environment: Mapping[str, str]) -> str | None:
    """What a launch of this project, or Accelerate's, has handed on, as JSON; None where nothing is asked for."""
    own = environment.get("NOTEBOOK_LAUNCHER_PARALLELISM_CONFIG")
    if own:
        return own
    variables = {name: environment.get(f"PARALLELISM_CONFIG_{name.upper()}", "") for name in _SIZES}
    found = sizes({name: int(text) for name, text in variables.items() if text.strip().isdecimal()})
    return json.dumps(found) if found else None


def strategy_of(found: Mapping[str, int | None], asked: str | None = None) -> str | None:
    """The strategy that the sizes ask for, where ``asked`` leaves it open or is what that does as well."""
    own = next((name for size, name in _BY_SIZE.items() if (found.get(size) or 1) > 1), None)
    return own if asked is None or asked in INSIDE.get(own or "", ()) else asked


def refuse(strategy: str | None, found: Mapping[str, int], num_processes: int | None) -> str | None:
    """Why a launch can't be, in a sentence; None where it can. ``num_processes`` None: nobody knows them yet."""
    told = " x ".join(f"{name} {size}" for name, size in found.items() if size > 1)
    if told and strategy in WITHOUT_MESH:
        way = "Leave one of them out" + ("" if strategy in DEVICE_OF else ", or use strategy='fsdp', 'tp' or 'pp'")
        return f"strategy={strategy!r} can't be together with {SECTION} ({told}): {WITHOUT_MESH[strategy]}. {way}."
    absent = next((name for name in NOT_HERE if found.get(name, 1) > 1), None)
    if absent:
        return (
            f"{SECTION} asks for {absent} {found[absent]}, a way to spread a model that is not here: leave it out, or "
            "use tp_size, pp_size, dp_replicate_size and dp_shard_size."
        )
    if found.get("pp_size", 1) > 1 and found.get("tp_size", 1) > 1:
        return (
            f"{SECTION} asks for pp_size {found['pp_size']} and tp_size {found['tp_size']}: a pipeline's stages can be "
            "sharded or replicated, by dp_shard_size and dp_replicate_size, but not tensor parallel. Leave one out."
        )
    product = math.prod(found.values())
    is_open = "dp_shard_size" not in found
    if not told or num_processes is None or product == num_processes or (is_open and num_processes % product == 0):
        return None
    way = f"a multiple of {product}" if is_open else str(product)
    return (
        f"{SECTION} asks for {told} = {product} processes, and the run has {num_processes}: launch {way}, or change "
        "the sizes."
    )
