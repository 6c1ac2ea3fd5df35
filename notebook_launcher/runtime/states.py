"""``PartialState``, ``AcceleratorState`` and ``GradientState``: the facts that code asks for without an accelerator.

They are views. One that an accelerator gave shows that accelerator; any other shows the one made last, and where there
is none, what the launch chose. Making one changes nothing for another.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from notebook_launcher.core import config
from notebook_launcher.core.deepspeed_options import DeepSpeedPlugin
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.fsdp_options import FullyShardedDataParallelPlugin
from notebook_launcher.runtime import agreement, options, process
from notebook_launcher.runtime.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.runtime.accelerator import Accelerator
    from notebook_launcher.runtime.accumulation import Iteration
    from notebook_launcher.runtime.data import PreparedLoader

_T = TypeVar("_T")
latest: Callable[[], Accelerator | None] = lambda: None  # noqa: E731 - replaced by a weak reference


def remember(accelerator: Accelerator) -> None:
    """Make ``accelerator`` the one that states show, as long as somebody holds it."""
    global latest  # noqa: PLW0603 - the process's latest, of which there is one
    latest = weakref.ref(accelerator)


class _View:
    """Of an accelerator, if there is one."""

    initialized = True
    _given: Accelerator | None = None

    @property
    def _accelerator(self) -> Accelerator | None:
        return self._given or latest()

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:  # noqa: FBT001, FBT002 - Accelerate's
        """Do nothing, for code that used to need it: nothing is kept from one accelerator to the next."""


class PartialState(_View, Identity):
    """This process among the others; without an accelerator it joins them."""

    fork_launched = False

    def __init__(self, cpu: bool = False, *, _given: Accelerator | None = None, **_: Any) -> None:  # noqa: FBT001, FBT002
        """``cpu``: stay on the CPU, where no accelerator has chosen."""
        self._given = _given
        shown = self._accelerator
        self._process = shown._process if shown else process.join(process.place(config.world(), cpu=cpu))  # noqa: SLF001

    @property
    def _data_process(self) -> process.Process:
        shown = self._accelerator
        return shown._data_process if shown else self._process  # noqa: SLF001

    @property
    def backend(self) -> str | None:
        """The process group's backend: "gloo", "nccl"..., None without a group."""
        return str(dist.get_backend()) if dist.is_initialized() else None

    @property
    def debug(self) -> bool:
        """Whether collectives are compared before they are begun (``ACCELERATE_DEBUG_MODE``)."""
        return agreement.is_on

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\nNum processes: {self.num_processes}\nProcess "
            f"index: {self.process_index}\nLocal process index: {self.local_process_index}\nDevice: {self.device}\n"
        )


class AcceleratorState(PartialState):
    """``PartialState`` and the precision."""

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **options_: Any) -> None:  # noqa: FBT001, FBT002
        """``mixed_precision`` where no accelerator has chosen; one that contradicts it is a ``ConfigError``."""
        super().__init__(cpu, **options_)
        self._wanted = mixed_precision
        if mixed_precision not in {None, self.mixed_precision}:
            raise ConfigError(
                f"AcceleratorState(mixed_precision={mixed_precision!r}) contradicts the Accelerator, which has "
                f"mixed_precision={self.mixed_precision!r}; leave it out, or make an Accelerator with the other"
            )

    @property
    def mixed_precision(self) -> str:
        """The precision in force."""
        shown = self._accelerator
        return shown.mixed_precision if shown else options.mixed_precision(self._wanted, config.world())

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The one in force, with what the launch added to it; None under another strategy."""
        return self._plugin(DeepSpeedPlugin)

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """The one in force; None under another strategy."""
        return self._plugin(FullyShardedDataParallelPlugin)

    def _plugin(self, kind: type[_T]) -> _T | None:
        shown = self._accelerator
        found = getattr(shown._strategy, "plugin", None) if shown else None  # noqa: SLF001
        return found if isinstance(found, kind) else None

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


class GradientState(_View):
    """Where training is in its accumulation group and in its data."""

    def __init__(self, *_: Any, _given: Accelerator | None = None) -> None:
        """Nothing is set here."""
        self._given = _given

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its group."""
        return self._accelerator is None or self._accelerator.sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches in a group."""
        return self._accelerator.gradient_accumulation_steps if self._accelerator else 1

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a group ends with the data."""
        return self._accelerator is None or self._accelerator._accumulation.sync_at_end  # noqa: SLF001

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are exchanged in every micro-batch."""
        return self._accelerator is not None and self._accelerator._accumulation.sync_each_batch  # noqa: SLF001

    @property
    def adjust_scheduler(self) -> bool:
        """True: schedulers step when their optimizers do."""
        return True

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """What ``GradientAccumulationPlugin`` was given, in effect."""
        return {"num_steps": self.num_steps, "sync_with_dataloader": self.sync_with_dataloader}

    @property
    def _iteration(self) -> Iteration | None:
        return self._accelerator._progress.latest if self._accelerator else None  # noqa: SLF001

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self._iteration is not None

    @property
    def dataloader_references(self) -> list[PreparedLoader | None]:
        """The prepared loaders being read, the one around the others first; as Accelerate has it, None before them."""
        shown = self._accelerator
        passes = {id(one.loader): one.stamp for one in shown._progress.open} if shown else {}  # noqa: SLF001
        loaders = [one for one in shown._loaders if id(one._share) in passes] if shown else []  # noqa: SLF001
        return [None, *sorted(loaders, key=lambda one: passes[id(one._share)])]  # noqa: SLF001

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The prepared loader being read, None where none is."""
        return self.dataloader_references[-1]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the latest batch is the last of its loader."""
        return self._iteration is not None and self._iteration.is_last

    @property
    def remainder(self) -> int:
        """Real samples in the loader's last batches, over all processes; -1 before the end."""
        now = self._iteration
        return sum(now.counts) if now is not None and now.is_last else -1
