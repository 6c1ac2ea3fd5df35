"""The teaching notebooks: each runs without an error or a warning, shows its pictures, and keeps to the rules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NUM_PICTURES = {
    "02_data_parallel": 1,
    "03_precision": 2,
    "04_accumulation": 1,
    "05_checkpoints": 1,
    "06_panel": 0,
    "09_sharding": 1,
    "10_deepspeed": 2,
    "11_devices": 1,
}
MAX_CELLS = 20
MAX_LINES = 15


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    import nbformat  # not above: it takes seconds, also where nothing of this file is run

    return nbformat.read(request.param, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_PICTURES)
def test_it_runs_and_shows_its_pictures(name, tmp_path):
    # The tests' own drawing draws nothing in a notebook.
    environment = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
    script, executed = ROOT / "scripts" / "execute_notebook.py", tmp_path / "executed.ipynb"
    done = subprocess.run(
        [sys.executable, script, ROOT / "notebooks" / f"{name}.ipynb", executed],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    import nbformat

    outputs = [output for cell in code(nbformat.read(executed, as_version=4)) for output in cell.outputs]
    assert not [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == NUM_PICTURES[name]


def test_every_notebook_is_executed():
    # The quickstart is, by scripts/test.py, with the oldest supported packages.
    assert {path.stem for path in NOTEBOOKS} == {"01_quickstart", *NUM_PICTURES}


def test_it_is_short(notebook):
    import nbformat

    nbformat.validate(notebook)
    assert len(notebook.cells) <= MAX_CELLS
    longest = max(code(notebook), key=lambda cell: cell.source.count("\n"))
    assert len(longest.source.splitlines()) <= MAX_LINES, longest.source


def test_it_says_at_its_beginning_what_it_teaches_and_checks_it_at_its_end(notebook):
    assert notebook.cells[0].source.startswith("# ")
    assert "After this notebook you can\n\n- " in notebook.cells[0].source
    assert "assert " in notebook.cells[-1].source
    num_texts = len(notebook.cells) - len(code(notebook))
    assert 0.7 <= num_texts / len(code(notebook)) <= 1.4


def test_no_outputs_are_kept(notebook):
    assert not [cell for cell in code(notebook) if cell.outputs or cell.execution_count is not None]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_readme_lists_it(path):
    assert f"](notebooks/{path.name})" in (ROOT / "README.md").read_text()
