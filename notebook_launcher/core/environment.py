"""Who a process is, from a mapping of environment variables: this project's, ``torchrun``'s, Accelerate's or Slurm's.

Pure functions; ``core.config`` hands them the process's own environment.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import parallelism
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_TRUTHS = {  # Accelerate's words
    **dict.fromkeys(("1", "true", "yes", "on", "y", "t"), True),
    **dict.fromkeys(("0", "false", "no", "off", "n", "f", ""), False),
}
_SPREADING = ("fsdp", "deepspeed")  # strategies that `accelerate launch` names by a variable
_FIRST_PORT = 15000  # below what systems give out to outgoing connections
_NUM_PORTS = 15000
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm's numbers for its batch, extern and interactive steps


def read_world(environment: Mapping[str, str]) -> World:
    """The process's place in its run; ``World`` of one where nobody launched it."""
    choices = _choices(environment)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _torch_world(environment, choices)
    if _in_slurm_step(environment):
        return _slurm_world(environment, choices)
    return World(**choices)


def _choices(environment: Mapping[str, str]) -> dict[str, Any]:
    """What was chosen for the run, as against the process's place in it."""
    device = environment.get("NOTEBOOK_LAUNCHER_DEVICE", "")
    strategy = environment.get("NOTEBOOK_LAUNCHER_STRATEGY", "")
    for option, _, value in accelerates_choices(environment):
        device = device or (value if option == "device" else "")
        strategy = strategy or (value if option == "strategy" else "")
    threads = environment.get("OMP_NUM_THREADS", "").split(",")[0]  # OpenMP takes one number a nesting level
    found = {
        "device": device.lower() or None,
        "mixed_precision": environment.get("ACCELERATE_MIXED_PRECISION", "").lower() or None,
        "strategy": strategy or None,
        "strategy_config": environment.get("NOTEBOOK_LAUNCHER_STRATEGY_CONFIG") or None,
        "parallelism_config": parallelism.of_environment(environment),
        "gradient_accumulation_steps": _number(environment, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        "seed": _number(environment, "NOTEBOOK_LAUNCHER_SEED"),
        "num_threads": int(threads) if threads.strip().isdecimal() else None,
        "debug": _truth(environment, "ACCELERATE_DEBUG_MODE") or None,
        "launched": "NOTEBOOK_LAUNCHER" in environment or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def accelerates_choices(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Option, variable and value for what Accelerate's variables of yes and no ask for."""
    if _truth(environment, "ACCELERATE_USE_CPU"):
        yield "device", "ACCELERATE_USE_CPU", "cpu"
    asked = ((name, f"ACCELERATE_USE_{name.upper()}") for name in _SPREADING)
    for name, variable in asked:
        if _truth(environment, variable):
            yield "strategy", variable, name
            return


def _torch_world(environment: Mapping[str, str], choices: dict[str, Any]) -> World:
    rank = _number(environment, "RANK", 0)
    world_size = _number(environment, "WORLD_SIZE", 1)
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", world_size)
    _check_range("RANK", rank, "WORLD_SIZE", world_size)
    local_rank = _number(environment, "LOCAL_RANK", rank % max(local_world_size, 1))
    _check_range("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    machine_rank = _number(environment, "GROUP_RANK", _number(environment, "NODE_RANK", rank // local_world_size))
    num_machines = _number(environment, "NOTEBOOK_LAUNCHER_NUM_MACHINES", -(-world_size // local_world_size))
    port = _number(environment, "MASTER_PORT", 0)
    if world_size > 1 and not port:
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set, and MASTER_PORT is not: the ranks can't meet. Start "
            "them with launch or torchrun, which set all of them, or unset RANK and WORLD_SIZE to run alone."
        )
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        machine_rank=machine_rank,
        num_machines=max(num_machines, machine_rank + 1),
        main_address=environment.get("MASTER_ADDR") or "127.0.0.1",
        main_port=port,
        **choices,
    )


# --- Slurm -----------------------------------------------------------------------------------------------------------


def _in_slurm_step(environment: Mapping[str, str]) -> bool:
    """True for one of several tasks of ``srun``; a batch or interactive shell has the same counts, and is alone."""
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID") or ""
    if not step.isdecimal() or int(step) >= _FIRST_SPECIAL_STEP or "SLURM_PTY_PORT" in environment:
        return False
    return "SLURM_PROCID" in environment and _num_tasks(environment) > 1


def _num_tasks(environment: Mapping[str, str]) -> int:
    # The step's own count: an `srun -n 2` in a job of 8 tasks has 2.
    return int(_number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1)))


def _slurm_world(environment: Mapping[str, str], choices: dict[str, Any]) -> World:
    rank = _number(environment, "SLURM_PROCID", 0)
    world_size = _num_tasks(environment)
    _check_range("SLURM_PROCID", rank, "SLURM_NTASKS", world_size)
    machine_rank = _number(environment, "SLURM_NODEID", 0)
    num_machines = _number(environment, "SLURM_STEP_NUM_NODES", _number(environment, "SLURM_NNODES", 1))
    job = _number(environment, "SLURM_JOB_ID", 0) + _number(environment, "SLURM_STEP_ID", 0)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    local_rank = _number(environment, "SLURM_LOCALID", 0)
    local_world_size = _tasks_here(environment, machine_rank, -(-world_size // max(num_machines, 1)))
    _check_range("SLURM_LOCALID", local_rank, "the number of tasks on this node", local_world_size)
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        machine_rank=machine_rank,
        num_machines=num_machines,
        main_address=environment.get("MASTER_ADDR") or _first_host(nodes) or "127.0.0.1",
        main_port=_number(environment, "MASTER_PORT", 0) or _FIRST_PORT + job % _NUM_PORTS,
        **choices,
    )


def _tasks_here(environment: Mapping[str, str], machine_rank: int, otherwise: int) -> int:
    """From Slurm's list of tasks a node, such as ``4(x2),3``."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * min(int(repeats or 1), machine_rank + 1)
    if machine_rank < len(counts):
        return counts[machine_rank]
    return int(_number(environment, "SLURM_NTASKS_PER_NODE", otherwise))


def _first_host(nodes: str) -> str:
    """The first host of Slurm's list, such as ``gpu[003-005,9],login1``."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


# --- numbers, yes and no ---------------------------------------------------------------------------------------------


def _truth(environment: Mapping[str, str], variable: str) -> bool:
    text = environment.get(variable, "").strip()
    if text.lower() not in _TRUTHS:
        raise ConfigError(
            f"the environment variable {variable} is {text!r}, and it takes true or false: correct or unset it."
        )
    return _TRUTHS[text.lower()]


def _number(environment: Mapping[str, str], variable: str, otherwise: Any = None) -> Any:
    text = environment.get(variable, "").strip()
    if not text:
        return otherwise
    if not text.isdecimal():
        raise ConfigError(
            f"the environment variable {variable} is {text!r}, and it takes a whole number: correct or unset it."
        )
    return int(text)


def _check_range(variable: str, value: int, limit_variable: str, limit: int) -> None:
    if value >= limit:
        raise ConfigError(
            f"{variable}={value} can't be with {limit_variable}={limit}: it counts from 0 to {limit - 1}. "
            "Correct the environment variables, or unset them to run alone."
        )
