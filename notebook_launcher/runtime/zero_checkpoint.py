"""DeepSpeed's own checkpoint files, in a folder of ours; its pickles are read without executing anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.core.errors import CheckpointError
from notebook_launcher.runtime import shards

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from notebook_launcher.runtime.process import Process


def full_state(module: nn.Module) -> dict[str, Any]:
    """The whole state of ``module``, spread or not; every rank calls it."""
    return shards.full_state(module, _gathered)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    if not hasattr(tensor, "ds_id"):
        return tensor
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()


def save(engine: Any, folder: Path, name: str) -> None:
    """Write what this rank has of ``engine``."""
    engine.save_checkpoint(str(folder), tag=_tag(name), save_latest=False)


def check(stage: int, folder: Path, name: str, process: Process) -> None:
    """Raise ``CheckpointError`` where ``load`` would not find what it needs, with nothing changed."""
    place = folder / _tag(name)
    ranks = len(list(place.glob("*zero_pp_rank_*_optim_states.pt")))
    if not place.is_dir():
        raise CheckpointError(f"{folder} holds no files of DeepSpeed for {name!r}; prepare what was saved, in order")
    if bool(ranks) != bool(stage):
        kinds = {True: "a ZeRO stage from 1 to 3", False: "ZeRO stage 0"}
        raise CheckpointError(
            f"{place} was saved with {kinds[bool(ranks)]}, and this run has stage {stage}; launch with the stage that "
            "saved it"
        )
    if stage and ranks != process.num_processes:
        raise CheckpointError(
            f"{place} was saved by {ranks} processes, and this run has {process.num_processes}: ZeRO's files are each "
            f"rank's share. Launch with num_processes={ranks}, and save_model there for weights alone. DeepSpeed's own "
            "way is\n"
            f"    python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {place} "
            "--output_folder <new folder>\nand its own load_checkpoint with {'checkpoint': {'load_universal': True}}, "
            "which executes what is in the files, as load_state never does."
        )
    if not stage:
        return
    own = f"*zero_pp_rank_{process.rank}_mp_rank_*_optim_states.pt"
    path = next(place.glob(own), None)
    if path is None:
        raise CheckpointError(f"{place} lacks the share of rank {process.rank}, {own}. Load another checkpoint.")
    saved = read(path).get("optimizer_state_dict", {}).get("zero_stage")
    if saved is not None and int(saved) != stage:
        raise CheckpointError(f"{place} was saved with ZeRO stage {int(saved)}, and this run has {stage}; use that one")


def load(engine: Any, folder: Path, name: str, *, strict: bool) -> None:
    """Take up what ``save`` wrote."""
    engine.checkpoint_engine.load = read
    path, _ = engine.load_checkpoint(str(folder), tag=_tag(name), load_module_strict=strict)
    if path is None:
        raise CheckpointError(f"{folder / _tag(name)} can't be loaded: DeepSpeed finds no checkpoint in it")


def read(path: Any, map_location: Any = "cpu") -> Any:
    """A file of DeepSpeed; only its own plain classes are made, nothing is executed."""
    try:
        with torch.serialization.safe_globals(_plain_classes()):
            return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} can't be read without executing pickle: {why}. Load another checkpoint."
        ) from error


def _plain_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def _tag(name: str) -> str:
    return f"{name}.deepspeed"
