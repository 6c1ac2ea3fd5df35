"""Which precisions a device can do, and why not the others: one table of rules for launcher, worker and runtime.

Pure: whoever asks brings the facts, since only a process that may touch the device knows them.
"""

from __future__ import annotations

import dataclasses
import re

PRECISIONS = ("no", "fp16", "bf16")
_NATIVE_BF16 = (8, 0)  # CUDA's compute capability: Ampere
_MPS_BF16 = (14, 0)  # macOS
_EMULATED_BF16 = re.compile(r"Apple M[12]\b")
_MPS_FP16 = (2, 8)  # torch, whose loss scaling works there from then on

Version = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """What decides, beside the kind of device. A fact that is None is not known, and stands in nothing's way."""

    name: str = ""  # as its maker calls it
    capability: Version | None = None  # CUDA's compute capability
    is_rocm: bool = False  # torch calls AMD's devices "cuda" too, and their capability follows other rules
    has_native_bf16: bool | None = None  # what an Intel GPU says of itself
    macos: Version | None = None
    torch: Version | None = None


def refusals(kind: str, facts: DeviceFacts | None = None) -> dict[str, str]:
    """For each precision why a device of ``kind`` ("cpu", "cuda", "mps", "xpu", "tpu") can't do it, "" where it can."""
    facts = facts or DeviceFacts()
    return {"no": "", "fp16": _why_not_fp16(kind, facts), "bf16": _why_not_bf16(kind, facts)}


def usable(refused: dict[str, str]) -> str:
    """The precisions that are not refused, for a message: "'bf16' or 'no'"."""
    return " or ".join(repr(name) for name in reversed(PRECISIONS) if not refused.get(name))


def _why_not_fp16(kind: str, facts: DeviceFacts) -> str:
    if kind == "cpu":
        return (
            "a CPU emulates fp16, slower than fp32, and its narrow range loses small gradients; bf16 has the range of "
            "fp32"
        )
    if kind == "tpu":
        return "a TPU computes in bf16 and has no fp16"
    if kind == "mps" and facts.torch is not None and facts.torch < _MPS_FP16:
        return f"torch {_text(facts.torch)} can't scale losses on MPS, which fp16 needs; torch {_text(_MPS_FP16)} can"
    return ""


def _why_not_bf16(kind: str, facts: DeviceFacts) -> str:
    name = facts.name or "this GPU"
    if kind == "cuda" and not facts.is_rocm and facts.capability is not None and facts.capability < _NATIVE_BF16:
        return (
            f"{name} has no bf16 units (its compute capability is {_text(facts.capability)}, and bf16 came with "
            f"{_text(_NATIVE_BF16)}): it would emulate bf16, slower than fp32"
        )
    if kind == "xpu" and facts.has_native_bf16 is False:
        return f"{name} has no bf16 units: it would emulate bf16, slower than fp32"
    if kind == "mps" and _EMULATED_BF16.match(name):
        return f"{name} has no bf16 units: macOS emulates bf16, no faster than fp32"
    if kind == "mps" and facts.macos is not None and facts.macos < _MPS_BF16:
        return f"bf16 on an Apple GPU needs macOS {_text(_MPS_BF16)}, and this is macOS {_text(facts.macos)}"
    return ""


def _text(version: Version) -> str:
    return ".".join(map(str, version))
