"""The virtual environment that the other scripts run in: made on the first call, checked in milliseconds afterwards.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
OLDEST_CONSTRAINTS = ROOT / "tests" / "constraints-oldest.txt"
ASKS_FOR_XLA = "NOTEBOOK_LAUNCHER_TEST_XLA"  # no option of a launch's, which would be warned of
XLA_CONSTRAINTS = ROOT / "tests" / "constraints-xla.txt"

_OLDEST_PYTHON = (3, 11)
_STAMP = "notebook-launcher.json"


def say(text: str) -> None:
    """Print a line at once, also where the output is a file."""
    print(text, flush=True)


def check_python() -> None:
    """Leave with one clear sentence where the interpreter is too old."""
    if sys.version_info < _OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(
            f"This project needs Python 3.11 or newer, and {sys.executable} is Python {found}. "
            f"Run the same command with a newer one, for instance python3.12 {' '.join(sys.argv)}."
        )


def ensure(
    folder: str, extras: set[str], constraints: Path, packages: tuple[str, ...] = (), *, compiled: bool = False
) -> Path:
    """The interpreter of the environment ``folder`` (in the clone), with the project and ``extras`` installed.

    A stamp in the environment holds what it was made from, so that a second call installs nothing. ``compiled``: every
    module's bytecode is made now, on all cores, and not when it is first imported, where a test might wait for it.
    """
    environment = ROOT / folder
    python = environment / "bin" / "python"
    stamp = environment / _STAMP
    key = _key(constraints, packages)
    installed = _read(stamp, key)
    if python.exists() and installed is not None and extras <= installed:
        return python
    if not python.exists() or not _is_ours(environment):
        say(f"Making {folder} with Python {sys.version.split()[0]} ...")
        _make(environment)
    extras = extras | (installed or set())
    project = f"{ROOT}[{','.join(sorted(extras))}]" if extras else str(ROOT)
    say(f"Installing the project and what it needs into {folder} (torch among it: minutes on a first run) ...")
    started = time.monotonic()
    # pip would compile every module, on one core and one after the other: as long again as all the rest.
    pip(python, "install", "--no-compile", "--constraint", str(constraints), *packages, "--editable", project)
    if compiled:  # some packages hold templates that are no Python: they stay as they are
        subprocess.call([python, "-m", "compileall", "-qq", "-j", "0", environment / "lib"], stdin=subprocess.DEVNULL)
    say(f"Installed in {time.monotonic() - started:.0f} s.")
    stamp.write_text(json.dumps({"key": key, "extras": sorted(extras)}))
    return python


def pip(python: Path, *arguments: str) -> None:
    """Run pip; its many lines go to a log, and are shown only when it fails."""
    log = python.parent.parent / "pip.log"
    with log.open("w") as output:
        code = subprocess.call(
            [python, "-m", "pip", *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    if code:
        lines = [
            line for line in log.read_text(errors="replace").splitlines() if "is ignored: it is neither" not in line
        ]
        sys.exit("\n".join([*lines[-40:], f"pip failed with exit code {code}; its whole output is in {log}."]))


def clean_variables() -> dict[str, str]:
    """This process's environment without what would make the new interpreter look elsewhere, or begin slowly."""
    left_out = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MYPYPATH", ASKS_FOR_XLA}
    left_out.add("PYTHONDONTWRITEBYTECODE")  # each of hundreds of processes would compile the project again
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    variables["PYTHONUNBUFFERED"] = "1"
    variables["JUPYTER_PREFER_ENV_PATH"] = "1"  # a kernel of the same name in the home folder is not this one
    variables["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # else every older kernel prints six lines about its debugger
    return variables


def _make(environment: Path) -> None:
    try:
        venv.create(environment, clear=True, with_pip=True)
    except subprocess.CalledProcessError:
        sys.exit(
            f"{sys.executable} could not make a virtual environment with pip in it. On Debian and Ubuntu the venv "
            "module is a package of its own: apt install python3-venv, then run the command again."
        )


def _key(constraints: Path, packages: tuple[str, ...]) -> str:
    digest = hashlib.sha256(_version().encode())
    digest.update(str(ROOT).encode())  # an editable installation points to the folder: a moved clone is installed anew
    digest.update((ROOT / "pyproject.toml").read_bytes())
    digest.update(constraints.read_bytes())
    digest.update(" ".join(packages).encode())
    return digest.hexdigest()


def _version() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def _is_ours(environment: Path) -> bool:
    """Whether the environment was made with this Python's version."""
    try:
        settings = (environment / "pyvenv.cfg").read_text()
    except OSError:
        return False
    return any(
        line.partition("=")[2].strip().startswith(f"{_version()}.")
        for line in settings.splitlines()
        if line.startswith("version")
    )


def _read(stamp: Path, key: str) -> set[str] | None:
    """The extras that were installed from what ``key`` stands for; None where it was something else."""
    try:
        known = json.loads(stamp.read_text())
        return set(known["extras"]) if known["key"] == key else None
    except (OSError, ValueError, KeyError):
        return None
