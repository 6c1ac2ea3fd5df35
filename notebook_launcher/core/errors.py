"""The errors a user can meet.

::

    NotebookLauncherError
    ├── ConfigError (ValueError)        an option, or a combination of options, that can't be
    ├── PayloadError (TypeError)        a function, argument or captured variable that can't travel
    ├── ResultError (TypeError)         a rank's return value that could not travel back
    ├── ChannelClosedError (ConnectionError)  the process at the other end is gone
    ├── EngineError (RuntimeError)      worker processes could not be started
    ├── CheckpointError (RuntimeError)  a checkpoint that could not be written, or can't be loaded
    ├── PeerError (RuntimeError)        another rank failed where this one depends on it
    ├── DeadlockError (RuntimeError)    ranks that wait for each other in different collectives
    ├── WorkerError (RuntimeError)      what happened on a rank, as text
    └── RunTimeoutError (TimeoutError)  a run went on for longer than ``timeout_s``
    RunInterrupted (KeyboardInterrupt)  the notebook's Stop, drawn as one line

What a launch raises is the worker's own exception, with a ``WorkerError`` as its ``__cause__``.
"""

from __future__ import annotations

import os
import pathlib
import traceback

from notebook_launcher.core.cell_labels import in_cells

_PACKAGE = str(pathlib.Path(__file__).parent.parent)
_NOT_THE_USERS = (f"{os.sep}IPython{os.sep}", f"{os.sep}ipykernel{os.sep}")


class NotebookLauncherError(Exception):
    """Base of the package's own errors."""

    def _render_traceback_(self) -> list[str]:
        """IPython asks for this: the user's own lines, not the launcher's, and the message."""
        frames = [frame for frame in traceback.extract_tb(self.__traceback__) if _is_the_users(frame.filename)]
        told = in_cells("".join(traceback.format_list(frames))).splitlines()
        return [*told, f"{type(self).__name__}: {self}"]


def _is_the_users(filename: str) -> bool:
    return not filename.startswith(_PACKAGE) and not any(part in filename for part in _NOT_THE_USERS)


class ConfigError(NotebookLauncherError, ValueError):
    """An option, or a combination of options, that can't be: nothing was started."""


class PayloadError(NotebookLauncherError, TypeError):
    """A function, argument or captured variable that can't travel to a worker: nothing was started."""


class ResultError(NotebookLauncherError, TypeError):
    """A rank's return value that could not travel back; stands in its place in ``Run.results``."""


class ChannelClosedError(NotebookLauncherError, ConnectionError):
    """The process at the other end of a channel is gone."""


class EngineError(NotebookLauncherError, RuntimeError):
    """Worker processes could not be started, with what the system said."""


class CheckpointError(NotebookLauncherError, RuntimeError):
    """A checkpoint that could not be written, or can't be loaded: the same error on every rank."""


class PeerError(NotebookLauncherError, RuntimeError):
    """Another rank failed where this one depends on it: never the cause of a run's failure."""


class DeadlockError(NotebookLauncherError, RuntimeError):
    """Ranks wait for each other in different collectives; the message says in which, and on which lines."""


class RunTimeoutError(NotebookLauncherError, TimeoutError):
    """A run went on for longer than its ``timeout_s``; the message says where each rank was."""


class WorkerError(NotebookLauncherError, RuntimeError):
    """What happened on one rank, told as text.

    Attributes: ``rank``, ``host``, ``kind`` (the exception's type name, a signal's name, or "exit"),
    ``traceback_text`` (the worker's own frames, "" when the process died without a word) and ``others`` (one line for
    each other rank's fate).
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        host: str = "",
        kind: str = "",
        traceback_text: str = "",
        others: tuple[str, ...] = (),
    ) -> None:
        """Keep the facts; ``message`` is the headline."""
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.host = host
        self.kind = kind
        self.traceback_text = traceback_text
        self.others = others

    def __str__(self) -> str:
        """The headline, the rank's traceback, and what the other ranks did."""
        parts = [self.message]
        if self.traceback_text:
            parts.append(self.traceback_text.rstrip())
        parts.extend(self.others)
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the keyword-only facts, which the default would lose."""
        return (
            _worker_error,
            (self.message, self.rank, self.host, self.kind, self.traceback_text, self.others),
            self.__dict__,
        )


def _worker_error(
    message: str, rank: int, host: str, kind: str, traceback_text: str, others: tuple[str, ...]
) -> WorkerError:
    return WorkerError(message, rank=rank, host=host, kind=kind, traceback_text=traceback_text, others=others)


class RunInterrupted(KeyboardInterrupt):
    """The notebook's Stop ended a run; a cell shows it as one short line."""

    def _render_traceback_(self) -> list[str]:
        """IPython asks for this: the line, and no frames."""
        return [str(self)]
