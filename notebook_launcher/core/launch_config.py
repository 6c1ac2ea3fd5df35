"""``LaunchConfig``: a launch's options.

``LaunchConfig.make`` puts them together: arguments first, then a configuration file or object, then environment
variables, then defaults; ``sources`` says which it was.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from notebook_launcher.core import config_file, parallelism
from notebook_launcher.core.config import snapshot
from notebook_launcher.core.environment import accelerates_choices
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.notices import warn
from notebook_launcher.core.options import (
    LOWER,
    NUMBER,
    NUMBER_OR_UUID,
    PATH,
    SEPARATED,
    WHOLE,
    OptionRow,
    option_error,
    origin,
    parameters,
    rows,
    shortened,
)
from notebook_launcher.core.registry import nearest
from notebook_launcher.core.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_PROCESSES = 1024  # on one machine; more is a slip of the keyboard
_MAX_PORT = 65535
_MAX_SEED = 2**32 - 1  # what numpy takes

# Each rank's own: a launch sets them, so the same value for all ranks can only break it.
_RESERVED = {
    "RANK": "ranks are counted from 0",
    "LOCAL_RANK": "ranks are counted from 0",
    "WORLD_SIZE": "use num_processes",
    "LOCAL_WORLD_SIZE": "use num_processes",
    "GROUP_RANK": "use machine_rank",
    "NODE_RANK": "use machine_rank",
    "MASTER_ADDR": "use main_process_ip",
    "MASTER_PORT": "use main_process_port",
}

_VARIABLES = {  # read before NOTEBOOK_LAUNCHER_<OPTION>
    "mixed_precision": ("ACCELERATE_MIXED_PRECISION",),
    "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",),
}
_OTHER_DEVICE = "ACCELERATE_TORCH_DEVICE"  # which all processes would share
_PREFIX = "NOTEBOOK_LAUNCHER_"
_NO_VARIABLE = ("env", "extra")

_Count = Annotated[int, WHOLE]
_DeviceId = Annotated[int | str, NUMBER_OR_UUID]
_Device = Annotated[Literal["auto", "cpu", "cuda", "mps", "tpu", "xpu"], LOWER]
_Precision = Annotated[Literal["no", "fp16", "bf16"], LOWER]
_StartMethod = Annotated[Literal["forkserver", "spawn", "fork"], LOWER]
_Output = Annotated[Literal["all", "main"], LOWER]


class LaunchConfig(BaseModel):
    """The options of a launch; a wrong name, type or combination raises ``ConfigError``."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, allow_inf_nan=False)

    device: _Device = Field("auto", description="Kind of device to run on; auto takes the best that is there.")
    num_processes: _Count | None = Field(
        None, ge=1, le=MAX_PROCESSES, description="Processes on this machine; default: one a device, on the CPU 2."
    )
    device_ids: Annotated[list[_DeviceId], SEPARATED] | None = Field(
        None, description="Which devices to use, by number or UUID, one a process; default: the first ones."
    )
    mixed_precision: _Precision | None = Field(
        None, description="Number format of the forward pass; default: what the function says, else no."
    )
    strategy: str | None = Field(
        None, min_length=1, description="How the model is spread: single, ddp, ...; default: what the function says."
    )
    gradient_accumulation_steps: _Count | None = Field(
        None, ge=1, description="Batches whose gradients are added up before a step; default: what the function says."
    )
    engine: str = Field("local", min_length=1, description="Where the processes come from.")
    num_machines: _Count = Field(1, ge=1, description="Machines that take part.")
    machine_rank: _Count = Field(0, ge=0, description="Number of this machine, counted from 0.")
    main_process_ip: str | None = Field(None, min_length=1, description="Address of machine 0, for several machines.")
    main_process_port: _Count | None = Field(
        None, ge=1, le=_MAX_PORT, description="Free port on machine 0, for several machines."
    )
    start_method: _StartMethod = Field("forkserver", description="How processes are made.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables for the ranks.")
    preload: Annotated[list[str], SEPARATED] = Field(
        default_factory=list, description="Modules that are imported once, before the processes are made."
    )
    output: _Output = Field("all", description="Whose output is shown: every rank's, or rank 0's.")
    log_dir: Annotated[str, PATH] | None = Field(
        None, min_length=1, description="Folder for a log file of each rank; default: none is written."
    )
    stop_grace_s: Annotated[float, NUMBER] = Field(
        5.0, ge=0, description="Seconds that a rank which heard the interrupt may go on."
    )
    timeout_s: Annotated[float, NUMBER] | None = Field(
        None, gt=0, description="Seconds after which the run is ended as failed; default: never."
    )
    max_restarts: _Count = Field(0, ge=0, description="How often a failed run is started again.")
    seed: _Count | None = Field(
        None, ge=0, le=_MAX_SEED, description="Seed of the random generators; default: they are left alone."
    )
    standby: _Count | None = Field(
        None, ge=0, le=MAX_PROCESSES, description="Processes that wait for the next launch; default: as many as ran."
    )
    extra: dict[str, Any] = Field(default_factory=dict, description="Keys of a configuration file that are kept as is.")

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, /, **options: Any) -> None:
        """Check ``options``, by name; what isn't given has its default."""
        sources = options.pop("_sources", None) or dict.fromkeys(options, "argument")
        try:
            super().__init__(**options)
        except ValidationError as problem:
            raise option_error(problem, _table(), sources) from None
        self._sources.update(sources)
        for found in _contradictions(self):
            raise ConfigError(found.sentence + origin(sources, *found.names))

    @classmethod
    def make(
        cls,
        config: LaunchConfig | str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> LaunchConfig:
        """The launch's options: ``options``, else those of ``config`` (an object, names and values, or the path of a
        YAML file), else environment variables, else defaults. An option that is None counts as not given.

        ``environment`` stands in for ``os.environ``. Raises ``ConfigError`` with the option, its value and its source.
        """  # noqa: D205 - the order of precedence is one sentence
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        if config is not None:
            base = cls._base(config)
            values, sources = {name: getattr(base, name) for name in base.sources}, base.sources
        for name, value in options.items():
            if value is not None:
                values[name] = value
                sources[name] = "argument"
            elif name not in cls.model_fields:
                values[name] = value  # an unknown name is a mistake whatever its value
        environment = snapshot() if environment is None else environment
        _warn_of_unknown(environment)
        for name, variable, text in _from_environment(environment):
            if name not in values:
                values[name] = text
                sources[name] = f"environment variable {variable}"
        return cls(_sources=sources, **values)

    @classmethod
    def _base(cls, config: object) -> LaunchConfig:
        if isinstance(config, cls):
            return config
        if isinstance(config, str | os.PathLike):
            return cls.load(config)
        if isinstance(config, dict):
            return cls(**{str(name): value for name, value in config.items() if value is not None})
        raise ConfigError(
            f"config={shortened(config)} can't be: config takes a LaunchConfig, the path of a YAML file, or a dict."
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LaunchConfig:
        """Read a YAML file, Accelerate's or ``save``'s; keys that mean nothing here are kept, with a warning."""
        values = config_file.read(path)
        return cls(_sources=dict.fromkeys(values, f"file {os.fspath(path)}"), **values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a YAML file that ``load`` reads back as an equal configuration, with Accelerate's keys.

        Accelerate reads it where it has a key for each option that is set; else the file's first line says that it
        doesn't. A strategy that was left open comes back as ``ddp`` with several GPUs: Accelerate's word for them.
        """
        told = {row.name: getattr(self, row.name) for row in field_rows() if getattr(self, row.name) != row.default}
        config_file.write(path, {**told, "extra": self.extra} if self.extra else told)

    @property
    def sources(self) -> dict[str, str]:
        """Where each option that somebody set came from: "argument", "file c.yaml", "environment variable X"."""
        return dict(self._sources)

    def __eq__(self, other: object) -> bool:
        """Equal options; where they came from doesn't matter."""
        return isinstance(other, LaunchConfig) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse: a run's options stay as they were when it began."""
        if name in type(self).model_fields:
            raise ConfigError(
                f"{name} can't be changed in a LaunchConfig; LaunchConfig.make(config, {name}={shortened(value)}) "
                "makes another one."
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """The call that makes an equal one: what isn't default."""
        told = (row for row in field_rows() if getattr(self, row.name) != row.default)
        return f"LaunchConfig({', '.join(f'{row.name}={getattr(self, row.name)!r}' for row in told)})"

    __str__ = __repr__


def _documented(summary: str) -> str:
    """The class's docstring: ``summary``, then a line for each option."""
    lines = [
        f"    {row.name}: {row.description}" + (f" One of {', '.join(row.choices)}." if row.choices else "")
        for row in field_rows()
    ]
    return "\n".join([summary, "", "Options, all by name:", "", *lines])


@functools.cache
def field_rows() -> tuple[OptionRow, ...]:
    """Every option of a launch: name, what it takes, choices, default, description; in the order to show them."""
    return rows(LaunchConfig, without=("extra",))


LaunchConfig.__doc__ = _documented(LaunchConfig.__doc__ or "")
LaunchConfig.__signature__ = inspect.Signature(parameters(field_rows()))  # pydantic's fills a screen with validators


@functools.cache
def _table() -> dict[str, OptionRow]:
    return {row.name: row for row in field_rows()}


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Option, variable and text for each option that the environment sets; an empty variable sets nothing."""
    for option, variables in _option_variables():
        for variable in variables:
            if environment.get(variable):
                yield option, variable, environment[variable]
                break
    yield from accelerates_choices(environment)


def _warn_of_unknown(environment: Mapping[str, str]) -> None:
    """A variable with our prefix that nothing reads is a slip of the keyboard: say so instead of ignoring it."""
    if environment.get(_OTHER_DEVICE):
        warn(f"the environment variable {_OTHER_DEVICE} has no effect: device and device_ids choose the devices.")
    unknown = sorted(name for name in environment if name.startswith(_PREFIX) and environment[name])
    for name in unknown:
        if name in _known_variables():
            continue
        near = nearest(name.removeprefix(_PREFIX), [known.removeprefix(_PREFIX) for known in _known_variables()])
        hint = f" Did you mean {_PREFIX}{near}?" if near else f" An option's variable is {_PREFIX}<OPTION>."
        warn(f"the environment variable {name} stands for no option, so it has no effect.{hint}")


@functools.cache
def _option_variables() -> list[tuple[str, tuple[str, ...]]]:
    names = [row.name for row in field_rows() if row.name not in _NO_VARIABLE]
    return [(name, (*_VARIABLES.get(name, ()), _PREFIX + name.upper())) for name in names]


@functools.cache
def _known_variables() -> frozenset[str]:
    """The variables with our prefix: the options', and those that a launch sets for its ranks."""
    everything: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(World)), "")
    names = [variable for _, variables in _option_variables() for variable in variables]
    return frozenset([*names, *World(**everything).environment()])


class _Contradiction(NamedTuple):
    sentence: str
    names: tuple[str, ...]  # the options that it is about


def _contradictions(config: LaunchConfig) -> Iterator[_Contradiction]:
    if config.mixed_precision == "fp16" and config.device == "cpu":
        yield _Contradiction(
            "mixed_precision='fp16' doesn't work with device='cpu': a cpu emulates fp16, slower than float32, and "
            "its narrow range loses small gradients. Use 'bf16', which works on a cpu, or 'no'.",
            ("mixed_precision", "device"),
        )
    if config.device == "mps" and (config.num_processes or 1) > 1:
        yield _Contradiction(
            f"num_processes={config.num_processes} doesn't work with device='mps': an Apple GPU is one device and "
            "takes one process. Use num_processes=1, or device='cpu' for several.",
            ("num_processes", "device"),
        )
    mesh = parallelism.refuse(config.strategy, parallelism.sizes(config.extra.get(parallelism.SECTION)), None)
    if mesh:
        yield _Contradiction(mesh, ("strategy", "extra"))
    yield from _device_contradictions(config)
    yield from _machine_contradictions(config)
    yield from _name_contradictions(config)


def _device_contradictions(config: LaunchConfig) -> Iterator[_Contradiction]:
    ids = config.device_ids
    if ids is None:
        return
    if not ids:
        yield _Contradiction(
            "device_ids is empty: name at least one device, or leave it out to use all.", ("device_ids",)
        )
    if min((one for one in ids if isinstance(one, int)), default=0) < 0:
        yield _Contradiction(f"device_ids={ids} can't be: devices are numbered from 0.", ("device_ids",))
    if len(set(ids)) < len(ids):
        twice = next(number for number in ids if ids.count(number) > 1)
        yield _Contradiction(
            f"device_ids={ids} names device {twice} twice: a device takes one process.", ("device_ids",)
        )
    if config.device == "cpu":
        yield _Contradiction(
            f"device_ids={ids} doesn't go with device='cpu': it chooses GPUs. Leave one of them out.",
            ("device_ids", "device"),
        )
    if config.num_processes not in {None, len(ids)}:
        yield _Contradiction(
            f"device_ids={ids} names {len(ids)} device{'s' * (len(ids) != 1)}, and num_processes is "
            f"{config.num_processes}: a device takes one process. Make them agree, or leave num_processes out.",
            ("device_ids", "num_processes"),
        )


def _machine_contradictions(config: LaunchConfig) -> Iterator[_Contradiction]:
    if config.machine_rank >= config.num_machines:
        yield _Contradiction(
            f"machine_rank={config.machine_rank} can't be with num_machines={config.num_machines}: machines are "
            f"numbered from 0 to {config.num_machines - 1}.",
            ("machine_rank", "num_machines"),
        )
    missing = [name for name in ("main_process_ip", "main_process_port") if getattr(config, name) is None]
    if config.num_machines > 1 and missing:
        yield _Contradiction(
            f"num_machines={config.num_machines} needs {' and '.join(missing)}: the machines meet at an address and "
            "a free port of machine 0, the same on all of them.",
            ("num_machines",),
        )


def _name_contradictions(config: LaunchConfig) -> Iterator[_Contradiction]:
    for name, value in config.env.items():
        if not name or "=" in name or "\0" in name + value:
            yield _Contradiction(
                f"env holds {name!r}: {shortened(value)}, which can't be an environment variable.", ("env",)
            )
        if name in _RESERVED:
            yield _Contradiction(f"env can't set {name}: a launch sets it for each rank; {_RESERVED[name]}.", ("env",))
    for module in config.preload:
        if not all(part.isidentifier() for part in module.split(".")):
            yield _Contradiction(
                f"preload holds {module!r}, which is no module's name: it takes names such as 'numpy'.", ("preload",)
            )
