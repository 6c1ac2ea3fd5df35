"""What a kernel keeps of its runs, whoever still holds them: a line each, for a table."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from typing import TYPE_CHECKING

from notebook_launcher.launcher.plan import chosen_options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.launcher.record import Record

_MAX_KEPT = 200
_MAX_VALUES = 8  # of a run's metrics: a table has no room for more


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """One run, as a row of a table."""

    number: int  # from 1, in the order of the launches
    name: str  # the function's
    status: str
    headline: str
    options: tuple[str, ...]  # those that were chosen: "seed=3"
    began_s: float  # Unix time
    elapsed_s: float
    summary: str  # "" while it goes on
    last_values: dict[str, float]  # of its metrics


_numbers = itertools.count(1)
_kept: collections.deque[RunFacts] = collections.deque(maxlen=_MAX_KEPT)


def next_number() -> int:
    """The number of a run that begins."""
    return next(_numbers)


def facts_of(number: int, name: str, config: LaunchConfig, record: Record) -> RunFacts:
    """What is known of a run now."""
    values = {
        metric: float(value)
        for metric, value in list(record.last_values.items())
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return RunFacts(
        number=number,
        name=name,
        status=record.status,
        headline=record.headline,
        options=tuple(chosen_options(config).values()),
        began_s=time.time() - (time.monotonic() - record.began_s),
        elapsed_s=record.elapsed_s,
        summary=record.summary,
        last_values=dict(itertools.islice(values.items(), _MAX_VALUES)),
    )


def keep(facts: RunFacts) -> None:
    """Keep what a run has come to."""
    _kept.append(facts)


def joined(going_on: Iterable[RunFacts]) -> list[RunFacts]:
    """All runs by number: those that are kept, and those that go on."""
    by_number = {facts.number: facts for facts in (*going_on, *list(_kept))}
    return [by_number[number] for number in sorted(by_number)]
