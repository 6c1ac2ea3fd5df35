"""What the environment says: the only module that reads ``os.environ``. And the way to ``LaunchConfig``.

``LaunchConfig`` and ``field_rows`` live in ``launch_config`` and are loaded when they are first asked for, since
loading pydantic takes longer than the extension may.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.environment import read_world

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_launcher.core.launch_config import LaunchConfig, field_rows
    from notebook_launcher.core.world import World

__all__ = ["LaunchConfig", "field_rows", "set_default", "snapshot", "world"]

_read: tuple[dict[Any, Any], dict[str, str]] = {}, {}


def snapshot() -> dict[str, str]:
    """The environment as it is now, for a launch to carry to its workers."""
    global _read  # noqa: PLW0603 - what was read last is kept for the process
    stored = dict(
        getattr(os.environ, "_data", {})
    )  # the bytes behind it: to decode them all takes twenty times as long
    if not stored or stored != _read[0]:
        _read = stored, dict(os.environ)
    return dict(_read[1])


def world(environment: Mapping[str, str] | None = None) -> World:
    """Who this process is in a run: launched by this project, by ``torchrun`` or in a Slurm step; else alone.

    ``environment`` stands in for ``os.environ``. Raises ``ConfigError`` where the variables contradict one another.
    """
    return read_world(os.environ if environment is None else environment)


def set_default(variable: str, text: str) -> None:
    """Give a library a variable that it insists on, unless somebody has set it."""
    os.environ.setdefault(variable, text)


def __getattr__(name: str) -> Any:
    """``LaunchConfig`` and ``field_rows``, from where they live."""
    if name in {"LaunchConfig", "field_rows"}:
        return getattr(importlib.import_module("notebook_launcher.core.launch_config"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
