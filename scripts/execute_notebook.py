"""Execute a notebook without a browser, print what its cells printed, and save it: ``execute_notebook.py IN OUT``.

Runs inside an environment that ``environment.py`` made; needs nbclient and nbformat.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

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
    print(f"\nThe executed notebook is {options.executed} ({time.monotonic() - started:.0f} s).")
    if failure:
        print(f"\n{options.source} failed:\n{failure}", file=sys.stderr)
        return 1
    reached = [line.strip() for text in texts(notebook) for line in text.splitlines() if "accuracy" in line.lower()]
    print("\n".join(["Accuracy reached:", *(f"  {line}" for line in dict.fromkeys(reached))]) if reached else "")
    return 0


def execute(notebook: NotebookNode, folder: Path) -> str:
    """Run every cell in ``folder``, printing each one's output as it ends; return what went wrong, "" for nothing."""

    def report(cell: NotebookNode, cell_index: int, **_: Any) -> None:
        if found := cell_texts(cell):
            print(f"\n[cell {cell_index + 1}]", *(text.rstrip() for text in found), sep="\n", flush=True)

    client = NotebookClient(
        notebook,
        timeout=_CELL_LIMIT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        on_cell_executed=report,
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return _ESCAPE.sub("", str(error))
    return ""


def texts(notebook: NotebookNode) -> list[str]:
    """What the cells printed, in their order."""
    return [text for cell in notebook.cells for text in cell_texts(cell)]


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
