"""What the kernel asks of the fork server, and how it answers."""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_launcher.core.shared_memory import FileDescriptor

# Written to a worker's status pipe: its pid when forked, its exit code when reaped. The pipe's end without a code: the
# server died before it could tell.
STATUS = struct.Struct("!q")


@dataclasses.dataclass(frozen=True)
class Fork:
    """Fork one worker. It gets the three first descriptors; the server keeps ``status``."""

    channel: FileDescriptor
    stdout: FileDescriptor
    stderr: FileDescriptor
    status: FileDescriptor
    fresh: bool = False  # start a new interpreter in it: the start method "spawn"


@dataclasses.dataclass(frozen=True)
class Loading:
    """The server begins to load ``module``."""

    module: str


@dataclasses.dataclass(frozen=True)
class Warm:
    """The server has loaded everything; ``problems`` names the modules that could not be, with the reason."""

    problems: tuple[str, ...]
