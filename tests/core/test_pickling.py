import pickle
import sys
import threading
import warnings

import numpy as np
import pytest
from far_side import FarSide, Notebook

from notebook_launcher.core import pickling
from notebook_launcher.core.refusals import RefusedError


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


# --- code ----------------------------------------------------------------------------------------------------------


CODE = """
import abc, dataclasses, enum, functools, typing, weakref

def twice(f):
    @functools.wraps(f)
    def run(*args): return f(*args) * 2
    return run
@twice
def decorated(x): return x + 1
def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
def make(scale): return lambda x: x * scale
async def later(x): return x + 1
def defaults(a, b=2, *c, d=4, **e): return a, b, c, d, e
@dataclasses.dataclass
class Data:
    x: int
    y: list = dataclasses.field(default_factory=list)
    def total(self): return self.x + sum(self.y)
class Colour(enum.Enum):
    RED = 1
    GREEN = 2
class Flags(enum.IntFlag):
    A = 1
    B = 2
T = typing.TypeVar("T")
class Box(typing.Generic[T]):
    def __init__(self, value: T): self.value = value
    @property
    def doubled(self): return self.value * 2
    @classmethod
    def of(cls, value): return cls(value)
    @staticmethod
    def plain(value): return value
class Pair(typing.NamedTuple):
    a: int
    b: str = "b"
class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...
class Square(Shape):
    __slots__ = ("side",)
    def __init__(self, side): self.side = side
    def area(self): return self.side ** 2
class Sub(Data):
    def total(self): return super().total() + 100
def outer():
    class Inner:
        def value(self): return 7
    return Inner
def nested():
    def one(): return two()
    def two(): return 2
    return one
@functools.lru_cache(maxsize=100)
def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
class Lazy:
    @functools.cached_property
    def value(self): return 4
    @classmethod
    @functools.cache
    def once(cls): return 5
UserId = typing.NewType("UserId", int)
P = typing.ParamSpec("P")
Ts = typing.TypeVarTuple("Ts")
class Many(typing.Generic[typing.Unpack[Ts]]): pass
def typed(x: UserId = UserId(3), *args: P.args, **kwargs: P.kwargs) -> UserId: return x
@functools.singledispatch
def kind(x): return "object"
@kind.register
def _(x: int): return "int"
known = weakref.WeakKeyDictionary()
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decorated(3)", 8),
        ("factorial(6)", 720),
        ("even(10)", True),
        ("make(3)(4)", 12),
        ("defaults(1, d=5, z=6)", (1, 2, (), 5, {"z": 6})),
        ("functools.partial(defaults, 9)(8)", (9, 8, (), 4, {})),
        ("Data(1, [2]).total()", 3),
        ("Sub(1, [2]).total()", 103),
        ("Data(1) == Data(1)", True),
        ("Colour(1) is Colour.RED", True),
        ("Flags.A | Flags.B", 3),
        ("Box.of(4).doubled", 8),
        ("Box[int](2).value", 2),
        ("Box.plain(5)", 5),
        ("Pair(1)", (1, "b")),
        ("Square(3).area()", 9),
        ("outer()().value()", 7),
        ("nested()()", 2),
        ("fibonacci(20), fibonacci.cache_parameters()['maxsize']", (6765, 100)),
        ("Lazy().value + Lazy.once()", 9),
        ("typed()", 3),
        ("UserId.__supertype__, UserId.__module__", (int, "__main__")),
        ("Many.__parameters__ == (Ts,)", True),
        ("kind(1), kind('a')", ("int", "object")),
        ("len(known)", 0),
    ],
)
def test_a_notebooks_code_runs_on_a_worker(worker, notebook, text, expected):
    notebook.cell(CODE + f"def go(): return {text}")
    assert worker.run(notebook["go"]) == expected


def test_callables_of_every_kind_can_be_launched(worker, notebook):
    notebook.cell(CODE + "import functools\nadd = functools.partial(defaults, b=3)")
    assert worker.run(notebook["later"], 1) == 2
    assert worker.run(notebook["add"], 1)[:2] == (1, 3)
    assert worker.run(notebook["make"](5), 2) == 10
    assert worker.run(notebook["Data"](1, [5]).total) == 6
    assert worker.run(notebook["Data"], 4) == notebook["Data"](4)
    assert worker.run(max, 1, 2) == 2


def test_functions_of_one_launch_share_the_workers_main(worker, notebook):
    notebook.cell(
        "import sys\n"
        "step = 0\n"
        "def bump():\n    global step\n    step += 1\n"
        "class T:\n    def run(self):\n        bump()\n        return step\n"
        "def go():\n    bump()\n    here = T().run(), step\n"
        "    main = sys.modules['__main__']\n"
        "    return here, main.step, main.T is T, main.bump is bump, main.go.__name__\n"
    )
    assert worker.run(notebook["go"]) == ((2, 2), 2, True, True, "go")
    assert notebook["step"] == 0


def test_classes_are_found_by_plain_pickle_on_a_worker(worker, notebook):
    notebook.cell(
        "import pickle\n"
        "class A: pass\n"
        "class B: pass\n"
        "def go(x): return type(pickle.loads(pickle.dumps(A()))) is A, type(pickle.loads(pickle.dumps(x))) is type(x)\n"
    )
    b = notebook["B"]()
    notebook.cell("del B")
    assert worker.run(notebook["go"], b) == (True, True)


def test_a_second_launch_brings_the_notebooks_present_values(worker, notebook):
    notebook.cell("rate = 1\nclass A:\n    v = 1\ndef go(): return rate, A.v")
    assert worker.run(notebook["go"]) == (1, 1)
    notebook.cell("rate = 2\nA.v = 3")
    assert worker.run(notebook["go"]) == (2, 3)
    notebook.cell("class A:\n    v = 4\ndef go():\n    import __main__\n    return rate, A.v, __main__.A is A")
    assert worker.run(notebook["go"]) == (2, 4, True)


# --- the way back ---------------------------------------------------------------------------------------------------


def test_what_comes_back_is_of_the_kernels_own_types(worker, notebook):
    notebook.cell(
        CODE + "def go():\n"
        "    made = [Data(1), Colour.GREEN, Box(2), Pair(3), Square(4)]\n"
        "    return [*made, Data, factorial, Data(5).total, UserId, P, Ts, fibonacci]\n"
    )
    back = worker.run(notebook["go"])
    kinds = [notebook[name] for name in ("Data", "Colour", "Box", "Pair", "Square")]
    assert [type(value) for value in back[:5]] == kinds
    assert back[1] is notebook["Colour"].GREEN
    assert back[5] is notebook["Data"]
    assert back[6] is notebook["factorial"]
    assert back[7].__func__ is notebook["Data"].total
    assert back[8:] == [notebook[name] for name in ("UserId", "P", "Ts", "fibonacci")]


def test_a_result_changes_nothing_in_the_kernel(worker, notebook):
    notebook.cell(
        "count = 1\n"
        "class A:\n    v = 1\n    def m(self): return count\n"
        "def go():\n"
        "    global count\n"
        "    count = 50\n    A.v = 2\n    A.new = 3\n    A.m = lambda self: 'rewired'\n"
        "    return A(), A, go, lambda: (count, A)\n"
    )
    names, attributes = dict(notebook.names), dict(vars(notebook["A"]))
    a, kind, go, made = worker.run(notebook["go"])
    assert dict(notebook.names) == names
    assert dict(vars(notebook["A"])) == attributes
    assert type(a) is kind is notebook["A"]
    assert go is notebook["go"]
    assert made() == (50, notebook["A"])  # as it was on the worker, but for what is the kernel's
    assert made.__globals__ is not notebook.names


def test_a_class_redefined_meanwhile_is_the_one_of_that_name(worker, notebook):
    notebook.cell("class A:\n    pass\ndef go(): return A()")
    dumped = pickling.dump(notebook["go"])
    older = notebook["A"]
    notebook.cell("class A:\n    pass")
    assert type(worker.run_packed(dumped.packed, {})) is older
    del older, dumped
    notebook.cell("class B:\n    pass\ndef go(): return B()")
    packed = pickling.dumps(notebook["go"])
    notebook.cell("class B:\n    pass\ndel go")
    import gc

    gc.collect()
    assert type(worker.run_packed(packed, {})) is notebook["B"]


def test_a_class_deleted_meanwhile_is_named(worker, notebook):
    notebook.cell("class A:\n    pass\ndef go(): return A()")
    packed = pickling.dumps(notebook["go"])
    notebook.cell("del A, go")
    import gc

    gc.collect()
    with pytest.raises(pickle.UnpicklingError, match=r"__main__\.A was deleted or redefined"):
        worker.run_packed(packed, {})


def test_a_class_made_on_a_worker_arrives_and_is_set_once(worker, notebook):
    notebook.cell(
        "def make():\n    class Local:\n        v = 1\n        def m(self): return self.v\n    return Local\n"
        "kept = None\n"
        "def first():\n    import __main__\n    __main__.keep = make()\n    return keep()\n"
        "def again():\n    keep.v = 2\n    return keep()\n"
    )
    one = worker.run(notebook["first"])
    assert one.m() == 1
    two = worker.run(notebook["again"])
    assert type(two) is type(one)
    assert two.m() == 1


def test_values_of_many_kinds_come_back(worker, notebook):
    pandas = pytest.importorskip("pandas")
    notebook.cell(
        "import numpy as np, pandas\n"
        "def go(): return None, {1: (2, [3])}, np.arange(5), pandas.DataFrame({'a': [1.5, 2], 'b': ['x', 'y']})"
    )
    none, plain, array, frame = worker.run(notebook["go"])
    assert (none, plain) == (None, {1: (2, [3])})
    assert array.tolist() == [0, 1, 2, 3, 4]
    assert frame.equals(pandas.DataFrame({"a": [1.5, 2], "b": ["x", "y"]}))


# --- buffers --------------------------------------------------------------------------------------------------------


def test_arrays_travel_out_of_band_and_are_the_receivers_own(worker, notebook):
    array = np.zeros(100_000)
    notebook.cell("def go(a, b):\n    a += 1\n    return float(a.sum()), a, b")
    packed = pickling.dumps([array])
    assert packed.mapping_bytes == array.nbytes
    total, back, small = worker.run(notebook["go"], array, np.arange(3))
    back[0] = small[0] = 7
    assert total == 100_000
    assert array.sum() == 0


def test_an_array_that_cannot_be_written_stays_so():
    array = np.ones(100_000)
    array.flags.writeable = False
    assert not pickling.loads(pickling.dumps(array)).flags.writeable


def test_measure_counts_without_copying():
    array = np.zeros(100_000)
    assert array.nbytes < pickling.measure([array, array]) < array.nbytes + 1000
    assert pickling.measure(b"x" * 500_000) > 500_000
    with pytest.raises(TypeError, match="lock"):
        pickling.measure(threading.Lock())


# --- what belongs to one process --------------------------------------------------------------------------------------


def test_files_are_refused_and_standard_streams_are_the_receivers(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("x")
    with path.open() as file, pytest.raises(RefusedError, match="pass its path"):
        pickling.dumps(file)
    assert pickling.loads(pickling.dumps([sys.stderr]))[0] is sys.stderr


@pytest.mark.parametrize("module", ["accelerate.accelerator", "notebook_launcher.runtime.accelerator"])
def test_an_accelerator_is_refused_by_its_name(module):
    kind = type("Accelerator", (), {"__module__": module})
    with pytest.raises(RefusedError, match="create it inside the function"):
        pickling.dumps({"a": kind()})


def test_get_ipython_is_the_receivers_and_a_shell_is_refused():
    import IPython

    class Shell:
        __module__ = "IPython.core.interactiveshell"
        __qualname__ = "InteractiveShell"

        def get_ipython(self):
            return self

    assert pickling.loads(pickling.dumps(Shell().get_ipython)) is IPython.get_ipython
    with pytest.raises(RefusedError, match="kernel only"):
        pickling.dumps(Shell())


# --- a worker's own children ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_pools_that_a_worker_starts_find_the_notebooks_code(worker, notebook, method):
    notebook.cell(
        "import concurrent.futures, multiprocessing, inspect\n"
        "SCALE = 10\n"
        "class Item:\n    def __init__(self, v): self.v = v\n"
        "def scale(item): return Item(item.v * SCALE), 'SCALE' in inspect.getsource(scale)\n"
        "def go(method):\n"
        "    context = multiprocessing.get_context(method)\n"
        "    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:\n"
        "        return [(type(i) is Item, i.v, known) for i, known in pool.map(scale, [Item(1), Item(2)])]\n"
    )
    assert worker.run(notebook["go"], method) == [(True, 10, True), (True, 20, True)]


def test_a_worker_and_its_children_never_run_the_script_again(worker, notebook, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('the script ran')")
    notebook.names["__file__"] = str(script)
    notebook.cell(
        "import multiprocessing, os\n"
        "def name(x): return os.path.basename(__file__)\n"
        "def go():\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: return pool.map(name, [1])\n"
    )
    assert worker.run(notebook["go"]) == ["script.py"]


def test_this_process_pickles_for_its_children_as_before():
    from multiprocessing.reduction import ForkingPickler

    pickling.dumps(Notebook)
    assert not hasattr(ForkingPickler, "reducer_override")


def test_pickling_warns_of_nothing(notebook):
    notebook.cell(CODE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickling.loads(pickling.dumps([notebook["Data"](1), notebook["Box"], notebook["Colour"].RED]))
