"""What a person should know of a device that ran out of memory: this rank's use, the others', and the batch at hand.

Written for CUDA, ROCm, XPU and MPS; never run on such hardware.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.config import snapshot
from notebook_launcher.worker.inspection import is_users

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_GIB = 1 << 30
_NUM_FRAMES = 3  # the innermost of the user's
_NUM_TENSORS = 6  # of each
_MPS = "MPS backend out of memory"


def explain(error: BaseException) -> str:
    """Lines for the error of a device that is full: who holds what of it, and the tensors that were at hand; else "".

    Nothing is allocated, and nothing raises.
    """
    torch: Any = sys.modules.get("torch")
    kind = "" if torch is None else _kind(torch, error)
    if not kind:
        return ""
    try:
        return "\n".join([*_use(torch, kind), *_at_hand(torch, error)])
    except Exception as problem:  # noqa: BLE001 - the error itself is worth more than what is said about it
        return f"(nothing more can be said of the memory: {type(problem).__name__})"


def _kind(torch: Any, error: BaseException) -> str:
    """The kind of device that ``error`` says is full; "" for any other error."""
    if isinstance(error, torch.OutOfMemoryError):
        return next((name for name in ("cuda", "xpu") if getattr(torch, name).is_initialized()), "")
    is_mps = type(error) is RuntimeError and str(error.args[0] if error.args else "").startswith(_MPS)
    return "mps" if is_mps else ""


def _use(torch: Any, kind: str) -> Iterator[str]:
    rank = snapshot().get("RANK", "0")
    module = getattr(torch, kind)
    if kind == "mps":
        used, total = module.driver_allocated_memory(), module.recommended_max_memory()
        yield (
            f"rank {rank} holds {_size(used)} of the {_size(total)} that macOS recommends for the GPU, "
            f"{_size(module.current_allocated_memory())} of it in tensors"
        )
        return
    index = module.current_device()
    free, total = module.mem_get_info(index)
    tensors, reserved = module.memory_allocated(index), module.memory_reserved(index)
    name = module.get_device_properties(index).name
    others = max(0, total - free - reserved)
    yield (
        f"rank {rank} on {kind}:{index} ({name}, {_size(total)}) holds {_size(reserved)}, {_size(tensors)} of it in "
        f"tensors; other processes on the card, and {kind.upper()} itself, hold {_size(others)}; {_size(free)} is free"
    )


def _at_hand(torch: Any, error: BaseException) -> Iterator[str]:
    """For the user's innermost functions, outermost first: the tensors that they held, which tell the batch."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if is_users(frame.f_code.co_filename)]
    for frame in frames[-_NUM_FRAMES:]:
        found = list(_tensors(torch, frame))
        if found:
            more = f" and {len(found) - _NUM_TENSORS} more" if len(found) > _NUM_TENSORS else ""
            yield f"tensors in {frame.f_code.co_name}: {', '.join(found[:_NUM_TENSORS])}{more}"


def _tensors(torch: Any, frame: FrameType) -> Iterator[str]:
    for name, value in frame.f_locals.items():
        parts = {name: value}
        if type(value) in {list, tuple}:
            parts = {f"{name}[{number}]": one for number, one in enumerate(value[:_NUM_TENSORS])}
        elif isinstance(value, Mapping):
            parts = {f"{name}[{key!r}]": one for key, one in list(value.items())[:_NUM_TENSORS]}
        for label, one in parts.items():
            if isinstance(one, torch.Tensor) and not isinstance(one, torch.nn.Parameter):
                yield f"{label} {tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}"


def _size(number: int) -> str:
    return f"{number / _GIB:.2f} GiB"
