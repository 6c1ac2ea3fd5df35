"""Objects that belong to one process: what to do instead of sending them.

Some would pickle, and then fail far away or quietly do nothing; those are refused. The rest can't be pickled anyway.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """A type, by the module (or the start of its name) and the qualified name ("" is any), and what to do about it."""

    module: str
    name: str
    advice: str
    refused: bool = False
    for_result: str = ""  # what to do when it is a result


_IN_FUNCTION = "create it inside the function"
_FILE = "open the file inside the function: pass its path"
_WRAP = "wrap the model inside the function"
_UNWRAP = "return its state_dict(), or the model that it wraps (accelerator.unwrap_model(model))"
_RULES = (
    Rule("notebook_launcher.runtime.accelerator", "Accelerator", _IN_FUNCTION, refused=True),
    Rule("accelerate.accelerator", "Accelerator", _IN_FUNCTION, refused=True),
    Rule(
        "torch.nn.parallel.distributed",
        "DistributedDataParallel",
        _WRAP,
        refused=True,
        for_result=_UNWRAP,
    ),
    Rule(
        "torch.distributed.fsdp",
        "FullyShardedDataParallel",
        _WRAP,
        refused=True,
        for_result=_UNWRAP,
    ),
    Rule("torch", "ProcessGroup", f"it lives in this process only: {_IN_FUNCTION}", refused=True),
    Rule("torch", "Store", f"it lives in this process only: {_IN_FUNCTION}", refused=True),
    Rule("torch.distributed.device_mesh", "DeviceMesh", _IN_FUNCTION, refused=True),
    Rule("IPython.core.interactiveshell", "InteractiveShell", "get_ipython() runs in the kernel only", refused=True),
    Rule("ipywidgets", "Widget", "it runs in the kernel only: pass its value", refused=True),
    Rule("torch._dynamo", "", "call torch.compile inside the function, on the function that is compiled"),
    Rule("_io", "TextIOWrapper", _FILE, refused=True),
    *(Rule("_io", name, _FILE) for name in ("FileIO", "BufferedReader", "BufferedWriter", "BufferedRandom")),
    Rule("socket", "socket", "connect inside the function: pass the address"),
    Rule("sqlite3", "Connection", "connect inside the function: pass the path"),
    Rule("_thread", "", _IN_FUNCTION),
    Rule("threading", "", _IN_FUNCTION),
    Rule("builtins", "generator", "a generator can't be copied: call its function inside, or pass a list"),
    Rule("builtins", "coroutine", "a coroutine can't be copied: pass the async function itself, and await it inside"),
    Rule("builtins", "async_generator", "a generator can't be copied: call its function inside"),
    Rule("builtins", "frame", "keep its text instead"),
    Rule("builtins", "traceback", "keep its text instead (traceback.format_exc())"),
)
_rules_of: dict[type, Rule | None] = {}


class RefusedError(pickle.PicklingError):
    """Raised while pickling an object that belongs to one process; ``value`` is the object."""

    def __init__(self, message: str, value: object) -> None:
        """Keep the object, so that whoever shows the error can name the variable that holds it."""
        super().__init__(message)
        self.value = value


def rule_of(kind: type) -> Rule | None:
    """The rule for a type or a base of it."""
    if kind not in _rules_of:
        _rules_of[kind] = next((rule for rule in _RULES if any(_is(rule, base) for base in kind.__mro__)), None)
    return _rules_of[kind]


def refuse(value: object, *, is_result: bool) -> Any:
    """Raise the ``RefusedError`` of ``value``, whose type has a rule."""
    rule = rule_of(type(value))
    advice = "" if rule is None else (rule.for_result if is_result else rule.advice)
    kind = type_name(type(value))
    text = f"{kind} objects belong to one process" + (f": {advice}" if advice else "")
    raise RefusedError(text, value)


def type_name(kind: type) -> str:
    """A type's name as a person knows it: ``ValueError``, ``Net``, ``socket.socket``."""
    module = getattr(kind, "__module__", "")
    if module in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{module.removeprefix('_')}.{kind.__qualname__}"


def _is(rule: Rule, base: type) -> bool:
    module = getattr(base, "__module__", None)
    if not isinstance(module, str) or not (module == rule.module or module.startswith(f"{rule.module}.")):
        return False
    return rule.name in ("", base.__qualname__)
