"""As much of torch_xla as the project uses, over threads, without a device: tests put ``tests/fakes`` on the path.

``PJRT_DEVICE`` and ``CPU_NUM_DEVICES`` mean what they do there. ``FAKE_WORLD_SIZE`` is what the runtime says instead of
the truth, ``FAKE_PROBLEM`` why it can't start, ``FAKE_CHIPS`` how many there are of ``FAKE_VERSION``.
"""

from __future__ import annotations

import threading
import types

import torch

local = threading.local()  # ordinal: the device of this thread
calls: list[object] = []  # what the project asked for, in order
state = types.SimpleNamespace(initialized=False, spmd=False, seed=101)
_XLAC = types.SimpleNamespace(_xla_runtime_is_initialized=lambda: state.initialized)


def device():
    state.initialized = True
    return torch.device("xla", getattr(local, "ordinal", 0))


def sync():
    calls.append("sync")


def _prepare_to_exit():
    calls.append("exit")


def _setup_xla_flags():
    calls.append("flags")
