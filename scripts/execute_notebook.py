"""Execute a notebook without a browser, print what its cells printed, and save it: ``execute_notebook.py IN OUT``.

Runs inside an environment that ``environment.py`` made; needs nbclient and nbformat.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets.config import Config

if TYPE_CHECKING:
    from nbformat import NotebookNode

_CELL_LIMIT_S = 600
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def main() -> int:
    """Execute, print and save; return the exit code."""
    parser = argparse.ArgumentParser(description="Execute a notebook and print what its cells printed.")
    parser.add_argument("source", type=Path)
    parser.add_argument("executed", type=Path)
    options = parser.parse_args()
    notebook = nbformat.read(options.source, as_version=4)
    print(f"Executing {options.source} ...", flush=True)
    started = time.monotonic()
    failure = execute(notebook, options.source.parent)
    options.executed.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, options.executed)
    took = f"{time.monotonic() - started:.0f} s"
    if failure:
        print(f"\n{failure}\nFAILED after {took}. As far as it got, it is in {options.executed}.", file=sys.stderr)
        return 1
    print(f"\nThe executed notebook is {options.executed} ({took}).")
    return 0


def execute(notebook: NotebookNode, folder: Path) -> str:
    """Run every cell in ``folder``, printing each one's output as it ends; return what went wrong, "" for nothing."""

    def report(cell: NotebookNode, **_: Any) -> None:
        if found := cell_texts(cell):
            print(f"\nIn[{cell.execution_count}]", *(text.rstrip() for text in found), sep="\n", flush=True)

    with tempfile.TemporaryDirectory(prefix="nl-") as connection:
        client = NotebookClient(
            notebook,
            timeout=_CELL_LIMIT_S,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
            on_cell_executed=report,
            config=_without_network(Path(connection)),
        )
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            return _ESCAPE.sub("", str(error))
    return ""


def _without_network(folder: Path) -> Config:
    """The kernel is talked to over sockets in ``folder``: over TCP it would warn that others can listen."""
    config = Config()
    config.KernelManager.transport = "ipc"
    # The sockets lie beside this file, and their paths must be short.
    config.KernelManager.connection_file = str(folder / "kernel.json")
    return config


def cell_texts(cell: NotebookNode) -> list[str]:
    """The cell's outputs as text; a picture is left to the notebook."""
    found = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            found.append(output.text)
        elif output.output_type in ("display_data", "execute_result") and not any(
            "image/" in kind for kind in output.data
        ):
            found.append(output.data.get("text/plain", ""))
    return [_ESCAPE.sub("", text) for text in found if text.strip()]


if __name__ == "__main__":
    sys.exit(main())
