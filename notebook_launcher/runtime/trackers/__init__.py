"""Trackers: where ``Accelerator.log`` writes besides the notebook. Adding one is one file and one line here."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import endings, notices
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.registry import Registry, unknown_name
from notebook_launcher.runtime.trackers.general import Blank, GeneralTracker, LibraryTracker, check

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

__all__ = ["TRACKERS", "GeneralTracker", "Trackers"]

TRACKERS = Registry(
    "tracker",
    {
        "tensorboard": "notebook_launcher.runtime.trackers.tensorboard:TensorBoard",
        "wandb": "notebook_launcher.runtime.trackers.wandb:WandB",
        "mlflow": "notebook_launcher.runtime.trackers.mlflow:MLflow",
    },
)


class Trackers:
    """An accelerator's trackers, from ``log_with`` to the end of their runs."""

    def __init__(self, log_with: Any, logging_dir: str | PathLike[str] | None, *, is_main: bool) -> None:
        """``log_with``: names, "all", or objects of subclasses of ``GeneralTracker``; one, or a list.

        Raises ``ConfigError`` for a name that isn't known, a package or a folder that is missing, on every rank.
        """
        self._logging_dir = logging_dir
        self._is_main = is_main
        self._chosen = _choose(log_with, has_folder=logging_dir is not None)
        self.active: list[GeneralTracker] = []  # those with an open run on this rank

    def start(self, project: str, config: Mapping[str, Any] | None, init_kwargs: Mapping[str, Any]) -> None:
        """Open a run of each that this rank has; runs that are open are closed first."""
        self.end()
        endings.register(self.end)
        for chosen in self._chosen:
            if chosen.main_process_only and not self._is_main:
                continue
            own = init_kwargs.get(chosen.name, {})
            tracker: GeneralTracker = chosen(project, self._logging_dir, **own) if isinstance(chosen, type) else chosen
            tracker.start()
            self.active.append(tracker)
            if config is not None:
                tracker.store_init_configuration(config)

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Any]) -> None:
        """Record ``values``; warns where nobody has opened a run for them."""
        if self._chosen and not self.active and self._is_main:
            notices.warn(f"log() reached no tracker: {self._no_run()}")
        for tracker in self.active:
            tracker.log(values, step=step, **log_kwargs.get(tracker.name, {}))

    def get(self, name: str, *, unwrap: bool) -> Any:
        """The tracker ``name``, or its library's object; a blank where this rank has none."""
        for tracker in self.active:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]
        names = [chosen.name for chosen in self._chosen]
        if names and name not in names:
            raise unknown_name("tracker", name, names)
        if names and self._is_main:
            raise ConfigError(f"get_tracker({name!r}) finds nothing: {self._no_run()}")
        return Blank()

    def end(self, failed: bool = False) -> None:  # noqa: FBT001, FBT002 - core.endings calls it
        """Close all runs."""
        endings.unregister(self.end)
        with contextlib.ExitStack() as stack:  # one that can't be closed keeps no other open
            while self.active:
                tracker = self.active.pop()
                stack.callback(tracker.fail if failed else tracker.finish)

    def _no_run(self) -> str:
        names = ", ".join(chosen.name for chosen in self._chosen)
        return f"no run of {names} is open. init_trackers(project_name) opens one, and end_training() closes it."


def _choose(log_with: Any, *, has_folder: bool) -> list[GeneralTracker | type[LibraryTracker]]:
    chosen: dict[str, GeneralTracker | type[LibraryTracker]] = {}
    for one in log_with if isinstance(log_with, list | tuple) else [log_with]:
        if isinstance(one, GeneralTracker):
            check(one)
            chosen[one.name] = one
        elif one == "all":
            for kind in map(TRACKERS.load, TRACKERS.names):
                if _is_installed(kind) and (has_folder or not kind.requires_logging_directory):
                    chosen.setdefault(kind.name, kind)
        elif one is not None:
            kind = _load(getattr(one, "value", one))
            if kind.requires_logging_directory and not has_folder:
                raise ConfigError(
                    f"log_with={kind.name!r} writes to a folder, and none was given; give one: "
                    "Accelerator(project_dir='runs')"
                )
            chosen[kind.name] = kind
    return list(chosen.values())


def _load(name: Any) -> type[LibraryTracker]:
    if name not in TRACKERS.names:
        raise ConfigError(
            f"{unknown_name('log_with', name, [*TRACKERS.names, 'all'])} Any other tracker can be wrapped in a "
            "subclass of GeneralTracker, whose object log_with takes."
        )
    kind: type[LibraryTracker] = TRACKERS.load(name)
    if not _is_installed(kind):
        raise ConfigError(
            f"log_with={name!r} needs the package {kind.package!r}, which is not installed here: pip install "
            f"{kind.package}"
        )
    return kind


def _is_installed(kind: type[LibraryTracker]) -> bool:
    return importlib.util.find_spec(kind.package) is not None
