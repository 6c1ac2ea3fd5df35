"""Whether this is a hosted notebook, by the variables that its host sets for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Host(NamedTuple):
    """A place that runs notebooks, and where in it a machine with an accelerator is chosen."""

    name: str
    advice: str


# Not KAGGLE_USERNAME or KAGGLE_KEY, which whoever uses Kaggle's API has at home. Nor TPU_NAME and the like, which are
# set on machines without a TPU and missing on some with one: what a machine has, its hardware says.
_HOSTS = {
    "COLAB_RELEASE_TAG": Host("Google Colab", "Runtime > Change runtime type"),
    "KAGGLE_KERNEL_RUN_TYPE": Host("Kaggle", "Settings > Accelerator"),
}


def host(environment: Mapping[str, str]) -> Host | None:
    """The host of this notebook; None at home."""
    return next((one for variable, one in _HOSTS.items() if environment.get(variable)), None)
