"""Launching from a real kernel: after it was used, again and again, seeing the notebook as it is now."""

from __future__ import annotations

import json

import psutil
import pytest


def test_a_launch_after_the_kernel_has_used_all_its_cores(shared_kernel):
    cell = shared_kernel.ok("""
a = torch.randn(1500, 1500, requires_grad=True)
for _ in range(3): (a @ a).sum().backward()
def train():
    b = torch.randn(1500, 1500, requires_grad=True)
    (b @ b).sum().backward()
    return torch.get_num_threads() >= 1 and bool(b.grad.isfinite().all())
print(launch(train, num_processes=2).results)
""")
    assert "[True, True]" in cell.stdout


def test_ten_launches_in_a_row_of_changing_sizes(shared_kernel):
    cell = shared_kernel.ok("""
def count(): return int(os.environ["WORLD_SIZE"])
print([launch(count, num_processes=1 + i % 3).results for i in range(10)])
""")
    assert str([[1 + i % 3] * (1 + i % 3) for i in range(10)]) in cell.stdout


def test_two_runs_at_once_meet_through_their_own_rendezvous(shared_kernel):
    cell = shared_kernel.ok("""
def total(k):
    dist.init_process_group("gloo")
    t = torch.tensor([float(k)]); dist.all_reduce(t)
    return t.item()
runs = [launch(total, (k,), num_processes=2, wait=False) for k in (1, 10)]
print([run.wait().results for run in runs])
""")
    assert "[[2.0, 2.0], [20.0, 20.0]]" in cell.stdout


def test_a_launch_from_a_thread(shared_kernel):
    cell = shared_kernel.ok("""
import threading
got = []
thread = threading.Thread(target=lambda: got.append(launch(rank, num_processes=2).results))
thread.start(); thread.join(); print(got)
""")
    assert "[[0, 1]]" in cell.stdout


def test_a_background_run_leaves_the_kernel_free(shared_kernel):
    shared_kernel.ok("""
def wait_for(path):
    while not os.path.exists(path): time.sleep(0.01)
    return rank()
background = launch(wait_for, (os.path.abspath("go"),), num_processes=2, wait=False)
""")
    assert "running" in shared_kernel.ok("print(background.status if time.sleep(0.5) is None else '')").stdout
    cell = shared_kernel.ok("open('go', 'w').close(); print(background.wait().results); print(background)")
    assert "[0, 1]" in cell.stdout
    assert "finished in" in cell.stdout


def test_environment_directory_path_and_modules_are_the_notebooks_as_they_are_now(shared_kernel):
    code = """
os.makedirs("inside", exist_ok=True); open("inside/local_module.py", "w").write("VALUE = %r\\n")
os.environ["NOW"] = %r; os.chdir(%r)
if "inside" not in sys.path[0]: sys.path.insert(0, os.path.join(home, "inside"))
def see():
    import local_module
    return local_module.VALUE, os.environ["NOW"], os.path.basename(os.getcwd()), "GONE" in os.environ
results = launch(see, num_processes=2).results
os.chdir(home); os.environ["GONE"] = "1"
print(json.dumps(results))
"""
    shared_kernel.ok("home = os.getcwd()")
    first = json.loads(shared_kernel.ok(code % ("a", "one", "inside")).stdout)
    shared_kernel.ok("%env MAGIC=yes")
    second = json.loads(shared_kernel.ok(code % ("longer", "two", ".")).stdout)
    assert first == [["a", "one", "inside", False]] * 2
    assert [row[:2] for row in second] == [["longer", "two"]] * 2
    assert [row[3] for row in second] == [True] * 2
    cell = shared_kernel.ok("""
del os.environ["GONE"]
print(launch(lambda: (os.environ["MAGIC"], "GONE" in os.environ), num_processes=1).results)
""")
    assert "[('yes', False)]" in cell.stdout


def test_nothing_listens_where_another_machine_could_connect(shared_kernel):
    shared_kernel.ok("""
def hold():
    dist.init_process_group("gloo")
    t = torch.ones(1); dist.all_reduce(t)
    print("holding", flush=True)
    while not os.path.exists("release"): time.sleep(0.01)
holding = launch(hold, num_processes=2, wait=False)
while holding.logs(0).count("holding") + holding.logs(1).count("holding") < 2: time.sleep(0.01)
""")
    listening = [
        (process.pid, connection.laddr.ip)
        for process in shared_kernel.children()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    shared_kernel.ok("open('release', 'w').close(); holding.wait(); os.remove('release')")
    assert listening, "the ranks meet over sockets, so some must listen"
    assert {ip for _, ip in listening} <= {"127.0.0.1", "::1"}


def test_workers_standing_by_use_no_processor_time(shared_kernel):
    shared_kernel.ok("_ = launch(rank, num_processes=2)")
    busy = sum(process.cpu_percent(0.2) for process in shared_kernel.children())
    assert busy < 20


def test_the_cell_says_what_the_launch_does_and_where_options_came_from(shared_kernel):
    cell = shared_kernel.ok("""
os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
_ = launch(rank, num_processes=2, device="cpu")
del os.environ["ACCELERATE_MIXED_PRECISION"]
""")
    assert "2 processes · CPU (gloo) · bf16 · DDP" in cell.shown
    assert "num_processes=2 from argument" in cell.shown
    assert "mixed_precision='bf16' from environment variable ACCELERATE_MIXED_PRECISION" in cell.shown


def test_a_large_captured_object_is_named_with_its_size(shared_kernel):
    cell = shared_kernel.ok("""
table = torch.zeros(32 * 2**20)
print(launch(lambda: table.sum().item(), num_processes=2).results)
del table
""")
    assert "[0.0, 0.0]" in cell.stdout
    assert "'table'" in cell.stderr
    assert "134 MB" in cell.stderr
    assert "table" not in cell.html


def test_magics_run_calls_and_cells_on_every_rank(shared_kernel):
    shared_kernel.ok("def power(x, p=1): return (x + rank()) ** p\nbase = 3")
    assert "[9, 16]" in shared_kernel.ok("run = %launch -n 2 power(base, p=2)\nprint(run.results)").stdout
    cell = shared_kernel.ok(
        "%%launch -n 2 --save squares\nimport math\ny = base + rank()\nprint('y is', y)\nmath.sqrt(y * y)"
    )
    assert "[0] y is 3" in cell.shown
    assert "[1] y is 4" in cell.shown
    assert "[3.0, 4.0]" in shared_kernel.ok("print(squares)").stdout


def test_launcher_magic_shows_devices_and_runs(shared_kernel):
    cell = shared_kernel.ok("%launcher devices")
    assert "cpu" in cell.shown.lower()
    assert "without CUDA" in cell.shown
    shared_kernel.ok("kept = launch(rank, num_processes=1)")
    assert "finished" in shared_kernel.ok("%launcher status").shown


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_other_start_methods_give_the_same(shared_kernel, method):
    if method == "fork":
        code = "import subprocess"  # the kernel has used OpenMP threads by now; a fork may only do without them
        body = "return rank()"
    else:
        code = ""
        body = "dist.init_process_group('gloo'); t = torch.ones(1); dist.all_reduce(t); return rank()"
    cell = shared_kernel.ok(
        f"{code}\ndef work():\n    {body}\nprint(launch(work, num_processes=2, start_method={method!r}).results)"
    )
    assert "[0, 1]" in cell.stdout
