"""Which modules a worker can import by itself, given this process's ``sys.path``; what it can't travels by value."""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

_OWN = __name__.partition(".")[0]
_known: dict[str, tuple[ModuleType, bool]] = {}  # top-level name -> the module that was asked about, the answer
_known_for: list[str] = []  # the sys.path that the answers hold for


def is_importable(name: str) -> bool:
    """Tell whether a worker that is given this ``sys.path`` gets the same module by ``import name``.

    Asked of the top-level package: what a package makes of its inside (``six.moves``, ``torch.ops``) it makes in the
    worker too. A name that is not in ``sys.modules`` counts as importable, since nothing speaks against it.
    """
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == _OWN:
        return True
    module = sys.modules.get(top)
    if module is None:
        return True
    if _known_for != sys.path:
        _known.clear()
        _known_for[:] = sys.path
    answer = _known.get(top)
    if answer is None or answer[0] is not module:
        answer = _known[top] = (module, _find(top, module))
    return answer[1]


def _find(name: str, module: ModuleType) -> bool:
    spec: ModuleSpec | None = getattr(module, "__spec__", None)
    here = getattr(spec, "origin", None) or getattr(module, "__file__", None)
    if here is not None and (here in ("built-in", "frozen") or here.endswith(tuple(EXTENSION_SUFFIXES))):
        return True  # compiled code has no value to travel by: the worker's ImportError says what is wrong
    found = PathFinder.find_spec(name)
    if found is not None:
        return here is None or found.origin is None or _same_file(here, found.origin)
    return any(_finds(finder, name) for finder in sys.meta_path)


def _finds(finder: Any, name: str) -> bool:
    """Ask only finders that every interpreter of this environment has: those of editable installs and setuptools."""
    owner = getattr(finder, "__module__", None) or type(finder).__module__
    if not owner.startswith(("__editable__", "_distutils_hack")):
        return False
    return finder.find_spec(name, None) is not None


def _same_file(one: str, other: str) -> bool:
    return one == other or Path(one).resolve() == Path(other).resolve()
