"""Set up an environment with torch_xla and pass its tests: ``python3 scripts/test_xla.py``; the rest goes to pytest.

XLA runs on the CPU there. torch_xla works beside the torch of its own number only, which pip has as a CUDA build: the
environment takes 7 GB, and minutes to install.

``scripts/test.py``, and so CI, run them where one of XLA's files is another than the repository says. What is
changed is so tested by CI until, once CI has passed with it, ``--keep`` writes that file and somebody commits it.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import subprocess
import sys
from typing import TYPE_CHECKING

import environment

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ("ipykernel", "jupyter_client", "matplotlib", "pytest", "pytest-timeout", "scikit-learn")
FILES = (
    "notebook_launcher/launcher/engines/xla*.py",
    "notebook_launcher/runtime/backends/xla*.py",
    "notebook_launcher/runtime/strategies/xla*.py",
    "notebook_launcher/worker/rank_threads*.py",
    "notebook_launcher/worker/serve.py",
    "notebook_launcher/worker/xla*.py",
    "scripts/test_xla.py",
    "tests/constraints-xla.txt",
    "tests/xla/**/*.py",
)
RECORD = "tests/xla/passed_with.txt"


def main() -> int:
    """Run the tests; return the exit code."""
    parser = argparse.ArgumentParser(description="Pass the tests of XLA, in an environment of 7 GB of their own.")
    parser.add_argument(
        "--keep", action="store_true", help=f"where all pass, write {RECORD}: CI has passed with these files"
    )
    options, given = parser.parse_known_args()
    if options.keep and given:
        parser.error(
            f"--keep says that all tests have passed, so it can't go with {' '.join(given)}, which goes to pytest"
        )
    environment.check_python()
    problem = library_problem()
    if problem:
        environment.say(problem)
        return 1
    python = environment.ensure(".venv-xla", {"tpu"}, environment.XLA_CONSTRAINTS, PACKAGES, compiled=True)
    command: list[str | Path] = [python, "-m", "pytest", "tests/xla", *given]
    before = digest(environment.ROOT)
    code = subprocess.call(command, cwd=environment.ROOT, env=environment.clean_variables(), stdin=subprocess.DEVNULL)
    if code == 0 and options.keep:
        (environment.ROOT / RECORD).write_text(f"{before}\n")
    return code


def have_passed(root: Path) -> bool:
    """Whether XLA's files are those of which the repository says that CI has passed with them."""
    record = root / RECORD
    return record.exists() and record.read_text().strip() == digest(root)


def digest(root: Path) -> str:
    """A number for the names and texts of XLA's files."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in FILES for path in root.glob(pattern)}):
        text = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()} {len(text)}\n".encode())
        found.update(text)
    return found.hexdigest()


def library_problem() -> str:
    """Why torch_xla could not be loaded, before gigabytes are installed; "" where it can."""
    number = ".".join(map(str, sys.version_info[:2]))
    try:
        ctypes.CDLL(f"libpython{number}.so.1.0")
    except OSError as error:
        return (
            f"torch_xla needs Python's shared library, which can't be loaded here ({error}). On Debian and Ubuntu: "
            f"apt install libpython{number}"
        )
    return ""


if __name__ == "__main__":
    sys.exit(main())
