import linecache
import sys
import threading
import warnings

import numpy as np
import pytest
from far_side import FarSide, Notebook

from notebook_launcher.core import pickling
from notebook_launcher.core.errors import ConfigError, PayloadError
from notebook_launcher.launcher import payload
from notebook_launcher.launcher.payload import check_call, for_call, for_cell


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


# --- what is checked before anything starts ---------------------------------------------------------------------------


def train(epochs, lr=0.1):
    return epochs, lr


async def later():
    return 1


@pytest.mark.parametrize("given", [None, 3, {"loss": 1}])
def test_the_result_of_a_call_in_place_of_a_function_is_told_apart(given):
    with pytest.raises(PayloadError, match=r"result of a call, drop the parentheses: launch\(train\)"):
        check_call(given, (), {})


def test_a_coroutine_in_place_of_a_function_is_told_apart_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PayloadError, match="drop the parentheses"):
            check_call(later(), (), {})


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {}, r"train\(epochs, lr=0.1\) can't be called with \(\): missing a required argument: 'epochs'"),
        ((1, 2, 3), {}, r"can't be called with \(1, 2, 3\): too many positional arguments"),
        ((1,), {"rate": 2}, r"can't be called with \(1, rate=2\): got an unexpected keyword argument 'rate'"),
    ],
)
def test_wrong_arguments_show_the_functions_signature(args, kwargs, text):
    with pytest.raises(PayloadError, match=text):
        check_call(train, args, kwargs)


def test_arguments_in_the_wrong_form_are_corrected():
    with pytest.raises(ConfigError, match=r"write args=\(3,\)"):
        check_call(train, 3, {})
    with pytest.raises(ConfigError, match=r"write args=\('ab',\)"):
        check_call(train, "ab", {})
    with pytest.raises(ConfigError, match="kwargs is a dict"):
        check_call(train, (), [1])
    check_call(train, [1], None)
    check_call(dict, (), {"a": 1})  # no signature to check


# --- calls ----------------------------------------------------------------------------------------------------------


def test_a_call_is_packed_with_its_name_and_sources(worker, notebook):
    filename = notebook.cell("def train(epochs, lr=0.1): return epochs, lr")
    packed = for_call(notebook["train"], (3,), {"lr": 1})
    assert (packed.name, packed.large, packed.notes) == ("train", [], [])
    assert packed.sources == {filename: linecache.cache[filename][2][0]}
    assert packed.kept == (notebook["train"],)
    assert worker.run_packed(packed.packed, packed.sources) == (3, 1)


def test_packing_is_fast(notebook):
    import time

    notebook.cell("def train(epochs): return epochs")
    for_call(notebook["train"], (1,))
    times = []
    for _ in range(20):
        start_s = time.perf_counter()
        for_call(notebook["train"], (1,))
        times.append(time.perf_counter() - start_s)
    assert min(times) < 0.5e-3


CULPRITS = """
import functools, threading, socket
lock = threading.Lock()
def direct(): return lock
def helper(): return lock
def through(): return helper()
def make():
    inner_lock = threading.Lock()
    def inside(): return inner_lock
    return inside
closure = make()
def default(x=lock): pass
config = {"deep": [1, {"lock": lock}]}
def contained(): return config
class Holder:
    def __init__(self): self.lock = lock
holder = Holder()
def attribute(): return holder
class Uses:
    def method(self): return lock
def by_class(): return Uses()
class Has:
    held = lock
def class_attribute(): return Has()
def takes(model, *rest, **more): pass
partial = functools.partial(takes, x=lock)
generator = (i for i in range(3))
def generates(): return generator
class Bad:
    def __reduce__(self): raise RuntimeError("I refuse\\nsecond line")
bad = Bad()
def reduces(): return bad
"""


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        (
            "direct",
            (),
            r"the global variable `lock`, which direct\(\) uses, can't travel .* Create it inside the function",
        ),
        ("through", (), r"global variable `lock`, which helper\(\) uses \(through\(\) uses helper\(\)\)"),
        ("closure", (), r"closure variable `inner_lock`, which inside\(\) uses"),
        ("default", (), r"default argument `x`, which default\(\) uses"),
        ("contained", (), r"global variable `config\['deep'\]\[1\]\['lock'\]`, which contained\(\) uses"),
        ("attribute", (), r"global variable `holder.lock`, which attribute\(\) uses, .* of type thread.lock"),
        ("by_class", (), r"global variable `lock`, which Uses.method\(\) uses"),
        ("class_attribute", (), r"global variable `Has.held`, which class_attribute\(\) uses"),
        ("takes", ("lock",), r"argument `model` of takes\(\)"),
        ("takes", (1, "lock"), r"argument `args\[1\]` of takes\(\)"),
        ("takes", ("holder",), r"argument `model.lock` of takes\(\)"),
        ("partial", (1,), r"argument `x` of takes\(\)"),
        ("generates", (), r"`generator`.* of type generator.* A generator can't be copied"),
        ("reduces", (), r"`bad`.* of type Bad, which can't be pickled \(RuntimeError: I refuse\)"),
    ],
)
def test_what_cannot_travel_is_named(notebook, name, args, text):
    notebook.cell(CULPRITS)
    values = [notebook[arg] if isinstance(arg, str) else arg for arg in args]
    with pytest.raises(PayloadError, match=text) as caught:
        for_call(notebook[name], values)
    assert "second line" not in str(caught.value)


def test_a_bound_methods_object_is_named(notebook):
    notebook.cell(CULPRITS + "class Trainer(Holder):\n    def fit(self): pass\ntrainer = Trainer()")
    with pytest.raises(PayloadError, match=r"`self\.lock`"):
        for_call(notebook["trainer"].fit)


def test_open_files_sockets_and_accelerators_come_with_advice(notebook, tmp_path):
    notebook.cell("def go(): return thing")
    text = r"`thing`.* Open the file inside the function: pass its path"
    with (tmp_path / "f").open("w") as notebook.names["thing"], pytest.raises(PayloadError, match=text):
        for_call(notebook["go"])
    kind = type("Accelerator", (), {"__module__": "notebook_launcher.runtime.accelerator"})
    notebook.names["thing"] = [kind()]
    with pytest.raises(
        PayloadError, match=r"`thing\[0\]`.*runtime.accelerator.Accelerator.* Create it inside the function"
    ):
        for_call(notebook["go"])


def test_torch_objects_that_live_in_one_process_are_refused(notebook):
    torch = pytest.importorskip("torch")
    notebook.cell("def go(): return thing")
    notebook.names["thing"] = torch.distributed.HashStore()
    with pytest.raises(PayloadError, match=r"`thing`.*HashStore.*lives in this process only"):
        for_call(notebook["go"])
    # A real one needs a process group; what matters is what it is an instance of.
    notebook.names["thing"] = torch.nn.parallel.DistributedDataParallel.__new__(
        torch.nn.parallel.DistributedDataParallel
    )
    with pytest.raises(PayloadError, match=r"`thing`.*DistributedDataParallel.* Wrap the model inside the function"):
        for_call(notebook["go"])


def test_the_search_ends_in_circles(notebook):
    notebook.cell(CULPRITS + "circle = {'lock': lock}\ncircle['self'] = circle\ndef go(): return go, circle")
    with pytest.raises(PayloadError, match=r"`circle\['lock'\]`"):
        for_call(notebook["go"])


# --- large objects --------------------------------------------------------------------------------------------------


def test_large_objects_are_named_with_their_size(notebook, monkeypatch):
    monkeypatch.setattr(payload, "LARGE_BYTES", 1_000_000)
    notebook.cell(
        "import numpy as np\n"
        "table = np.zeros(200_000)\n"
        "small = np.zeros(1000)\n"
        "config = {'weights': [np.zeros(150_000)], 'rate': 1}\n"
        "class T:\n    def run(self): return table\n"
        "def go(data): return T().run(), small, config\n"
    )
    packed = for_call(notebook["go"], (np.zeros(300_000),))
    assert [(name, size // 100_000) for name, size in packed.large] == [("data", 24), ("table", 16), ("config", 12)]
    cell = for_cell("table.sum()", notebook.names, "<cell>")
    assert [name for name, _ in cell.large] == ["table"]


def test_sizes_are_not_looked_for_where_all_is_small(notebook, monkeypatch):
    monkeypatch.setattr(payload, "large", lambda *_: pytest.fail("nobody is large"))
    notebook.cell("def go(): return 1")
    assert for_call(notebook["go"]).large == []


def test_a_reloaded_class_is_noted(notebook, monkeypatch, tmp_path):
    (tmp_path / "changing.py").write_text("class C:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    import changing

    monkeypatch.setitem(sys.modules, "changing", changing)
    notebook.names["older"] = changing.C()
    importlib.reload(changing)
    notebook.cell("def go(): return older")
    assert for_call(notebook["go"]).notes == [
        "changing.C was reloaded after it was used: the older class travels along"
    ]


# --- cells ----------------------------------------------------------------------------------------------------------


def test_a_cell_sees_the_notebooks_variables_and_gives_its_last_value(worker, notebook):
    notebook.cell(
        "rate = 2\nclass Point:\n    def __init__(self, x): self.x = x\ndef double(p): return Point(p.x * rate)"
    )
    packed = for_cell("p = Point(4)\ndouble(p)", notebook.names, "<cell 3>")
    assert packed.name == "cell"
    assert packed.sources["<cell 3>"] == "p = Point(4)\ndouble(p)"
    back = worker.run_packed(packed.packed, packed.sources)
    assert type(back) is notebook["Point"]
    assert back.x == 8
    assert "p" not in notebook.names


def test_a_cell_takes_only_what_it_uses(worker, notebook):
    notebook.names.update(lock=threading.Lock(), data=threading.Lock(), x=3)
    packed = for_cell("data = x + 1\ndef f(lock=None): return data, lock\nf()", notebook.names, "<cell>")
    assert worker.run_packed(packed.packed, packed.sources) == (4, None)
    with pytest.raises(PayloadError, match="the variable `lock`, which the cell uses, can't travel"):
        for_cell("print(lock)", notebook.names, "<cell>")


def test_a_cell_may_await_and_be_decorated_with_a_semicolon(worker, notebook):
    awaiting = for_cell("import asyncio\nawait asyncio.sleep(0, 5)", notebook.names, "<cell>")
    assert worker.run_packed(awaiting.packed, awaiting.sources) == 5
    silent = for_cell("5;", notebook.names, "<cell>")
    assert worker.run_packed(silent.packed, silent.sources) is None


def test_a_cells_mistakes_are_found_before_anything_starts(notebook):
    notebook.cell("def train(epochs, lr=0.1): return epochs")
    with pytest.raises(SyntaxError):
        for_cell("train(3", notebook.names, "<cell>")
    with pytest.raises(PayloadError, match=r"train\(epochs, lr=0.1\) can't be called with \(x \+ 1, rate=2\)"):
        for_cell("train(x + 1, rate=2)", notebook.names, "<cell>")
    for fine in ("train(*x)", "train(3, **y)", "unknown(1)", "train(3)"):
        for_cell(fine, notebook.names, "<cell>")


def test_a_cells_errors_show_its_lines(worker, notebook):
    packed = for_cell("x = 1\nraise ValueError('in the cell')", notebook.names, "<cell 9>", name="cell 9")
    with pytest.raises(ValueError, match="in the cell") as caught:
        worker.run_packed(packed.packed, packed.sources)
    assert 'File "<cell 9>", line 2' in caught.value.far_traceback
    assert "raise ValueError('in the cell')" in caught.value.far_traceback
    assert packed.name == "cell 9"


def test_a_payload_needs_its_packed_part_only(worker, notebook):
    notebook.cell("def go(): return 1")
    assert pickling.loads(for_call(notebook["go"]).packed)() == 1
