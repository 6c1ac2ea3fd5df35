"""Strategies of XLA: a replica a process, and by SPMD, one process for all devices, data parallel and FSDPv2.

Under SPMD the program is that of one device; XLA splits it as tensors are marked. Batches are split by the backend, so
that parameters without a mark are whole on every device, and their gradients those of the whole batch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from typing import TYPE_CHECKING, Any, final

import torch

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import holdings, models, shards, trees
from notebook_launcher.runtime.backends import xla
from notebook_launcher.runtime.strategies import single

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import nn

    from notebook_launcher.runtime.plugins import Keywords
    from notebook_launcher.runtime.process import Process
    from notebook_launcher.runtime.shards import Models, Optimizers
    from notebook_launcher.runtime.storage import Draft


def _sync() -> None:
    importlib.import_module("torch_xla").sync()


def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
    """``optimizer.step``, and have XLA run all that was recorded up to it."""
    result = single.step(optimizer, closure)
    _sync()
    return result


def full_state(model: nn.Module) -> dict[str, Any]:
    """The state in host memory; what is tied shares its memory there too."""
    given = models.unwrap(model, keep_torch_compile=False)
    hosted: dict[int, Any] = {}
    state = given.state_dict(keep_vars=True)
    _sync()
    return {
        name: hosted.setdefault(id(value), value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        for name, value in state.items()
    }


def save(draft: Draft, models_: Models, optimizers: Optimizers, *, safe: bool) -> None:
    """Whole states, by way of host memory: those that write do, when every rank has run what it recorded."""
    _sync()
    shards.save(draft, models_, optimizers, 0, safe=safe, sharded=False, gathered=full_state)


def load(folder: Path, models_: Models, optimizers: Optimizers, *, strict: bool) -> Callable[[], None]:
    """What ``save`` wrote; marks on parameters stay."""
    take_up = single.load(folder, models_, optimizers, strict=strict)

    def take_up_and_sync() -> None:
        take_up()
        _sync()

    return take_up_and_sync


class _Apart:
    """A context, made once and entered again and again, in which gradients stay on this rank."""

    __slots__ = ("_strategy",)

    def __init__(self, strategy: Replica) -> None:
        self._strategy = strategy

    def __enter__(self) -> None:
        self._strategy.num_apart += 1

    def __exit__(self, *exception: object) -> None:
        self._strategy.num_apart -= 1


@contextlib.contextmanager
def _together(strategy: Replica) -> Iterator[None]:
    before, strategy.num_apart = strategy.num_apart, 0
    try:
        yield
    finally:
        strategy.num_apart = before


@final
class Replica:
    """Every rank has the whole model and its own batches; a backward averages the gradients over the ranks.

    Averaging twice changes nothing, and averages of sums are sums of averages: so it does not matter how many losses a
    step has, nor which of the micro-batches before were averaged. One process needs none of it. With several it was
    never run, since XLA on the CPU can't.

    By SPMD one process is a replica on all devices; by FSDPv2 each of them has a part of every parameter, gradient and
    optimizer state.
    """

    layout = single.Single.layout
    clip = staticmethod(single.clip)
    clip_value = staticmethod(single.clip_value)
    gradients = staticmethod(single.gradients)
    pair = staticmethod(single.pair)
    step = staticmethod(step)
    full_state = staticmethod(full_state)
    save = staticmethod(save)
    load = staticmethod(load)
    go_on = staticmethod(single.go_on)
    held = staticmethod(holdings.whole)

    def __init__(self, process: Process, keywords: Keywords, *, name: str = "xla") -> None:
        """Train on the process's device, or by SPMD on all of them; raise ``ConfigError`` on another kind of device."""
        del keywords
        if process.device.type != "xla":
            raise ConfigError(f"strategy={name!r} is for device='tpu', and the device is {process.device.type!r}")
        self.name = name
        self.data_process = process
        self._num_ranks = process.num_processes if name == "xla" else 1  # by SPMD XLA itself exchanges
        self.trains_apart = self._num_ranks == 1  # several are all needed for each step
        self._wrapper = _fully_sharded() if name == "spmd_fsdp" else None
        self._models: list[nn.Module] = []
        self.num_apart = 0  # contexts entered in which gradients stay here

    def place(self, model: nn.Module) -> Any:
        """The model on the device."""
        return single.moved(model, self.data_process.backend)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself, of several ranks with the first one's parameters; for FSDPv2 behind torch_xla's wrapper."""
        if self._num_ranks > 1:
            importlib.import_module("torch_xla.core.xla_model").broadcast_master_param(model)
            self._models.append(model)
        if self._wrapper is None:
            return model
        wrapped: nn.Module = self._wrapper(model, mesh=xla.mesh(), shard_output=_split_outputs)
        _sync()
        return wrapped

    def no_sync(self, model: nn.Module) -> _Apart | None:
        """A context without gradient exchange; None for one process."""
        del model
        return _Apart(self) if self._num_ranks > 1 else None

    def sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[None] | None:
        """The exchange, for one backward."""
        del model
        return _together(self) if self._num_ranks > 1 else None

    def join(self, models_: Sequence[nn.Module]) -> None:
        """None: all ranks exchange gradients at each step."""

    def forget(self) -> None:
        """Let go of the models whose gradients it exchanges."""
        self._models.clear()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Add the gradients of ``loss``, and average them over the ranks."""
        loss.backward(**options)  # type: ignore[no-untyped-call]
        if self._num_ranks > 1 and not self.num_apart:
            found = list(self._gradients())
            importlib.import_module("torch_xla.core.xla_model").all_reduce("sum", found, scale=1 / self._num_ranks)

    def _gradients(self) -> Iterator[torch.Tensor]:
        held = {id(parameter): parameter for model in self._models for parameter in model.parameters()}
        return (parameter.grad for parameter in held.values() if parameter.grad is not None)


Spmd = functools.partial(Replica, name="spmd")
SpmdSharded = functools.partial(Replica, name="spmd_fsdp")


def _fully_sharded() -> Any:
    """Torch_xla's wrapper, which splits each parameter along its longest dim."""
    module = importlib.import_module("torch_xla.experimental.spmd_fully_sharded_data_parallel")
    wrapper = module.SpmdFullyShardedDataParallel
    if wrapper not in models.WRAPPERS:
        models.WRAPPERS.append(wrapper)
        # Of a hook that the wrapper puts on every module: the first one's inputs need no gradients.
        warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients")
    return wrapper


def _split_outputs(outputs: Any, mesh: Any) -> None:
    """Have what a forward gives split as its batch is, in any nesting."""
    spmd = importlib.import_module("torch_xla.distributed.spmd")
    for leaf in trees.leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] % mesh.size() == 0:
            spmd.mark_sharding(leaf, mesh, ("fsdp", *[None] * (leaf.ndim - 1)))
