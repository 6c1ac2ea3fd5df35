import sys
import threading

import pytest
from far_side import FarSide, Notebook

from notebook_launcher.core import pickling
from notebook_launcher.core.errors import WorkerError


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


class UnusualError(ValueError):
    def __init__(self, *, code, where):
        super().__init__(f"code {code}")
        self.code, self.where = code, where


class DoubledError(Exception):
    def __init__(self, text):
        super().__init__(f"doubled {text}")


class FiledError(OSError):
    def __init__(self, number, text, name, extra):
        super().__init__(number, text, name)
        self.extra = extra


class Grouped(ExceptionGroup):
    def __new__(cls, errors, code):
        self = super().__new__(cls, f"code {code}", errors)
        self.code = code
        return self

    def derive(self, excs):
        return Grouped(excs, self.code)


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def _back(error):
    packed = pickling.dump_error(error)
    assert packed is not None
    return pickling.load_error(packed)


def test_errors_keep_type_and_state_whatever_their_signature():
    back = _back(UnusualError(code=3, where=["a"]))
    assert (type(back), str(back), back.code, back.where) == (UnusualError, "code 3", 3, ["a"])
    assert str(_back(DoubledError("x"))) == "doubled x"
    back = _back(FiledError(2, "missing", "file.txt", "e"))
    assert (back.errno, back.strerror, back.filename, back.extra) == (2, "missing", "file.txt", "e")
    assert type(_back(UnprintableError(1))) is UnprintableError


@pytest.mark.parametrize(
    "error",
    [
        KeyError("k"),
        SystemExit(3),
        KeyboardInterrupt(),
        StopIteration(5),
        FileNotFoundError(2, "missing", "f"),
        ImportError("m", name="n", path="p"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        SyntaxError("bad", ("cell", 2, 5, "x = = 1", 2, 6)),
        WorkerError("it failed", rank=1, kind="ValueError"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_pythons_own_errors_arrive_as_they_were(error):
    back = _back(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    names = ("errno", "filename", "code", "value", "name", "path", "start", "lineno", "offset", "text", "rank", "kind")
    assert [getattr(back, n, None) for n in names] == [getattr(error, n, None) for n in names]


def test_causes_contexts_and_notes_are_kept():
    inner = UnusualError(code=1, where=None)
    inner.add_note("a note")
    error = KeyError("outer")
    error.__cause__ = error.__context__ = inner
    back = _back(error)
    assert isinstance(back.__cause__, UnusualError)
    assert back.__cause__ is back.__context__
    assert back.__suppress_context__
    assert back.__cause__.__notes__ == ["a note"]


def test_a_circle_of_contexts_is_kept():
    one, two = ValueError("one"), KeyError("two")
    one.__context__, two.__context__ = two, one
    back = _back(one)
    assert back.__context__.__context__ is back


def test_groups_keep_their_members():
    back = _back(
        ExceptionGroup("several", [UnusualError(code=1, where=0), ExceptionGroup("inner", [DoubledError("y")])])
    )
    assert [str(error) for error in back.exceptions] == ["code 1", "inner (1 sub-exception)"]
    back = _back(Grouped([ValueError("v")], 4))
    assert (type(back), back.code, back.message, str(back.exceptions[0])) == (Grouped, 4, "code 4", "v")


def test_an_error_that_cannot_travel_is_none_and_one_with_such_a_cause_goes_alone():
    holder = ValueError("holder")
    holder.lock = threading.Lock()
    assert pickling.dump_error(holder) is None
    error = KeyError("k")
    error.__cause__ = holder
    assert _back(error).__cause__ is None

    class LyingError(Exception):
        def __reduce__(self):
            return ValueError, ("something else",)

    assert pickling.dump_error(LyingError()) is None
    assert pickling.dump_error(type("Thrower", (Exception,), {"__reduce__": lambda _: 1 / 0})()) is None


def test_an_error_of_a_notebooks_class_is_caught_as_such(worker, notebook):
    notebook.cell(
        "class TooBig(ValueError):\n    def __init__(self, *, size): super().__init__(size); self.size = size\n"
        "def go(): raise TooBig(size=64) from KeyError('why')\n"
    )
    with pytest.raises(notebook["TooBig"], match="64") as caught:
        worker.run(notebook["go"])
    assert caught.value.size == 64
    assert isinstance(caught.value.__cause__, KeyError)


def test_load_error_refuses_what_is_no_error():
    with pytest.raises(TypeError, match="int is not an exception"):
        pickling.load_error(pickling.dumps_result(3))
