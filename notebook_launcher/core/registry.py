"""Named choices (engines, strategies, backends, sinks): one line a choice, its module imported on first use."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not known: it guesses the one that was meant, and lists those that are known."""
    names = sorted(known)
    near = nearest(name, names)
    guess = f" Did you mean {near!r}?" if near else ""
    return ConfigError(f"{kind} {name!r} is not known.{guess} Known: {', '.join(names)}.")


def nearest(name: object, known: Iterable[str]) -> str:
    """The known name that ``name`` is most like, "" where it is like none."""
    by_lower = {one.lower(): one for one in sorted(known)}
    return by_lower.get(next(iter(difflib.get_close_matches(str(name).lower(), by_lower, n=1)), ""), "")


class Registry:
    """A table of names, each standing for a ``"package.module:attribute"`` that is imported when it is asked for."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        """``kind`` names what the table holds, for messages: "engine", "strategy"."""
        self.kind = kind
        self._entries = dict(entries)

    @property
    def names(self) -> tuple[str, ...]:
        """The known names, in the order in which they were registered."""
        return tuple(self._entries)

    def load(self, name: str) -> Any:
        """Import and return what ``name`` stands for; an unknown name raises ``ConfigError``."""
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        module, _, attribute = self._entries[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
