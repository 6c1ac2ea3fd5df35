"""Looking: where a rank's function is right now, and what devices this machine has."""

from __future__ import annotations

import dataclasses
import importlib.util
import linecache
import os
import pathlib
import platform
import sys
import traceback
from typing import TYPE_CHECKING, Any

from notebook_launcher.core import apple_chip
from notebook_launcher.core.config import snapshot
from notebook_launcher.core.cores import num_cores
from notebook_launcher.core.events import DeviceRow, Where
from notebook_launcher.core.precisions import PRECISIONS, DeviceFacts, refusals
from notebook_launcher.worker import xla
from notebook_launcher.worker.collectives import last_collective

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

_OWN_ROWS = ("cuda", "mps", "xpu", "tpu", "cpu")
_PLUGINS = {"npu": "torch_npu", "hpu": "habana_frameworks", "mlu": "torch_mlu", "musa": "torch_musa"}
_HIDES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_PACKAGE = f"{pathlib.Path(__file__).parent.parent}{os.sep}"


def where(thread: int) -> Where:
    """The place in ``thread``: the collective or function it is in, the user's line, the stack as text."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the documented way to look at another thread
    if frame is None:
        return Where("", "", "")
    stack = list(_outward(frame))
    collective = _collective(stack)
    user = next((one for one in stack if is_users(one.f_code.co_filename)), None)
    if user is None:
        return Where(collective or stack[0].f_code.co_name, "", "", last_collective())
    text = linecache.getline(user.f_code.co_filename, user.f_lineno).strip()
    line = f"line {user.f_lineno} of {user.f_code.co_name}" + (f": {text}" if text else "")
    shown = [one for one in stack if not one.f_code.co_filename.startswith(_PACKAGE)]
    summary = traceback.StackSummary.extract((one, one.f_lineno) for one in reversed(shown))
    return Where(collective or user.f_code.co_name, line, "".join(summary.format()), last_collective())


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


def is_users(filename: str) -> bool:
    """Whether code from that file is the user's: not installed, not Python's, not this package's."""
    installed = f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename
    standard = filename.startswith((os.path.dirname(os.__file__), "<frozen"))  # noqa: PTH120 - a prefix of names
    return not (installed or standard or filename.startswith(_PACKAGE))


def devices() -> tuple[DeviceRow, ...]:
    """A row for each kind of device that torch knows; run in a worker, so that the kernel never touches one."""
    import torch

    cores = num_cores()
    cpu = DeviceRow("cpu", cores, (f"{cores} cores",), precisions=refusals("cpu"))
    return _cuda(torch), _mps(torch), _xpu(torch), xla.row(), *_others(torch), cpu


def _cuda(torch: Any) -> DeviceRow:
    if not torch.backends.cuda.is_built() and getattr(torch.version, "hip", None) is None:
        reason = (
            f"this torch ({torch.__version__}) is a build without CUDA, which uses no GPU even where there is one; "
            "pytorch.org/get-started has the command that installs a build with it"
        )
        return DeviceRow("cuda", 0, reason=reason)
    if not torch.cuda.is_available():
        return DeviceRow("cuda", 0, reason=f"torch sees no CUDA device: {_why_none(snapshot())}")
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    is_rocm = getattr(torch.version, "hip", None) is not None
    facts = [DeviceFacts(name=one.name, capability=(one.major, one.minor), is_rocm=is_rocm) for one in found]
    uuids = tuple(str(one.uuid) for one in found if hasattr(one, "uuid"))
    return dataclasses.replace(_several("cuda", found, facts), uuids=uuids, no_peers=_no_peers(torch, len(found)))


def _why_none(environment: Mapping[str, str]) -> str:
    hidden = next((name for name in _HIDES if name in environment), None)
    if hidden is not None:
        return f"{hidden}={environment[hidden]!r} hides them, or the driver is missing"
    return "there is none, or its driver is missing"


def _no_peers(torch: Any, num_devices: int) -> tuple[tuple[int, int], ...]:
    """The pairs that can't read each other's memory, so that NCCL must not try: on many consumer cards."""
    can = getattr(torch.cuda, "can_device_access_peer", None)
    pairs = [(one, other) for one in range(num_devices) for other in range(one)]
    return tuple((other, one) for one, other in pairs if can is not None and not (can(one, other) and can(other, one)))


def _mps(torch: Any) -> DeviceRow:
    if platform.system() != "Darwin":
        return DeviceRow(
            "mps", 0, reason=f"MPS is the GPU of a Mac with Apple silicon, and this is {platform.system()}"
        )
    if not torch.backends.mps.is_built():
        return DeviceRow("mps", 0, reason=f"this build of torch ({torch.__version__}) has no MPS")
    if not torch.backends.mps.is_available():
        return DeviceRow("mps", 0, reason="this Mac or its macOS has no MPS device")
    name = apple_chip.name()
    facts = DeviceFacts(name=name, macos=_version(platform.mac_ver()[0]), torch=_version(torch.__version__))
    most = getattr(getattr(torch, "mps", None), "recommended_max_memory", None)
    memory = () if most is None else (most(),)
    return DeviceRow("mps", 1, (f"{name or 'Apple'} GPU",), memory, refusals("mps", facts))


def _xpu(torch: Any) -> DeviceRow:
    if getattr(getattr(torch, "version", None), "xpu", "") is None:  # a torch before 2.7 does not say
        return DeviceRow("xpu", 0, reason=f"this torch ({torch.__version__}) is a build without XPU (Intel GPUs)")
    if not hasattr(torch, "xpu") or not torch.xpu.is_available():
        return DeviceRow("xpu", 0, reason="torch sees no Intel GPU: there is none, or its driver is missing")
    found = [torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())]
    facts = [
        DeviceFacts(name=one.name, has_native_bf16=getattr(one, "has_bfloat16_conversions", None)) for one in found
    ]
    return _several("xpu", found, facts)


def _others(torch: Any) -> Iterator[DeviceRow]:
    """Kinds that torch knows by a plugin: told of, and not launched on by this version."""
    accelerator = getattr(torch, "accelerator", None)
    found = accelerator.current_accelerator() if accelerator is not None and accelerator.is_available() else None
    present = "" if found is None or found.type in _OWN_ROWS else found.type
    for kind, plugin in {**_PLUGINS, **({present: ""} if present else {})}.items():
        if kind == present and accelerator is not None:
            count = accelerator.device_count()
            reason = f"torch sees {count} of them, and this version launches on none: it knows {', '.join(_OWN_ROWS)}"
        elif importlib.util.find_spec(plugin) is None:
            reason = f"torch's plugin for it, {plugin}, is not installed"
        else:
            reason = f"{plugin} is installed, and torch.accelerator sees no such device"
        yield DeviceRow(kind, 0, reason=reason)


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
