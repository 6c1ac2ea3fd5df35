"""A launch's options as controls, made from ``LaunchConfig``'s fields and what the machine's devices can do."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.config import field_rows
from notebook_launcher.core.precisions import refusals
from notebook_launcher.core.strategies import DEVICE_OF, is_for
from notebook_launcher.launcher.engines import ENGINES
from notebook_launcher.launcher.plan import preferred_kind
from notebook_launcher.widgets.controls import Choice, Control, Held

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_launcher.core.config import LaunchConfig
    from notebook_launcher.core.events import DeviceRow
    from notebook_launcher.core.options import OptionRow

MAIN = ("device", "num_processes", "mixed_precision", "strategy", "gradient_accumulation_steps")
_LABELS = {
    "num_processes": "Processes",
    "mixed_precision": "Precision",
    "gradient_accumulation_steps": "Accumulation steps",
    "num_machines": "Machines",
    "main_process_ip": "Main process IP",
    "env": "Environment",
    "log_dir": "Log folder",
    "stop_grace_s": "Stop grace (s)",
    "timeout_s": "Time limit (s)",
}
_NOT_SAID = {"mixed_precision": "as the function says, else fp32", "strategy": "as the function says, else automatic"}
_NAMES = {("mixed_precision", "no"): "no (fp32)"}
_TYPED = {
    "int list": ", numbers with commas between",
    "str list": ", with commas between",
    "pairs": ", such as A=1 B='two words'",
}
_DEFAULT = re.compile(r"default: (?P<what>.*?)\.?$")


def option_controls(
    start: LaunchConfig,
    device: str,
    devices: Sequence[DeviceRow] | None,
    strategies: Sequence[str],
    held: str | None = None,
) -> tuple[Control, ...]:
    """A control for each option, those that everybody needs first. They begin with what ``start`` says.

    ``device`` is what the device's control holds; ``devices`` is None until the machine's are known. Of ``strategies``
    those are offered that the device has; ``held`` is that of the strategy's control, which stays, and is refused.
    """
    table = {row.name: row for row in field_rows()}
    order = [*MAIN, *(name for name in table if name not in MAIN)]
    rows = None if devices is None else {row.kind: row for row in devices}
    kind = _kind(device, rows)
    offered = [name for name in strategies if is_for(name, kind) or name in {held, start.strategy}]
    return tuple(_control(table[name], getattr(start, name), device, rows, offered) for name in order)


def written(row: OptionRow, value: Any) -> str:
    """The option's value as it is typed; "" for one that is left open."""
    if value is None:
        return ""
    if row.kind in {"int list", "str list"}:
        return ", ".join(map(str, value))
    if row.kind == "pairs":
        return shlex.join(f"{name}={text}" for name, text in value.items())
    return f"{value:g}" if row.kind == "float" else str(value)


def read(row: OptionRow, given: Held) -> Any:
    """What ``LaunchConfig`` is given for what was typed; raises ``ValueError`` with a sentence."""
    text = str(given).strip()
    if row.kind == "pairs":
        return _pairs(text)
    return None if not text and row.optional else text


def complaint(row: OptionRow, given: Held) -> str:
    """What is said beside the control when its value alone can't be."""
    nothing = ", or nothing" if row.optional else ""
    return f"{str(given).strip()!r} can't be: it takes {row.words}{_TYPED.get(row.kind, '')}{nothing}."


def _pairs(text: str) -> dict[str, str]:
    try:
        words = shlex.split(text)
    except ValueError:
        raise ValueError(f"{text!r} can't be: a quotation mark is not closed.") from None
    for word in words:
        if "=" not in word:
            raise ValueError(f"{word!r} can't be: it takes names and values, such as A=1 B='two words'.")
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _control(
    row: OptionRow, value: Any, device: str, rows: Mapping[str, DeviceRow] | None, strategies: Sequence[str]
) -> Control:
    names = {"strategy": tuple(strategies), "engine": ENGINES.names}.get(row.name, row.choices)
    refusing = {"device": _refused_devices, "mixed_precision": _refused_precisions, "strategy": _refused_strategies}
    refused = refusing.get(row.name, _none_refused)(row, device, rows, names)
    open_choice = (Choice("", _NOT_SAID.get(row.name, "not said")),) if row.optional and names else ()
    default = _DEFAULT.search(row.description)
    takes = f" Takes {row.words}{_TYPED.get(row.kind, '')}." if not names else ""
    return Control(
        row.name,
        _LABELS.get(row.name, row.name.replace("_", " ").capitalize()),
        "choice" if names else "text",
        default=written(row, value),
        choices=(*open_choice, *_choices(row.name, names, refused, rows)),
        help=row.description + takes,
        placeholder=default["what"] if default else "none" if row.kind in {"pairs", "str list"} else "",
        group="main" if row.name in MAIN else "rarer",
    )


def _choices(
    name: str, names: Sequence[str], refused: Mapping[str, tuple[str, str]], rows: Mapping[str, DeviceRow] | None
) -> list[Choice]:
    found = []
    for each in names:
        label = _NAMES.get((name, each), each)
        if (name, each) == ("device", "auto") and rows is not None:
            label = f"auto ({preferred_kind(rows)})"
        where, reason = refused.get(each, ("", ""))
        found.append(
            Choice(each, f"{label} ({where})" if where else label, f"{each}: {where}: {reason}" if where else "")
        )
    return found


def _none_refused(*_: object) -> dict[str, tuple[str, str]]:
    return {}


def _refused_devices(
    _: OptionRow, __: str, rows: Mapping[str, DeviceRow] | None, names: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """For each kind of device that isn't here, "not here" and why."""
    if rows is None:
        return {}
    unknown = {name: "this version does not know it yet" for name in names if name not in {"auto", *rows}}
    absent = {kind: one.reason or "there is none" for kind, one in rows.items() if not one.num_devices}
    return {name: ("not here", reason) for name, reason in {**unknown, **absent}.items()}


def _refused_precisions(
    _: OptionRow, device: str, rows: Mapping[str, DeviceRow] | None, __: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """For each precision that the chosen device can't do, "not on ..." and why."""
    kind = _kind(device, rows)
    if not kind:
        return {}
    known = rows[kind].precisions if rows is not None and kind in rows else refusals(kind)
    return {name: (f"not on {kind.upper()}", reason) for name, reason in known.items() if reason}


def _refused_strategies(
    _: OptionRow, device: str, rows: Mapping[str, DeviceRow] | None, names: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """For each strategy that the chosen device doesn't have, "not on ..." and why."""
    kind = _kind(device, rows)
    if not kind:
        return {}
    told = {name: f"it is for device={DEVICE_OF[name]!r}" if name in DEVICE_OF else "it isn't there" for name in names}
    return {name: (f"not on {kind.upper()}", why) for name, why in told.items() if not is_for(name, kind)}


def _kind(device: str, rows: Mapping[str, DeviceRow] | None) -> str:
    """The kind of device that is chosen, "" while nobody knows which ``auto`` takes."""
    return device if device != "auto" else preferred_kind(rows) if rows is not None else ""
