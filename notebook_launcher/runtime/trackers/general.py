"""``GeneralTracker``: what a tracker is, and what stands in its place where there is none."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from notebook_launcher.core import notices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class GeneralTracker:
    """An experiment tracker, for ``Accelerator(log_with=...)``.

    A subclass has the class attributes ``name`` and ``requires_logging_directory`` and a property ``tracker``, the
    library's own object; it overrides what it can do. With ``main_process_only`` it is used on rank 0 alone.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool]
    main_process_only: ClassVar[bool] = True

    def __init__(self) -> None:
        """Raises ``NotImplementedError`` where the subclass lacks a part, and names it."""
        check(self)

    def start(self) -> None:
        """Open the run: ``init_trackers`` calls it before all else."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Record the run's hyperparameters."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values of one step."""

    def finish(self) -> None:
        """Close the run."""

    def fail(self) -> None:
        """Close the run of a function that has raised."""
        self.finish()


def check(tracker: GeneralTracker) -> None:
    """Raise ``NotImplementedError`` where a subclass has not all that one must have."""
    present = dir(tracker)
    missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in present]
    if missing:
        raise NotImplementedError(
            f"the tracker {type(tracker).__name__} lacks {', '.join(missing)}: a subclass of GeneralTracker has the "
            "class attributes name (str) and requires_logging_directory (bool), and a property tracker"
        )


class LibraryTracker(GeneralTracker):
    """A tracker that this package knows; ``start`` sets ``run``, the library's object."""

    package: ClassVar[str]
    run: Any = None

    def __init__(self, project_name: str, logging_dir: Any = None, **init_kwargs: Any) -> None:
        """``init_kwargs`` are those of what opens a run in the library."""
        super().__init__()
        self._project_name, self._logging_dir, self._init_kwargs = project_name, logging_dir, init_kwargs

    @property
    def tracker(self) -> Any:
        """The library's object for the run."""
        return self.run

    @classmethod
    def library(cls) -> Any:
        """The module of ``package``."""
        return importlib.import_module(cls.package)


class Blank(GeneralTracker):
    """A tracker, and a library's object, on a rank that has none: whatever is done with it does nothing."""

    def __init__(self) -> None:
        """It has no parts."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copying and displaying ask for these
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> Blank:
        """It stands for methods, too."""
        return self

    def __getitem__(self, _key: Any) -> Blank:
        return self

    def __setitem__(self, _key: Any, _value: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with tensors and arrays as numbers, or lists of them."""
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}


def refuse(tracker: GeneralTracker, name: str, value: Any) -> None:
    """Warn that ``tracker`` does not record ``value``: a log must not end a training."""
    notices.warn(
        f"{tracker.name} does not record {name!r}, a {type(value).__name__}; give it to the library itself: "
        f"accelerator.get_tracker({tracker.name!r}, unwrap=True)"
    )
