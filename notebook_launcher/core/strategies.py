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
    },
)
