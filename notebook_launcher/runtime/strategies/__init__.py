"""Strategies: how a model is spread over the processes. Adding one is one file and one line in ``core.strategies``.

A strategy is a final class; what two of them do alike is a function that both name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.strategies import STRATEGIES
from notebook_launcher.runtime.plugins import ParallelismConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from torch import nn

    from notebook_launcher.runtime.plugins import DataLoaderConfiguration, Keywords
    from notebook_launcher.runtime.process import Process
    from notebook_launcher.runtime.shards import Models, Optimizers
    from notebook_launcher.runtime.storage import Draft

__all__ = ["STRATEGIES", "Strategy", "create"]


class Strategy(Protocol):
    """What the accelerator asks of a way to spread a model."""

    name: str
    layout: str  # of what ``save`` writes: strategies of one layout can load each other's
    trains_apart: bool  # a rank has all of the model, and can train it by itself for some steps
    data_process: Process  # the process as one of those that share the data: ranks with parts of one model get the same

    def place(self, model: nn.Module) -> Any:
        """The model on this process's device, or where ``wrap`` will move it from."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model to train, on this process's device; ``models.unwrap`` leads back to ``model``."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any] | None:
        """A context in which backward keeps ``model``'s gradients on this rank; None where they never leave it.

        It can be entered again and again.
        """

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any] | None:
        """A context whose backward exchanges ``model``'s gradients, though its forward ran under ``no_sync``."""

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any] | None:
        """A context in which ranks may train ``models`` on fewer batches than others; None where each needs as many."""

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Add the gradients of ``loss``, averaged over the ranks unless under ``no_sync``."""

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale the gradients so that their norm, over all ranks' shares, is at most ``max_norm``; return it."""

    def pair(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear of ``optimizer``, before it first steps: its models were wrapped before, or will be.

        It may hear of one several times.
        """

    def gradients(self, parameters: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
        """What this rank has collected for ``parameters``, to be scaled in place."""

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Bring each element of the gradients into [-clip_value, clip_value]."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Let ``optimizer`` step; return what it returns."""

    def full_state(self, model: nn.Module) -> dict[str, Any]:
        """The whole of ``model``'s state, under the names of the module that was given to ``prepare``."""

    def save(self, draft: Draft, models: Models, optimizers: Optimizers, *, safe: bool) -> None:
        """Write the states under their names; ``safe``: models without pickle. Every rank calls it, writing or not."""

    def load(self, folder: Path, models: Models, optimizers: Optimizers, *, strict: bool) -> Callable[[], None]:
        """Read and check what ``save`` wrote; the function returned takes it up.

        Raises ``CheckpointError`` for what doesn't fit, with nothing changed; not ``strict``: parts may be missing.
        """

    def go_on(self) -> None:
        """Have the first step after ``load`` compute as the run would have that saved; every rank calls it.

        It comes after what ``load`` returned has been called on every rank.
        """

    def forget(self) -> None:
        """Let go of every model that it has wrapped: none of them is trained any more."""


def create(
    name: str | None, process: Process, keywords: Keywords, loading: DataLoaderConfiguration | None = None
) -> Strategy:
    """The strategy ``name`` for this process; None chooses: one process needs none, several train data-parallel.

    ``keywords`` are what it may hand on to torch.

    Raises ``ConfigError`` for a name that isn't known, or that doesn't go with the number of processes or ``loading``.
    """
    known = process.backend.strategies
    if process.num_processes == 1 and name in ({None, "ddp"} if known else {None, "ddp", "fsdp", "pp", "tp"}):
        keywords[ParallelismConfig].sizes(1, "dp_shard")
        name = "single"
    if process.num_processes > 1 and name == "single":
        raise ConfigError(
            f"strategy='single' trains on one process, and this run has {process.num_processes}: each would train a "
            "model of its own. Use strategy='ddp', or leave it out, to train one model on all of them; or launch with "
            "num_processes=1."
        )
    name = name or "ddp"
    if known and name in STRATEGIES.names and name not in known:
        raise ConfigError(
            f"strategy={name!r} is not there for the device {process.backend.device_type!r}, which has "
            f"{', '.join(known)}. Launch with one of them, or leave it out."
        )
    strategy: Strategy = STRATEGIES.load(known.get(name, name))(process, keywords)
    several = strategy.data_process.num_processes > 1
    if several and loading is not None and not loading.even_batches and not strategy.trains_apart:
        raise ConfigError(
            f"even_batches=False can give ranks different numbers of batches, and with strategy={strategy.name!r} all "
            "are needed for each one, so that the others would wait for ever: leave it out. The last batch is then "
            "filled up, and gather_for_metrics drops what fills it."
        )
    return strategy
