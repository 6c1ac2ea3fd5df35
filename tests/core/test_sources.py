import inspect
import linecache
import sys

import pytest
from far_side import FarSide, Notebook

from notebook_launcher.core import pickling, sources


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


def test_sources_travel_so_that_inspect_and_tracebacks_show_lines(worker, notebook):
    filename = notebook.cell(
        "import inspect\n"
        "class Cfg:\n    lr = 0.1\n"
        "class A:\n    # a comment\n    def m(self):\n        return 1\n"
        "class P:\n    @property\n    def p(self): return 2\n"
        "def go(): return [inspect.getsource(x) for x in (go, A, A.m, P, Cfg)]\n"
        "def fail():\n    raise ValueError('at the bottom')\n"
    )
    go, a, m, p, cfg = worker.run(notebook["go"])
    assert go.startswith("def go():")
    assert a == "class A:\n    # a comment\n    def m(self):\n        return 1\n"
    assert m == "    def m(self):\n        return 1\n"
    assert p.startswith("class P:")
    assert cfg == "class Cfg:\n    lr = 0.1\n"
    with pytest.raises(ValueError, match="at the bottom") as caught:
        worker.run(notebook["fail"])
    assert filename in caught.value.far_traceback
    assert "raise ValueError('at the bottom')" in caught.value.far_traceback


def test_only_texts_that_are_in_no_file_are_collected(notebook):
    filename = notebook.cell("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\ndef go(): return A")
    assert list(pickling.dump(notebook["go"]).sources) == [filename]
    linecache.getlines(__file__)
    assert sources.collect([__file__, "<stdin>", "<string>"]) == {}


def test_getsource_of_what_has_no_text_still_says_so(notebook):
    sources.install({"<a cell>": "x = 1\n"})
    exec("class Nowhere:\n    def m(self): return 1", notebook.names)  # noqa: S102
    with pytest.raises(OSError, match="source"):
        inspect.getsource(notebook["Nowhere"])
    with pytest.raises(TypeError):
        inspect.getsource(int)
