"""What every rank does, and fails at, together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from notebook_launcher.core.errors import CheckpointError, ConfigError
from notebook_launcher.runtime import gather

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


def together(call: str, act: Callable[[], _T]) -> list[_T]:
    """What ``act`` returns, by rank; ``CheckpointError`` on every rank where it raises on one."""
    error: Exception | None = None
    result: Any = None
    text: str | None = None
    try:
        result = act()
    except Exception as caught:  # noqa: BLE001 - it is told to all ranks, and raised on each
        error = caught
        text = str(error) if isinstance(error, CheckpointError | ConfigError) else repr(error)
    told = gather.all_objects((result, text))
    failed = {rank: text for rank, (_, text) in enumerate(told) if text is not None}
    if failed:
        first = min(failed)
        where = f" on rank {first}" if len(told) > 1 else ""
        raise CheckpointError(f"{call} failed{where}: {failed[first]}") from error
    return [result for result, _ in told]
