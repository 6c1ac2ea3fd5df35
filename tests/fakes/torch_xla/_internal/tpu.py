"""What chips there are."""

from __future__ import annotations

import os


def num_available_chips():
    return int(os.environ.get("FAKE_CHIPS", "0"))


def version():
    if "FAKE_VERSION" not in os.environ:
        raise OSError("no metadata server")
    return int(os.environ["FAKE_VERSION"])


def num_logical_cores_per_chip():
    return 2 if version() <= 3 else 1
