"""``save_state`` and ``load_state``: what a run needs to go on as if it had never stopped, in one folder.

::

    checkpoint.json        what is here, and each file's size and crc32: written last
    model.safetensors      (model_1 ...)  optimizer.safetensors  or parts, as ``shards`` says
    optimizer.bin          the groups' options  scheduler.bin  scaler.pt  custom_checkpoint_0.pkl
    random_states_0.pkl    every rank's random numbers
    loaders_0.bin          every rank's places in its loaders

Rank 0 writes them, with ``save_on_each_node`` the first rank of each machine, from what all ranks have told it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import pickle
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_launcher.core import endings, notices
from notebook_launcher.core.errors import CheckpointError, ConfigError
from notebook_launcher.runtime import folders, randomness, staging, storage
from notebook_launcher.runtime.together import together

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from notebook_launcher.runtime.accumulation import Accumulation
    from notebook_launcher.runtime.data import PreparedLoader
    from notebook_launcher.runtime.groups import Groups
    from notebook_launcher.runtime.loss_scaling import LossScaling
    from notebook_launcher.runtime.optim import PreparedOptimizer, PreparedScheduler
    from notebook_launcher.runtime.plugins import ProjectConfiguration
    from notebook_launcher.runtime.process import Process
    from notebook_launcher.runtime.strategies import Strategy

_T = TypeVar("_T")
_RANDOM = "random_states_"


@dataclasses.dataclass
class _Found:
    """What was read of a checkpoint."""

    acts: list[Callable[[], object]] = dataclasses.field(default_factory=list)  # they put it in its place
    registered: list[Any] = dataclasses.field(default_factory=list)  # the states of what was registered
    lost: list[str] = dataclasses.field(default_factory=list)  # what can't be kept


@dataclasses.dataclass
class Checkpoints:
    """An accelerator's: what it has prepared (its own lists, which grow), and what was registered."""

    process: Process
    strategy: Strategy
    precision: str
    project: ProjectConfiguration
    models: list[tuple[nn.Module, nn.Module]]
    optimizers: list[PreparedOptimizer]
    schedulers: list[PreparedScheduler]
    loaders: list[PreparedLoader]
    accumulation: Accumulation
    groups: Groups
    registered: list[Any] = dataclasses.field(default_factory=list)
    save_hooks: dict[int, Callable[..., object]] = dataclasses.field(default_factory=collections.OrderedDict)
    load_hooks: dict[int, Callable[..., object]] = dataclasses.field(default_factory=collections.OrderedDict)
    _pending: staging.Background | None = None  # the latest save in the background
    _memory: staging.Memory = dataclasses.field(default_factory=staging.Memory)
    _guard: staging.Guard = dataclasses.field(default_factory=staging.Guard)

    @property
    def writes(self) -> bool:
        """Whether this rank writes what all have in full."""
        return self.process.rank == 0 or (self.project.save_on_each_node and self.process.world.local_rank == 0)

    def register(self, objects: Iterable[Any]) -> None:
        """Keep the state of ``objects`` too; ``ConfigError`` for those that have none."""
        objects, methods = list(objects), ("state_dict", "load_state_dict")
        wrong = [repr(one) for one in objects if not all(callable(getattr(one, name, None)) for name in methods)]
        if wrong:
            raise ConfigError(
                "register_for_checkpointing takes objects that have state_dict() and load_state_dict(), and was given "
                f"{', '.join(wrong)}; put a plain value into a class that has them"
            )
        self.registered += [one for one in objects if not any(one is other for other in self.registered)]

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(
        self, output_dir: str | os.PathLike[str] | None, *, safe: bool, sharded: bool | None, in_background: bool
    ) -> str:
        """Write a checkpoint, and return its folder; ``CheckpointError`` on every rank where one could not."""
        self._refuse_no_folder("save_state", output_dir)
        self.wait("save_state")
        if self.process.rank == 0 and any(group.is_unfinished for group in self.groups.values()):
            notices.warn(
                "save_state was called within an accumulation group, and the gradients collected so far are not saved: "
                "a run that resumes begins a new group there. Call it where accelerator.sync_gradients is True."
            )
        told = together("save_state", lambda: (self._new_folder(output_dir), self._of_this_rank(), uuid.uuid4().hex))
        (folder, _, name), ranks = told[0], [state for _, state, _ in told]
        call = f"save_state to {folder}"
        if in_background:
            self._memory.reset(self._guard.over(self.optimizers, (prepared for _, prepared in self.models)))
        memory = self._memory if in_background else None
        draft = storage.Draft(folder, writes=self.writes, sharded=sharded, memory=memory)
        begun = staging.Background(draft, self.process.rank, self._guard)

        def write() -> tuple[int, staging.Files]:
            num_models = self._write(draft, ranks, safe=safe)
            begun.claim()
            return num_models, draft.files

        try:
            together(call, lambda: draft.begin() if draft.writes else None)
            written = together(call, write)
            commit = functools.partial(self._commit, draft, self._facts(folder, written[0][0], name))
            if in_background:
                self._pending = begun
                endings.register(self._at_end)
                begun.start(commit)
            else:
                files = dict(item for _, files in written for item in files.items())
                together(call, lambda: commit(files) if draft.writes else None)
        except CheckpointError:
            begun.give_up()
            draft.discard()
            raise
        if output_dir is None:
            self.project.iteration = folders.number(folder) + 1
        return str(folder)

    def wait(self, call: str | None = None) -> None:
        """Wait for a save in the background; ``CheckpointError`` where this rank couldn't.

        With ``call``, which every rank makes, every rank raises it.
        """
        endings.unregister(self._at_end)
        if self._pending is None:
            return
        if call is None:
            self._pending.result()
            return
        pending = self._pending
        try:
            together(call, pending.result)
        finally:
            self._pending = pending if pending.is_running else None  # whoever waits may be interrupted

    def _at_end(self, failed: bool) -> None:  # noqa: ARG002, FBT001 - core.endings calls it
        self.wait()

    def forget(self) -> None:
        """Give back the memory of saves in the background, when the latest is done with it."""
        self._memory = staging.Memory()

    def _refuse_no_folder(self, call: str, folder: object) -> None:
        if folder is None and not self.project.automatic_checkpoint_naming:
            raise ConfigError(
                f"{call}() was given no folder; name one, or have folders numbered by Accelerator(project_config="
                "ProjectConfiguration(project_dir, automatic_checkpoint_naming=True))"
            )

    def _new_folder(self, output_dir: str | os.PathLike[str] | None) -> Path:
        """Where to save; with automatic naming it never takes the place of another."""
        if output_dir is not None:
            folder = Path(output_dir).expanduser().resolve()
            if folder == folder.parent:
                raise ConfigError(f"{output_dir} can't be replaced as a whole; name a folder in it")
            return folder
        taken = [folders.number(folder) + 1 for folder in folders.numbered(self._home())]
        return self._home() / f"checkpoint_{max([self.project.iteration, *taken])}"

    def _home(self) -> Path:
        return (Path(self.project.project_dir or ".") / "checkpoints").resolve()

    def _of_this_rank(self) -> bytes:
        """Pickled here, where an error can be told to the other ranks."""
        return pickle.dumps((randomness.snapshot(self.process.device), [loader.place() for loader in self.loaders]))

    def _scalings(self) -> list[LossScaling]:
        windows = [self.accumulation.alone, *self.groups.values()]
        return [window.scaling for window in windows if window.scaling is not None]

    def _write(self, draft: storage.Draft, ranks: list[bytes], *, safe: bool) -> int:
        """Write all but the manifest; return how many models are there."""
        models = [prepared for _, prepared in self.models]
        if self.save_hooks:
            # Of models in parts a hook gets no weights, as from Accelerate: one rank's hook may not decide for all.
            weights = [self.strategy.full_state(model) for model in models if self.strategy.trains_apart]
            left = list(weights)
            for hook in self.save_hooks.values():
                hook([*models], left, str(draft.path))
            # A hook takes away the weights that it has saved itself.
            kept = [any(own is one for one in left) for own in weights] or [True] * len(models)
            models = list(itertools.compress(models, kept))
        optimizers = _named("optimizer", self.optimizers)
        self.strategy.save(draft, _named("model", models), optimizers, safe=safe)
        scalings = [scaling.state_dict() for scaling in self._scalings()]
        if draft.writes:
            for name, scheduler in _named("scheduler", self.schedulers).items():
                draft.objects(f"{name}.bin", scheduler.state_dict())
            if scalings:
                draft.objects("scaler.pt", scalings)
            for number, thing in enumerate(self.registered):
                draft.objects(f"custom_checkpoint_{number}.pkl", thing.state_dict())
            for rank, (random, places) in enumerate(map(pickle.loads, ranks)):
                draft.objects(f"{_RANDOM}{rank}.pkl", random)
                draft.objects(f"loaders_{rank}.bin", places)
        return len(models)

    def _facts(self, folder: Path, num_models: int, name: str) -> dict[str, Any]:
        is_numbered = folders.is_numbered(folder) and folder.parent == self._home()
        return {
            "id": name,
            "strategy": self.strategy.name,
            "layout": self.strategy.layout,
            "num_processes": self.process.num_processes,
            "shares": self._shares(),
            "mixed_precision": self.precision,
            "iteration": folders.number(folder) + 1 if is_numbered else self.project.iteration,
            "counts": self._counts(num_models),
        }

    def _shares(self) -> list[int]:
        """Of the data, by rank."""
        return list(self.strategy.data_process.shares or range(self.process.num_processes))

    def _commit(self, draft: storage.Draft, facts: dict[str, Any], files: staging.Files) -> None:
        draft.commit(facts, files)
        if self.project.automatic_checkpoint_naming:
            folders.tidy(self._home(), self.project.total_limit)

    def _counts(self, num_models: int) -> dict[str, int]:
        return {
            "models": num_models,
            "optimizers": len(self.optimizers),
            "schedulers": len(self.schedulers),
            "loaders": len(self.loaders),
            "registered objects": len(self.registered),
        }

    # --- loading -----------------------------------------------------------------------------------------------------

    def load(self, input_dir: str | os.PathLike[str] | None, *, strict: bool, skip_random_states: bool) -> None:
        """Take up what ``save`` kept. Nothing is changed where ``CheckpointError``, on every rank, says why not."""
        self._refuse_no_folder("load_state", input_dir)
        self.wait("load_state")
        ignore = _RANDOM if skip_random_states else ""
        folder = together("load_state", lambda: self._chosen(input_dir, ignore))[0]
        found = _Found()
        if len(set(together("load_state", lambda: self._read(folder, found, strict=strict, ignore=ignore)))) > 1:
            raise CheckpointError(f"load_state failed: {folder} was replaced while it was read. Load it again.")
        self._load_registered(found.registered)
        together("load_state", lambda: [act() for act in found.acts] and None)
        self.strategy.go_on()
        if found.lost and self.process.rank == 0:
            notices.warn(f"load_state of {folder}: {'; '.join(found.lost)}")

    def _load_registered(self, states: list[Any]) -> None:
        """Before all else: code that isn't ours may fail on one rank, and then all go back to what they had."""
        before: list[tuple[Any, Any]] = []

        def load() -> None:
            for thing, state in zip(self.registered, states, strict=False):
                before.append((thing, copy.deepcopy(thing.state_dict())))
                thing.load_state_dict(state)

        try:
            together("load_state", load)
        except CheckpointError:
            for thing, state in before:
                with contextlib.suppress(Exception):  # the one that failed may fail again, and others have a way back
                    thing.load_state_dict(state)
            raise

    def _chosen(self, input_dir: str | os.PathLike[str] | None, ignore: str) -> Path:
        """The folder to load, found whole; rank 0 chooses."""
        if self.process.rank:
            return Path()
        problems: list[str] = []
        given = None if input_dir is None else Path(input_dir).expanduser().resolve()
        for folder in reversed(folders.numbered(self._home())) if given is None else [given]:
            try:
                found = storage.locate(folder)
                storage.checked(found, ignore=ignore)
            except CheckpointError as error:
                way_out = " skip_random_states=True leaves random numbers as they are." if _RANDOM in str(error) else ""
                problems.append(f"{error}{way_out}")
                continue
            if problems:
                notices.warn(f"load_state takes {found}, the newest that can be loaded. {' '.join(problems)}")
            return found
        raise CheckpointError(" ".join(problems) or f"{self._home()} holds no checkpoint yet; name the folder of one.")

    def _read(self, folder: Path, found: _Found, *, strict: bool, ignore: str) -> str:
        """Read and check everything, into ``found``; return its id."""
        acts, lost, rank = found.acts, found.lost, self.process.rank
        elsewhere = rank and self.process.world.local_rank == 0  # a machine that may have files of its own
        facts = storage.checked(folder, ignore=ignore) if elsewhere else storage.manifest(folder)
        self._compare(folder, facts, lost)
        share, shares = self.strategy.data_process.rank, facts["shares"]
        is_same, is_exact = shares == self._shares(), max(shares) == max(self._shares())
        was = rank if is_same else shares.index(share) if share in shares else None  # the rank that this one was
        models = [prepared for _, prepared in self.models]
        for hook in self.load_hooks.values():
            hook(models if self.strategy.trains_apart else [], str(folder))
        self._compare_counts(folder, facts["counts"], len(models), lost)
        optimizers = _named("optimizer", self.optimizers)
        acts.append(self.strategy.load(folder, _named("model", models), optimizers, strict=strict))
        for name, scheduler in _named("scheduler", self.schedulers).items():
            acts.append(functools.partial(scheduler.load_state_dict, storage.read(folder / f"{name}.bin")))
        found.registered += [storage.read(folder / f"custom_checkpoint_{i}.pkl") for i in range(len(self.registered))]
        scalings = storage.read(folder / "scaler.pt") if "scaler.pt" in facts["files"] else []
        places = storage.read(folder / f"loaders_{was or 0}.bin")
        for number, (loader, place) in enumerate(zip(self.loaders, places, strict=False), 1):
            if not loader.fits(place):
                raise CheckpointError(
                    f"{folder} holds the place of a loader with other generators than those of loader {number}; "
                    "prepare loaders as the code that saved it did, in the same order"
                )
            if change := loader.change(place, is_exact=is_exact):
                lost.append(f"loader {number} read {change}: the rest of its epoch is not what it would have been")
            acts.append(functools.partial(loader.go_on, place, is_exact=is_exact))
            began = place if place.get("is_over", True) else place["beginning"]  # the pass that comes next
            if loader.persistent_workers and (began["epoch"] or loader._iterator is not None):  # noqa: SLF001 - torch's
                lost.append(
                    "workers that persist had drawn random numbers in earlier passes, which is not saved, and draw "
                    "others than they would have; without persistent_workers they draw the same"
                )
        acts += [*(group.drop for group in self.groups.values()), functools.partial(self._load_scalings, scalings)]
        if self.project.automatic_checkpoint_naming:
            acts.append(lambda: setattr(self.project, "iteration", facts["iteration"]))
        if not ignore and was is not None:  # last: what comes before may draw
            acts.append(functools.partial(randomness.restore, self._random(folder, was), self.process.device))
        if storage.manifest(folder) != facts:
            raise CheckpointError(f"{folder} was replaced while it was read. Load it again.")
        return str(facts["id"])

    def _compare(self, folder: Path, facts: dict[str, Any], lost: list[str]) -> None:
        if facts["layout"] != self.strategy.layout:
            raise CheckpointError(
                f"{folder} was saved with strategy={facts['strategy']!r}, and can't be loaded with "
                f"strategy={self.strategy.name!r}: they lay out the files differently. Launch with the strategy that "
                "saved it; weights alone go over by save_model."
            )
        saved, own = facts["num_processes"], self.process.num_processes
        if facts["shares"] != (shares := self._shares()):
            said = f"it was saved by {saved} processes and is loaded by {own}"
            if saved == own:
                said = f"its data were shared by {max(facts['shares']) + 1} and are shared by {max(shares) + 1}"
            lost.append(f"{said}, which can't keep the random numbers of processes and loader workers")
            if max(facts["shares"]) != max(shares):
                lost[-1] += (
                    ", nor the place within a step: an epoch goes on at a whole one, some samples may come twice"
                )
        if facts["mixed_precision"] != self.precision:
            lost.append(f"it was saved with mixed_precision={facts['mixed_precision']!r}, not {self.precision!r}")

    def _compare_counts(self, folder: Path, counts: dict[str, int], num_models: int, lost: list[str]) -> None:
        for kind, own in self._counts(num_models).items():
            if own > counts[kind]:
                raise CheckpointError(
                    f"{folder} holds {counts[kind]} {kind}, and this accelerator has {own}; prepare and register what "
                    "the code that saved it had, in the same order"
                )
            if own < counts[kind]:
                lost.append(f"of its {counts[kind]} {kind}, only the {own} that this accelerator has are loaded")

    def _random(self, folder: Path, rank: int) -> Any:
        path = folder / f"{_RANDOM}{rank}.pkl"
        random = storage.read(path)
        if lacking := randomness.snapshot(self.process.device).keys() - random.keys():
            raise CheckpointError(
                f"{path} lacks the state of the random numbers of {', '.join(sorted(lacking))}, so that the run would "
                "not go on as it was; load_state(..., skip_random_states=True) leaves random numbers as they are"
            )
        return random

    def _load_scalings(self, states: list[Any]) -> None:
        held = self._scalings()
        for scaling, state in zip(held, states, strict=False):
            scaling.load_state_dict(state)
        self.accumulation.saved_scalings = states[len(held) :]  # of groups that are not entered yet


def _named(kind: str, things: Sequence[_T]) -> dict[str, _T]:
    """By the names of their files: "model", "model_1", and so on."""
    return {f"{kind}_{number}" if number else kind: thing for number, thing in enumerate(things)}
