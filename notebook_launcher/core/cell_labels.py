"""Tracebacks in a notebook's words: "Cell In[3], line 2" instead of the temporary file that a cell was compiled as."""

from __future__ import annotations

import re
import sys

_PLACE = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+)')


def in_cells(text: str) -> str:
    """``text`` with the places that lie in this kernel's cells named as the notebook numbers them."""
    numbers = _cell_numbers()
    if not numbers:
        return text

    def named(place: re.Match[str]) -> str:
        number = numbers.get(place["file"])
        return place[0] if number is None else f"Cell In[{number}], line {place['line']}"

    return _PLACE.sub(named, text)


def _cell_numbers() -> dict[str, int]:
    """Files of cells and the cells' numbers, empty outside IPython and where IPython does not keep them."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", None)
    return dict(numbers) if isinstance(numbers, dict) else {}
