"""Places in cells are named as the notebook numbers them."""

from __future__ import annotations

import sys
import types

import pytest

from notebook_launcher.core.cell_labels import in_cells

TEXT = '  File "/cells/1.py", line 3, in train\n    fail()\n  File "/lib/other.py", line 9, in fail\n'


@pytest.fixture
def shell(monkeypatch):
    one = types.SimpleNamespace(compile=types.SimpleNamespace(_filename_map={"/cells/1.py": 5}))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: one))
    return one


@pytest.mark.usefixtures("shell")
def test_a_cells_file_becomes_its_number_and_other_files_stay():
    assert in_cells(TEXT) == '  Cell In[5], line 3, in train\n    fail()\n  File "/lib/other.py", line 9, in fail\n'


def test_without_a_record_of_cells_nothing_changes(shell):
    del shell.compile._filename_map
    assert in_cells(TEXT) == TEXT


def test_outside_ipython_nothing_changes(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert in_cells(TEXT) == TEXT
