"""What ``import notebook_launcher`` offers: a name is added or taken away here on purpose."""

from __future__ import annotations

import importlib.metadata

import pytest

import notebook_launcher

PROMISED = {"Accelerator", "LaunchConfig", "Run", "WorkerError", "launch", "monitor", "notebook_launcher"}


def test_all_is_sorted_and_has_no_doubles():
    assert list(notebook_launcher.__all__) == sorted(set(notebook_launcher.__all__))


def test_promised_names_are_public():
    assert set(notebook_launcher.__all__) >= PROMISED


@pytest.mark.parametrize("name", notebook_launcher.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name):
    value = getattr(notebook_launcher, name)
    assert value.__doc__, f"{name} has no docstring"
    assert value.__name__ == name


def test_names_are_offered_to_completion():
    assert set(notebook_launcher.__all__) <= set(dir(notebook_launcher))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="lanch"):
        notebook_launcher.lanch  # noqa: B018


def test_the_version_is_the_distributions():
    assert notebook_launcher.__version__ == importlib.metadata.version("notebook-launcher")
