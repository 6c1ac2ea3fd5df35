"""The panel, used by a front end's messages; ``scripts/test.py oldest`` does the same with ipywidgets 7."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "drive_panel.py"


@pytest.mark.slow
@pytest.mark.kernel
def test_the_whole_flow():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
