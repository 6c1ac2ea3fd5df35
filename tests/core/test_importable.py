import sys
import types

import pytest
from far_side import FarSide, Notebook

from notebook_launcher.core import pickling
from notebook_launcher.core.importable import is_importable


@pytest.fixture(scope="module")
def worker():
    one = FarSide()
    yield one
    one.close()


@pytest.fixture
def notebook(monkeypatch):
    one = Notebook()
    monkeypatch.setitem(sys.modules, "__main__", one.module)
    return one


def test_importable_code_goes_by_reference(notebook):
    notebook.cell("import json, json.decoder\ndef go(): return json.loads, json.decoder.JSONDecoder")
    packed = pickling.dumps(notebook["go"])
    assert b"raw_decode" not in packed.parts[0]


def _module_outside_the_path(monkeypatch, folder, text):
    (folder / "aside.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    import aside

    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "aside", aside)
    return aside


def test_a_module_that_a_worker_cannot_import_travels(worker, monkeypatch, tmp_path):
    text = (
        "import math\nhidden = 3\n"
        "class K:\n    def v(self): return twice(hidden)\n"
        "def twice(x): return 2 * x\n"
        "def set_hidden(x):\n    global hidden\n    hidden = x\n"
    )
    with monkeypatch.context() as m:
        aside = _module_outside_the_path(m, tmp_path, text)
    monkeypatch.setitem(sys.modules, "aside", aside)
    one = Notebook()
    monkeypatch.setitem(sys.modules, "__main__", one.module)
    one.cell("import aside\ndef go():\n    aside.set_hidden(5)\n    return aside.K().v(), aside.K(), aside.math.pi > 3")
    value, instance, imported = worker.run(one["go"])
    assert (value, imported) == (10, True)
    assert type(instance) is aside.K
    assert aside.hidden == 3
    one.cell("from aside import K\ndef go2(): return K().v()")
    assert worker.run(one["go2"]) == 6


def test_a_module_made_in_the_notebook_travels(worker, notebook):
    made = types.ModuleType("made_here")
    made.x = 4
    notebook.names["made"] = made
    notebook.cell("def go(): return made.x")
    assert worker.run(notebook["go"]) == 4


def test_a_class_whose_module_was_reloaded_goes_by_value(worker, notebook, monkeypatch, tmp_path):
    (tmp_path / "again.py").write_text("class C:\n    v = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    import again

    monkeypatch.setitem(sys.modules, "again", again)
    older = again.C()
    importlib.reload(again)
    notebook.cell("def go(o): return o.v, o")
    assert pickling.dump(older).reloaded == ("again.C",)
    value, back = worker.run(notebook["go"], older)
    assert value == 1
    assert type(back) is type(older)


def test_what_every_interpreter_has_is_importable():
    for name in ("json", "sys", "numpy.linalg", "notebook_launcher.core", "cloudpickle", "never_imported"):
        assert is_importable(name), name


def test_a_file_of_the_same_name_elsewhere_is_not_it(monkeypatch, tmp_path):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twin.py").write_text(f"NAME = {folder!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "one"))
    import twin

    monkeypatch.setitem(sys.modules, "twin", twin)
    assert is_importable("twin")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), *sys.path])
    assert not is_importable("twin")
