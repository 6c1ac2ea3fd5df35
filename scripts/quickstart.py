"""Set up and run the quickstart notebook: ``python3 scripts/quickstart.py``, or ``--lab`` to open it in JupyterLab."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import environment

NOTEBOOK = environment.ROOT / "notebooks" / "01_quickstart.ipynb"
EXECUTED = environment.ROOT / "output" / NOTEBOOK.name


def main() -> int:
    """Run or open the notebook; return the exit code."""
    parser = argparse.ArgumentParser(description="Run the quickstart notebook, or open it.")
    parser.add_argument("--lab", action="store_true", help="open it in JupyterLab instead of running it here")
    options = parser.parse_args()
    environment.check_python()
    python = environment.ensure(".venv", {"lab"}, environment.CONSTRAINTS)
    variables = environment.clean_variables()
    if options.lab:
        settings = [f"--ServerApp.root_dir={environment.ROOT}"]  # not the notebook's folder: output/ can be opened too
        if os.geteuid() == 0:
            settings.append("--allow-root")  # JupyterLab refuses root, as containers are, without it
        return subprocess.call([python, "-m", "jupyterlab", *settings, NOTEBOOK], cwd=environment.ROOT, env=variables)
    script = environment.ROOT / "scripts" / "execute_notebook.py"
    return subprocess.call([python, script, NOTEBOOK, EXECUTED], cwd=environment.ROOT, env=variables)


if __name__ == "__main__":
    sys.exit(main())
