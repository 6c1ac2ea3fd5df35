"""Pickles that carry notebook code by value and big buffers out of band.

``dumps`` is for the way to a worker: code of ``__main__`` runs there in the worker's own ``__main__``, so that all of
it shares one namespace. ``dumps_result`` and ``dump_error`` are for the way back: what came from the kernel returns to
it by name, so that the kernel's classes and functions are the same as before, and untouched. ``loads`` reads either.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import os
import pickle
import sys
import types
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle  # type: ignore[import-untyped]
from cloudpickle import cloudpickle as internals

from notebook_launcher.core import named_pickling, origins, refusals, sources
from notebook_launcher.core.error_pickling import reduce_error
from notebook_launcher.core.importable import is_importable
from notebook_launcher.core.shared_memory import Packed, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Receiver = Literal["worker", "kernel", "child"]  # "child": a process that a worker starts

_IN_BAND_BYTES = 16 * 1024  # below this a buffer of its own costs more than the copy it saves
_CODE_REDUCTION = 6  # items of a reduction that has a state setter, as cloudpickle makes for code by value
_LOST_FILENAME = (
    "<dynamic-code>"  # what cloudpickle 3.1.3 puts in place of a code object's file (cloudpipe/cloudpickle#560)
)
_PACKAGE_ATTRIBUTES = ("__package__", "__path__", "__file__")
_NOT_STATE = ("__builtins__", "__loader__", "__spec__", "__cached__")


@dataclasses.dataclass(frozen=True)
class Dumped:
    """A packed value, and what is known from pickling it."""

    packed: Packed
    sources: dict[str, str]  # texts of the cells that its code was made in
    sent: tuple[Any, ...]  # code that went by value: kept, it is found again when a result refers to it
    reloaded: tuple[str, ...]  # classes that are no longer what their module holds, and so went by value


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: Any, to: Receiver, callback: Callable[[pickle.PickleBuffer], object] | None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=callback)
        self.to = to
        self.chained = True
        self.code_files: set[str] = set()
        self.sent: list[Any] = []
        self.reloaded: set[str] = set()
        self._reducers: dict[type, Callable[[Any], Any] | None] = {}
        if to != "kernel":
            self.globals_ref[id(sys.modules["__main__"].__dict__)] = origins.Namespace("__main__")

    def dump(self, obj: Any) -> None:
        try:
            super().dump(obj)
        finally:
            self._reducers.clear()  # they hold this pickler, which holds all that it has pickled
            self.__dict__.pop("_own", None)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind not in self._reducers:
            self._reducers[kind] = self._choose(kind)
        reduce = self._reducers[kind]
        return NotImplemented if reduce is None else reduce(obj)

    def _choose(self, kind: type) -> Callable[[Any], Any] | None:
        reduce = next((self._own[base] for base in kind.__mro__ if base in self._own), None)
        rule = refusals.rule_of(kind)
        if reduce is None and rule is not None and rule.refused:
            reduce = functools.partial(refusals.refuse, is_result=self.to == "kernel")
        if reduce is None and "torch" in sys.modules and any(_is_torch(base) for base in kind.__mro__):
            reduce = self._storages.reducer_for(kind)
        return reduce

    @functools.cached_property
    def _own(self) -> dict[type, Callable[[Any], Any]]:
        return {
            type: self._reduce_class,
            types.ModuleType: self._reduce_module,
            types.FunctionType: self._reduce_function,
            types.CodeType: self._reduce_code,
            types.MethodType: self._reduce_process_object,
            type(sys.stdout): self._reduce_process_object,
            type(sys.stderr): self._reduce_process_object,
            BaseException: functools.partial(reduce_error, chained=self.chained),
            **named_pickling.PARTS,
            **dict.fromkeys(named_pickling.NAMED_PARTS, self._reduce_named),
        }

    @functools.cached_property
    def _storages(self) -> Any:
        from notebook_launcher.core.torch_pickling import StorageReducer

        return StorageReducer(to_kernel=self.to == "kernel")

    def _reduce_class(self, cls: type) -> Any:
        if self.to == "kernel" and (known := origins.reference(cls)) is not None:
            return known
        if _is_stranded(cls):
            reduced = internals._dynamic_class_reduce(cls)  # noqa: SLF001 - there is no public way
        else:
            reduced = super().reducer_override(cls)
            if not isinstance(reduced, tuple) or len(reduced) != _CODE_REDUCTION:
                return reduced
            if cls.__module__ != "__main__" and isinstance(_namesake(cls), type):
                self.reloaded.add(f"{cls.__module__}.{cls.__qualname__}")
        if self.to != "kernel":
            return self._by_value(cls, reduced)
        origins.made_here(cls)
        make, args, state, _, _, set_state = reduced
        return make, args, (set_state, state), None, None, origins.receive_made_class

    def _reduce_function(self, function: types.FunctionType) -> Any:
        if self.to == "kernel":
            known = origins.reference(function)
            return super().reducer_override(function) if known is None else known
        if _is_stranded(function):
            self._share_namespace(sys.modules[function.__module__], function)
            reduced = self._dynamic_function_reduce(function)
        else:
            reduced = super().reducer_override(function)
        return self._by_value(function, reduced) if isinstance(reduced, tuple) else reduced

    def _share_namespace(self, module: types.ModuleType, function: types.FunctionType) -> None:
        space = module.__dict__
        if function.__globals__ is space and id(space) not in self.globals_ref:
            attributes = {name: space[name] for name in _PACKAGE_ATTRIBUTES if name in space}
            self.globals_ref[id(space)] = origins.Namespace(module.__name__, attributes)

    def _by_value(self, code: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        make, args, state, _, _, set_state = reduced
        key = ""
        if self.to == "worker":
            self.sent.append(code)
            key = origins.key_for(code)
        return make, args, (key, origins.bound_name(code), set_state, state), None, None, origins.receive

    def _reduce_named(self, value: Any) -> Any:
        if named_pickling.is_held(value) and not _is_stranded(value):
            return NotImplemented
        if self.to == "kernel" and (known := origins.reference(value)) is not None:
            return known
        make, args = named_pickling.NAMED_PARTS[type(value)](value)
        if self.to == "kernel":
            return make, args
        return self._by_value(value, (make, args, None, None, None, origins.leave))

    def _reduce_code(self, code: types.CodeType) -> Any:
        self.code_files.add(code.co_filename)
        make, args = self.dispatch_table[types.CodeType](code)
        if _LOST_FILENAME in args:
            args = tuple(code.co_filename if isinstance(a, str) and a == _LOST_FILENAME else a for a in args)
        return make, args

    def _reduce_module(self, module: types.ModuleType) -> Any:
        name = module.__name__
        registered = sys.modules.get(name) is module
        if registered and is_importable(name):
            return importlib.import_module, (name,)
        if self.to == "kernel" and (known := origins.reference(module)) is not None:
            return known
        key = ""
        if self.to == "worker":
            self.sent.append(module)
            key = origins.key_for(module)
        state = {k: v for k, v in module.__dict__.items() if k not in _NOT_STATE}
        make = origins.named_module if registered and self.to != "kernel" else types.ModuleType
        return make, (name,), (key, state), None, None, origins.receive_module

    def _reduce_process_object(self, obj: Any) -> Any:
        """Standard streams and ``get_ipython`` are the receiver's own."""
        for name in ("stdout", "stderr"):
            if obj is getattr(sys, name):
                return getattr, (sys, name)
        if isinstance(obj, types.MethodType):
            shell = refusals.rule_of(type(obj.__self__))
            if obj.__name__ == "get_ipython" and shell is not None and shell.name == "InteractiveShell":
                return getattr, (sys.modules["IPython"], "get_ipython")
            return NotImplemented
        rule = refusals.rule_of(type(obj))
        return refusals.refuse(obj, is_result=self.to == "kernel") if rule is not None else NotImplemented


def _is_torch(kind: type) -> bool:
    return isinstance(kind.__module__, str) and kind.__module__.partition(".")[0] == "torch"


def _namesake(cls: type) -> Any:
    """What the class's module holds under the class's name."""
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None)


def _is_stranded(code: Any) -> bool:
    """Tell whether a function or class belongs to a module that this process has and a worker can't import."""
    name = code.__module__
    return isinstance(name, str) and name != "__main__" and name in sys.modules and not is_importable(name)


def travels_by_value(code: Any) -> bool:
    """Tell whether a function or class is sent as what it is, and not as the name of something to import."""
    if not isinstance(code, types.FunctionType | type) or code.__module__ == "builtins":
        return False
    return _is_stranded(code) or not internals._should_pickle_by_reference(code)  # noqa: SLF001 - no public way


def captured_globals(function: types.FunctionType) -> dict[str, Any]:
    """The globals that ``function``, and the functions made inside it, refer to: those that travel with it."""
    names: Iterable[str] = internals._extract_code_globals(function.__code__)  # noqa: SLF001 - exactly what is sent
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def dump(value: Any, *, to: Receiver = "worker", chained: bool = True) -> Dumped:
    """Pickle ``value``: a large buffer is copied once, into the mapping. ``chained`` False leaves causes of errors out.

    Raises what the objects' own pickling raises, ``refusals.RefusedError`` for one that belongs to this process.
    """
    buffers: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _IN_BAND_BYTES:
            return True
        buffers.append(view)
        return False

    stream = io.BytesIO()
    pickler = _Pickler(stream, to, take)
    pickler.chained = chained
    pickler.dump(value)
    packed = pack(stream.getvalue(), buffers)
    return Dumped(packed, sources.collect(pickler.code_files), tuple(pickler.sent), tuple(sorted(pickler.reloaded)))


def dumps(value: Any) -> Packed:
    """Pickle ``value`` for a worker; raises as ``dump`` does."""
    return dump(value).packed


def dumps_result(value: Any) -> Packed:
    """Pickle ``value`` on a worker, for the kernel; raises as ``dump`` does."""
    return dump(value, to="kernel").packed


def loads(packed: Packed, *, device: str | None = None) -> Any:
    """Unpickle. Arrays and tensors are writable, and a write stays in this process.

    What was on an accelerator arrives on ``device``, or where that is None on this process's current accelerator.
    Results are in host memory in any case: reading them touches no device.
    """
    stream, buffers = unpack(packed)
    token = origins.arrival_device.set(device)
    try:
        return pickle.loads(stream, buffers=buffers)
    finally:
        origins.arrival_device.reset(token)


class _Counter:
    """A file that only counts."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.num_bytes += size
        return size


def measure(value: Any) -> int:
    """Bytes of ``value``'s pickle and buffers, without making a copy of them; raises as ``dump`` does."""
    counter = _Counter()

    def count(buffer: pickle.PickleBuffer) -> None:
        counter.num_bytes += buffer.raw().nbytes

    _Pickler(counter, "worker", count).dump(value)
    return counter.num_bytes


# --- exceptions -----------------------------------------------------------------------------------------------------


def dump_error(error: BaseException) -> Packed | None:
    """Pickle what a rank raised, for the kernel; None where that can't be done.

    Its causes, context, notes and group come along; where one of the causes can't be pickled, the exception goes alone.
    """
    return _checked_dump(error, chained=True) or _checked_dump(error, chained=False)


def _checked_dump(error: BaseException, *, chained: bool) -> Packed | None:
    try:
        packed = dump(error, to="kernel", chained=chained).packed
        back = loads(packed)
    except Exception:  # noqa: BLE001 - the exception's own pickling code; its text travels beside it in any case
        return None
    return packed if type(back) is type(error) else None


def load_error(packed: Packed) -> BaseException:
    """The exception that ``dump_error`` packed, without a traceback."""
    error = loads(packed)
    if not isinstance(error, BaseException):
        msg = f"{type(error).__name__} is not an exception"
        raise TypeError(msg)
    return error


# --- processes that a worker starts -----------------------------------------------------------------------------------

_worker_pid = 0


def by_value_in_children() -> None:
    """Make ``multiprocessing`` send code that can't be imported by value from this process to those it starts.

    So loader workers (``spawn`` and ``forkserver``), ``multiprocessing`` pools and ``concurrent.futures`` find the
    notebook's functions and classes. Called in a worker, once.
    """
    global _worker_pid  # noqa: PLW0603 - what multiprocessing does is a process-wide setting in itself
    from multiprocessing import reduction, spawn

    if not _worker_pid:
        spawn.get_preparation_data = _without_main(spawn.get_preparation_data)  # type: ignore[assignment]
        reduction.ForkingPickler.reducer_override = _reduce_for_child  # type: ignore[method-assign]
    _worker_pid = os.getpid()


def _without_main(prepare: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """Keep children from running the notebook's script again, where a function that uses ``__file__`` brought it."""

    @functools.wraps(prepare)
    def preparation_data(name: str) -> dict[str, Any]:
        data = prepare(name)
        return {key: value for key, value in data.items() if not key.startswith("init_main_from")}

    return preparation_data


def _reduce_for_child(_pickler: object, obj: Any) -> Any:
    # A child answers with plain pickle: by then its classes have names in __main__, as they have here.
    if os.getpid() != _worker_pid or not travels_by_value(obj):
        return NotImplemented
    stream = io.BytesIO()
    pickler = _Pickler(stream, "child", None)
    pickler.dump(obj)
    return load_in_child, (stream.getvalue(), sources.collect(pickler.code_files))


def load_in_child(stream: bytes, texts: dict[str, str]) -> Any:
    """Receiver: code from the worker that started this process."""
    sources.install(texts)
    return pickle.loads(stream)
