"""How many cores there are to share."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Cores that this process may use, which in a container is fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
