"""Does all of it work on a machine with one NVIDIA GPU? A table and JSON, in less than five minutes.

It installs nothing: it runs from the clone with the ``python3`` that has torch. Where that lacks one of the few other
packages, it says which, and the two lines that bring them without changing that Python.

    python3 benchmarks/gpu_check.py
    python3 benchmarks/gpu_check.py --only out_of_memory left_behind --json findings.json
    python3 benchmarks/gpu_check.py --device cpu          # the script itself, on a machine without a GPU

A check that fails hides no other. It ends with code 1 where one failed, with 2 where nothing can be checked: a package
or the GPU is missing, or an argument can't be; the file of --json then has every check as skipped, with the reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {  # by module, as pyproject.toml has them
    "torch": "torch>=2.6",
    "cloudpickle": "cloudpickle>=3.0",
    "numpy": "numpy>=1.26",
    "psutil": "psutil>=5.9",
    "pydantic": "pydantic>=2",
    "yaml": "PyYAML>=6",
    "safetensors": "safetensors>=0.4",
}
PYTHON = (3, 11)
BESIDE = "build/gpu_check"  # where the packages that are lacking may be put
NUM_LAUNCHES = 5
NUM_STEPS, NUM_WARM_STEPS = 30, 5
SIZES = {"cuda": (2048, 1024), "cpu": (64, 32)}  # width of the model, samples of a batch
HELD_BYTES = 2 << 30  # by the rank that is stopped
LEFT_BYTES = 64 << 20  # more of the card's memory in use than before means that something was left behind
LIMIT_S = 60.0
GOING_ON = ("starting", "running", "stopping")


class Skip(Exception):  # noqa: N818 - no error
    """Why a check has nothing to check here."""


class Finding(NamedTuple):
    """What one check came to: "ok", "skipped" or "FAILED"; in words; its figures; how long it took."""

    name: str
    state: str
    text: str
    figures: dict[str, float]
    took_s: float


def lay_out(folder: Path) -> None:
    """Make ``notebook_launcher`` with its mapped parts importable, as if installed, also in the processes it starts."""
    import tomllib

    mapped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    package = folder / "notebook_launcher"
    package.mkdir()
    for path in (ROOT / "notebook_launcher").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for name, path in mapped.items():
        (package / name.partition(".")[2]).symlink_to(ROOT / path)
    sys.path.insert(0, str(folder))


# --- what the ranks do ------------------------------------------------------------------------------------------------


def one_operation(device: str) -> float:
    """``time.monotonic()`` once the device has computed something."""
    import torch

    value = torch.ones(8, device=device).sum().item()
    assert value == 8, value  # noqa: S101 - the check
    return time.monotonic()


def first_line(_: str) -> float:
    """``time.monotonic()`` at the function's first line."""
    return time.monotonic()


def model_and_batch(device: str) -> tuple[Any, Any, Any]:
    """A network, inputs and targets, always the same."""
    import torch
    from torch import nn

    width, batch_size = SIZES[device]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    inputs, targets = torch.randn(batch_size, width), torch.randn(batch_size, 1)
    return model.to(device), inputs.to(device), targets.to(device)


def wait_for(device: str) -> None:
    """Return once the device has done what it was given."""
    import torch

    if device != "cpu":
        torch.accelerator.synchronize()


def timed_steps(steps: list[Callable[[], Any]], device: str) -> list[tuple[list[float], float]]:
    """For each loop the losses of some steps, and the median time of one in ms; they take turns, so none is first."""
    losses: list[list[float]] = [[] for _ in steps]
    times: list[list[float]] = [[] for _ in steps]
    for number in range(NUM_WARM_STEPS + NUM_STEPS):
        for one, step in enumerate(steps):
            wait_for(device)
            start_s = time.perf_counter()
            loss = step()
            wait_for(device)
            if number >= NUM_WARM_STEPS:
                times[one].append(time.perf_counter() - start_s)
            losses[one].append(float(loss))
    return [(told, statistics.median(taken) * 1e3) for told, taken in zip(losses, times, strict=True)]


def raw_step(device: str, precision: str) -> Callable[[], Any]:
    """A training step as it is written by hand."""
    import torch

    model, inputs, targets = model_and_batch(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")

    def step() -> Any:
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            outputs = model(inputs)
        loss = torch.nn.functional.mse_loss(outputs.float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def prepared_step(device: str) -> Callable[[], Any]:
    """The same by ``Accelerator``, in the launch's precision and strategy."""
    import torch

    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    model, inputs, targets = model_and_batch(device)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))

    def step() -> Any:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def both_ways(device: str, precision: str) -> dict[str, Any]:
    """Losses and times of the raw loop and of ``Accelerator``."""
    steps = [raw_step(device, precision), prepared_step(device)]
    (raw, raw_ms), (ours, ours_ms) = timed_steps(steps, device)
    apart = max(abs(one - other) / max(abs(one), 1e-6) for one, other in zip(raw, ours, strict=True))
    return {"raw_ms": raw_ms, "ours_ms": ours_ms, "apart": apart, "first": raw[0], "last": raw[-1]}


def data_parallel(device: str) -> dict[str, Any]:
    """One step with DDP over a group of this rank, and without; and what the flight recorder then has."""
    import torch
    import torch.distributed as dist

    from notebook_launcher.worker.collectives import last_collective

    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    weights = []
    for wrap in (True, False):
        model, inputs, targets = model_and_batch(device)
        used = torch.nn.parallel.DistributedDataParallel(model) if wrap else model
        torch.nn.functional.mse_loss(used(inputs), targets).backward()
        weights.append([parameter.grad.clone() for parameter in model.parameters()])
    apart = max((one - other).abs().max().item() for one, other in zip(*weights, strict=True))
    total = torch.ones(4, device=device)
    dist.all_reduce(total)
    wait_for(device)
    return {"apart": apart, "sum": total.sum().item(), "recorded": last_collective(), "group": dist.get_backend()}


def save_and_load(device: str, folder: str) -> tuple[float, float]:
    """The loss of the step after a checkpoint, gone on and loaded again."""
    import torch

    from notebook_launcher import Accelerator

    accelerator = Accelerator()
    model, inputs, targets = model_and_batch(device)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step() -> float:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    step()
    accelerator.save_state(folder)
    step()
    gone_on = step()
    accelerator.load_state(folder)
    step()
    return gone_on, step()


def fill(device: str) -> None:
    """Ask for more memory than there is."""
    import torch

    batch = torch.ones(512, 3, device=device)
    kept = [batch]
    while True:
        kept.append(torch.empty(4 << 30, dtype=torch.uint8, device=device))


def hold(device: str) -> None:
    """Take memory, say so, and wait to be stopped."""
    import threading

    import torch

    held = torch.zeros(HELD_BYTES, dtype=torch.uint8, device=device)
    torch.ones(1, device=device).item()
    print("holding", held.numel(), flush=True)
    threading.Event().wait(LIMIT_S)


def visible(device: str) -> tuple[int, str]:
    """How many devices the rank sees, and the first one's name."""
    import torch

    module = torch.get_device_module(device)
    return module.device_count(), module.get_device_name(0)


# --- the checks: each gives a sentence and figures, or raises -------------------------------------------------------


def expect(condition: object, what: str) -> None:
    """Fail the check with a sentence."""
    if not condition:
        raise AssertionError(what)


def run_one(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result of a launch on one rank."""
    from notebook_launcher.launcher.launch import launch_payload
    from notebook_launcher.launcher.payload import for_call

    return launch_payload(for_call(function, arguments), _config(**options), wait=True, sink="none").result


def _config(**options: Any) -> Any:
    from notebook_launcher import LaunchConfig

    return LaunchConfig.make(num_processes=1, timeout_s=LIMIT_S, **options)


def what_is_here(device: str) -> tuple[str, dict[str, float]]:
    """The machine's devices, as a worker sees them."""
    import torch

    from notebook_launcher.launcher import warm

    row = next(row for row in warm.devices() if row.kind == device)
    expect(row.num_devices, row.reason)
    can = ", ".join(name for name, why in row.precisions.items() if not why)
    return f"torch {torch.__version__}, {row.names[0]}; precisions: {can}", {"num_devices": row.num_devices}


def after_the_notebook_used_it(device: str) -> tuple[str, dict[str, float]]:
    """A launch from a process that has a CUDA context itself."""
    one_operation(device)
    began_s = time.monotonic()
    ended_s = run_one(one_operation, device, device=device)
    return f"this process had used {device}, and the rank used it too", {"first_launch_s": ended_s - began_s}


def launch_latency(device: str) -> tuple[str, dict[str, float]]:
    """From the call to the function's first line, and to its first result from the device."""
    figures = {}
    for name, function in {"first_line_s": first_line, "first_operation_s": one_operation}.items():
        times = []
        for _ in range(NUM_LAUNCHES):
            began_s = time.monotonic()
            times.append(run_one(function, device, device=device) - began_s)
        figures[name] = statistics.median(times)
    return f"medians of {NUM_LAUNCHES} launches", figures


def preflight(device: str) -> tuple[str, dict[str, float]]:
    """What ``%launcher check`` says."""
    from notebook_launcher.launcher.preflight import check

    found = check(_config(device=device))
    expect(found.ok, str(found))
    return found.checks[-1].text, found.figures


def ddp(device: str) -> tuple[str, dict[str, float]]:
    """DDP over NCCL with one rank: the gradients are those without it."""
    recorded: dict[str, Any] = {"env": {"TORCH_FR_BUFFER_SIZE": "50"}} if device == "cpu" else {}  # elsewhere it is on
    found = run_one(data_parallel, device, device=device, **recorded)
    expect(found["apart"] <= 1e-6 and found["sum"] == 4, f"gradients or sums differ: {found}")
    expect("all_reduce" in found["recorded"], f"the flight recorder has {found['recorded']!r}")
    return f"{found['group']}: gradients equal; recorded: {found['recorded']}", {}


def _precision(device: str, precision: str) -> tuple[str, dict[str, float]]:
    from notebook_launcher.launcher import warm

    row = next(row for row in warm.devices() if row.kind == device)
    if row.precisions.get(precision):
        raise Skip(row.precisions[precision])
    found = run_one(both_ways, device, precision, device=device, mixed_precision=precision)
    expect(found["apart"] < 1e-2, f"losses are {found['apart']:.2g} apart: {found}")
    expect(found["last"] < found["first"], f"nothing was learnt: {found}")
    figures = {name: found[name] for name in ("raw_ms", "ours_ms")}
    text = f"losses of {NUM_WARM_STEPS + NUM_STEPS} steps at most {found['apart']:.1e} apart from a raw loop's"
    return text, figures | {"ours_over_raw": found["ours_ms"] / found["raw_ms"]}


def fp32_steps(device: str) -> tuple[str, dict[str, float]]:
    """Training steps in fp32."""
    return _precision(device, "no")


def bf16_steps(device: str) -> tuple[str, dict[str, float]]:
    """Training steps in bf16."""
    return _precision(device, "bf16")


def fp16_steps(device: str) -> tuple[str, dict[str, float]]:
    """Training steps in fp16, with loss scaling."""
    return _precision(device, "fp16")


def _strategy(device: str, *names: str) -> tuple[str, dict[str, float]]:
    from notebook_launcher.core.strategies import STRATEGIES

    name = next((name for name in names if name in STRATEGIES.names), None)
    if name is None:
        raise Skip(f"this version has no strategy {' or '.join(names)}")
    found = run_one(both_ways, device, "no", device=device, strategy=name)
    expect(found["apart"] < 1e-3, f"losses are {found['apart']:.2g} apart: {found}")
    return f"{name}: losses at most {found['apart']:.1e} apart from a raw loop's", {"ours_ms": found["ours_ms"]}


def sharded(device: str) -> tuple[str, dict[str, float]]:
    """FSDP2 on one rank."""
    return _strategy(device, "fsdp2", "fsdp")


def zero(device: str) -> tuple[str, dict[str, float]]:
    """DeepSpeed's ZeRO on one rank."""
    if importlib.util.find_spec("deepspeed") is None:
        raise Skip("deepspeed is not installed")
    return _strategy(device, "zero2", "zero", "deepspeed")


def checkpoint(device: str) -> tuple[str, dict[str, float]]:
    """What is loaded goes on as what was saved."""
    with tempfile.TemporaryDirectory() as folder:
        gone_on, loaded = run_one(save_and_load, device, f"{folder}/state", device=device)
    expect(abs(gone_on - loaded) <= 1e-6 * abs(gone_on), f"the loss is {loaded} where {gone_on} is right")
    return "the loss after loading is that of going on", {"apart": abs(gone_on - loaded)}


def chosen_by_uuid(device: str) -> tuple[str, dict[str, float]]:
    """A device named as nvidia-smi -L names it."""
    from notebook_launcher.launcher import warm

    row = next(row for row in warm.devices() if row.kind == device)
    if not row.uuids:
        raise Skip(f"{device} devices have no UUIDs")
    count, name = _launched_on(f"GPU-{row.uuids[0]}", device)
    expect(count == 1, f"the rank sees {count} devices")
    return f"GPU-{row.uuids[0][:8]}... is {name}", {}


def _launched_on(uuid: str, device: str) -> tuple[int, str]:
    found: tuple[int, str] = run_one(visible, device, device=device, device_ids=[uuid])
    return found


def out_of_memory(device: str) -> tuple[str, dict[str, float]]:
    """The error of a full card says who holds what of it, and the batch."""
    if device == "cpu":
        raise Skip("a CPU's memory is the machine's: the system ends the process")
    try:
        run_one(fill, device, device=device)
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        notes = "\n".join(getattr(error, "__notes__", ()))
        expect(type(error).__name__ == "OutOfMemoryError", f"it raised {type(error).__name__}: {error}")
        for part in (f"rank 0 on {device}:", "other processes on the card", "batch (512, 3) float32"):
            expect(part in notes, f"its notes lack {part!r}: {notes}")
        return notes.splitlines()[0], {}
    raise AssertionError("nothing was raised")


def left_behind(device: str) -> tuple[str, dict[str, float]]:
    """The card's memory after a run that was stopped is what it was before."""
    from notebook_launcher.launcher.launch import launch_payload
    from notebook_launcher.launcher.payload import for_call

    if device == "cpu":
        raise Skip("only a card's memory is counted here")
    import torch

    one_operation(device)
    free_before = torch.cuda.mem_get_info()[0]
    run = launch_payload(for_call(hold, (device,)), _config(device=device, stop_grace_s=0.5), wait=False, sink="none")
    try:
        until(lambda: "holding" in run.logs(0) or run.status not in GOING_ON, "the rank never held anything")
        expect(run.status in GOING_ON, f"the rank held nothing: {run!r}")
        during = free_before - torch.cuda.mem_get_info()[0]
        run.stop()
        until(lambda: run.status not in GOING_ON, "the run does not end")
    finally:
        run.kill()
    left = free_before - torch.cuda.mem_get_info()[0]
    expect(during >= HELD_BYTES, f"the rank held {during / 1e6:.0f} MB")
    expect(left <= LEFT_BYTES, f"{left / 1e6:.0f} MB are left behind")
    return f"{during / 1e6:,.0f} MB in use before the stop, nothing after it", {"left_mb": max(0.0, left / 1e6)}


def until(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait for ``condition``; fail the check with ``otherwise`` where it doesn't come."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        expect(time.monotonic() < end_s, otherwise)
        time.sleep(0.05)


CHECKS: dict[str, Callable[[str], tuple[str, dict[str, float]]]] = {
    "what_is_here": what_is_here,
    "after_the_notebook_used_it": after_the_notebook_used_it,
    "launch_latency": launch_latency,
    "preflight": preflight,
    "ddp": ddp,
    "fp32_steps": fp32_steps,
    "bf16_steps": bf16_steps,
    "fp16_steps": fp16_steps,
    "sharded": sharded,
    "zero": zero,
    "checkpoint": checkpoint,
    "chosen_by_uuid": chosen_by_uuid,
    "out_of_memory": out_of_memory,
    "left_behind": left_behind,
}


# --- whether anything can be checked ----------------------------------------------------------------------------------


def lacking(find: Callable[[str], Any] = importlib.util.find_spec) -> list[str]:
    """What this Python lacks, as pip names it, with what is there instead: ["pydantic>=2 (1.10 is there)"]."""
    found = []
    for module, requirement in NEEDED.items():
        name, _, least = requirement.partition(">=")
        if find(module) is None:
            found.append(requirement)
            continue
        try:
            there = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # it can be imported, and nothing says its version
        if _numbers(there) < _numbers(least):
            found.append(f"{requirement} ({there} is there)")
    return found


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", version)[:2]]


def in_words(lacks: list[str]) -> str:
    """What is missing, and what brings it."""
    told = f"gpu_check can't run: {sys.executable} lacks {', '.join(lacks)}."
    if any(one.startswith("torch>=") for one in lacks):
        return f"{told} pytorch.org/get-started has the command that installs torch for this GPU."
    python, names = shlex.quote(sys.executable), " ".join(shlex.quote(one.partition(" ")[0]) for one in lacks)
    return (
        f"{told} These two lines bring that, and leave this Python as it is:\n"
        f"    {python} -m pip install --target {BESIDE} {names}\n"
        f"    PYTHONPATH={BESIDE} {shlex.join([sys.executable, *sys.argv])}"
    )


def why_not(device: str) -> str:
    """Why this machine can't use the device; "" where it can."""
    from notebook_launcher.core.errors import EngineError
    from notebook_launcher.launcher import warm

    try:
        row = next(row for row in warm.devices() if row.kind == device)
    except EngineError as error:
        return f"gpu_check can't run: {error}"
    return "" if row.num_devices else f"gpu_check has no {device} device to check: {row.reason}."


# --- running them, and telling --------------------------------------------------------------------------------------


def found_by(name: str, device: str) -> Finding:
    """Run one check, whatever becomes of it."""
    began_s = time.monotonic()
    figures: dict[str, float] = {}
    try:
        text, figures = CHECKS[name](device)
        state = "ok"
    except Skip as why:
        state, text = "skipped", str(why)
    except Exception as error:  # noqa: BLE001 - one failure hides no other
        traceback.print_exc()
        state, text = "FAILED", f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return Finding(name, state, text, figures, time.monotonic() - began_s)


def told(finding: Finding) -> str:
    """A line of the table."""
    figures = ", ".join(f"{name} {value:.4g}" for name, value in finding.figures.items())
    text = "; ".join(part for part in (finding.text, figures) if part)
    return f"{finding.state:<8} {finding.name:<27} {finding.took_s:6.1f} s  {text}"


def nothing(why: str, given: argparse.Namespace) -> int:
    """Say why nothing can be checked, in the file that is asked for too; the exit code."""
    print(why)
    if given.json is not None:
        given.json.write_text(json.dumps([Finding(name, "skipped", why, {}, 0.0)._asdict() for name in given.only]))
    return 2


def main() -> int:
    """Run the checks that were asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--json", type=Path, help="write the findings to this file too")
    given = parser.parse_args()
    if given.json is not None and not given.json.parent.is_dir():
        parser.error(f"--json {given.json}: there is no folder {given.json.parent}")
    if sys.version_info < PYTHON:
        needed = ".".join(map(str, PYTHON))
        return nothing(f"gpu_check can't run: it needs Python {needed}, and {sys.executable} is older.", given)
    if lacks := lacking():
        return nothing(in_words(lacks), given)
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder))
        from notebook_launcher.launcher import warm

        try:
            if why := why_not(given.device):
                return nothing(why, given)
            findings = []
            for name in given.only:
                findings.append(found_by(name, given.device))
                print(told(findings[-1]), flush=True)
        finally:
            warm.shutdown()
    written = json.dumps([finding._asdict() for finding in findings])
    print(written)
    if given.json is not None:
        given.json.write_text(written)
    return int(any(finding.state == "FAILED" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
