"""How much memory a training will take on each rank: from the model's shapes, before anything is loaded or launched."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.precisions import PRECISIONS
from notebook_launcher.core.registry import unknown_name
from notebook_launcher.core.world import World
from notebook_launcher.runtime import checks, options
from notebook_launcher.runtime.plugins import Keywords
from notebook_launcher.runtime.strategies import STRATEGIES
from notebook_launcher.runtime.zero_engine import twin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.runtime.holdings import Held

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryEstimate:
    """Bytes on the rank that has the most, from the first step on."""

    weights: int  # parameters and buffers
    gradients: int  # when backward has ended
    optimizer_state: int  # and the copies of weights that ZeRO steps on
    strategy: str
    num_processes: int

    @property
    def total(self) -> int:
        """The three together."""
        return self.weights + self.gradients + self.optimizer_state

    def __repr__(self) -> str:
        ranks = f"{self.num_processes} process{'es' * (self.num_processes != 1)}"
        return (
            f"{_size(self.total)} a rank ({self.strategy}, {ranks}): weights {_size(self.weights)}, gradients "
            f"{_size(self.gradients)}, optimizer state {_size(self.optimizer_state)}"
        )


def estimate(
    model: nn.Module,
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer = "AdamW",
    strategy: str | None = None,
    *,
    num_processes: int = 2,
    mixed_precision: str = "no",
    **plugins: Any,
) -> MemoryEstimate:
    """The bytes that ``model`` and its optimizer take on a rank, under a strategy ("ddp" where nothing says another).

    ``model`` may be on "meta" (``init_empty_weights``), where it takes no memory itself. ``optimizer`` is one made of
    its parameters, a class, or the name of one of torch's. ``plugins`` are those of ``Accelerator``: ``fsdp_plugin``,
    ``deepspeed_plugin``, ``parallelism_config``, ``pipeline_plugin``; what they offload counts too. Not in it:
    activations, what is gathered or exchanged at the moment, and what torch itself takes. A model that a pipeline's
    stages are traced from needs its values.

    Raises ``ConfigError`` for what ``Accelerator`` refuses, and for an optimizer that can't be made.
    """
    checks.instance("estimate", model, nn.Module, "a model")
    num_processes = checks.whole("num_processes", num_processes, of="processes")
    if mixed_precision not in PRECISIONS:
        raise unknown_name("mixed_precision", mixed_precision, PRECISIONS)
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = _class_of(optimizer)
    keywords = Keywords(None)
    world = World(world_size=num_processes, strategy=strategy, mixed_precision=mixed_precision)
    world = options.with_plugins(world, keywords, **plugins)
    name = world.strategy or "ddp"
    kind = STRATEGIES.load(name)
    if not hasattr(kind, "held"):
        raise ConfigError(f"estimate can't say what strategy={name!r} keeps on each rank")
    modules = kind.divide(model, world, keywords) if hasattr(kind, "divide") else [model]  # ranks with other modules
    found = []
    for module in modules:
        parts: list[Held] = list(kind.held(module, world, keywords))
        buffers = sum({id(one): one.nbytes for one in module.buffers()}.values())
        found.append(
            MemoryEstimate(
                weights=buffers + sum(one.weights for one in parts),
                gradients=sum(one.gradients for one in parts),
                optimizer_state=sum(one.masters for one in parts) + _state(optimizer, parts),
                strategy=name,
                num_processes=num_processes,
            )
        )
    return max(found, key=lambda one: one.total)


def _state(optimizer: Any, parts: Sequence[Held]) -> int:
    """Bytes of all tensors that the optimizer has after a step on ``parts``."""
    groups = _groups(optimizer, parts)
    stepped = []
    for group in groups:
        joined = [one.stepped for one in group if one.is_joined]
        rows = [torch.empty(sum(one.numel() for one in joined), dtype=joined[0].dtype, device="meta")] if joined else []
        stepped.append([*rows, *(one.stepped for one in group if not one.is_joined)])
    try:
        return _stepped(optimizer, stepped)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # it looks at values, of which "meta" has none
        return sum(
            _stepped_alone(optimizer, number, len(groups), one.shape, one.dtype)
            for number, group in enumerate(stepped)
            for one in group
        )


def _groups(optimizer: Any, parts: Sequence[Held]) -> list[list[Held]]:
    """The parts that train, by the optimizer's groups."""
    trained = [one for one in parts if one.parameter.requires_grad]
    if not isinstance(optimizer, torch.optim.Optimizer):
        return [trained]
    own = {id(one.parameter): one for one in trained}
    return [[own[id(p)] for p in group["params"] if id(p) in own] for group in optimizer.param_groups]


def _stepped(optimizer: Any, groups: Sequence[Sequence[torch.Tensor]]) -> int:
    parameters = [[nn.Parameter(one) for one in group] for group in groups]
    for one in (one for group in parameters for one in group):
        one.grad = torch.zeros_like(one)
    if not any(parameters):
        return 0
    if isinstance(optimizer, torch.optim.Optimizer):
        trying = twin(optimizer)
        for group, own in zip(trying.param_groups, parameters, strict=True):
            group["params"] = own
    else:
        trying = optimizer([one for group in parameters for one in group])
    trying.step()
    found = {id(v): v for values in trying.state.values() for v in values.values() if isinstance(v, torch.Tensor)}
    return sum(one.untyped_storage().nbytes() for one in found.values())


def _stepped_alone(optimizer: Any, number: int, num_groups: int, shape: torch.Size, dtype: torch.dtype) -> int:
    """With a real parameter, one at a time."""
    groups: list[list[torch.Tensor]] = [[] for _ in range(num_groups)]
    groups[number].append(torch.zeros(shape, dtype=dtype))
    try:
        return _stepped(optimizer, groups)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        kind = getattr(optimizer, "__name__", None) or type(optimizer).__name__
        raise ConfigError(
            f"a step of {kind} can't be tried, to see what state it keeps ({type(error).__name__}: {error}); give an "
            "optimizer that was made of the model's parameters and steps without a closure"
        ) from error


def _class_of(optimizer: Any) -> Any:
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer
    known = {name.lower(): one for name, one in vars(torch.optim).items() if isinstance(one, type)}
    found = known.get(str(optimizer).lower())
    if not isinstance(optimizer, str) or found is None or found is torch.optim.Optimizer:
        names = [one.__name__ for one in known.values() if one is not torch.optim.Optimizer]
        raise unknown_name("optimizer", optimizer, names)
    return found


def _size(num_bytes: float) -> str:
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:  # noqa: PLR2004 - of one unit to the next
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{num_bytes:.1f} {_UNITS[unit]}"
