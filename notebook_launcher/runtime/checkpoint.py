"""``save_state`` and ``load_state``: what a run needs to go on as if it had never stopped, in one folder.

::

    checkpoint.json        what is here, and each file's size and crc32: written last
    model.safetensors      (model_1 ...)  optimizer.bin  scheduler.bin  scaler.pt  custom_checkpoint_0.pkl
    random_states_0.pkl    every rank's random numbers
    loaders_0.bin          every rank's places in its loaders

Rank 0 writes them, with ``save_on_each_node`` the first rank of each machine, from what all ranks have told it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pickle
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_launcher.core import notices
from notebook_launcher.core.errors import CheckpointError, ConfigError
from notebook_launcher.runtime import gather, randomness, storage

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
_NUMBERED = re.compile(r"checkpoint_(\d+)")


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

    @property
    def writes(self) -> bool:
        """Whether this rank writes what all have in full."""
        first_here = self.process.world.local_rank == 0
        return self.process.rank == 0 or (self.project.save_on_each_node and first_here)

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

    def save(self, output_dir: str | os.PathLike[str] | None, *, safe: bool) -> str:
        """Write a checkpoint, and return its folder; ``CheckpointError`` on every rank where one could not."""
        self._refuse_no_folder("save_state", output_dir)
        if self.process.rank == 0 and any(group.is_unfinished for group in self.groups.values()):
            notices.warn(
                "save_state was called within an accumulation group, and the gradients collected so far are not saved: "
                "a run that resumes begins a new group there. Call it where accelerator.sync_gradients is True."
            )
        told = _together("save_state", lambda: (self._new_folder(output_dir), self._of_this_rank(), uuid.uuid4().hex))
        (folder, _, name), ranks = told[0], [state for _, state, _ in told]
        draft = storage.Draft(folder, writes=self.writes)
        try:
            _together("save_state", lambda: draft.begin() if draft.writes else None)
            num_models = _together("save_state", lambda: self._write(draft, ranks, safe=safe))[0]
            _together("save_state", lambda: self._commit(draft, num_models, name) if draft.writes else None)
        except CheckpointError:
            if draft.writes:
                draft.discard()
            raise
        if output_dir is None:
            self.project.iteration = _number(folder) + 1
        return str(folder)

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
        taken = [_number(folder) + 1 for folder in self._numbered()]
        return self._home() / f"checkpoint_{max([self.project.iteration, *taken])}"

    def _home(self) -> Path:
        return (Path(self.project.project_dir or ".") / "checkpoints").resolve()

    def _numbered(self) -> list[Path]:
        """The folders of automatic naming, oldest first."""
        home = self._home()
        found = [path for path in home.iterdir() if _NUMBERED.fullmatch(path.name)] if home.is_dir() else []
        return sorted(found, key=_number)

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
            weights = [self.strategy.full_state(model) for model in models]
            left = list(weights)
            for hook in self.save_hooks.values():
                hook([*models], left, str(draft.path))
            # A hook takes away the weights that it has saved itself.
            models = [model for model, own in zip(models, weights, strict=True) if any(own is one for one in left)]
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

    def _commit(self, draft: storage.Draft, num_models: int, name: str) -> None:
        project, home = self.project, self._home()
        is_numbered = draft.folder.parent == home and _NUMBERED.fullmatch(draft.folder.name)
        draft.commit(
            {
                "id": name,
                "strategy": self.strategy.name,
                "layout": self.strategy.layout,
                "num_processes": self.process.num_processes,
                "mixed_precision": self.precision,
                "iteration": _number(draft.folder) + 1 if is_numbered else project.iteration,
                "counts": self._counts(num_models),
            }
        )
        if project.automatic_checkpoint_naming:
            storage.clear(*home.glob(".checkpoint_*.saving"))
            storage.remove(*home.glob(".checkpoint_*.removing"))
            for folder in self._numbered()[: -project.total_limit] if project.total_limit else ():
                storage.take_away(folder)

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
        ignore = _RANDOM if skip_random_states else ""
        folder = _together("load_state", lambda: self._chosen(input_dir, ignore))[0]
        acts: list[Callable[[], object]] = []
        lost: list[str] = []
        ids = _together("load_state", lambda: self._read(folder, acts, lost, strict=strict, ignore=ignore))
        if len(set(ids)) > 1:
            raise CheckpointError(f"load_state failed: {folder} was replaced while it was read. Load it again.")
        for act in acts:
            act()
        if lost and self.process.rank == 0:
            notices.warn(f"load_state of {folder}: {'; '.join(lost)}")

    def _chosen(self, input_dir: str | os.PathLike[str] | None, ignore: str) -> Path:
        """The folder to load, found whole; rank 0 chooses."""
        if self.process.rank:
            return Path()
        problems: list[str] = []
        given = None if input_dir is None else Path(input_dir).expanduser().resolve()
        for folder in reversed(self._numbered()) if given is None else [given]:
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

    def _read(
        self, folder: Path, acts: list[Callable[[], object]], lost: list[str], *, strict: bool, ignore: str
    ) -> str:
        """Read and check everything; ``acts`` put it in its place, ``lost`` tells what can't be kept. Return its id."""
        rank = self.process.rank
        elsewhere = rank and self.process.world.local_rank == 0  # a machine that may have files of its own
        facts = storage.checked(folder, ignore=ignore) if elsewhere else storage.manifest(folder)
        self._compare(folder, facts, lost)
        is_same = facts["num_processes"] == self.process.num_processes
        models = [prepared for _, prepared in self.models]
        for hook in self.load_hooks.values():
            hook(models, str(folder))
        self._compare_counts(folder, facts["counts"], len(models), lost)
        optimizers = _named("optimizer", self.optimizers)
        acts.append(self.strategy.load(folder, _named("model", models), optimizers, strict=strict))
        rest = {f"{name}.bin": scheduler for name, scheduler in _named("scheduler", self.schedulers).items()}
        rest |= {f"custom_checkpoint_{number}.pkl": thing for number, thing in enumerate(self.registered)}
        for name, thing in rest.items():
            acts.append(functools.partial(thing.load_state_dict, storage.read(folder / name)))
        scalings = storage.read(folder / "scaler.pt") if "scaler.pt" in facts["files"] else []
        places = storage.read(folder / f"loaders_{rank if is_same else 0}.bin")
        for number, (loader, place) in enumerate(zip(self.loaders, places, strict=False), 1):
            if not loader.fits(place):
                raise CheckpointError(
                    f"{folder} holds the place of a loader with other generators than those of loader {number}; "
                    "prepare loaders as the code that saved it did, in the same order"
                )
            if change := loader.change(place):
                lost.append(f"loader {number} read {change}: the rest of its epoch is not what it would have been")
            acts.append(functools.partial(loader.go_on, place, is_exact=is_same))
            if loader.persistent_workers and place["epoch"]:
                lost.append("workers that persist have drawn random numbers in earlier epochs, and new ones begin anew")
        acts += [self._drop_groups, functools.partial(self._load_scalings, scalings)]
        if self.project.automatic_checkpoint_naming:
            acts.append(lambda: setattr(self.project, "iteration", facts["iteration"]))
        if not ignore and rank < facts["num_processes"]:  # last: what comes before may draw
            acts.append(functools.partial(randomness.restore, self._random(folder), self.process.device))
        if storage.manifest(folder) != facts:
            raise CheckpointError(f"{folder} was replaced while it was read. Load it again.")
        return str(facts["id"])

    def _compare(self, folder: Path, facts: dict[str, Any], lost: list[str]) -> None:
        if facts["layout"] != self.strategy.layout:
            raise CheckpointError(
                f"{folder} was saved with strategy={facts['strategy']!r}, and can't be loaded with "
                f"strategy={self.strategy.name!r}: they lay out the files differently. Launch with the strategy that "
                "saved it."
            )
        saved, own = facts["num_processes"], self.process.num_processes
        if saved != own:
            lost.append(
                f"it was saved by {saved} processes and is loaded by {own}, which can't keep the random numbers of "
                "processes and loader workers, nor the place within a step: an epoch goes on at a whole step, so that "
                "samples of one may come twice"
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

    def _random(self, folder: Path) -> Any:
        path = folder / f"{_RANDOM}{self.process.rank}.pkl"
        random = storage.read(path)
        lacking = randomness.snapshot(self.process.device).keys() - random.keys()
        if lacking:
            raise CheckpointError(
                f"{path} lacks the state of the random numbers of {', '.join(sorted(lacking))}, so that the run would "
                "not go on as it was; load_state(..., skip_random_states=True) leaves random numbers as they are"
            )
        return random

    def _drop_groups(self) -> None:
        for group in self.groups.values():
            group.drop()

    def _load_scalings(self, states: list[Any]) -> None:
        held = self._scalings()
        for scaling, state in zip(held, states, strict=False):
            scaling.load_state_dict(state)
        self.accumulation.saved_scalings = states[len(held) :]  # of groups that are not entered yet


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def _named(kind: str, things: Sequence[_T]) -> dict[str, _T]:
    """By the names of their files: "model", "model_1", and so on."""
    return {f"{kind}_{number}" if number else kind: thing for number, thing in enumerate(things)}


def _together(call: str, act: Callable[[], _T]) -> list[_T]:
    """What ``act`` returns, by rank; ``CheckpointError`` on every rank where it raises on one."""
    error: Exception | None = None
    result: Any = None
    try:
        result = act()
    except Exception as caught:  # noqa: BLE001 - it is told to all ranks, and raised on each
        error = caught
    text = "" if error is None else str(error) if isinstance(error, CheckpointError | ConfigError) else repr(error)
    told = gather.all_objects((result, text))
    failed = {rank: text for rank, (_, text) in enumerate(told) if text}
    if failed:
        first = min(failed)
        where = f" on rank {first}" if len(told) > 1 else ""
        raise CheckpointError(f"{call} failed{where}: {failed[first]}") from error
    return [result for result, _ in told]
