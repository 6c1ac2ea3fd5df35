"""Which chip a Mac has."""

from __future__ import annotations

import subprocess


def name() -> str:
    """The chip's name, such as "Apple M2 Pro"; "" on other machines."""
    try:
        told = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip()
