"""The options that belong to one strategy: shown once it is chosen, kept in the section that Accelerate's files have.

A strategy reads its own section. To offer an option is one line here; only those of known strategies are shown.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from notebook_launcher.widgets.controls import Choice, Control, Held

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class StrategyOption:
    """One key of a strategy's section; ``values`` are what may be chosen, the first being the default."""

    strategy: str
    section: str
    key: str
    label: str
    values: tuple[Any, ...]
    help: str

    @property
    def name(self) -> str:
        """The control's."""
        return f"{self.section}.{self.key}"


_FSDP, _DEEPSPEED = ("fsdp", "fsdp_config"), ("deepspeed", "deepspeed_config")
_PLACES = ("none", "cpu", "nvme")
OPTIONS = (
    StrategyOption(
        *_FSDP,
        "fsdp_reshard_after_forward",
        "Reshard after forward",
        (True, False),
        "Give parameters back after the forward pass: less memory, more traffic.",
    ),
    StrategyOption(*_FSDP, "fsdp_offload_params", "Offload to the CPU", (False, True), "Keep parameters on the CPU."),
    StrategyOption(
        *_FSDP,
        "fsdp_activation_checkpointing",
        "Recompute activations",
        (False, True),
        "Compute activations again in the backward pass: less memory, more time.",
    ),
    StrategyOption(
        *_DEEPSPEED,
        "zero_stage",
        "ZeRO stage",
        (2, 0, 1, 3),
        "What is spread: 1 the optimizer's state, 2 gradients too, 3 parameters too.",
    ),
    StrategyOption(
        *_DEEPSPEED, "offload_optimizer_device", "Offload optimizer", _PLACES, "Where the optimizer's state is kept."
    ),
    StrategyOption(
        *_DEEPSPEED, "offload_param_device", "Offload parameters", _PLACES, "Where parameters are kept; ZeRO stage 3."
    ),
)


def options_of(strategy: Held) -> tuple[StrategyOption, ...]:
    """Those of the chosen strategy."""
    return tuple(option for option in OPTIONS if option.strategy == strategy)


def control(option: StrategyOption, extra: Mapping[str, Any]) -> Control:
    """The option's control; it begins with what the configuration's section says."""
    said = _section(option, extra).get(option.key, option.values[0])
    if set(option.values) == {True, False}:
        return Control(option.name, option.label, "flag", default=bool(said), help=option.help)
    values = option.values if said in option.values else (said, *option.values)
    choices = tuple(Choice(str(value), str(value)) for value in values)
    return Control(option.name, option.label, "choice", default=str(said), choices=choices, help=option.help)


def put(option: StrategyOption, given: Held, extra: Mapping[str, Any]) -> dict[str, Any]:
    """``extra`` with the option in its section; as it was where the section need not say it."""
    before = _section(option, extra)
    value = given if isinstance(given, bool) else next((one for one in option.values if str(one) == given), given)
    if value == before.get(option.key, option.values[0]):
        return dict(extra)
    return {**extra, option.section: {**before, option.key: value}}


def _section(option: StrategyOption, extra: Mapping[str, Any]) -> dict[str, Any]:
    section = extra.get(option.section)
    return dict(section) if isinstance(section, dict) else {}
