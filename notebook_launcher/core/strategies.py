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
        "xla": "notebook_launcher.runtime.strategies.xla:Replica",
        "spmd": "notebook_launcher.runtime.strategies.xla:Spmd",
        "spmd_fsdp": "notebook_launcher.runtime.strategies.xla:SpmdSharded",
    },
)
DEVICE_OF = {"xla": "tpu", "spmd": "tpu", "spmd_fsdp": "tpu"}  # the kind of device that a strategy is for, if one
IN_ONE_PROCESS = ("spmd", "spmd_fsdp")  # those that drive every device from one process
