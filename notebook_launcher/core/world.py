"""``World``: who a process is within its run, and the environment variables that say so.

A launched worker gets these variables from the launcher; under ``torchrun`` or in a Slurm step they are there already.
The runtime reads its world from them and from nowhere else, so it need not know who launched it.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class World:
    """One process's place in a run. ``rank`` counts over all machines, ``local_rank`` on this one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    machine_rank: int = 0
    num_machines: int = 1
    main_address: str = "127.0.0.1"
    main_port: int = 0  # 0: no rendezvous was set up, the process is alone
    device: str = "auto"
    mixed_precision: str | None = None  # None: nobody said; the function decides
    strategy: str | None = None
    strategy_config: str | None = None  # the strategy's own section of a configuration file, as JSON
    parallelism_config: str | None = None  # sizes of a mesh, as JSON
    gradient_accumulation_steps: int | None = None
    seed: int | None = None
    num_threads: int | None = None
    attempt: int = 0  # how often the run was restarted before
    debug: bool = False  # compare the ranks' collectives before they are begun
    launched: bool = False  # by this project, as against torchrun, Slurm or nobody

    def environment(self) -> dict[str, str]:
        """The variables that every library reads, and the choices as Accelerate and ``Trainer`` read them."""
        variables = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.machine_rank,
            "NODE_RANK": self.machine_rank,
            "MASTER_ADDR": self.main_address,
            "MASTER_PORT": self.main_port,
            "TORCHELASTIC_RESTART_COUNT": self.attempt,
            "NOTEBOOK_LAUNCHER": 1,
            "NOTEBOOK_LAUNCHER_DEVICE": self.device,
            "NOTEBOOK_LAUNCHER_NUM_MACHINES": self.num_machines,
            "NOTEBOOK_LAUNCHER_STRATEGY": self.strategy,
            "NOTEBOOK_LAUNCHER_STRATEGY_CONFIG": self.strategy_config,
            "NOTEBOOK_LAUNCHER_PARALLELISM_CONFIG": self.parallelism_config,
            "NOTEBOOK_LAUNCHER_SEED": self.seed,
            "ACCELERATE_MIXED_PRECISION": self.mixed_precision,
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": self.gradient_accumulation_steps,
            "ACCELERATE_DEBUG_MODE": "true" if self.debug else None,
            "ACCELERATE_USE_CPU": "true" if self.device == "cpu" else None,
            "OMP_NUM_THREADS": self.num_threads,
        }
        return {name: str(value) for name, value in variables.items() if value is not None}
