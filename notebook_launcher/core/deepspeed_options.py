"""What DeepSpeed is told: ``DeepSpeedPlugin``, Accelerate's ``deepspeed_config``, and DeepSpeed's own configuration.

The launcher looks for slips in the section before anything starts; what hangs on a model is filled in on the ranks.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.registry import nearest

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping


@dataclasses.dataclass
class DeepSpeedPlugin:
    """How DeepSpeed spreads a model; None leaves it to ``hf_ds_config``, and after that to the default.

    ``hf_ds_config`` is DeepSpeed's own configuration, a dictionary or the path of a JSON file; "auto" is filled in.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None  # of every step; clip_grad_norm_ replaces it
    zero_stage: int | None = None  # 0 nothing is spread, 1 optimizer state, 2 gradients too (default), 3 weights too
    is_train_batch_min: bool = True  # makes no difference: no batch size is needed
    offload_optimizer_device: str | None = None  # "cpu", "nvme"
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | os.PathLike[str] | None = None
    offload_param_nvme_path: str | os.PathLike[str] | None = None
    zero3_init_flag: bool | None = None  # makes no difference: use deepspeed.zero.Init, whose models are taken
    zero3_save_16bit_model: bool | None = None  # makes no difference: save_model is always whole

    def __post_init__(self) -> None:
        """Read ``hf_ds_config``; raise ``ConfigError`` where it can't be read, or is contradicted."""
        given = self.hf_ds_config
        if given is not None and not isinstance(given, dict):
            given = getattr(given, "config", given)  # of transformers' HfDeepSpeedConfig
        if isinstance(given, str | pathlib.PurePath):
            try:
                given = json.loads(pathlib.Path(given).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"hf_ds_config={self.hf_ds_config!r} can't be read: {error}. Give the path of DeepSpeed's JSON "
                    "file, or its content as a dictionary."
                ) from None
        if not isinstance(given, dict | None):
            raise ConfigError(f"hf_ds_config={self.hf_ds_config!r} is neither a dictionary nor the path of a JSON file")
        self.hf_ds_config = given
        for name in ("gradient_accumulation_steps", "gradient_clipping"):
            own, said = getattr(self, name), (given or {}).get(name, "auto")
            own = None if own == "auto" else own
            if said != "auto" and own not in {None, said}:
                raise ConfigError(
                    f"DeepSpeedPlugin({name}={own!r}) contradicts its hf_ds_config, which has {name}={said!r}; leave "
                    "one of them out"
                )
            setattr(self, name, said if own is None and said != "auto" else own)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's own configuration."""
        return self.hf_ds_config or {}


AUTO = "auto"
OFFLOADS = ("offload_optimizer", "offload_param")  # sections of zero_optimization
_DEFAULT_STAGE = 2
_WITH_WEIGHTS = 3  # the stage that spreads parameters too
_STEPS = "gradient_accumulation_steps"
# Accelerate's names in the section of a launch's file that choose its launcher, or what is chosen elsewhere.
_ELSEWHERE = (
    *("deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter"),
    *("deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names", _STEPS),
)
_KNOWN = {
    *("train_micro_batch_size_per_gpu", "train_batch_size", _STEPS),
    *("activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16"),
    *("checkpoint", "comet", "comms_logger", "communication_data_type", "compile", "compression_training"),
    *("csv_monitor", "curriculum_learning", "data_efficiency", "data_types", "dataloader_drop_last", "dump_state"),
    *("disable_allgather", "elasticity", "eigenvalue", "flops_profiler", "fp16", "fp32_allreduce"),
    *("gradient_clipping", "gradient_predivide_factor", "graph_harvesting", "hybrid_engine", "memory_breakdown"),
    *("load_universal_checkpoint", "managed_gradient_accumulation", "monitor_config", "nebula", "optimizer"),
    *(
        "pipeline",
        "prescale_gradients",
        "progressive_layer_drop",
        "python_gc",
        "scheduler",
        "seq_parallel_communication_data_type",
    ),
    *("sparse_attention", "sparse_gradients", "steps_per_print", "tensor_parallel", "tensorboard", "timers"),
    *("torch_autocast", "use_data_before_expert_parallelism", "use_node_local_storage", "wandb", "weight_quantization"),
    *("wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization"),
    *("zenflow", "expert_parallel", "gradient_allreduce_op", "disable_python_gc", "log_level", "vocabulary_size"),
}


def check(section: Any) -> None:
    """Raise ``ConfigError`` for a slip in ``section``, a ``deepspeed_config``, as far as it shows without a model."""
    if not isinstance(section, dict | None):
        raise ConfigError(f"deepspeed_config={section!r}: it takes names and values, such as zero_stage: 3")
    refuse(_joined(DeepSpeedPlugin(), section or {}))


def with_section(plugin: DeepSpeedPlugin, section: str | None) -> DeepSpeedPlugin:
    """``plugin``, and where it is silent the launch's ``deepspeed_config`` (JSON); ``ConfigError`` for a slip."""
    told = _joined(plugin, json.loads(section or "{}"))
    told.zero_stage = stage_of(told)
    return told


def _joined(plugin: DeepSpeedPlugin, section: Mapping[str, Any]) -> DeepSpeedPlugin:
    names = {field.name for field in dataclasses.fields(plugin)}
    changes: dict[str, Any] = {}
    for key, value in section.items():
        name = "hf_ds_config" if key == "deepspeed_config_file" else key
        if key in _ELSEWHERE or value is None:
            continue
        if name not in names:
            raise _unknown("deepspeed_config", key, {*names, "deepspeed_config_file"})
        if getattr(plugin, name) is None:
            changes[name] = value
    return dataclasses.replace(plugin, **changes)


def refuse(plugin: DeepSpeedPlugin) -> None:
    """Raise ``ConfigError`` for what can't be, as far as it shows without a model."""
    for key in plugin.hf_ds_config or {}:
        if key not in _KNOWN:
            raise _unknown("DeepSpeed's configuration", key, _KNOWN)
    said = _zero(plugin).get("stage", AUTO)
    if plugin.zero_stage is not None and said not in {AUTO, plugin.zero_stage}:
        raise ConfigError(
            f"zero_stage={plugin.zero_stage!r} contradicts DeepSpeed's own configuration, which has "
            f"zero_optimization.stage={said!r}; leave one of them out"
        )
    stage = stage_of(plugin)
    sections = {key: offload(plugin, key) for key in OFFLOADS}
    if sections["offload_param"] and stage != _WITH_WEIGHTS:
        raise ConfigError(
            f"offload_param_device needs zero_stage=3, which spreads parameters, and the stage is {stage}; use stage "
            "3, or offload the optimizer alone (offload_optimizer_device)"
        )
    try:
        float(plugin.gradient_clipping or 0)
    except (TypeError, ValueError):
        raise ConfigError(
            f"DeepSpeed's gradient_clipping={plugin.gradient_clipping!r} is not a number; give the largest norm that "
            "gradients may have, such as 1.0, or leave it out"
        ) from None


def stage_of(plugin: DeepSpeedPlugin) -> int:
    """The plugin's own, or that of DeepSpeed's configuration, or a default: with one DeepSpeed's own, else ours.

    Raises ``ConfigError`` for one that isn't known.
    """
    said = _zero(plugin).get("stage", AUTO)
    known = [plugin.zero_stage, None if said == AUTO else said, 0 if plugin.hf_ds_config else _DEFAULT_STAGE]
    stage = next(stage for stage in known if stage is not None)
    if stage not in range(_WITH_WEIGHTS + 1):
        raise ConfigError(f"zero_stage={stage!r} is not known. Known: 0, 1, 2, 3.")
    return int(stage)


def offload(plugin: DeepSpeedPlugin, key: str) -> dict[str, Any]:
    """The section ``key`` of ``zero_optimization``, one of ``OFFLOADS``; empty where nothing is offloaded.

    Raises ``ConfigError`` for a device that isn't known, or that needs a folder.
    """
    given = _zero(plugin).get(key)
    device = getattr(plugin, f"{key}_device")
    path = getattr(plugin, f"{key}_nvme_path")
    if given is None and device in {None, "none"}:
        return {}
    section = dict(given or {})
    if section.get("device", AUTO) == AUTO:
        section["device"] = device or "none"
    if section.get("nvme_path", AUTO) == AUTO:
        section.pop("nvme_path", None)
        if path is not None:
            section["nvme_path"] = str(path)
    if section["device"] == "none":
        return {}
    if section["device"] not in {"cpu", "nvme"}:
        raise ConfigError(f"{key}_device={section['device']!r} is not known. Known: cpu, none, nvme.")
    if section["device"] == "nvme" and "nvme_path" not in section:
        raise ConfigError(f"{key}_device='nvme' needs a folder; give {key}_nvme_path")
    return section


def _zero(plugin: DeepSpeedPlugin) -> dict[str, Any]:
    zero = (plugin.hf_ds_config or {}).get("zero_optimization", {})
    for name, section in (("", zero), *((f".{key}", zero.get(key)) for key in OFFLOADS if isinstance(zero, dict))):
        if not isinstance(section, dict | None):
            raise ConfigError(
                f"DeepSpeed's configuration has zero_optimization{name}={section!r}: it takes names and values"
            )
    return zero or {}


def _unknown(where: str, key: str, known: Iterable[str]) -> ConfigError:
    near = nearest(key, known)
    guess = f" Did you mean {near!r}?" if near else ""
    return ConfigError(f"{where} has the key {key!r}, which is not known, so it would do nothing.{guess}")
