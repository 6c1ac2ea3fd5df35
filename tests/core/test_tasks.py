import __future__

import asyncio
import sys
import types

import pytest

from notebook_launcher.core.tasks import Call, Cell, compile_cell, future_flags


@pytest.fixture
def main(monkeypatch):
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module.__dict__


def test_a_call_returns_what_the_function_returns():
    assert Call(lambda a, b=0: (a, b), (1,), {"b": 2})() == (1, 2)
    with pytest.raises(ZeroDivisionError):
        Call(lambda: 1 / 0)()


def test_a_call_of_an_async_function_is_awaited():
    async def later(x):
        await asyncio.sleep(0)
        return x + 1

    assert Call(later, (1,))() == 2


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\nx + 1", 2),
        ("x = 1\nx + 1;", None),
        ("3;  # a comment\n\n", None),
        ("'a;'", "a;"),
        ("x = 5", None),
        ("", None),
        ("# only a comment", None),
        ("import asyncio\nx = 1\nawait asyncio.sleep(0, x + 1)", 2),
        ("import asyncio\ny = await asyncio.sleep(0, 4)\ny", 4),
        ("import asyncio\nawait asyncio.sleep(0, 4);", None),
        ("import asyncio\nasync def f(): return 6\nasyncio.run(f())", 6),
        ("async def f(x): return x + 1\nf(4)", 5),
        ("import asyncio\nasync def f(): return 6\nawait asyncio.sleep(0)\nf()", 6),
        ("async def f(): return 6\nawait f()", 6),
        ("given * 2", 14),
        ("def f(): return given\ngiven = 8\nf()", 8),
    ],
)
def test_a_cell_gives_its_last_expressions_value(main, source, expected):
    assert Cell(source, "<cell>", {"given": 7})() == expected


def test_a_cell_runs_in_main(main):
    Cell("import sys\nclass A: pass\nsame = sys.modules['__main__'].A is A\ngiven += 1", "<cell>", {"given": 1})()
    assert (main["same"], main["given"], main["A"].__module__) == (True, 2, "__main__")


def test_a_cells_lines_are_in_its_tracebacks(main):
    with pytest.raises(ZeroDivisionError) as caught:
        Cell("x = 1\n\n1 / 0", "<the cell>")()
    last = caught.traceback[-1]
    assert (str(last.path), last.lineno + 1) == ("<the cell>", 3)


def test_a_cell_that_is_not_python_says_so_when_it_is_compiled():
    with pytest.raises(SyntaxError):
        compile_cell("x = = 1", "<cell>")


def test_future_imports_of_earlier_cells_hold(main):
    namespace = {"annotations": __future__.annotations, "division": "the user's own"}
    flags = future_flags(namespace)
    assert flags == __future__.annotations.compiler_flag
    assert Cell("def f(x: Missing): pass\nf.__annotations__", "<cell>", {}, flags)() == {"x": "Missing"}
    with pytest.raises(NameError):
        Cell("def f(x: Missing): pass", "<cell>")()
