"""What is to be done as a module gets loaded: a worker loads nothing that its function does not ask for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec

_waiting: dict[str, Callable[[Any], None]] = {}


def once_loaded(name: str, act: Callable[[Any], None]) -> None:
    """Call ``act`` with the module ``name``: now, or else as it is loaded, in place of what was to be called then."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
        return
    _waiting[name] = act
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder:
    """Finds what the other finders find, and adds to the loading of a module what waits for it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        load = loader.exec_module

        def load_and_act(module: Any) -> None:
            load(module)
            if module.__name__ == name and name in _waiting:  # an archive's loader loads others, too
                _waiting.pop(name)(module)

        loader.exec_module = load_and_act
        return spec


_FINDER = _Finder()
