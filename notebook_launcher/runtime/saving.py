"""What ``Accelerator`` has for saving and resuming; the work is done in ``checkpoint`` and ``weights``."""

# ruff: noqa: FBT001, FBT002 - positional booleans where Accelerate has them

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import checks, weights
from notebook_launcher.runtime.skipping import skip_first_batches

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from notebook_launcher.runtime.checkpoint import Checkpoints
    from notebook_launcher.runtime.strategies import Strategy


class Saving:
    """Checkpoints and model files. Whoever inherits sets ``_checkpoints`` and ``_strategy``."""

    _checkpoints: Checkpoints
    _strategy: Strategy
    skip_first_batches = staticmethod(skip_first_batches)

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint that is named automatically."""
        return self._checkpoints.project.iteration

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        sharded: bool | None = None,
        async_: bool = False,
        **save_kwargs: Any,
    ) -> str:
        """Save all that a run needs to go on as if it had never stopped; return the folder. Every process calls it.

        Models, optimizers, schedulers, fp16 loss scales, every process's random numbers and places in its loaders, and
        what was registered. Models are in safetensors, or with ``safe_serialization`` False as torch saves them.
        Called in a loop over a prepared loader, what is saved is the place after the batch at hand, and so where an
        exception that has ended the loop is handled (``except KeyboardInterrupt``). After ``break``, whose next pass is
        the next epoch, so is the one after loading, but for ``skip_first_batches`` of all that was handed out and
        ``set_epoch`` of that epoch, which give its rest.

        The folder is replaced in one step: whatever happens, either the checkpoint that was there before can be loaded,
        or this one. Without ``output_dir`` it is ``checkpoints/checkpoint_<n>`` in the project's folder. Raises
        ``CheckpointError``, the same on all processes, where it can't be written.

        ``sharded``, where processes have parts of a model: True, each writes its own; False, all is written whole;
        None, as the strategy is set up. Either can be loaded by any number of processes and by any strategy but
        DeepSpeed's, whose files are its own.

        ``async_``: a thread writes it while training goes on; the folder is what it was until all is written.
        ``wait_for_save``, the next ``save_state``, ``load_state`` or ``end_training``, and the end of the process wait
        for it; there an error is raised. The memory of the copy is kept for the next one. What DeepSpeed and hooks
        write is written before it returns. Everything is copied before that, but for the state of optimizers on the
        CPU, for which their next step waits, as does the prepared optimizer's ``state``. Code that holds a tensor of it
        and changes it sooner has the save fail, or, by its ``.data``, what is saved may be wrong.
        """
        _refuse("save_state", save_kwargs)
        checks.flags(safe_serialization=safe_serialization, sharded=sharded, async_=async_)
        return self._checkpoints.save(output_dir, safe=safe_serialization, sharded=sharded, in_background=async_)

    def wait_for_save(self) -> None:
        """Wait until ``save_state(async_=True)`` has written its checkpoint. Every process calls it.

        Raises ``CheckpointError``, on all processes, where it could not.
        """
        self._checkpoints.wait("wait_for_save")

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
        skip_random_states: bool = False,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Go on from the checkpoint in ``input_dir``, or the newest good one of those named automatically.

        What was saved in a loop goes on there by itself: the next pass over the loader is the rest of that epoch (see
        ``loader.batches_seen``). What was handed out is read again and dropped, so that random numbers come as they
        would have; ``skip_first_batches`` does without. Call it when everything is prepared, in the order of the run
        that saved. Nothing in the files is ever executed, and nothing is changed before all of them were checked.

        On the CPU the run goes on bit for bit, on as many processes. DDP on three and more exchanges gradients as it
        did where the model was not trained before, and has no ``static_graph``, communication hook, sparse gradients
        or hooks of others on its parameters; else the first step may round sums otherwise.

        ``strict`` False takes what fits of models. ``skip_random_states`` leaves random numbers as they are, where
        those saved are damaged or incomplete. Raises ``CheckpointError`` for a folder that holds no checkpoint, a file
        that is damaged, or one that doesn't fit. Warns of what can't be kept, as with another number of processes.
        """
        _refuse("load_state", {**(load_kwargs or {}), **load_model_func_kwargs}, map_location=None, weights_only=True)
        checks.flags(strict=strict, skip_random_states=skip_random_states)
        self._checkpoints.load(input_dir, strict=strict, skip_random_states=skip_random_states)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have ``save_state`` keep ``objects`` too: each has ``state_dict()`` and ``load_state_dict(state)``.

        It is rank 0's state that all processes load. Raises ``ConfigError`` for objects that lack one of the two,
        and ``TypeError`` for a class, whose objects have them.
        """
        for one in objects:
            if isinstance(one, type):
                raise checks.wrong_type("register_for_checkpointing", one, "objects, not their class")
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., object]) -> RemovableHandle:
        """Have ``save_state`` first call ``hook(models, weights, output_dir)``, on every process.

        It may write files of its own there, and take the models' states out of the list ``weights``, which are then not
        saved. That list is empty where ranks have parts of the models (FSDP, ZeRO, tensor and pipeline parallel), which
        are saved in any case. ``.remove()`` of what is returned takes it back.
        """
        checks.function("register_save_state_pre_hook", hook)
        return _kept(hook, self._checkpoints.save_hooks)

    def register_load_state_pre_hook(self, hook: Callable[..., object]) -> RemovableHandle:
        """Have ``load_state`` first call ``hook(models, input_dir)``, when the files are checked.

        It may take models that it loads itself out of the list ``models``, which is empty where ranks have parts of
        them. ``.remove()`` takes it back.
        """
        checks.function("register_load_state_pre_hook", hook)
        return _kept(hook, self._checkpoints.load_hooks)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state of a prepared model, under the names of the module that was given to ``prepare``."""
        del unwrap  # the names of a wrapper are of no use to anyone
        checks.instance("get_state_dict", model, nn.Module, "a model")
        return self._strategy.full_state(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write ``model`` as ``transformers`` reads it: ``model.safetensors``, or numbered files with an index.

        A file has at most ``max_shard_size``, in bytes or such as "500MB", "2GiB"; tied weights are kept once.
        """
        checks.instance("save_model", model, nn.Module, "a model")
        checks.flags(safe_serialization=safe_serialization)
        weights.num_bytes(max_shard_size)  # before the ranks bring the whole model together
        state = self._strategy.full_state(model)
        if self._checkpoints.writes:
            weights.save_model(state, save_directory, max_shard_size, safe=safe_serialization)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write ``obj`` to the file ``f`` as ``torch.save`` does, from rank 0; the file appears whole or not at all.

        ``safe_serialization``: a dictionary of tensors, as safetensors.
        """
        checks.flags(safe_serialization=safe_serialization)
        if self._checkpoints.writes:
            weights.save_object(obj, f, safe=safe_serialization)


def _kept(hook: Callable[..., object], hooks: dict[int, Callable[..., object]]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _refuse(call: str, given: Mapping[str, Any], **without_effect: Any) -> None:
    """Raise ``ConfigError`` for keywords of torch that would change what is saved or loaded."""
    for name, value in given.items():
        if name not in without_effect or without_effect[name] not in {None, value}:
            raise ConfigError(
                f"{call}({name}={value!r}) is not supported, and is not ignored: checkpoints have a form of their own, "
                "and nothing in them is ever executed; leave it out"
            )
