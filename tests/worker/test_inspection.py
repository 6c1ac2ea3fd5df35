"""Looking at a thread, and at what devices torch says there are."""

from __future__ import annotations

import threading
import types

import pytest
from real_rank import LIMIT_S

from notebook_launcher.core.cores import num_cores
from notebook_launcher.core.precisions import DeviceFacts
from notebook_launcher.worker import inspection


def _collective(module, name):
    """A function whose code says that it is from ``module``, as torch.distributed's own do."""
    scope = {}
    source = f"def wrapper(call):\n    return {name}(call)\ndef {name}(call):\n    return call()\n"
    exec(compile(source, module, "exec"), scope)  # noqa: S102
    return scope["wrapper"]


class Elsewhere:
    """A thread that is in ``call`` until the end of the block; ``where`` looks at it."""

    def __init__(self, call):
        self._inside, self._go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=call, args=(self._wait,))

    def _wait(self):
        self._inside.set()
        self._go_on.wait(LIMIT_S)

    def __enter__(self):
        self._thread.start()
        assert self._inside.wait(LIMIT_S)
        return inspection.where(self._thread.ident)

    def __exit__(self, *_):
        self._go_on.set()
        self._thread.join(LIMIT_S)


def test_a_function_is_named_with_its_line():
    def train(wait):
        wait()  # here

    with Elsewhere(train) as where:
        assert where.call == "_wait"  # the innermost function that is not the library's
        assert "of _wait: self._go_on.wait(LIMIT_S)" in where.line
        assert "in train" in where.stack
        assert "wait()  # here" in where.stack


def test_a_collective_is_named_with_the_users_line():
    reduce = _collective("/site-packages/torch/distributed/distributed_c10d.py", "all_reduce")

    with Elsewhere(reduce) as where:
        assert where.call == "all_reduce"


def test_a_thread_that_is_gone():
    where = inspection.where(0)
    assert (where.call, where.line, where.stack) == ("", "", "")


def test_a_thread_without_a_line_of_the_users(monkeypatch):
    monkeypatch.setattr(inspection, "is_users", lambda _: False)
    with Elsewhere(lambda wait: wait()) as where:
        assert where.call == "wait"
        assert where.line == ""


@pytest.mark.parametrize(
    ("name", "is_user"),
    [
        ("/home/me/train.py", True),
        ("/tmp/ipykernel_1/12345.py", True),  # noqa: S108
        ("<string>", True),
        (f"{inspection._PACKAGE[:-1]}_of_mine/train.py", True),
        (f"{inspection._PACKAGE}worker/serve.py", False),
        ("/usr/lib/python3/dist-packages/torch/nn/modules/linear.py", False),
        ("/opt/venv/lib/python3.12/site-packages/torch/optim/sgd.py", False),
        (threading.__file__, False),
        ("<frozen importlib._bootstrap>", False),
    ],
)
def test_whose_a_file_is(name, is_user):
    assert inspection.is_users(name) is is_user


# --- devices ----------------------------------------------------------------------------------------------------------


def _torch(*, cuda=(), capability=(9, 0), built=True, hip=None, mps=(False, False), xpu=()):
    """As much of torch as is asked: GPUs are (name, bytes)."""
    major, minor = capability
    properties = {
        kind: [types.SimpleNamespace(name=name, total_memory=size, major=major, minor=minor) for name, size in found]
        for kind, found in {"cuda": cuda, "xpu": xpu}.items()
    }

    def surface(kind, **more):
        found = properties[kind]
        return types.SimpleNamespace(
            is_available=lambda: bool(found),
            device_count=lambda: len(found),
            get_device_properties=found.__getitem__,
            **more,
        )

    mps_built, mps_available = mps
    return types.SimpleNamespace(
        __version__="9.9",
        version=types.SimpleNamespace(hip=hip),
        cuda=surface("cuda"),
        xpu=surface("xpu"),
        backends=types.SimpleNamespace(
            cuda=types.SimpleNamespace(is_built=lambda: built),
            mps=types.SimpleNamespace(is_built=lambda: mps_built, is_available=lambda: mps_available),
        ),
    )


def test_gpus_with_names_memory_and_precisions():
    row = inspection._cuda(_torch(cuda=[("H100", 80 << 30), ("H100", 79 << 30)]))
    assert (row.kind, row.num_devices, row.names, row.memory_bytes) == (
        "cuda",
        2,
        ("H100", "H100"),
        (80 << 30, 79 << 30),
    )
    assert row.precisions == {"no": "", "fp16": "", "bf16": ""}
    assert row.reason == ""


def test_gpus_that_only_emulate_bf16():
    row = inspection._cuda(_torch(cuda=[("T4", 16 << 30)], capability=(7, 5)))
    assert "T4 has no bf16 units" in row.precisions["bf16"]
    assert row.precisions["fp16"] == ""


def test_what_one_of_several_devices_cannot_do_a_run_on_all_cannot():
    facts = [DeviceFacts(name="A100", capability=(8, 0)), DeviceFacts(name="T4", capability=(7, 5))]
    found = [types.SimpleNamespace(name=one.name, total_memory=1) for one in facts]
    assert "T4 has no bf16 units" in inspection._several("cuda", found, facts).precisions["bf16"]


def test_no_cuda_says_why():
    assert inspection._cuda(_torch(built=False)).reason.startswith(
        "this torch (9.9) is a build without CUDA, which uses"
    )
    assert inspection._cuda(_torch(built=False, hip="6.2", cuda=[("MI300", 1)])).num_devices == 1


def test_what_hides_every_gpu_is_named(monkeypatch):
    for name in inspection._HIDES:
        monkeypatch.delenv(name, raising=False)
    assert inspection._cuda(_torch()).reason == "torch sees no CUDA device: there is none, or its driver is missing"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert inspection._cuda(_torch()).reason == (
        "torch sees no CUDA device: CUDA_VISIBLE_DEVICES='-1' hides them, or the driver is missing"
    )


def test_gpus_tell_their_uuids_and_which_cannot_reach_each_other():
    torch = _torch(cuda=[("RTX 4090", 24 << 30)] * 3)
    for number in range(3):
        one = torch.cuda.get_device_properties(number)
        one.uuid = f"uuid-{number}"
    torch.cuda.can_device_access_peer = lambda one, other: (one, other) not in {(0, 2), (2, 0), (1, 0)}
    row = inspection._cuda(torch)
    assert row.uuids == ("uuid-0", "uuid-1", "uuid-2")
    assert row.no_peers == ((0, 1), (0, 2))  # one way is not enough
    assert inspection._cuda(_torch(cuda=[("H100", 1)])).no_peers == ()


def _with_accelerator(kind=None, count=0):
    current = None if kind is None else types.SimpleNamespace(type=kind)
    return types.SimpleNamespace(
        accelerator=types.SimpleNamespace(
            is_available=lambda: current is not None, current_accelerator=lambda: current, device_count=lambda: count
        )
    )


def test_kinds_that_come_by_a_plugin_are_told_of():
    rows = {row.kind: row for row in inspection._others(_with_accelerator())}
    assert list(rows) == ["npu", "hpu", "mlu", "musa"]
    assert rows["npu"].reason == "torch's plugin for it, torch_npu, is not installed"
    rows = {row.kind: row for row in inspection._others(_with_accelerator("npu", 8))}
    assert rows["npu"].reason.startswith("torch sees 8 of them, and this version launches on none: it knows cuda, mps")
    rows = {row.kind: row for row in inspection._others(_with_accelerator("brandnew", 1))}
    assert "torch sees 1 of them" in rows["brandnew"].reason
    assert len(list(inspection._others(_with_accelerator("cuda", 8)))) == 4
    assert not any(row.num_devices for row in rows.values())


def test_a_plugin_that_finds_no_device(monkeypatch):
    monkeypatch.setattr(inspection, "_PLUGINS", {"npu": "json"})
    (row,) = inspection._others(types.SimpleNamespace())
    assert row.reason == "json is installed, and torch.accelerator sees no such device"


def test_apple_gpus(monkeypatch):
    monkeypatch.setattr(inspection.platform, "system", lambda: "Linux")
    reason = inspection._mps(_torch()).reason
    assert reason == "MPS is the GPU of a Mac with Apple silicon, and this is Linux"
    monkeypatch.setattr(inspection.platform, "system", lambda: "Darwin")
    assert "no MPS" in inspection._mps(_torch()).reason
    assert "no MPS device" in inspection._mps(_torch(mps=(True, False))).reason
    torch = _torch(mps=(True, True))
    assert inspection._mps(torch).num_devices == 1
    torch.mps = types.SimpleNamespace(recommended_max_memory=lambda: 11 << 30)
    assert inspection._mps(torch).memory_bytes == (11 << 30,)


def test_what_an_apple_gpu_can_do_is_by_its_chip(monkeypatch):
    monkeypatch.setattr(inspection.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(inspection.apple_chip, "name", lambda: "Apple M2 Pro")
    row = inspection._mps(_torch(mps=(True, True)))
    assert row.names == ("Apple M2 Pro GPU",)
    assert row.precisions["bf16"] == "Apple M2 Pro has no bf16 units: macOS emulates bf16, no faster than fp32"


def test_intel_gpus():
    assert inspection._xpu(_torch()).reason == "torch sees no Intel GPU: there is none, or its driver is missing"
    without = _torch()
    without.version.xpu = None
    assert inspection._xpu(without).reason == "this torch (9.9) is a build without XPU (Intel GPUs)"
    assert inspection._xpu(_torch(xpu=[("Max", 5)])).names == ("Max",)
    assert inspection._xpu(types.SimpleNamespace()).num_devices == 0  # torch before it knew them


def test_this_machine():
    rows = {row.kind: row for row in inspection.devices()}
    assert list(rows) == ["cuda", "mps", "xpu", "tpu", "npu", "hpu", "mlu", "musa", "cpu"]
    assert rows["cpu"].num_devices == num_cores()
    assert rows["cpu"].precisions["bf16"] == ""
    assert rows["cpu"].precisions["fp16"]
    assert all(row.num_devices or row.reason for row in rows.values())
