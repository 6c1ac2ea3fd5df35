"""``Accelerator``'s arguments against what the launch chose, and those whose feature is not there yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.core.errors import ConfigError

if TYPE_CHECKING:
    from notebook_launcher.core.world import World


def mixed_precision(given: str | None, world: World) -> str:
    """The precision's name: the argument, or what the launch chose, or "no"."""
    if given is None:
        return world.mixed_precision or "no"
    given = str(given)
    if world.mixed_precision not in {None, given}:
        raise _contradiction("mixed_precision", given, world.mixed_precision)
    return given


def gradient_accumulation_steps(given: int, world: World) -> int:
    """Micro-batches in a group. 1, the argument's default, leaves it to the launch."""
    num_steps = checked_num_steps(given)
    chosen = world.gradient_accumulation_steps
    if num_steps == 1:
        return chosen or 1
    if chosen not in {None, num_steps}:
        raise _contradiction("gradient_accumulation_steps", given, chosen)
    return num_steps


def checked_num_steps(given: Any) -> int:
    """``given`` as a number of micro-batches; raises ``ConfigError`` where it is none."""
    try:
        num_steps = int(given)
    except (TypeError, ValueError):
        num_steps = 0
    if num_steps < 1 or num_steps != given:
        raise ConfigError(
            f"gradient_accumulation_steps={given!r} is not a number of micro-batches; give a whole number, 1 or more"
        )
    return num_steps


def refuse_unsupported(**arguments: Any) -> None:
    """Raise ``ConfigError`` for the first argument that was given a value: none of these does anything yet."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"Accelerator({name}={value!r}) is not supported yet in this version, and is not ignored, since the "
                "training would differ from what you asked for; leave it out"
            )


def _contradiction(name: str, given: object, chosen: object) -> ConfigError:
    return ConfigError(
        f"Accelerator({name}={given!r}) contradicts the launch, which chose {name}={chosen!r}; leave one of "
        "them out, or make them equal"
    )
