"""Run a notebook's function on every GPU of the machine, or in several CPU processes, and get everything back."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.core.errors import (
        ConfigError,
        PayloadError,
        ResultError,
        RunInterrupted,
        RunTimeoutError,
        WorkerError,
    )
    from notebook_launcher.launcher.accelerate_style import notebook_launcher
    from notebook_launcher.launcher.launch import launch
    from notebook_launcher.launcher.run import Run
    from notebook_launcher.runtime.accelerator import Accelerator

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "ConfigError",
    "LaunchConfig",
    "PayloadError",
    "ResultError",
    "Run",
    "RunInterrupted",
    "RunTimeoutError",
    "WorkerError",
    "launch",
    "notebook_launcher",
]

# Each name's module is loaded when the name is first used: the import itself costs a kernel nothing, and no torch.
_HOMES = {
    "Accelerator": "runtime.accelerator",
    "ConfigError": "core.errors",
    "LaunchConfig": "core.config",
    "PayloadError": "core.errors",
    "ResultError": "core.errors",
    "Run": "launcher.run",
    "RunInterrupted": "core.errors",
    "RunTimeoutError": "core.errors",
    "WorkerError": "core.errors",
    "launch": "launcher.launch",
    "notebook_launcher": "launcher.accelerate_style",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'notebook_launcher' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"notebook_launcher.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext notebook_launcher``: register the magics, and start the fork server in the background."""
    from notebook_launcher import kernel_ext

    kernel_ext.load_ipython_extension(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """``%unload_ext notebook_launcher``: take the magics away."""
    from notebook_launcher import kernel_ext

    kernel_ext.unload_ipython_extension(ipython)
