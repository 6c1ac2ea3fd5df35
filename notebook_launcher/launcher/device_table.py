"""What this machine has, as rows, text and JSON: one pure function of what a worker saw."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.hosting import Host, host
from notebook_launcher.launcher.plan import DEFAULT_ON_CPU, preferred_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from notebook_launcher.core.events import DeviceRow

_GIB = 1 << 30
_HEADER = ("device", "name", "memory", "precisions")


@dataclasses.dataclass(frozen=True)
class DeviceTable:
    """The devices of a machine, and what ``device="auto"`` takes of them."""

    rows: tuple[DeviceRow, ...]
    auto: str  # the kind that is taken
    num_processes: int  # that a launch has there by default
    host: Host | None

    def lines(self) -> list[str]:
        """The table as text: the devices that are here, what they can't do, what isn't here and why, what is chosen."""
        here = [cells for row in self.rows for cells in _cells(row)]
        widths = [max(map(len, column)) for column in zip(_HEADER, *here, strict=True)]
        table = [_padded(cells, widths) for cells in (_HEADER, *here)]
        return [*table, "", *self._refused(), *self._absent(), "", *self._chosen()]

    def facts(self) -> dict[str, Any]:
        """The same for programs, as what JSON holds."""
        return {
            "host": self.host.name if self.host is not None else None,
            "auto": {"device": self.auto, "num_processes": self.num_processes},
            "devices": [_facts(row) for row in self.rows],
        }

    def _refused(self) -> Iterator[str]:
        for row in self.rows:
            yield from (f"{row.kind}: no {name}: {why}" for name, why in row.precisions.items() if why)
            if row.no_peers:
                pairs = ", ".join(f"{one} and {other}" for one, other in row.no_peers)
                yield f"{row.kind}: can't read each other's memory: {pairs}"

    def _absent(self) -> Iterator[str]:
        yield from (f"{row.kind}: not here: {row.reason}" for row in self.rows if not row.num_devices)

    def _chosen(self) -> Iterator[str]:
        processes = f"{self.num_processes} process" + "es" * (self.num_processes != 1)
        each = ", one a device" if self.auto != "cpu" else ""
        yield f"auto takes {self.auto}: {processes}{each}"
        if self.host is not None:
            advice = f"; {self.host.advice} gives a machine with a GPU or TPU" if self.auto == "cpu" else ""
            yield f"this is {self.host.name}{advice}"


def device_table(rows: Sequence[DeviceRow], environment: Mapping[str, str]) -> DeviceTable:
    """The table of ``rows``; ``environment`` is the notebook's, which says who hosts it."""
    kinds = {row.kind: row for row in rows}
    auto = preferred_kind(kinds)
    num_processes = DEFAULT_ON_CPU if auto == "cpu" else kinds[auto].num_devices
    return DeviceTable(tuple(rows), auto, num_processes, host(environment))


def _cells(row: DeviceRow) -> Iterator[tuple[str, ...]]:
    can = ", ".join(_precision(name) for name, why in row.precisions.items() if not why)
    for number, name in enumerate(row.names if row.num_devices else ()):
        label = f"{row.kind}:{number}" if len(row.names) > 1 else row.kind
        memory = f"{row.memory_bytes[number] / _GIB:.1f} GiB" if number < len(row.memory_bytes) else ""
        yield label, name, memory, can


def _precision(name: str) -> str:
    return "fp32" if name == "no" else name


def _padded(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True)).rstrip()


def _facts(row: DeviceRow) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "num_devices": row.num_devices,
        "names": list(row.names),
        "memory_bytes": list(row.memory_bytes),
        "uuids": list(row.uuids),
        "precisions": [name for name, why in row.precisions.items() if not why],
        "refused_precisions": {name: why for name, why in row.precisions.items() if why},
        "pairs_without_peer_access": [list(pair) for pair in row.no_peers],
        "is_stand_in": row.is_stand_in,
        "reason": row.reason or None,
    }
