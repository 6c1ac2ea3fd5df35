"""Who hosts a notebook, by its variables; and that those don't decide what devices it has."""

from __future__ import annotations

import pytest

from notebook_launcher.core.hosting import host

COLAB = {"COLAB_RELEASE_TAG": "release-colab-external_20260819", "COLAB_GPU": "1", "COLAB_BACKEND_URL": "x"}
KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "KAGGLE_URL_BASE": "https://www.kaggle.com"}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (COLAB, "Google Colab"),
        (KAGGLE, "Kaggle"),
        ({"KAGGLE_USERNAME": "me", "KAGGLE_KEY": "secret"}, None),  # whoever uses Kaggle's API at home has these
        ({"TPU_NAME": "local", "COLAB_GPU": ""}, None),
        ({}, None),
    ],
)
def test_hosts(environment, name):
    found = host(environment)
    assert (found and found.name) == name
