"""Amounts as people read them: durations, sizes, rates."""

from __future__ import annotations

_MINUTE_S, _HOUR_S = 60, 3600
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_THREE_DIGITS = 100
_THOUSAND = 999.5  # what has more than three digits before the point


def duration(seconds: float) -> str:
    """4.2 s, 3 min 20 s, 2 h 5 min."""
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    if round(seconds) < _HOUR_S:
        minutes, rest = divmod(round(seconds), _MINUTE_S)
        return f"{minutes} min {rest} s"
    hours, rest = divmod(round(seconds / _MINUTE_S), _MINUTE_S)
    return f"{hours} h {rest} min"


def size(num_bytes: float) -> str:
    """512 B, 1.4 GiB, 380 MiB."""
    amount, unit = float(num_bytes), 0
    while amount >= _STEP and unit < len(_UNITS) - 1:
        amount, unit = amount / _STEP, unit + 1
    return f"{amount:.0f} {_UNITS[unit]}" if unit == 0 or amount >= _THREE_DIGITS else f"{amount:.1f} {_UNITS[unit]}"


def rate(num_per_s: float) -> str:
    """12.4 steps/s, 72,200 steps/s; below one, 3.1 s/step."""
    if num_per_s <= 0:
        return ""
    return f"{_three_digits(num_per_s)} steps/s" if num_per_s >= 1 else f"{_three_digits(1 / num_per_s)} s/step"


def _three_digits(amount: float) -> str:
    return f"{amount:.3g}" if amount < _THOUSAND else f"{float(f'{amount:.3g}'):,.0f}"
