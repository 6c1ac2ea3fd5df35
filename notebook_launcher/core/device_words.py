"""Other words for devices than ours, and what whoever writes one is told."""

from __future__ import annotations

_TOLD_OF = "%launcher devices says whether one is here, and nothing launches on them in this version."

ADVICE = {
    "gpu": "A GPU is 'cuda' (NVIDIA and AMD), 'mps' (Apple) or 'xpu' (Intel); 'auto' takes what is there.",
    **dict.fromkeys(("rocm", "hip", "amd"), "An AMD GPU is 'cuda', as torch calls it."),
    "nvidia": "An NVIDIA GPU is 'cuda'.",
    "intel": "An Intel GPU is 'xpu'.",
    **dict.fromkeys(("apple", "metal"), "An Apple GPU is 'mps'."),
    "xla": "XLA's devices are 'tpu'.",
    **dict.fromkeys(("npu", "hpu", "mlu", "musa"), _TOLD_OF),
}
