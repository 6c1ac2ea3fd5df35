"""``Accelerator``'s arguments against what the launch chose."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_launcher.core import config, parallelism
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.registry import unknown_name
from notebook_launcher.core.strategies import INSIDE
from notebook_launcher.runtime import checks
from notebook_launcher.runtime.plugins import DataLoaderConfiguration, ParallelismConfig, ProjectConfiguration, changed

if TYPE_CHECKING:
    from notebook_launcher.core.world import World
    from notebook_launcher.runtime.plugins import GradientAccumulationPlugin, Keywords

_T = TypeVar("_T")
RNG_TYPES = ("generator", "torch", "cuda", "mps", "xpu", "xla")


def mixed_precision(given: str | None, world: World) -> str:
    """The precision's name: the argument, or what the launch chose, or "no"."""
    if given is None:
        return world.mixed_precision or "no"
    given = str(given)
    if world.mixed_precision not in {None, given}:
        raise _contradiction("mixed_precision", given, world.mixed_precision)
    return given


def gradient_accumulation_steps(given: int, plugin: GradientAccumulationPlugin, world: World) -> int:
    """Micro-batches in a group, as the argument or the plugin says. 1, the argument's default, leaves it open."""
    num_steps, chosen = checked_num_steps(given), world.gradient_accumulation_steps
    if plugin.num_steps is not None:
        if num_steps not in {1, plugin.num_steps}:
            name = "gradient_accumulation_steps"
            raise _contradiction(name, given, plugin.num_steps, by="gradient_accumulation_plugin")
        num_steps = checked_num_steps(plugin.num_steps)
    elif num_steps == 1:
        return chosen or 1
    if chosen not in {None, num_steps}:
        raise _contradiction("gradient_accumulation_steps", num_steps, chosen)
    return num_steps


def checked_num_steps(given: Any) -> int:
    """``given`` as a number of micro-batches; raises ``ConfigError`` where it is none."""
    return checks.whole("gradient_accumulation_steps", given, of="micro-batches")


def with_plugins(world: World, keywords: Keywords, **plugins: Any) -> World:
    """``world`` with what the ``plugins``, by argument, choose; they join ``keywords``, where strategies find them."""
    by = "the launch"
    if world.parallelism_config:
        plugins["parallelism_config"] = _joined(plugins.get("parallelism_config"), json.loads(world.parallelism_config))
    for argument, plugin in plugins.items():
        if plugin is None:
            continue
        name = getattr(plugin, "strategy", argument.removesuffix("_plugin"))
        if world.strategy in INSIDE.get(name, ()):
            world = dataclasses.replace(world, strategy=name)
        elif name in INSIDE.get(world.strategy or "", ()):
            name = world.strategy
        keywords.add(argument, plugin)
        asked = {"strategy": name, "gradient_accumulation_steps": getattr(plugin, "gradient_accumulation_steps", None)}
        chosen: dict[str, Any] = {option: value for option, value in asked.items() if value is not None}
        for option, value in chosen.items():
            if getattr(world, option) not in {None, value}:
                raise ConfigError(
                    f"Accelerator({argument}={_shown(plugin)}) asks for {option}={value!r}, and {by} chose "
                    f"{option}={getattr(world, option)!r}; leave one of them out, or make them equal"
                )
        by = f"its {argument}" if name and world.strategy is None else by
        world = dataclasses.replace(world, **chosen)
    found = {name: size for name, size in vars(keywords[ParallelismConfig]).items() if name.endswith("_size") and size}
    if mesh := parallelism.refuse(world.strategy, found, None):
        raise ConfigError(mesh)
    return world


def _shown(plugin: Any) -> str:
    """A plugin as a person has written it: what is at its default is left out."""
    return f"{type(plugin).__name__}({', '.join(f'{name}={value!r}' for name, value in changed(plugin).items())})"


def _joined(given: Any, sizes: dict[str, Any]) -> Any:
    """``parallelism_config`` with the launch's sizes; ``ConfigError`` where the two differ."""
    config = of_type("parallelism_config", given, ParallelismConfig)
    for name, size in sizes.items():
        if getattr(config, name) not in {None, 1, size}:
            raise _contradiction(f"parallelism_config.{name}", getattr(config, name), size)
    return dataclasses.replace(config, **sizes)


def of_type(argument: str, given: object, kind: type[_T]) -> _T:
    """``given`` as what the argument takes, at its defaults where it is None; ``ConfigError`` for another type."""
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise ConfigError(f"{argument}={given!r} is of type {type(given).__name__}; give a {kind.__name__}")
    return given


def loader_options(given: object, *, split_batches: bool) -> DataLoaderConfiguration:
    """``dataloader_config`` with the accelerator's own ``split_batches``; ``ConfigError`` where the two differ."""
    config = of_type("dataloader_config", given, DataLoaderConfiguration)
    if given is not None and split_batches and not config.split_batches:
        raise _contradiction("split_batches", given=True, chosen=False, by="dataloader_config")
    return dataclasses.replace(config, split_batches=config.split_batches or split_batches)


def project(given: object, project_dir: str | os.PathLike[str] | None) -> ProjectConfiguration:
    """``project_config`` with the accelerator's own ``project_dir``, made absolute.

    Raises ``ConfigError`` where the two differ.
    """
    config = of_type("project_config", given, ProjectConfiguration)
    if project_dir is not None:
        if config.project_dir is not None and _absolute(config.project_dir) != _absolute(project_dir):
            raise _contradiction("project_dir", project_dir, config.project_dir, by="project_config")
        config.set_directories(project_dir)
    if config.project_dir is None and config.automatic_checkpoint_naming:
        config.project_dir = "."
    for name in ("project_dir", "logging_dir"):  # now: a later os.chdir is to move neither
        if (folder := getattr(config, name)) is not None:
            setattr(config, name, _absolute(folder))
    return config


def _absolute(folder: str | os.PathLike[str]) -> str:
    return os.path.abspath(folder)  # noqa: PTH100 - pathlib would leave ".." in it


def rng_types(given: Any) -> tuple[str, ...]:
    """The names of the random streams to make equal, of one or several; ``ConfigError`` for one that isn't known."""
    several = given if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    names = tuple(str(getattr(name, "value", name)) for name in several if given is not None)
    for name in names:
        if name not in RNG_TYPES:
            raise unknown_name("rng_types", name, RNG_TYPES)
    return names


def dynamo_backend(given: Any) -> str | None:
    """The backend that ``torch.compile`` takes, None to compile nothing; raises ``ConfigError`` for an unknown one.

    Without ``given``, Accelerate's variable says it.
    """
    source = "dynamo_backend" if given else "ACCELERATE_DYNAMO_BACKEND"
    name = str(getattr(given, "value", given) or config.snapshot().get(source) or "no").lower()
    if name == "no":
        return None
    import torch._dynamo  # half a second

    known = torch._dynamo.list_backends(exclude_tags=())  # noqa: SLF001 - documented; torch.compiler hides some
    if name not in known:
        raise unknown_name(source, name, ["no", *known])
    return name


def _contradiction(name: str, given: object, chosen: object, by: str = "the launch") -> ConfigError:
    return ConfigError(
        f"Accelerator({name}={given!r}) contradicts {by}, which chose {name}={chosen!r}; leave one of them out, "
        "or make them equal"
    )
