"""A model's whole weights from a checkpoint, on one process: for inference, or to hand on."""

from __future__ import annotations

import functools
import io
import pickle
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.core.errors import CheckpointError
from notebook_launcher.runtime import shards, storage, weights
from notebook_launcher.runtime.shards import Saved

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from notebook_launcher.runtime.shards import Place

_METADATA = ".metadata"
_PLAIN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}


def merge_checkpoint(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    model: str = "model",
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write the whole weights in ``folder`` to the folder ``output``, as ``save_model`` does; no rank is needed.

    ``folder`` is one that ``save_state`` wrote, on however many processes, or one of torch's distributed checkpoint,
    such as Accelerate's ``pytorch_model_fsdp_0`` or the folder that it is in. ``model`` is the name of its files,
    "model_1" for the second. Nothing in the files is executed. Raises ``CheckpointError`` where there is no such model,
    or a file is damaged.
    """
    folder = Path(folder).expanduser().resolve()
    number = model.rpartition("_")[2] if "_" in model else "0"
    inside = folder / f"pytorch_model_fsdp_{number}"
    if (folder / _METADATA).is_file() or (inside / _METADATA).is_file():
        saved: dict[str, Any] = _of_torch(folder if (folder / _METADATA).is_file() else inside)
    else:
        found = storage.locate(folder)
        facts = storage.checked(found)
        saved = shards.find(found, model)[1]
        if not saved:
            raise CheckpointError(
                f"{folder} holds no weights of {model!r} that can be put together: it was saved with strategy="
                f"{facts['strategy']!r} and has {', '.join(sorted(facts['files']))}. Name a model that is there; what "
                "DeepSpeed has written, load_state loads on as many processes, and save_model then writes it whole."
            )
    tensors: dict[int, torch.Tensor] = {}
    for one in saved.values():  # tied ones once
        if id(one) not in tensors:
            tensors[id(one)] = one.read() if isinstance(one, Saved) else one
    state = {name: tensors[id(one)] for name, one in saved.items() if isinstance(one, Saved | torch.Tensor)}
    weights.save_model(state, output, max_shard_size, safe=safe_serialization)


# --- torch's distributed checkpoint ----------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """Makes what a distributed checkpoint says of itself, of plain classes only."""

    def find_class(self, module: str, name: str) -> Any:
        """One of them, a dtype or a size."""
        is_plain = name in _PLAIN.get(module, ())
        if is_plain or (module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and nothing is executed")


def _of_torch(folder: Path) -> dict[str, Saved]:
    path = folder / _METADATA
    try:
        with path.open("rb") as file:
            told = _Unpickler(file).load()
        tensors = {name: one for name, one in told.state_dict_metadata.items() if hasattr(one, "chunks")}
        places = {(index.fqn, tuple(index.offset or ())): where for index, where in told.storage_data.items()}
        names = {name: tuple(map(str, (told.planner_data or {}).get(name, (name,)))) for name in tensors}
        inside = all(len(parts) > 1 and parts[0] == "model" for parts in names.values())
        found: dict[str, Saved] = {}
        for name, one in tensors.items():
            chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)): chunk for chunk in one.chunks}
            pieces = {key: _reader(folder, places[name, key[0]]) for key in chunks}
            key = ".".join(names[name][1:] if inside else names[name])
            found[key] = Saved(f"{name!r} in {folder}", tuple(one.size), pieces)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} can't be read: {error!r}") from error
    return found


def _reader(folder: Path, where: Any) -> Callable[[Place], torch.Tensor]:
    path = PurePath(where.relative_path)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"{folder / _METADATA} names {str(path)!r}, which is not in its folder")
    if getattr(where, "transform_descriptors", None):
        raise CheckpointError(f"{folder / path} is compressed by {where.transform_descriptors}, which is not read here")
    return functools.partial(_chunk, folder / path, where.offset, where.length)


def _chunk(path: Path, offset: int, length: int, wanted: Place) -> torch.Tensor:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            tensor: torch.Tensor = torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
        return tensor.detach()[wanted]
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} can't be read: {why}") from error
