"""Set up and pass every check: ``python3 scripts/test.py``, or only some: ``python3 scripts/test.py lint pytest``."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import environment
import test_xla

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ROOT = environment.ROOT
NOTEBOOK = ROOT / "notebooks" / "01_quickstart.ipynb"
# The oldest versions that the project supports are those of Google Colab's runtime, which nobody can change there.
OLDEST_PACKAGES = ("ipykernel", "jupyter_client", "matplotlib", "nbclient", "scikit-learn")


def run(command: Sequence[str | Path], folder: Path = ROOT) -> bool:
    """Run one command, showing its output; return whether it succeeded."""
    return subprocess.call(command, cwd=folder, env=environment.clean_variables(), stdin=subprocess.DEVNULL) == 0


def lint(python: Path) -> bool:
    """Style and formatting, of the notebooks too."""
    checked = run([python, "-m", "ruff", "check", "."])
    return run([python, "-m", "ruff", "format", "--check", "."]) and checked


def types(python: Path) -> bool:
    """Types, on a copy laid out as installed: only there are kernel_ext/ and widgets/ found by their names."""
    import tomllib  # not above: an older Python is to reach the sentence that says so

    copy = ROOT / "build" / "typed"
    shutil.rmtree(copy, ignore_errors=True)
    mapped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    for name, folder in {"notebook_launcher": "notebook_launcher", **mapped}.items():
        shutil.copytree(ROOT / folder, copy.joinpath(*name.split(".")), ignore=shutil.ignore_patterns("__pycache__"))
    settings: list[str | Path] = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    package = run([python, "-m", "mypy", *settings, "-p", "notebook_launcher"], copy)
    return run([python, "-m", "mypy", *settings, "."], ROOT / "scripts") and package


def pytest(python: Path) -> bool:
    """The tests, two files at a time: most of them wait for processes."""
    return run([python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", "not slow"])


def slow(python: Path) -> bool:
    """The tests that take long: every strategy against plain torch, notebooks, the browser, installing."""
    return run([python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", "slow"])


def oldest(_: Path) -> bool:
    """The quickstart and the panel, with the oldest supported set of packages in an environment of their own."""
    python = environment.ensure(".venv-oldest", set(), environment.OLDEST_CONSTRAINTS, OLDEST_PACKAGES)
    executed = ROOT / "output" / "oldest" / NOTEBOOK.name
    quickstart = run([python, ROOT / "scripts" / "execute_notebook.py", NOTEBOOK, executed])
    return run([python, ROOT / "scripts" / "drive_panel.py"]) and quickstart


def xla(_: Path) -> bool:
    """The tests of XLA, in an environment of 7 GB, where asked for or where CI has not passed with XLA's files yet."""
    if "xla" not in sys.argv[1:] and os.environ.get(environment.ASKS_FOR_XLA) != "1":
        how = f"{environment.ASKS_FOR_XLA}=1 runs it, and so does scripts/test_xla.py"
        if test_xla.have_passed(ROOT):
            environment.say(f"Skipped: XLA's files are those with which CI has passed; {how}.")
            return True
        if problem := test_xla.library_problem():
            environment.say(f"Skipped: {problem}; {how}.")
            return True
    return run([sys.executable, ROOT / "scripts" / "test_xla.py"])


STEPS = {"lint": lint, "types": types, "pytest": pytest, "slow": slow, "oldest": oldest, "xla": xla}


def main() -> int:
    """Run the steps, every one even where an earlier one fails; return the exit code."""
    parser = argparse.ArgumentParser(description="Set up and pass every check.")
    parser.add_argument("steps", nargs="*", metavar="step", help=f"some of {', '.join(STEPS)}; all when left out")
    wanted = parser.parse_args().steps or list(STEPS)
    unknown = sorted(set(wanted) - set(STEPS))
    if unknown:
        parser.error(f"unknown step {', '.join(unknown)}: the steps are {', '.join(STEPS)}")
    # What a shell runs in the background ignores Ctrl-C, and so does what that starts: the tests of it would fail.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment.check_python()
    python = environment.ensure(".venv", {"deepspeed", "lab", "test"}, environment.CONSTRAINTS, compiled=True)
    failed = []
    for name in wanted:
        environment.say(f"\n=== {name}: {STEPS[name].__doc__}")
        started = time.monotonic()
        passed = STEPS[name](python)
        environment.say(f"=== {name} {'passed' if passed else 'FAILED'} in {time.monotonic() - started:.0f} s")
        failed += [] if passed else [name]
    environment.say(f"\nFailed: {', '.join(failed)}" if failed else "\nEverything passed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
