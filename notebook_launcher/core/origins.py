"""Where notebook code comes from: rebuilds it in a worker, and finds the kernel's own again when it comes back.

Code that travels by value gets a key. A worker keeps the keys of what it received; a result names such a function or
class by its key, and the kernel, which kept the object, puts its own there: nothing of the kernel's is made anew or
changed.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import pickle
import sys
import types
import uuid
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Held weakly: whoever needs them to be found again keeps them (a payload keeps what it sent).
_key_of_sent: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_key_of_received: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_sent: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_received: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_complete: weakref.WeakSet[type] = weakref.WeakSet()  # classes made on a worker whose state must not be set again

arrival_device: contextvars.ContextVar[str | None] = contextvars.ContextVar("arrival_device", default=None)


class Namespace:
    """Stands for a module's ``__dict__`` in a pickle; the receiver's own takes its place."""

    def __init__(self, name: str, attributes: dict[str, Any] | None = None) -> None:
        """``name`` is the module's; ``attributes`` are for the receiver's, where it has to be made."""
        self.name = name
        self.attributes = attributes or {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the receiver's namespace."""
        return namespace, (self.name, self.attributes)


# --- sender ---------------------------------------------------------------------------------------------------------


def key_for(code: Any) -> str:
    """The key of a function, class or module that is being sent to a worker."""
    key = _key_of_sent.get(code)
    if key is None:
        key = _key_of_sent[code] = uuid.uuid4().hex
        _sent[key] = code
    return key


def reference(code: Any) -> tuple[Any, ...] | None:
    """How to name, in a result, a function, class or module that came from the kernel; None for what was made here."""
    key = _key_of_received.get(code)
    if key is None:
        return None
    if isinstance(code, types.ModuleType):
        return find, (key, code.__name__, "")
    return find, (key, code.__module__, _qualname(code))


def bound_name(code: Any) -> str:
    """The name under which the notebook's namespace holds ``code`` itself; "" where it doesn't."""
    name = _qualname(code)
    if getattr(code, "__module__", None) != "__main__" or "." in name:
        return ""
    held = sys.modules["__main__"].__dict__.get(name)
    return name if held is code else ""


def _qualname(code: Any) -> str:
    name: str = getattr(code, "__qualname__", None) or code.__name__
    return name


def made_here(cls: type) -> None:
    """Protect a class of this process from being set again when its own pickle is read here."""
    _complete.add(cls)


# --- receiver: a worker, or a process that a worker started -----------------------------------------------------------


def namespace(name: str, attributes: dict[str, Any]) -> dict[str, Any]:
    """The ``__dict__`` of a module, which is made and given ``attributes`` where this process doesn't have it."""
    found = sys.modules.get(name)
    if found is None:
        found = named_module(name)
        found.__dict__.update(attributes)
    return found.__dict__


def named_module(name: str) -> types.ModuleType:
    """The module that stands in ``sys.modules`` under ``name``, and in its package; a new one where there is none."""
    found = sys.modules.get(name)
    if found is None:
        found = sys.modules[name] = types.ModuleType(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(named_module(parent), child, found)
    return found


def receive(code: Any, state: tuple[str, str, Callable[[Any, Any], object], Any]) -> None:
    """State setter of a function or class: sets its state, remembers its key, binds its name in ``__main__``.

    With a name there, plain pickle finds it too: that of loader workers, of ``torch.save``, of ``concurrent.futures``.
    """
    key, name, set_state, inner = state
    set_state(code, inner)
    if key:
        _remember(code, key)
    main = sys.modules["__main__"].__dict__
    if name:
        main[name] = code
    elif isinstance(code, type) and code.__module__ == "__main__" and "." not in code.__qualname__:
        main.setdefault(code.__name__, code)


def leave(_code: Any, _state: None) -> None:
    """State setter of what has none."""


def receive_module(found: types.ModuleType, state: tuple[str, dict[str, Any]]) -> None:
    """State setter of a module that travels by value."""
    key, attributes = state
    found.__dict__.update(attributes)
    if key:
        _remember(found, key)


def _remember(code: Any, key: str) -> None:
    _key_of_received[code] = key
    _received[key] = code


# --- receiver: the kernel -------------------------------------------------------------------------------------------


def find(key: str, module_name: str, qualname: str) -> Any:
    """The object that was sent under ``key``; the one that has its name now, where that has been redefined since."""
    code = _sent.get(key)
    if code is None:
        code = _received.get(key)  # a worker that reads its own result
    if code is not None:
        return code
    try:
        owner = sys.modules.get(module_name) or importlib.import_module(module_name)
        return functools.reduce(getattr, qualname.split("."), owner) if qualname else owner
    except (ImportError, AttributeError):
        msg = f"{module_name}.{qualname} was deleted or redefined in the notebook while it was in use on a rank"
        raise pickle.UnpicklingError(msg) from None


def receive_made_class(cls: type, state: tuple[Callable[[Any, Any], object], Any]) -> None:
    """State setter of a class that was made on a worker: set once, never again."""
    if cls not in _complete:
        _complete.add(cls)
        set_state, inner = state
        set_state(cls, inner)
