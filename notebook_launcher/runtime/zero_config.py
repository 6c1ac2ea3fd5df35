"""DeepSpeed's configuration: from a plugin, a launch's section and DeepSpeed's own, every "auto" filled."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.core import deepspeed_options
from notebook_launcher.core.deepspeed_options import AUTO, DeepSpeedPlugin
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import holdings
from notebook_launcher.runtime.holdings import Held

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from notebook_launcher.core.world import World
    from notebook_launcher.runtime.plugins import Keywords

_PERSISTED = 100_000  # DeepSpeed's own: weights up to that size are on every rank in stage 3, too
_BUCKET = 500_000_000  # DeepSpeed's own, which it allocates whatever the model's size
_MICRO, _BATCH, _STEPS = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"


def build(
    plugin: DeepSpeedPlugin, precision: str, num_processes: int, model: nn.Module, *, on_cpu: bool
) -> dict[str, Any]:
    """The configuration of one engine, but for its optimizer and scheduler; ``ConfigError`` for what can't be."""
    config: dict[str, Any] = copy.deepcopy(plugin.hf_ds_config or {})
    deepspeed_options.refuse(plugin)
    _set_zero(config, plugin, model)
    _set_precision(config, precision, on_cpu=on_cpu)
    _set_batch_size(config, num_processes)
    config["gradient_clipping"] = float(plugin.gradient_clipping or 0)
    config.setdefault("steps_per_print", math.inf)
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)  # which would be compiled first
    config["managed_gradient_accumulation"] = False  # a group ends where the optimizer steps, whatever its size
    return config


def held(model: nn.Module, world: World, keywords: Keywords) -> Iterator[Held]:
    """By stage: whole weights with a part of the rest, or a part of all, but for small weights."""
    plugin = deepspeed_options.with_section(keywords[DeepSpeedPlugin], world.strategy_config)
    num_processes = world.world_size
    config = build(plugin, world.mixed_precision or "no", num_processes, model, on_cpu=False)
    zero = config["zero_optimization"]
    stage, persisted = zero["stage"], zero.get("stage3_param_persistence_threshold", _PERSISTED)
    if stage == 0:
        yield from holdings.whole(model)
        return
    in_bf16 = any(config.get(name, {}).get("enabled") for name in ("bf16", "bfloat16"))
    sizes = {one: one.nbytes // one.itemsize for one in model.parameters()}
    kept = _touched({one: size for one, size in sizes.items() if one.requires_grad}, num_processes)
    for one, numel in sizes.items():
        itemsize = 2 if in_bf16 else one.itemsize
        part = -(-numel // num_processes)
        weights = part + (numel if numel <= persisted else 0) if stage == 3 else numel  # noqa: PLR2004 - ZeRO's
        stepped = torch.empty(part if one.requires_grad else 0, dtype=torch.float32, device="meta")
        gradients = {1: numel, 2: numel if one in kept else 0, 3: part}[stage] if one.requires_grad else 0
        yield Held(one, weights * itemsize, gradients * itemsize, stepped, stepped.nbytes, is_joined=True)


def _touched(sizes: Mapping[nn.Parameter, int], num_parts: int) -> set[nn.Parameter]:
    """Those that the part which touches the most has a piece of: stage 2 keeps their gradients whole."""
    length, start = -(-sum(sizes.values()) // num_parts), 0
    parts: list[set[nn.Parameter]] = [set() for _ in range(num_parts)]
    for one, size in sizes.items():
        for part in range(start // max(1, length), -(-(start + size) // max(1, length))):
            parts[part].add(one)
        start += size
    return max(parts, key=lambda part: sum(sizes[one] for one in part))


def fill_optimizer(config: dict[str, Any], lr: Any, values: Mapping[str, Any], total: Any, warmup: Any) -> None:
    """Fill "auto" in the sections of optimizer and scheduler: from the options of the optimizer, and numbers of steps.

    Raises ``ConfigError`` for one that nobody has said a value for.
    """
    optimizer, scheduler = config.get("optimizer"), config.get("scheduler")
    if optimizer is not None:
        params = optimizer.setdefault("params", {})
        for name, value in list(params.items()):
            if value == AUTO and values.get(name) is not None:
                params[name] = values[name]
            elif value == AUTO:
                del params[name]  # the optimizer's own default
        if str(optimizer.get("type", "")).lower() in {"adam", "adamw"}:
            params.setdefault("torch_adam", True)  # DeepSpeed's are compiled first, for half a minute
    if scheduler is not None:
        known = {"warmup_min_lr": 0, "warmup_max_lr": lr, "warmup_num_steps": warmup, "total_num_steps": total}
        params = scheduler.setdefault("params", {})
        for name, value in params.items():
            if value == AUTO:
                params[name] = known.get(name)
    for path in _autos(config):
        raise ConfigError(
            f"DeepSpeed's configuration has {path}='auto', and nothing here knows a value for it; write the value, or "
            "leave the key out for DeepSpeed's own"
        )


def _set_zero(config: dict[str, Any], plugin: DeepSpeedPlugin, model: nn.Module) -> None:
    zero = config.setdefault("zero_optimization", {})
    stage = zero["stage"] = deepspeed_options.stage_of(plugin)
    for key in deepspeed_options.OFFLOADS:
        zero.pop(key, None)
        if section := deepspeed_options.offload(plugin, key):
            zero[key] = section
    if stage != 2:  # noqa: PLR2004
        zero["overlap_comm"] = False  # DeepSpeed has it only for stage 2 where groups of micro-batches vary
    hidden = _hidden_size(model)
    by_size = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    for key, value in list(zero.items()):
        if value == AUTO and key in by_size and hidden:
            zero[key] = by_size[key]
        elif value == AUTO:
            del zero[key]
    numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    zero.setdefault("reduce_bucket_size", max(1, min(_BUCKET, numel)))


def _set_precision(config: dict[str, Any], precision: str, *, on_cpu: bool) -> None:
    fp16 = config.get("fp16", {}).get("enabled", False)
    if precision == "fp16" or fp16 is True:
        why = (
            "a cpu emulates fp16, slower than float32, and DeepSpeed refuses it"
            if on_cpu
            else "DeepSpeed scales losses itself, which is not supported yet"
        )
        said = "mixed_precision='fp16'" if precision == "fp16" else "fp16.enabled in DeepSpeed's configuration"
        raise ConfigError(f"{said} can't be used with strategy='deepspeed': {why}. Use bf16, or 'no'.")
    config.pop("fp16", None)
    for name in ("bf16", "bfloat16"):
        section = config.get(name)
        if section is not None and section.get("enabled", False) == AUTO:
            section["enabled"] = precision == "bf16"
        if section and section.get("enabled") and config["zero_optimization"]["stage"] == 0:
            raise ConfigError(
                f"{name}.enabled in DeepSpeed's configuration needs zero_stage 1, 2 or 3 here; with stage 0 use "
                "mixed_precision='bf16', which keeps fp32 weights"
            )


def _set_batch_size(config: dict[str, Any], num_processes: int) -> None:
    """No batch size is needed; but those that are said must agree."""
    micro, batch, steps = (config.pop(name, AUTO) for name in (_MICRO, _BATCH, _STEPS))
    if AUTO not in {micro, batch, steps} and batch != micro * steps * num_processes:
        raise ConfigError(
            f"DeepSpeed's configuration has {_BATCH}={batch}, and {_MICRO}={micro} x {_STEPS}={steps} x "
            f"{num_processes} processes is {micro * steps * num_processes}; leave one of them out, or write 'auto'"
        )
    config[_MICRO] = 1 if micro == AUTO else micro


def _hidden_size(model: nn.Module) -> int:
    """The width of a ``transformers`` model, by which its users tune buckets; 0 where nobody knows."""
    of_model = getattr(model, "config", None)
    for one in (of_model, getattr(of_model, "text_config", None)):
        size = getattr(one, "hidden_size", None) or max(getattr(one, "hidden_sizes", None) or [0])
        if size:
            return int(size)
    return 0


def _autos(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in _autos(inner, f"{path}.{key}".lstrip("."))]
    return [path] if isinstance(value, str) and value == AUTO else []
