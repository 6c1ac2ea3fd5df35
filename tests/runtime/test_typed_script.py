"""``Accelerator`` as types, signatures and ``help`` show it."""

import inspect
import pathlib
import pydoc

import pytest
from mypy import api

from notebook_launcher import Accelerator

SCRIPT = pathlib.Path(__file__).with_name("typed_script.py")


@pytest.mark.slow
def test_a_typed_script_passes_mypy_strict():
    said, errors, status = api.run(["--strict", "--config-file=", str(SCRIPT)])
    assert status == 0, said + errors


def typed_script(folder):
    names = {}
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), names)  # noqa: S102 - it is ours
    return names["main"](pathlib.Path(folder))


def test_the_typed_script_runs(on_ranks, tmp_path):
    first, second = on_ranks(typed_script, str(tmp_path))
    assert first == second
    assert len(first) == 2
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["profile_0.json", "profile_1.json"]


def test_help_reads_well():
    text = pydoc.plain(pydoc.render_doc(Accelerator.prepare))
    for part in ("prepare(self, *objects", "device_placement", "in the order given", "Raises"):
        assert part in text
    for name, member in inspect.getmembers(Accelerator):
        if not name.startswith("_"):
            assert inspect.getdoc(member), f"{name} says nothing"
