"""Models' weights in files: safetensors, in the layout that ``transformers`` reads, tied tensors kept once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.core.errors import CheckpointError, ConfigError
from notebook_launcher.runtime import storage

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

_CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_CODES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL"}
_CODES |= {torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"}
_CODES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}IB": 1024**n for n, p in enumerate("KMGT", 1)}

Tensors = dict[str, torch.Tensor]


def check(path: Path, state: Mapping[str, Any], own: Mapping[str, Any], kind: str, *, strict: bool) -> None:
    """Raise ``CheckpointError`` where ``state``, from ``path``, doesn't fit ``own``, the state of a model ``kind``."""
    lacking, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if strict and (lacking or unknown):
        raise CheckpointError(
            f"{path} doesn't fit the model, a {kind}: it lacks {lacking}, and has {unknown} that the "
            "model lacks. Prepare the model that was saved, or load_state(..., strict=False) takes what there is."
        )
    for key in own.keys() & state.keys():
        saved, wanted = (getattr(one[key], "shape", None) for one in (state, own))
        if saved != wanted and key.rpartition(".")[2] != "_extra_state":  # which a module may have of any size
            raise CheckpointError(
                f"{path} doesn't fit the model, a {kind}: {key!r} has the shape {_shape(saved)} there, "
                f"and {_shape(wanted)} in the model"
            )


def save_model(
    state: Mapping[str, Any], folder: str | os.PathLike[str], max_shard_size: int | str = "10GB", *, safe: bool = True
) -> None:
    """``state`` in ``folder``, in files of at most ``max_shard_size``, with an index where there are several.

    Each file appears whole or not at all; files of an earlier, larger set are removed. Raises ``ConfigError`` for a
    folder of ``save_state``, whose files have these names.
    """
    if (Path(folder) / storage.MANIFEST).exists():
        raise ConfigError(
            f"save_model({str(folder)!r}) would replace files of the checkpoint that is there, which could then not be "
            "loaded; name another folder"
        )
    draft = storage.Draft(Path(folder), in_place=True)
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    tensors, aliases = untied(state) if safe else (dict(state), {})
    shards = list(_shards(tensors, num_bytes(max_shard_size)))
    files = [f"{stem}-{i:05}-of-{len(shards):05}.{suffix}" for i in range(1, len(shards) + 1)]
    files = files if len(files) > 1 else [f"{stem}.{suffix}"]
    for file, shard in zip(files, shards, strict=True):
        if safe:
            write(draft, file, shard, {old: kept for old, kept in aliases.items() if kept in shard})
        else:
            draft.objects(file, shard)
    if len(files) > 1:
        places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(map(_size, tensors.values()))}, "weight_map": places}
        files.append(f"{stem}.{suffix}.index.json")
        draft.put(files[-1], [json.dumps(index, indent=1).encode()])
    ours = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}(\.index\.json)?")
    for path in Path(folder).iterdir():
        if ours.fullmatch(path.name) and path.name not in files:
            path.unlink()


def save_object(thing: Any, path: str | os.PathLike[str], *, safe: bool = False) -> None:
    """``thing`` in the file ``path``, which appears whole or not at all; ``safe``: a state in safetensors."""
    path = Path(path)
    draft = storage.Draft(path.parent, in_place=True)
    if safe:
        write(draft, path.name, *untied(thing))
    else:
        draft.objects(path.name, thing, of_any_kind=True)


def num_bytes(size: int | str) -> int:
    """``size`` in bytes: a number, or one with a unit, "10GB" (of 1000) or "5GiB" (of 1024)."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(\w*)\s*", str(size))
    unit = _UNITS.get(found[2].upper()) if found else None
    size_bytes = int(float(found[1]) * unit) if found and unit else 0
    if size_bytes < 1:
        raise ConfigError(f"max_shard_size={size!r} is no size; give bytes, or a text such as '10GB'")
    return size_bytes


def untied(state: Mapping[str, Any]) -> tuple[Tensors, dict[str, str]]:
    """The tensors of ``state``, those that share memory once; and under which name the others are found."""
    kept: dict[Any, str] = {}
    tensors: Tensors = {}
    aliases: dict[str, str] = {}
    for name, value in state.items():
        is_reserved = name == "__metadata__"
        if is_reserved or not is_plain(value):
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            kind = "name that the format has taken" if is_reserved else kind
            raise ConfigError(
                f"{name!r} in the model's state, a {kind}, can't be in a safetensors file; pass "
                "safe_serialization=False"
            )
        memory = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        place: Any = memory if value.numel() and value.data_ptr() else name  # XLA's tensors all say 0
        if place in kept:
            aliases[name] = kept[place]
        else:
            kept[place] = name
            tensors[name] = value
    return tensors, aliases


def is_plain(value: Any) -> bool:
    """Whether a safetensors file can hold it."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype in _CODES


def _shards(tensors: Tensors, max_bytes: int) -> Iterator[Tensors]:
    shard: Tensors = {}
    total = 0
    for name, tensor in tensors.items():
        if shard and total + _size(tensor) > max_bytes:
            yield shard
            shard, total = {}, 0
        shard[name] = tensor
        total += _size(tensor)
    yield shard


def _size(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _shape(shape: Any) -> Any:
    return shape if shape is None else tuple(shape)


def write(draft: storage.Draft, file: str, tensors: Tensors, aliases: Mapping[str, str]) -> None:
    """``tensors`` as a safetensors file, with ``aliases`` in its metadata.

    The format is a few lines; the package's own writer takes no open file, and copies every tensor before.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **aliases}}
    stop = 0
    for name, tensor in tensors.items():
        start, stop = stop, stop + _size(tensor)
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    draft.put(file, [len(text).to_bytes(8, "little") + text, *tensors.values()])
