"""What a form asks for: one ``Control`` a value, described without saying how it is drawn."""

from __future__ import annotations

import dataclasses

Held = str | bool  # what a control can hold


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of the values that a control offers; ``refused`` says why it can't be taken here, "" where it can."""

    value: str
    label: str
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Control:
    """A value that a person gives. What it holds is text, True or False; of a choice, the choice's ``value``."""

    name: str  # "num_processes"; "lr()" for the function's argument lr
    label: str
    kind: str  # "choice", "flag" or "text"
    default: Held = ""
    choices: tuple[Choice, ...] = ()
    help: str = ""  # what it means and takes, a sentence
    placeholder: str = ""  # what an empty text stands for
    group: str = "main"  # "function", "argument", "main" or "rarer"

    @property
    def refusals(self) -> dict[str, str]:
        """Why a choice can't be taken, by its value; only those that can't."""
        return {choice.value: choice.refused for choice in self.choices if choice.refused}


def one_of(choices: tuple[Choice, ...], value: Held) -> Choice | None:
    """The choice with this value."""
    return next((choice for choice in choices if choice.value == value), None)
