"""Looking: where a rank's function is right now, and what devices this machine has."""

from __future__ import annotations

import linecache
import os
import pathlib
import sys
import traceback
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.events import DeviceRow, Where

if TYPE_CHECKING:
    from types import FrameType

_PACKAGE = f"{pathlib.Path(__file__).parent.parent}{os.sep}"


def where(thread: int) -> Where:
    """The place in ``thread``: the collective or function it is in, the user's line, the stack as text."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the documented way to look at another thread
    if frame is None:
        return Where("", "", "")
    stack = list(_outward(frame))
    collective = _collective(stack)
    user = next((one for one in stack if _is_user(one.f_code.co_filename)), None)
    if user is None:
        return Where(collective or stack[0].f_code.co_name, "", "")
    text = linecache.getline(user.f_code.co_filename, user.f_lineno).strip()
    line = f"line {user.f_lineno} of {user.f_code.co_name}" + (f": {text}" if text else "")
    shown = [one for one in stack if not one.f_code.co_filename.startswith(_PACKAGE)]
    summary = traceback.StackSummary.extract((one, one.f_lineno) for one in reversed(shown))
    return Where(collective or user.f_code.co_name, line, "".join(summary.format()))


def _outward(frame: FrameType | None) -> Any:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _collective(stack: list[FrameType]) -> str:
    """The outermost call into torch.distributed, "" where the thread is in none."""
    names = [
        one.f_code.co_name
        for one in stack
        if one.f_code.co_filename.endswith("distributed_c10d.py") and one.f_code.co_name != "wrapper"
    ]
    return names[-1] if names else ""


def _is_user(filename: str) -> bool:
    installed = f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename
    standard = filename.startswith((os.path.dirname(os.__file__), "<frozen"))  # noqa: PTH120 - a prefix of names
    return not (installed or standard or filename.startswith(_PACKAGE))


def devices() -> tuple[DeviceRow, ...]:
    """A row for each kind of device that torch knows; run in a worker, so that the kernel never touches one."""
    import torch

    cores = _num_cores()
    precisions = {"no": "", "bf16": "", "fp16": "a CPU emulates it, slower and less exact than bf16"}
    rows = [_cuda(torch), _mps(torch), _xpu(torch), DeviceRow("cpu", cores, (f"{cores} cores",), precisions=precisions)]
    return tuple(rows)


def _num_cores() -> int:
    """Cores that this process may use, which in a container is fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _cuda(torch: Any) -> DeviceRow:
    if not torch.backends.cuda.is_built() and getattr(torch.version, "hip", None) is None:
        return DeviceRow("cuda", 0, reason=f"this build of torch ({torch.__version__}) has no CUDA")
    if not torch.cuda.is_available():
        reason = "torch sees no CUDA device: the driver is missing, or CUDA_VISIBLE_DEVICES hides them"
        return DeviceRow("cuda", 0, reason=reason)
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    bf16 = "" if torch.cuda.is_bf16_supported(including_emulation=False) else "this GPU has no bf16 units; use fp16"
    return DeviceRow(
        "cuda",
        len(found),
        tuple(one.name for one in found),
        tuple(one.total_memory for one in found),
        {"no": "", "fp16": "", "bf16": bf16},
    )


def _mps(torch: Any) -> DeviceRow:
    if not torch.backends.mps.is_built():
        return DeviceRow("mps", 0, reason=f"this build of torch ({torch.__version__}) has no MPS")
    if not torch.backends.mps.is_available():
        return DeviceRow("mps", 0, reason="this Mac or its macOS has no MPS device")
    return DeviceRow("mps", 1, ("Apple GPU",), precisions={"no": "", "fp16": "", "bf16": ""})


def _xpu(torch: Any) -> DeviceRow:
    if not hasattr(torch, "xpu") or not torch.xpu.is_available():
        return DeviceRow("xpu", 0, reason="torch sees no Intel GPU")
    found = [torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())]
    names, memory = tuple(one.name for one in found), tuple(one.total_memory for one in found)
    return DeviceRow("xpu", len(found), names, memory, {"no": "", "fp16": "", "bf16": ""})
