"""The quickstart command: what it prints of a notebook that works, and of one that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each loads nbclient and a kernel

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "execute_notebook.py"


@pytest.fixture
def execute(tmp_path):
    def run(*sources):
        import nbformat  # not above: it takes seconds, also where nothing of this file is run
        from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

        cells = [new_markdown_cell("# Title"), *(new_code_cell(source) for source in sources)]
        nbformat.write(new_notebook(cells=cells), tmp_path / "in.ipynb")
        arguments = [sys.executable, SCRIPT, tmp_path / "in.ipynb", tmp_path / "out" / "executed.ipynb"]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_outputs_stand_under_the_notebook_s_own_numbers(execute, tmp_path):
    done = execute("x = 1", "print('accuracy 0.5')")
    assert done.returncode == 0
    assert done.stdout.count("accuracy 0.5") == 1
    assert "\nIn[2]\naccuracy 0.5\n" in done.stdout
    assert f"The executed notebook is {tmp_path / 'out' / 'executed.ipynb'}" in done.stdout
    assert done.stderr == ""


def test_a_failure_is_not_told_as_a_success(execute, tmp_path):
    done = execute("print('so far')", "1 / 0", "print('never')")
    assert done.returncode == 1
    assert "so far" in done.stdout
    assert "The executed notebook is" not in done.stdout
    assert "ZeroDivisionError" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("FAILED after")
    assert last.endswith(str(tmp_path / "out" / "executed.ipynb") + ".")
    assert (tmp_path / "out" / "executed.ipynb").exists()
