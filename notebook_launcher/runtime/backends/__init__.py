"""Backends: one kind of hardware each. Adding one is one file, or one row of ``torch_devices``, and one line here."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import device_words
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from notebook_launcher.core.world import World

BACKENDS = Registry(
    "device",
    {
        "cpu": "notebook_launcher.runtime.backends.torch_devices:cpu",
        "cuda": "notebook_launcher.runtime.backends.torch_devices:cuda",
        "mps": "notebook_launcher.runtime.backends.torch_devices:mps",
        "xpu": "notebook_launcher.runtime.backends.torch_devices:xpu",
        "tpu": "notebook_launcher.runtime.backends.xla:tpu",
    },
)


@dataclasses.dataclass(frozen=True)
class Backend:
    """One kind of hardware, as one process uses it."""

    device_type: str
    device: torch.device  # this process's own
    process_group: str  # the name that init_process_group takes
    distributed_type: str  # Accelerate's word for several processes on it
    refusals: dict[str, str]  # precision -> why it can't do it, "" where it can; see core.precisions
    strategies: dict[str, str] = dataclasses.field(default_factory=dict)  # those it has, and which does it; {}: all
    move: Callable[[nn.Module], nn.Module] | None = None  # puts a model on the device, where ``to`` would not do
    put: Callable[[Any], Any] | None = None  # puts a loader's batch there, likewise

    def moved(self, model: nn.Module) -> Any:
        """``model`` on the device."""
        return model.to(self.device) if self.move is None else self.move(model)


def select(world: World, *, cpu: bool) -> tuple[Backend, str]:
    """The backend for this process, and why it is that one.

    ``cpu`` is ``Accelerator(cpu=True)``; raises ``ConfigError`` where it contradicts the launch, or where the processes
    can't have that device.
    """
    from notebook_launcher.runtime.backends.torch_devices import accelerator_type

    if cpu and world.device not in {"auto", "cpu"}:
        raise ConfigError(
            f"Accelerator(cpu=True) contradicts the launch, which chose device={world.device!r}; leave one of them out"
        )
    if cpu:
        name, why = "cpu", "Accelerator was given cpu=True"
    elif world.device != "auto":
        name, why = world.device, f"the launch chose device={world.device!r}"
    else:
        found = accelerator_type()
        name = found or "cpu"
        why = f"torch found {found!r}" if found else "torch found no accelerator on this machine"
    if name in device_words.ADVICE:
        raise ConfigError(
            f"device {name!r} is not known ({why}). {device_words.ADVICE[name]} Known: {', '.join(BACKENDS.names)}."
        )
    return BACKENDS.load(name)(world), why
