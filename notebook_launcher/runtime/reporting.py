"""What ``Accelerator`` has to report with: trackers, and what streams to the notebook."""

# ruff: noqa: FBT001, FBT002 - positional booleans where Accelerate has them

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_launcher.core import events, notices
from notebook_launcher.runtime import checks, trees
from notebook_launcher.runtime.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from notebook_launcher.runtime.checkpoint import Checkpoints
    from notebook_launcher.runtime.loops import Loops
    from notebook_launcher.runtime.trackers import GeneralTracker, Trackers

_A = TypeVar("_A")


class Reporting(Identity):
    """Trackers, metrics and progress. Whoever inherits sets ``_trackers``, ``_loops`` and ``_checkpoints``."""

    _trackers: Trackers
    _loops: Loops
    _checkpoints: Checkpoints

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers with an open run on this rank; those of most kinds are on rank 0 alone."""
        return self._trackers.active

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open a run of ``project_name`` with each tracker of ``log_with``, on rank 0.

        ``config`` has the hyperparameters to record; ``init_kwargs``, by tracker, options of what opens its run.
        """
        self._trackers.start(project_name, config, init_kwargs or {})

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Record ``values`` of ``step``, from rank 0, with the trackers; in a launched run they stream to the notebook.

        Tensors and arrays become numbers, or lists of them. ``log_kwargs``: by tracker, options of its ``log``.
        Objects go to trackers only.
        """
        checks.instance("log", values, Mapping, "names and values, such as {'loss': 0.5}")
        step = step if step is None else checks.whole("step", step, of="a step (None: without)", least=-1)
        self._trackers.log(values, step, log_kwargs or {})
        if self.is_main_process:
            shown = {name: trees.map_leaves(_plain, value) for name, value in values.items()}
            for name in [name for name, value in shown.items() if not all(map(_is_data, trees.leaves(value)))]:
                shown.pop(name)  # an object of the rank's is of no use in the kernel, or would take its GPU
                if not self.trackers:
                    given = type(values[name]).__name__
                    notices.warn(f"log does not show {name!r}, a {given}; give numbers, texts, or containers of them")
            events.emit(events.Metric(shown, step, time.time()))

    def progress(self, iterable: Iterable[_A], total: int | None = None, description: str = "") -> Iterator[_A]:
        """What ``iterable`` gives, a loader's batches for one; the notebook's monitor shows how far this process is.

        ``total`` is the number of steps where ``iterable`` has no length. Such loops may stand inside one another.
        """
        return self._loops.track(iterable, total, description)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker ``name``, or with ``unwrap`` its library's own object (a ``SummaryWriter``, a ``wandb.Run``).

        On a rank without trackers an object that swallows whatever is called on it. Raises ``ConfigError`` for a name
        that ``log_with`` does not have, or where no run is open.
        """
        return self._trackers.get(name, unwrap=unwrap)

    def end_training(self) -> None:
        """Close the trackers' runs, and wait for a save in the background. A launch does both at its end too.

        The process group stays: other accelerators of this process use it.
        """
        self._trackers.end()
        self._checkpoints.wait()


def _plain(leaf: Any) -> Any:
    return leaf.tolist() if hasattr(leaf, "tolist") else leaf


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, str | int | float | bytes | None)
