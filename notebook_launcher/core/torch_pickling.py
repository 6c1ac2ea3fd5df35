"""Tensors out of band: their storages travel as buffers, each once, so that what shared memory shares it again.

Everything else about a tensor (views, strides, dtype, ``Parameter``, sparse layouts, subclasses) is torch's own
pickling, which asks only for the storage. Imported where torch is loaded already, or where a tensor arrives.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.core import origins

if TYPE_CHECKING:
    from collections.abc import Callable

_WITHOUT_STORAGE = ("xla", "maia", "mtia")
_rebuild_new_dtype: Any = torch._utils._rebuild_tensor_v3  # noqa: SLF001 - what a tensor's own pickling refers to
_Typed: Any = torch.storage.TypedStorage
_Untyped: Any = torch.UntypedStorage


class StorageReducer:
    """Reduces the storages of one pickle; ``to_kernel``: all arrive in host memory, and no device is touched there."""

    def __init__(self, *, to_kernel: bool) -> None:
        """Begin a pickle."""
        self._to_kernel = to_kernel
        # One Python object for each storage, since a pickle knows objects by identity.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def reducer_for(self, kind: type) -> Callable[[Any], Any] | None:
        """The method that reduces objects of type ``kind``, None where torch's own pickling is right."""
        if issubclass(kind, torch.UntypedStorage):
            return self.reduce_untyped
        if issubclass(kind, torch.storage.TypedStorage):
            return self.reduce_typed
        if issubclass(kind, torch.Tensor):
            return self.reduce_tensor
        return None

    def reduce_tensor(self, tensor: Any) -> Any:
        """As torch does, with two exceptions.

        A result on a device whose tensors have no storage (XLA) comes back as a host tensor. And torch (2.13 at least)
        can't read its own pickles of the newer dtypes, fp8 among them: it expects a storage of another kind.
        """
        if self._to_kernel and tensor.device.type in _WITHOUT_STORAGE:
            tensor = tensor.detach().cpu().requires_grad_(tensor.requires_grad)
        reduced = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if not isinstance(reduced, tuple):
            return reduced
        make, args, *rest = reduced
        args = tuple(new_dtype_tensor if arg is _rebuild_new_dtype else arg for arg in args)
        return (new_dtype_tensor if make is _rebuild_new_dtype else make, args, *rest)

    def reduce_typed(self, storage: Any) -> Any:
        """A storage with a dtype: the untyped one, and the dtype."""
        untyped = storage._untyped_storage  # noqa: SLF001 - the public accessor warns
        return typed, (self._storages.setdefault(untyped._cdata, untyped), storage.dtype)  # noqa: SLF001

    def reduce_untyped(self, storage: Any) -> Any:
        """Bytes, as a buffer without a copy; those of a device are copied to the host first."""
        first: Any = self._storages.setdefault(storage._cdata, storage)  # noqa: SLF001 - the storage's identity
        if first is not storage:
            return same, (first,)
        kind = storage.device.type
        if kind == "meta":
            return meta_storage, (storage.nbytes(),)
        host: Any = storage if kind == "cpu" else storage.cpu()
        arrive = host_storage if kind == "cpu" or self._to_kernel else device_storage
        return arrive, (_buffer(host),)


def _buffer(storage: Any) -> Any:
    size = storage.nbytes()
    if size == 0:
        return b""
    view: Any = (ctypes.c_ubyte * size).from_address(storage.data_ptr())
    view.storage = storage  # the memory lives as long as the buffer
    return pickle.PickleBuffer(view)


def own_device() -> torch.device:
    """Where this process puts what was on an accelerator: on its own current one, on the host where it has none."""
    named = origins.arrival_device.get()
    if named is not None:
        return torch.device(named)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Without an index a device means the current one of its kind.
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type)


def same(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Receiver: another Python object for a storage that has arrived."""
    return storage


def typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    """Receiver: the storage with its dtype."""
    return _Typed(wrap_storage=storage, dtype=dtype, _internal=True)


def new_dtype_tensor(storage: Any, *args: Any) -> Any:
    """Receiver: a tensor of a dtype that pickles as bytes."""
    return _rebuild_new_dtype(typed(storage, torch.uint8), *args)


def host_storage(buffer: Any) -> Any:
    """Receiver: a storage over ``buffer``, without a copy."""
    if memoryview(buffer).nbytes == 0:
        return _Untyped(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def device_storage(buffer: Any) -> Any:
    """Receiver: the bytes on the process's own device."""
    host, device = host_storage(buffer), own_device()
    if device.type == "cpu":
        return host
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(host).to(device).untyped_storage()


def meta_storage(size_bytes: int) -> Any:
    """Receiver: a storage that has a size and no bytes."""
    return _Untyped(size_bytes, device="meta")
