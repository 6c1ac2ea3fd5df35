"""Values: what a launch captures and what a rank returns arrive as they were; what can't travel is refused by name."""

from __future__ import annotations

import json

import pytest

SETUP = """
import contextlib, dataclasses, enum, functools, socket, threading
import numpy as np, pandas as pd, psutil
from torch import nn
from notebook_launcher.launcher import warm

taken = []  # one entry for each time that a launch took worker processes
def counting(take=warm.take):
    def counted(*args, **kwargs):
        taken.append(args)
        return take(*args, **kwargs)
    return counted
warm.take = counting()

def f(a, b=2, *, c=3): return a, b, c
class Holder:
    def __init__(self, held): self.held = held
    def train(self): return self.held
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel):
    """The shared kernel, which counts launches that got as far as processes."""
    shared_kernel.ok(SETUP)
    return shared_kernel


# --- there and back ---------------------------------------------------------------------------------------------------


def test_tensors_of_every_kind_go_and_come_back(notebook):
    notebook.ok("""
sent = {
    "bf16": torch.randn(50_000).bfloat16(), "fp8": torch.randn(40).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]), "complex": torch.randn(3, dtype=torch.complex64),
    "sparse": torch.eye(300).to_sparse(), "grad": torch.ones(30_000, requires_grad=True),
    "transposed": torch.arange(40_000.0).view(200, 200).t(), "strided": torch.arange(100_000)[::3],
    "expanded": torch.ones(1, 5).expand(4, 5),
    "channels_last": torch.randn(2, 3, 40, 40).to(memory_format=torch.channels_last),
    "empty": torch.empty(0, 3), "scalar": torch.tensor(3.5), "large": torch.randn(300_000),
    "parameter": nn.Parameter(torch.randn(20_000)), "buffer": nn.Buffer(torch.zeros(3)), "named": torch.Size([2, 3]),
}
def facts(value):
    if not isinstance(value, torch.Tensor): return type(value).__name__, value
    strides = value.stride() if value.layout is torch.strided else None
    return type(value).__name__, value.dtype, value.layout, value.shape, strides, value.requires_grad
def bits(value):
    if not isinstance(value, torch.Tensor): return value
    value = value.detach().to_dense().contiguous()
    return value.reshape(-1).view(torch.uint8) if value.numel() else value
def there(): return {name: facts(value) for name, value in sent.items()}, sent
run = launch(there, num_processes=2)
for seen, back in run.results:
    for name, value in sent.items():
        assert seen[name] == facts(value), (name, seen[name], facts(value))
        assert facts(back[name]) == facts(value), (name, facts(back[name]), facts(value))
        if isinstance(value, torch.Tensor): assert torch.equal(bits(back[name]), bits(value)), name
""")


def test_what_shares_memory_shares_it_there_and_again_here(notebook):
    notebook.ok("""
base = torch.zeros(100_000)
part = base[10:20]
def fill(): part.fill_(3); return base.sum().item(), base, part
total, got_base, got_part = launch(fill, num_processes=1).result
assert total == 30
got_part[0] = 8
assert got_base[10] == 8 and base.sum() == 0
""")


def test_a_model_of_a_notebook_class_keeps_its_class_and_its_tied_weights(notebook):
    notebook.ok("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 400), nn.Linear(400, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(50)
    def forward(self, x): return self.norm(self.head(self.embedding(x)))
net = Net()
before = net.head.weight.detach().clone()
def train():
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    nn.functional.cross_entropy(net(torch.arange(50)), torch.arange(50)).backward()
    optimizer.step()
    return net, net.head.weight is net.embedding.weight, len(list(net.parameters()))
for got, tied, num_parameters in launch(train, num_processes=2).results:
    assert type(got) is Net and tied and num_parameters == 3
    assert got.head.weight is got.embedding.weight and type(got.head.weight) is nn.Parameter
    assert not torch.equal(got.head.weight, before) and got.norm.num_batches_tracked == 1
    assert got(torch.arange(50)).shape == (50, 50)
assert torch.equal(net.head.weight, before) and net.norm.num_batches_tracked == 0
""")


def test_arrays_and_frames_go_and_come_back(notebook):
    notebook.ok("""
arrays = [
    np.random.default_rng(0).normal(size=(200, 300)), np.asfortranarray(np.arange(60_000).reshape(200, 300)),
    np.zeros(5000, dtype=[("a", "i4"), ("b", "f8")]), np.array(7), np.array(["x", None, {}], dtype=object),
    np.arange("2024-01", "2024-09", dtype="datetime64[D]"), np.ma.masked_greater(np.arange(10), 5), np.float32(2.5),
]
frame = pd.DataFrame(
    {"n": np.arange(20_000), "s": ["a", "b"] * 10_000, "c": pd.Categorical(["x", "y"] * 10_000),
     "t": pd.date_range("2024", periods=20_000, freq="min"), "i": pd.array([1, None] * 10_000, dtype="Int64")},
).set_index(["n", "s"])
for got, got_frame, mean in launch(lambda: (arrays, frame, frame.i.mean()), num_processes=2).results:
    for one, other in zip(got, arrays, strict=True):
        assert type(one) is type(other) and one.dtype == other.dtype
        assert one.flags.f_contiguous == other.flags.f_contiguous
        np.testing.assert_array_equal(one, other)
    pd.testing.assert_frame_equal(got_frame, frame)
    assert mean == 1
    got[0][0, 0] = 5  # what comes back can be written to
""")


def test_results_are_instances_of_the_notebooks_own_classes(notebook):
    notebook.ok("""
class Colour(enum.Enum): RED = 1; BLUE = 2
@dataclasses.dataclass
class Point:
    x: int
    colour: Colour = Colour.RED
class Outer:
    class Inner: pass
class Special(dict): pass
def triple(x): return 3 * x
def make():
    inner, special = Outer.Inner(), Special(a=1)
    special.note = Colour
    partial = functools.partial(triple, rank())
    return Point(rank(), Colour.BLUE), Point, Colour.RED, inner, special, triple, None, partial
for number, got in enumerate(launch(make, num_processes=2).results):
    point, cls, red, inner, special, function, nothing, partial = got
    assert point == Point(number, Colour.BLUE) and type(point) is Point and cls is Point
    assert red is Colour.RED and point.colour is Colour.BLUE and special.note is Colour
    assert type(inner) is Outer.Inner and type(special) is Special and special == {"a": 1}
    assert function is triple and nothing is None and partial() == 3 * number
""")


def test_code_that_a_rank_made_comes_back_and_runs(notebook):
    notebook.ok("""
offset = 100
def make():
    k = rank()
    class Local:
        value = k
        def get(self): return self.value + offset
    return (lambda x: x + k), Local, Local()
for number, (function, cls, instance) in enumerate(launch(make, num_processes=2).results):
    assert function(1) == 1 + number and type(instance) is cls and cls().get() == instance.get() == 100 + number
""")


def test_a_write_stays_in_its_rank(notebook):
    notebook.ok("""
tensor, array, numbers = torch.zeros(100_000), np.zeros(100_000), [0]
frame = pd.DataFrame({"x": np.zeros(50_000)})
def write():
    dist.init_process_group("gloo")
    if rank() == 0: tensor.fill_(1); array[:] = 1; numbers[0] = 1; frame.loc[:, "x"] = 1.0
    dist.barrier()
    return tensor.sum().item(), array.sum().item(), numbers[0], frame.x.sum()
assert launch(write, num_processes=2).results == [(100_000, 100_000, 1, 50_000), (0, 0, 0, 0)]
assert tensor.sum() == array.sum() == numbers[0] == frame.x.sum() == 0
""")


def test_a_large_result_arrives_as_one_copy_and_goes_with_its_last_holder(notebook):
    cell = notebook.ok("""
import pathlib
def pss():
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
def make(): return torch.full((125_000_000,), 2.0)
before = pss()
began = time.monotonic()
run = launch(make, num_processes=1)
tensor = run.result
total = tensor.sum(dtype=torch.float64).item()
took = time.monotonic() - began
held = pss() - before
del run, tensor
print(json.dumps([total, held, pss() - before, took]))
""")
    size = 500_000_000
    total, held, left, took_s = json.loads(cell.stdout)
    assert total == 250_000_000
    assert 0.9 * size < held < 1.2 * size
    assert left < 0.1 * size
    assert took_s < 20


def test_what_a_run_took_along_goes_with_its_end(notebook):
    cell = notebook.ok("""
big = torch.ones(50_000_000)
big.sum()
before = pss()
run = launch(lambda: (big.sum().item(), big.data_ptr() % 64), num_processes=2)
limit = time.monotonic() + 10
while pss() - before > 20e6 and time.monotonic() < limit: time.sleep(0.01)
print(run.results, pss() - before < 20e6)
del big
""")
    assert "[(50000000.0, 0), (50000000.0, 0)] True" in cell.stdout


def test_a_result_that_cannot_travel_says_what_it_is(notebook):
    cell = notebook.ok("""
def countdown():
    yield 1
run = launch(countdown, num_processes=2)
print(run.status, *map(str, run.results), sep="\\n")
""")
    assert cell.stdout.splitlines()[0] == "finished"
    for number, line in enumerate(cell.stdout.splitlines()[1:]):
        assert line.startswith(f"rank {number}: the result, a generator, can't be pickled")


def test_arguments_arrive_by_place_and_by_name(notebook):
    cell = notebook.ok("""
print(launch(f, (1,), {"c": 5}, num_processes=2).results, launch(f, [1, 4], num_processes=1).result)
class Counter:
    def __init__(self, start): self.start = start
    def add(self, *more, **named): return self.start + sum(more) + sum(named.values()) + rank()
async def slow(x): return x
print(launch(Counter(10).add, (1, 2), {"z": 3}, num_processes=2).results, launch(slow, (3,), num_processes=1).result)
print(launch(functools.partial(f, 0, c=1), (9,), num_processes=1).result)
""")
    assert cell.stdout.splitlines() == ["[(1, 2, 5), (1, 2, 5)] (1, 4, 3)", "[16, 17] 3", "(0, 9, 1)"]


# --- mistakes ---------------------------------------------------------------------------------------------------------

LOCK = (
    "PayloadError",
    ["`held`", "train()", "thread.lock", "belongs to this process", "Create it inside the function"],
)
FILE = ("PayloadError", ["`held`", "train()", "Open the file inside the function: pass its path"])
SIGNATURE = "f(a, b=2, *, c=3)"

MISTAKES = {
    "lock": ("threading.Lock()", *LOCK),
    "lock inside": ("{'k': [1, threading.Lock()]}", LOCK[0], ["`held['k'][1]`", *LOCK[1][1:]]),
    "lock of an object": ("Holder(threading.Lock())", LOCK[0], ["`held.held`", *LOCK[1][1:]]),
    "thread": ("threading.Thread()", "PayloadError", ["`held`", "threading.Thread", "Create it inside the function"]),
    "text file": ("resources.enter_context(open('x.txt', 'w'))", *FILE),
    "binary file": ("resources.enter_context(open('x.txt', 'rb'))", *FILE),
    "socket": (
        "resources.enter_context(socket.socket())",
        "PayloadError",
        ["`held`", "socket.socket", "pass the address"],
    ),
    "generator": (
        "(i for i in range(3))",
        "PayloadError",
        ["`held`", "generator", "call its function inside, or pass a list"],
    ),
    "Accelerator": (
        "__import__('notebook_launcher').Accelerator()",
        "PayloadError",
        ["`held`", "Accelerator", "Create it inside"],
    ),
    "process group": ("dist.group.WORLD", "PayloadError", ["`held`", "ProcessGroup", "create it inside the function"]),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_captured_object_that_cannot_travel_is_named(notebook, what):
    value, error, words = MISTAKES[what]
    cell = refused(
        notebook,
        f"""
with contextlib.ExitStack() as resources:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    resources.callback(dist.destroy_process_group)
    held = {value}
    def train(): return held
    launch(train, num_processes=2)
""",
    )
    assert cell.error == error
    assert all(word in cell.message for word in words), cell.message
    assert "launch(train, num_processes=2)" in cell.traceback
    assert len(cell.traceback.splitlines()) <= 4, cell.traceback


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ("launch(f, (1,), num_proceses=2)", "ConfigError", ["'num_proceses'", "Did you mean 'num_processes'?"]),
        ("launch(f, (1,), num_processes=0)", "ConfigError", ["num_processes=0", "from 1 to"]),
        ("launch(f, (1,), num_processes=-2)", "ConfigError", ["num_processes=-2", "from 1 to"]),
        ("launch(f, (1,), num_processes='two')", "ConfigError", ["num_processes='two'", "a whole number"]),
        ("launch(f, (1,), num_processes=1000)", "ConfigError", ["num_processes=1000 is too many", "cores", "limit"]),
        ("launch(f, (1,), num_processes=10**6)", "ConfigError", ["num_processes=1000000", "from 1 to"]),
        ("launch(f, (1,), device='cpu', mixed_precision='fp16')", "ConfigError", ["'fp16'", "cpu emulates", "'bf16'"]),
        ("launch(f, (1,), device='gpu')", "ConfigError", ["'gpu'", "A GPU is 'cuda'"]),
        ("launch(f, (1, 2, 3))", "PayloadError", [f"{SIGNATURE} can't be called with (1, 2, 3)", "too many"]),
        ("launch(f)", "PayloadError", [f"{SIGNATURE} can't be called with ()", "missing", "'a'"]),
        ("launch(f, (1,), {'d': 1})", "PayloadError", [f"{SIGNATURE} can't be called with (1, d=1)", "'d'"]),
        ("launch(f, 3)", "ConfigError", ["args is a tuple", "write args=(3,)"]),
        (
            "launch(print())",
            "PayloadError",
            ["a function is needed, and got None", "launch(train), not launch(train())"],
        ),
        (
            "launch(f(1))",
            "PayloadError",
            ["a function is needed, and got an object of type tuple", "drop the parentheses"],
        ),
        ("launch(f, (threading.Lock(),))", "PayloadError", ["the argument `a` of f()", "thread.lock"]),
        ("launch(Holder(threading.Lock()).train)", "PayloadError", ["`self.held`", "thread.lock"]),
    ],
)
def test_a_wrong_call_is_refused_before_anything_starts(notebook, call, error, words):
    cell = refused(notebook, call)
    assert cell.error == error
    assert all(word in cell.message for word in words), cell.message
    assert len(cell.traceback.splitlines()) <= 4, cell.traceback


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("%launch", ["%launch needs a call, such as %launch -n 2 train(3, lr=1e-3)"]),
        ("%launch -n 2", ["%launch needs a call"]),
        ("%launch f", ["%launch needs a call", "Did you mean f()?"]),
        ("%launch --num-proceses 2 f(1)", ["'--num-proceses'", "Did you mean '--num-processes'?"]),
        ("%launch -n 0 f(1)", ["num_processes='0'", "from 1 to"]),
        ("%launch -p fp16 -d cpu f(1)", ["'fp16'", "'bf16'"]),
        ("%launch f(1, 2, 3)", [SIGNATURE, "too many positional arguments"]),
        ("%launch ff(1)", ["'ff'", "hasn't defined", "Did you mean"]),
        ("stuck = threading.Lock()\n%launch f(stuck)", ["`stuck`", "thread.lock", "Create it inside the function"]),
        ("%%launch --num-proceses 2\nf(1)", ["Did you mean '--num-processes'?"]),
        ("%%launch\nstuck.acquire()", ["`stuck`, which the cell uses", "Create it inside the function"]),
    ],
)
def test_a_magics_mistake_is_one_line_in_the_cell(notebook, code, words):
    cell = refused(notebook, code)
    assert all(word in cell.shown for word in words), cell.shown
    assert cell.shown.strip().startswith("UsageError: ")
    assert len(cell.shown.strip().splitlines()) == 1


def refused(kernel, code):
    """Run ``code``, which must not get as far as taking a process or showing a run."""
    before = kernel.ok("taken.clear()")
    assert not before.shown.strip()
    cell = kernel.run(code)
    assert kernel.ok("print(len(taken))").stdout == "0\n", "processes were started"
    assert cell.displays == []
    return cell
