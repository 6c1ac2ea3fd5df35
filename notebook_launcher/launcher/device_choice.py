"""Which of a kind's devices a launch takes, by number or UUID, and the variables that this takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.core.events import DeviceRow

_FRESH = ("mps",)  # kinds whose processes begin with a new interpreter
_PEERS = "NCCL_P2P_DISABLE"


def numbers(ids: Sequence[int | str], row: DeviceRow) -> list[int]:
    """``device_ids`` as numbers among the devices that the notebook sees; raises ``ConfigError`` for another UUID.

    A UUID may be cut short, as NVIDIA's own tools allow, as long as one device has it.
    """
    found = [_number(one, row) for one in ids]
    twice = next((number for number in found if found.count(number) > 1), None)
    if twice is not None:
        named = [one for one, number in zip(ids, found, strict=True) if number == twice]
        raise ConfigError(
            f"device_ids={list(ids)} names device {twice} twice ({' and '.join(map(repr, named))}): a device takes one "
            "process."
        )
    return found


def _number(wanted: int | str, row: DeviceRow) -> int:
    if isinstance(wanted, int):
        return wanted
    if not row.uuids:
        raise ConfigError(f"device_ids names {wanted!r}, and torch tells no UUIDs of {row.kind} devices: use numbers.")
    found = [number for number, uuid in enumerate(row.uuids) if _bare(uuid).startswith(_bare(wanted))]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{number}: GPU-{_bare(uuid)}" for number, uuid in enumerate(row.uuids))
    how = "no device that the notebook sees has" if not found else f"{len(found)} devices have"
    raise ConfigError(f"device_ids names {wanted!r}, which {how}. It sees {known}.")


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def visibility(variables: Sequence[str], chosen: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """The settings that leave a process the ``chosen`` devices, in that order: of the last variable, and those set.

    Numbers count what the notebook sees, which a variable may have narrowed already.
    """
    found = {}
    for variable in variables:
        names = _names(variable, environment)
        if names or variable == variables[-1]:
            found[variable] = ",".join(names[one] if one < len(names) else str(one) for one in chosen)
    return found


def narrowed(variables: Sequence[str], environment: Mapping[str, str]) -> str:
    """What hides devices, in brackets, for a message; "" where nothing does."""
    told = [f"{one}={environment[one]}" for one in variables if _names(one, environment)]
    return f" ({', '.join(told)})" if told else ""


def _names(variable: str, environment: Mapping[str, str]) -> list[str]:
    return [name.strip() for name in environment.get(variable, "").split(",") if name.strip()]


def started_for(config: LaunchConfig, device: str) -> LaunchConfig:
    """``config`` with the way to make processes that ``device`` needs, where nobody has named one.

    Apple's frameworks don't work in a process that was forked from one which has loaded them.
    """
    if device in _FRESH and "start_method" not in config.sources:
        return config.model_copy(update={"start_method": "spawn"})
    return config


def peer_settings(
    row: DeviceRow | None, chosen: Sequence[int], environment: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables for devices that can't read each other's memory, and a line that says so.

    Nothing where they can, or where somebody has said otherwise in ``environment``.
    """
    apart = [pair for pair in (row.no_peers if row is not None else ()) if set(pair) <= set(chosen)]
    if not apart or _PEERS in environment:
        return {}, ()
    one, other = apart[0]
    more = f" (nor can {len(apart) - 1} other pair{'s' * (len(apart) > 2)})" if len(apart) > 1 else ""  # noqa: PLR2004
    why = f"devices {one} and {other} can't read each other's memory{more}"
    return {_PEERS: "1"}, (f"{_PEERS}=1: {why}, so NCCL exchanges through the host's",)
