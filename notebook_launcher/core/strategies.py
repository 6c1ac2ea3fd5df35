"""The names of the strategies: the launcher checks a name before anything starts, the runtime loads what it stands for.

Adding a strategy is one file in ``runtime/strategies`` and one line here.
"""

from __future__ import annotations

from notebook_launcher.core.registry import Registry

STRATEGIES = Registry(
    "strategy",
    {
        "single": "notebook_launcher.runtime.strategies.single:Single",
        "ddp": "notebook_launcher.runtime.strategies.ddp:DistributedData",
        "fsdp": "notebook_launcher.runtime.strategies.fsdp:FullySharded",
        "deepspeed": "notebook_launcher.runtime.strategies.deepspeed:DeepSpeed",
        "pp": "notebook_launcher.runtime.strategies.pipeline:Pipeline",
        "tp": "notebook_launcher.runtime.strategies.tensor_parallel:TensorParallel",
        "xla": "notebook_launcher.runtime.strategies.xla:Replica",
        "spmd": "notebook_launcher.runtime.strategies.xla:Spmd",
        "spmd_fsdp": "notebook_launcher.runtime.strategies.xla:SpmdSharded",
    },
)
DEVICE_OF = {"xla": "tpu", "spmd": "tpu", "spmd_fsdp": "tpu"}  # the kind of device that a strategy is for, if one
ON_DEVICE = {  # of kinds of device that don't have all strategies, those they have
    "tpu": ("single", "ddp", *DEVICE_OF),
    "mps": ("single", "ddp"),  # torch can't exchange its tensors, which the others do with one process too
}
IN_ONE_PROCESS = ("spmd", "spmd_fsdp")  # those that drive every device from one process
WITHOUT_MESH = {  # why they don't go with sizes of a mesh
    "single": "it is one process",
    "deepspeed": "ZeRO spreads a model over all processes, and has no part in tensor or pipeline parallel",
    "xla": "each TPU process keeps a whole model",
    **dict.fromkeys(IN_ONE_PROCESS, "it is XLA that spreads what there is, over all TPU devices"),
}
WITHOUT_ACCUMULATION = {  # why they don't go with gradient accumulation over several steps
    "pp": "it does so within a pipeline_step, over PipelineParallelPlugin(num_microbatches=...)",
}
WITHOUT_FP16 = {  # why they don't go with fp16, which scales losses by what all gradients look like
    "pp": "it has gradients on several ranks",
    "tp": "it has some gradients split and others whole, which torch's GradScaler can't take together",
}
PACKAGES = {"deepspeed": "deepspeed>=0.19"}  # what they need beyond the project's own dependencies; extras of that name
INSIDE = {"tp": ("ddp", "fsdp"), "pp": ("ddp", "fsdp")}  # what a strategy does as well, so that both may be asked for


def is_for(strategy: str, device: str) -> bool:
    """Whether that kind of device has the strategy; "" is a kind that isn't known yet."""
    return DEVICE_OF.get(strategy, device) == device and strategy in ON_DEVICE.get(device, (strategy,))
