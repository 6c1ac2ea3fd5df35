import ast

import pytest

from notebook_launcher.core.tasks import compile_cell
from notebook_launcher.launcher.cell_names import used_names


def _names(source):
    codes = [code for code in compile_cell(source, "<cell>") if code is not None]
    return used_names(codes, ast.parse(source), dict.fromkeys("abc"))


@pytest.mark.parametrize(
    "source",
    [
        "a",
        "a += 1",
        "a = a + 1",
        "del a",
        "x.b, a",
        "f(lambda: a)",
        "def f(): return a",
        "def f(x=a): pass",
        "@a\ndef f(): pass",
        "class K(a): pass",
        "class K:\n    x = a",
        "if x: a = 1\na",
        "for i in x: a = 1\na",
        "while x: a = 1\na",
        "for a in x: pass\na",
        "for i in a: a = 1",
        "with a as x: pass",
        "try:\n    a = 1\nexcept E:\n    pass\na",
        "try:\n    pass\nfinally:\n    print(a)\na = 1",
        "[a for x in y]",
        "[x for x in a]",
        "print(f'{a}')",
        "async def f(): await a",
        "match a:\n    case 1: pass",
        "a, x = 1, a",
    ],
)
def test_names_that_are_read_before_they_are_set_are_needed(source):
    assert _names(source).needed == ("a",)


@pytest.mark.parametrize(
    "source",
    [
        "a = 1\na",
        "a: int = 1\na",
        "import a\na",
        "import x as a\na",
        "from x import a\na",
        "def a(): pass\na()",
        "class a: pass\na()",
        "with x as a: a",
        "with x:\n    a = 1\na",
        "for a in x: a",
        "for i in x:\n    a = i\n    print(a)",
        "while x:\n    a = 1\n    a",
        "if x:\n    a = 1\n    a",
        "if x: a = 1\nelse: a = 2\na",
        "try:\n    import a\nexcept E:\n    a = None\na",
        "(a := 1)\na",
        "x.a",
        "x(a=1)",
        "def f():\n    a = 1\n    return a",
        "[a for a in x]",
        "lambda a: a",
        "'a'",
    ],
)
def test_names_that_the_cell_sets_itself_are_not(source):
    assert _names(source) == type(_names(source))((), ())


def test_names_that_the_cell_sets_and_a_function_reads_are_perhaps_needed():
    assert _names("def f(): return a\na = 1\nf()").perhaps == ("a",)
    assert _names("a = 1\nb\nlambda: (a, c)").needed == ("b", "c")
