"""Warnings as text, for where nobody would see them printed: the callbacks of widgets."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def told_warnings() -> Iterator[list[str]]:
    """A list that holds, after the block, the text of each warning that came in it."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield told
        finally:
            told += [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
