"""Looking: where a rank's function is right now, and what devices this machine has."""

from __future__ import annotations

import linecache
import os
import pathlib
import platform
import sys
import traceback
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.cores import num_cores
from notebook_launcher.core.events import DeviceRow, Where
from notebook_launcher.core.precisions import PRECISIONS, DeviceFacts, refusals

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

    cores = num_cores()
    cpu = DeviceRow("cpu", cores, (f"{cores} cores",), precisions=refusals("cpu"))
    return _cuda(torch), _mps(torch), _xpu(torch), cpu


def _cuda(torch: Any) -> DeviceRow:
    if not torch.backends.cuda.is_built() and getattr(torch.version, "hip", None) is None:
        return DeviceRow("cuda", 0, reason=f"this build of torch ({torch.__version__}) has no CUDA")
    if not torch.cuda.is_available():
        reason = "torch sees no CUDA device: the driver is missing, or CUDA_VISIBLE_DEVICES hides them"
        return DeviceRow("cuda", 0, reason=reason)
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    is_rocm = getattr(torch.version, "hip", None) is not None
    facts = [DeviceFacts(name=one.name, capability=(one.major, one.minor), is_rocm=is_rocm) for one in found]
    return _several("cuda", found, facts)


def _mps(torch: Any) -> DeviceRow:
    if not torch.backends.mps.is_built():
        return DeviceRow("mps", 0, reason=f"this build of torch ({torch.__version__}) has no MPS")
    if not torch.backends.mps.is_available():
        return DeviceRow("mps", 0, reason="this Mac or its macOS has no MPS device")
    facts = DeviceFacts(macos=_version(platform.mac_ver()[0]), torch=_version(torch.__version__))
    return DeviceRow("mps", 1, ("Apple GPU",), precisions=refusals("mps", facts))


def _xpu(torch: Any) -> DeviceRow:
    if not hasattr(torch, "xpu") or not torch.xpu.is_available():
        return DeviceRow("xpu", 0, reason="torch sees no Intel GPU")
    found = [torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())]
    facts = [
        DeviceFacts(name=one.name, has_native_bf16=getattr(one, "has_bfloat16_conversions", None)) for one in found
    ]
    return _several("xpu", found, facts)


def _several(kind: str, found: list[Any], facts: list[DeviceFacts]) -> DeviceRow:
    """A row for several devices: what one of them can't do, a run on all of them can't."""
    each = [refusals(kind, one) for one in facts]
    together = {name: next((one[name] for one in each if one[name]), "") for name in PRECISIONS}
    names, memory = tuple(one.name for one in found), tuple(one.total_memory for one in found)
    return DeviceRow(kind, len(found), names, memory, together)


def _version(text: str) -> tuple[int, int] | None:
    """Major and minor of a version such as "14.5" or "2.13.0+cpu"; None for "", macOS's version elsewhere."""
    major, *rest = text.split(".")
    return (int(major), int(rest[0]) if rest else 0) if major else None
