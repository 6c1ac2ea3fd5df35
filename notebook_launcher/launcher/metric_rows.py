"""``MetricRows``: what a run's ranks have logged, in columns: a million rows take some 40 MB, not half a gigabyte."""

from __future__ import annotations

import array
import bisect
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from notebook_launcher.core.events import Metrics

_MAX_TABLES = 1000  # whoever invents a name for each value is kept row by row
_TYPECODES: dict[type, str] = {float: "d", int: "q"}


class _Column:
    """Values: numbers of one type side by side, anything else as it is."""

    def __init__(self) -> None:
        self.values: Any = []  # a list, or an array of numbers
        self._kind: type | None = None  # of all values so far, where they are in an array

    def extend(self, values: Sequence[Any]) -> None:
        kinds = set(map(type, values))
        kind = kinds.pop() if len(kinds) == 1 else None
        if not self.values and kind in _TYPECODES:
            self._kind, self.values = kind, array.array(_TYPECODES[kind])
        if self._kind is not None and kind is self._kind:
            try:
                self.values += array.array(_TYPECODES[kind], values)
            except OverflowError:  # an integer of more than 64 bits
                pass
            else:
                return
        if self._kind is not None:
            self._kind, self.values = None, list(self.values)  # whoever reads the array now has all that it asked for
        self.values += values


class _Table:
    """The rows of one rank that have the same names."""

    def __init__(self, rank: int, names: Iterable[str]) -> None:
        self.rank = rank
        self.num_rows = 0
        self.steps, self.times_s = _Column(), _Column()
        self.columns = {name: _Column() for name in names}

    def add(self, metrics: Metrics) -> None:
        self.steps.extend(metrics.steps)
        self.times_s.extend(metrics.times_s)
        self.add_values(metrics)
        self.num_rows += len(metrics.steps)

    def add_values(self, metrics: Metrics) -> None:
        for name, column in self.columns.items():
            column.extend(metrics.columns[name])

    def stretch(self, begin: int, end: int) -> Stretch:
        columns = {name: column.values[begin:end] for name, column in self.columns.items()}
        return Stretch(self.rank, self.steps.values[begin:end], columns, lambda: map(self.row, range(begin, end)))

    def row(self, place: int) -> dict[str, Any]:
        own = {"rank": self.rank, "step": self.steps.values[place], "time_s": self.times_s.values[place]}
        return own | self.values(place)

    def values(self, place: int) -> dict[str, Any]:
        return {name: column.values[place] for name, column in self.columns.items()}


class _Sundries(_Table):
    """Rows of one rank, of whatever names."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, ())
        self._values: list[dict[str, Any]] = []

    def add_values(self, metrics: Metrics) -> None:
        for place in range(len(metrics.steps)):
            self._values.append({name: values[place] for name, values in metrics.columns.items()})

    def values(self, place: int) -> dict[str, Any]:
        return self._values[place]


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Rows of one rank, one after another, that have the same names; each sequence has a value for each row."""

    rank: int
    steps: Sequence[Any]
    columns: dict[str, Sequence[Any]]  # none where the rows are kept one by one
    rows: Callable[[], Iterable[dict[str, Any]]]


class MetricRows(Sequence[dict[str, Any]]):
    """Rows: rank, step, time_s and the values, a dictionary each, made when it is asked for. One thread adds to them.

    Values named as one of the first three take its place.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._tables: dict[tuple[int, tuple[str, ...] | None], _Table] = {}
        # Where rows begin that lie side by side in one table: the first one's number, its table, its place in there.
        self._first = array.array("q")
        self._table: list[_Table] = []
        self._place = array.array("q")
        self.last_steps: dict[int, float] = {}  # by rank, of those that give steps

    def add(self, rank: int, metrics: Metrics) -> None:
        """Add rows."""
        table = self._table_of(rank, tuple(metrics.columns))
        if not self._table or self._table[-1] is not table:
            self._table.append(table)
            self._place.append(table.num_rows)
            self._first.append(self._num_rows)
        table.add(metrics)
        step = metrics.columns.get("step", metrics.steps)[-1]
        if isinstance(step, int | float):
            self.last_steps[rank] = step
        self._num_rows += len(metrics.steps)  # last: whoever reads meanwhile finds all of the rows that it counts

    def stretches(self, start: int, stop: int) -> list[Stretch]:
        """The rows from number ``start`` to before ``stop``: each rank's in order, however they lie between others'."""
        found: list[list[Any]] = []  # table, first place, the one after the last
        last: dict[int, list[Any]] = {}  # by rank
        for table, begin, end in self._pieces(start, stop):
            if table.rank in last and last[table.rank][0] is table:
                last[table.rank][2] = end
            else:
                last[table.rank] = [table, begin, end]
                found.append(last[table.rank])
        return [table.stretch(begin, end) for table, begin, end in found]

    def __len__(self) -> int:
        """The number of rows."""
        return self._num_rows

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """A row, or the list of a slice's."""
        chosen = range(self._num_rows)[index]
        if isinstance(chosen, range):
            return [self[number] for number in chosen]
        at = bisect.bisect_right(self._first, chosen) - 1
        return self._table[at].row(self._place[at] + chosen - self._first[at])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows, in the order in which they came."""
        for table, begin, end in self._pieces(0, self._num_rows):
            yield from map(table.row, range(begin, end))

    def _table_of(self, rank: int, names: tuple[str, ...]) -> _Table:
        table = self._tables.get((rank, names))
        if table is None:
            if len(self._tables) < _MAX_TABLES:
                table = self._tables[rank, names] = _Table(rank, names)
            else:
                table = self._tables.setdefault((rank, None), _Sundries(rank))
        return table

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[_Table, int, int]]:
        """Table, first place and the one after the last there, of rows that follow each other."""
        at = max(0, bisect.bisect_right(self._first, start) - 1)
        while start < stop:
            after = min(stop, self._first[at + 1]) if at + 1 < len(self._first) else stop
            begin = self._place[at] + start - self._first[at]
            yield self._table[at], begin, begin + after - start
            start, at = after, at + 1
