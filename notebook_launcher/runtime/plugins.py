"""What ``Accelerator`` takes as objects: Accelerate's configurations, plugins and keyword holders, by its names.

Plain data: what each does is said where it is used. Torch is not loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import enum
import math
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from notebook_launcher.core import parallelism
from notebook_launcher.core.deepspeed_options import DeepSpeedPlugin
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.fsdp_options import FullyShardedDataParallelPlugin
from notebook_launcher.core.registry import unknown_name
from notebook_launcher.runtime import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch
    from torch.profiler import profile

_T = TypeVar("_T")
MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "tp")  # outermost first: neighbours exchange most


@dataclasses.dataclass
class DataLoaderConfiguration(checks.Flagged):
    """How loaders are shared among the processes, and in which order they are read."""

    split_batches: bool = False  # a loader's batch is that of all processes together
    dispatch_batches: bool | None = None  # rank 0 reads and sends; None: data that can only be read in order
    even_batches: bool = True  # every process gets as many batches, filled with samples from the start
    use_seedable_sampler: bool = False  # the order depends on the seed alone, not on what was drawn before
    data_seed: int | None = None  # of the order; None: torch's
    non_blocking: bool = False  # batches move to the device without waiting
    use_stateful_dataloader: bool = False  # makes no difference: every prepared loader knows its place

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a seed and flags that are none."""
        super().__post_init__()
        if self.data_seed is not None:
            self.data_seed = checks.whole("data_seed", self.data_seed, of="an order", least=0)


@dataclasses.dataclass
class GradientAccumulationPlugin(checks.Flagged):
    """How micro-batches form groups."""

    num_steps: int | None = None  # micro-batches in a group; None: what the launch chose
    adjust_scheduler: bool = True  # makes no difference: schedulers step when the optimizer does
    sync_with_dataloader: bool = True  # a group ends with the data
    sync_each_batch: bool = False  # exchange gradients in every micro-batch: same result, slower, less memory


@dataclasses.dataclass
class ProjectConfiguration(checks.Flagged):
    """Where a project's files go, and how its checkpoints are named and kept."""

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None  # None: project_dir
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None  # checkpoints to keep; None: all
    iteration: int = 0  # number of the next checkpoint
    save_on_each_node: bool = False  # each machine keeps the files, not the first alone

    def __post_init__(self) -> None:
        """Logs go where the project is. Raise ``ConfigError`` for numbers and flags that are none."""
        super().__post_init__()
        if self.total_limit is not None:
            self.total_limit = checks.whole("total_limit", self.total_limit, of="checkpoints to keep (None: all)")
        self.iteration = checks.whole("iteration", self.iteration, of="a checkpoint", least=0)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Make ``project_dir`` the project's folder, and that of its logs unless they have one.

        Raises ``TypeError`` for what is no path.
        """
        for name, folder in (("project_dir", project_dir), ("logging_dir", self.logging_dir)):
            checks.instance(name, folder, (str, os.PathLike, type(None)), "a folder's path")
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclasses.dataclass
class ParallelismConfig:
    """How many processes each way to spread a model takes; their product is the number of processes.

    ``tp_plan``: by pattern of the modules' names (``"layers.*.up"``), "colwise", "rowwise", "sequence", another of
    transformers' words, or torch's ``ParallelStyle``; None: the model's own ``tp_plan`` or ``_tp_plan``.
    """

    dp_replicate_size: int = 1  # replicas of the sharded model
    dp_shard_size: int | None = None  # processes that a replica is sharded over; None: as many as there are for each
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1  # more is refused: torch's context_parallel has no attention kernel for the CPU
    sp_size: int = 1  # more is refused, as that is
    ep_size: int = 1  # more is refused: torch has no public way to spread experts
    tp_plan: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a size that is none, or that is not supported."""
        for name, size in vars(self).items():
            if not name.endswith("_size"):
                continue
            is_open = size is None and name == "dp_shard_size"
            if not is_open and (type(size) is not int or size < 1):
                raise ConfigError(f"ParallelismConfig({name}={size!r}): it takes a number of processes, 1 or more")
            if size != 1 and name in parallelism.NOT_HERE:
                raise ConfigError(
                    f"ParallelismConfig({name}={size}) asks for a way to spread a model that is not here: leave it "
                    "out, or use tp_size, pp_size, dp_replicate_size and dp_shard_size"
                )

        if self.tp_plan is not None and not isinstance(self.tp_plan, Mapping):
            raise ConfigError(
                f"ParallelismConfig(tp_plan={self.tp_plan!r}): it takes patterns of names and how each is split, such "
                "as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
            )

    @property
    def strategy(self) -> str | None:
        """The one that it asks for by itself."""
        return parallelism.strategy_of(vars(self))

    def sizes(self, num_processes: int, own: str) -> dict[str, int]:
        """The sizes of ``MESH_DIMS`` for a strategy that is about ``own``.

        Where its size was left out, it takes the processes that the others leave; else ``dp_shard`` does. Raises
        ``ConfigError`` where the product is not ``num_processes``.
        """
        given: dict[str, int | None] = {name: getattr(self, f"{name}_size") for name in MESH_DIMS}
        if own in {"pp", "tp"} and given[own] == 1:
            given |= {own: None, "dp_shard": self.dp_shard_size or 1}
        known = math.prod(size for size in given.values() if size is not None)
        sizes = {name: max(1, num_processes // known) if size is None else size for name, size in given.items()}
        product = math.prod(sizes.values())
        if product != num_processes:
            told = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            raise ConfigError(
                f"{told} = {product}, and the run has {num_processes} process{'es' * (num_processes > 1)}: make the "
                f"product of ParallelismConfig's sizes {num_processes}, or launch {product} processes"
            )
        return sizes


@dataclasses.dataclass
class PipelineParallelPlugin:
    """How a model is cut into stages, and how microbatches pass through them, with ``ParallelismConfig(pp_size=...)``.

    ``loss_fn(outputs, target)`` gives the mean over samples; it serves ``pipeline_step`` with other strategies too.
    """

    schedule: str = "1f1b"  # "gpipe", "1f1b" or "interleaved1f1b", which gives each rank several stages
    num_microbatches: int | None = None  # of a batch; None: as many as there are stages
    split_points: Sequence[str | int] | None = None  # names of the modules that begin a stage; None: even in parameters
    loss_fn: Callable[..., torch.Tensor] | None = None
    example: Any = None  # a microbatch's input, or a tuple of its inputs: a model that is no nn.Sequential is traced
    strategy: ClassVar[None] = None  # it chooses none

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a schedule that isn't known, and for a number that is none."""
        self.schedule = _named("schedule", self.schedule, ["gpipe", "1f1b", "interleaved1f1b"])
        count = self.num_microbatches
        if count is not None and (type(count) is not int or count < 1):
            raise ConfigError(f"PipelineParallelPlugin(num_microbatches={count!r}): give a whole number, 1 or more")
        if count is not None and self.example is not None:
            raise ConfigError(
                f"PipelineParallelPlugin(num_microbatches={count}, example=...): the microbatches of a model that is "
                "traced are as large as its example; leave num_microbatches out"
            )


class DDPCommunicationHookType(enum.StrEnum):
    """What DDP does to gradients on their way: torch's hooks by name."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclasses.dataclass
class DistributedDataParallelKwargs(checks.Flagged):
    """Arguments of ``torch.nn.parallel.DistributedDataParallel``, and the hook that exchanges gradients."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO  # compresses what the hook sends
    comm_state_option: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments of PowerSGDState

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a hook that isn't known or can't wrap another, and a size that is none."""
        super().__post_init__()
        if self.bucket_cap_mb is not None:  # torch's own
            checks.between("bucket_cap_mb", self.bucket_cap_mb, 0, math.inf, usual=25)
        self.comm_hook = _named("comm_hook", self.comm_hook, list(DDPCommunicationHookType))
        self.comm_wrapper = _named("comm_wrapper", self.comm_wrapper, list(DDPCommunicationHookType)[:3])


@dataclasses.dataclass
class GradScalerKwargs(checks.Flagged):
    """Arguments of ``torch.amp.GradScaler``, for fp16. ``enabled`` False: losses are not scaled."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for numbers with which losses would vanish, overflow for good, or change sign."""
        super().__post_init__()
        checks.between("init_scale", self.init_scale, 0, math.inf, usual=65536.0)
        checks.between("growth_factor", self.growth_factor, 1, math.inf, usual=2.0)
        checks.between("backoff_factor", self.backoff_factor, 0, 1, usual=0.5)
        self.growth_interval = checks.whole("growth_interval", self.growth_interval, of="steps")


@dataclasses.dataclass
class InitProcessGroupKwargs:
    """Arguments of ``torch.distributed.init_process_group``; None leaves each to the device and the launch."""

    backend: str | None = None
    init_method: str | None = None
    timeout: dt.timedelta | None = None

    def __post_init__(self) -> None:
        """Raise ``TypeError`` for a timeout that is a number."""
        seconds = self.timeout if isinstance(self.timeout, int | float) else 1800
        words = f"a duration, such as datetime.timedelta(seconds={seconds})"
        checks.instance("InitProcessGroupKwargs(timeout=...)", self.timeout, (dt.timedelta, type(None)), words)


@dataclasses.dataclass
class AutocastKwargs(checks.Flagged):
    """Arguments of ``torch.autocast``; ``cache_enabled`` None is torch's own choice."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclasses.dataclass
class ProfileKwargs(checks.Flagged):
    """Arguments of ``torch.profiler.profile``, and where each rank writes its trace, ``profile_<rank>.json``."""

    activities: list[str] | None = None  # "cpu", "cuda", "xpu" ...; None: all there are
    schedule_option: dict[str, int] | None = None  # arguments of torch.profiler.schedule
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for an activity, a schedule or a flag that is none, ``TypeError`` for a wrong type."""
        super().__post_init__()
        if self.activities is not None:
            checks.instance("ProfileKwargs(activities=...)", self.activities, (list, tuple), 'a list, such as ["cpu"]')
            self.activities = [_named("activity", name, _ACTIVITIES) for name in self.activities]
        steps = self.schedule_option or {}
        if not isinstance(steps, Mapping) or (steps and not steps.keys() >= {*_SCHEDULE[:3]}):
            raise ConfigError(
                f"schedule_option={steps!r} is no schedule; give numbers of steps by name, such as "
                "{'wait': 1, 'warmup': 1, 'active': 3}"
            )
        for name, number in steps.items():
            checks.whole(_named("schedule_option", name, _SCHEDULE), number, of="steps", least=name == "active")
        if self.on_trace_ready is not None:
            checks.function("ProfileKwargs(on_trace_ready=...)", self.on_trace_ready)
        words = (str, os.PathLike, type(None)), "a folder's path"
        checks.instance("ProfileKwargs(output_trace_dir=...)", self.output_trace_dir, *words)

    def build(self) -> profile:
        """Torch's profiler with these arguments; raises ``ConfigError`` for an activity that isn't known."""
        from torch import profiler

        arguments = {name: value for name, value in vars(self).items() if name not in _NOT_TORCHS}
        if self.schedule_option:
            arguments["schedule"] = profiler.schedule(**self.schedule_option)
        if self.activities is not None:
            known = {name.lower(): activity for name, activity in profiler.ProfilerActivity.__members__.items()}
            arguments["activities"] = [known[_named("activity", name, known)] for name in self.activities]
        return profiler.profile(**arguments)


@contextlib.contextmanager
def profiling(options: ProfileKwargs, rank: int) -> Iterator[profile]:
    """A context that profiles, and writes ``rank``'s trace if nothing went wrong inside."""
    with options.build() as profiler:
        yield profiler
    if options.output_trace_dir is not None:
        folder = pathlib.Path(options.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{rank}.json"))


_ACTIVITIES = ("cpu", "cuda", "hpu", "mtia", "privateuse1", "xpu")  # some versions of torch lack one
_SCHEDULE = ("active", "wait", "warmup", "repeat", "skip_first", "skip_first_wait")
_NOT_TORCHS = ("activities", "schedule_option", "output_trace_dir")
_PLUGINS: dict[str, type] = {
    "deepspeed_plugin": DeepSpeedPlugin,
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "parallelism_config": ParallelismConfig,
    "pipeline_plugin": PipelineParallelPlugin,
}
_KINDS = (DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, AutocastKwargs, ProfileKwargs)


class Keywords:
    """The ``kwargs_handlers`` that an accelerator was given, by kind; one that was left out is at its defaults."""

    def __init__(self, given: Iterable[Any] | None) -> None:
        """Raise ``ConfigError`` for one of another type, or for two of a kind."""
        self._found: dict[type, Any] = {}
        for one in [given] if isinstance(given, _KINDS) else given or ():
            if type(one) not in _KINDS:
                names = ", ".join(kind.__name__ for kind in _KINDS)
                raise ConfigError(f"kwargs_handlers holds {one!r}, which is none of {names}")
            other = self._found.setdefault(type(one), one)
            if other is not one:
                raise ConfigError(f"kwargs_handlers holds {other!r} and {one!r}, two of a kind; leave one out")

    def add(self, argument: str, plugin: Any) -> None:
        """Take ``plugin``, which ``argument`` was given; ``ConfigError`` where it is of another type."""
        if type(plugin) is not _PLUGINS[argument]:
            kind = _PLUGINS[argument].__name__
            raise ConfigError(f"{argument}={plugin!r} is of type {type(plugin).__name__}; give a {kind}")
        self._found[type(plugin)] = plugin

    def __getitem__(self, kind: type[_T]) -> _T:
        """The one of ``kind``."""
        found: _T = self._found.get(kind) or kind()
        return found


def changed(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults: torch knows its own, and drops one now and then."""
    default = type(options)()
    return {name: value for name, value in vars(options).items() if value != getattr(default, name)}


def _named(argument: str, given: Any, known: Any) -> Any:
    """The member of ``known`` that ``given`` names, in any case."""
    name = str(getattr(given, "value", given)).lower()
    found = next((one for one in known if one == name), None)
    if found is None:
        raise unknown_name(argument, given, known)
    return found
