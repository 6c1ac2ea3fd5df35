"""Saving in the background: what is saved is the moment of the call, and nothing unfinished is ever taken for whole."""

import contextlib
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from notebook_launcher import Accelerator, CheckpointError, FullyShardedDataParallelPlugin
from notebook_launcher.runtime import folders, staging, storage
from notebook_launcher.runtime.plugins import ProjectConfiguration

LIMIT_S = 30


class Run:
    """A model and an optimizer's state, all of one value."""

    def __init__(self, value=0.0, **options):
        self.accelerator = Accelerator(cpu=True, **options)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.model(torch.ones(1, 8)).sum().backward()
        self.optimizer.step()
        self.set(value)

    def tensors(self):
        moments = [value for one in self.optimizer.state.values() for value in one.values()]
        return [*self.model.parameters(), *moments]

    def set(self, value):
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(value)

    def value(self):
        (value,) = {float(value) for tensor in self.tensors() for value in storage_of(tensor).unique()}
        return value


def storage_of(tensor):
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


@pytest.fixture
def gate(monkeypatch):
    """Nothing is written in the background until it is set."""
    opened = threading.Event()

    def write_kept(self, original=storage.Draft.write_kept):
        assert opened.wait(LIMIT_S)
        original(self)

    monkeypatch.setattr(storage.Draft, "write_kept", write_kept)
    yield opened
    opened.set()


def fail(monkeypatch, error=errno.ENOSPC):
    @contextlib.contextmanager
    def open_(self, name):
        raise OSError(error, os.strerror(error))
        yield

    monkeypatch.setattr(storage.Draft, "open", open_)


def loaded(folder):
    run = Run(9.0)
    run.accelerator.load_state(folder)
    return run.value()


def test_what_is_saved_is_the_moment_of_the_call(tmp_path, gate):
    run = Run(1.0)
    run.accelerator.save_state(tmp_path / "ck")
    run.set(2.0)
    assert run.accelerator.save_state(tmp_path / "ck", async_=True) == str(tmp_path / "ck")
    run.set(3.0)
    assert loaded(tmp_path / "ck") == 1.0, "it is not there yet, and the one before is"
    gate.set()
    run.accelerator.wait_for_save()
    assert loaded(tmp_path / "ck") == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


@pytest.mark.parametrize("safe", [True, False])
def test_files_are_those_of_a_save_that_is_waited_for(tmp_path, safe):
    run = Run(1.0)
    run.accelerator.save_state(tmp_path / "a", safe)
    run.accelerator.save_state(tmp_path / "b", safe, async_=True)
    run.accelerator.wait_for_save()
    a, b = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.name != storage.MANIFEST}
        for name in "ab"
    )
    assert a == b


def test_the_newest_is_the_newest_that_is_finished(tmp_path, gate):
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    run = Run(1.0, project_config=project)
    run.accelerator.save_state()
    run.set(2.0)
    run.accelerator.save_state(async_=True)
    other = Run(9.0, project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True))
    other.accelerator.load_state()
    assert other.value() == 1.0
    gate.set()
    run.set(3.0)
    run.accelerator.load_state()  # waits for its own
    assert run.value() == 2.0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]


def test_a_second_save_waits_for_the_first(tmp_path, gate, monkeypatch):
    run = Run(1.0)
    run.accelerator.save_state(tmp_path / "a", async_=True)
    waited = []

    def result(self, original=staging.Background.result):
        waited.append((tmp_path / "a").exists())
        gate.set()
        original(self)
        waited.append((tmp_path / "a").exists())

    monkeypatch.setattr(staging.Background, "result", result)
    run.set(2.0)
    run.accelerator.save_state(tmp_path / "b", async_=True)
    assert waited == [False, True]
    run.accelerator.wait_for_save()
    assert (loaded(tmp_path / "a"), loaded(tmp_path / "b")) == (1.0, 2.0)


POINTS = {
    "wait_for_save": lambda run, _: run.accelerator.wait_for_save(),
    "save_state": lambda run, folder: run.accelerator.save_state(folder / "other"),
    "load_state": lambda run, folder: run.accelerator.load_state(folder / "ck"),
    "end_training": lambda run, _: run.accelerator.end_training(),
}


@pytest.mark.parametrize("point", POINTS)
def test_an_error_is_raised_where_somebody_waits(point, tmp_path, monkeypatch):
    run = Run(1.0)
    run.accelerator.save_state(tmp_path / "ck")
    with monkeypatch.context() as patched:
        fail(patched)
        run.accelerator.save_state(tmp_path / "ck", async_=True)
        message = r"ck could not be saved in the background, and is as it was before: OSError\(28, 'No space left"
        with pytest.raises(CheckpointError, match=message):
            POINTS[point](run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    run.accelerator.wait_for_save() if point != "end_training" else None  # it was told
    assert loaded(tmp_path / "ck") == 1.0


def test_what_can_t_be_loaded_is_refused_at_once(tmp_path):
    run = Run(1.0)
    run.optimizer.param_groups[0]["label"] = object()
    with pytest.raises(CheckpointError, match=r"optimizer.bin would hold .*executing pickle"):
        run.accelerator.save_state(tmp_path / "ck", async_=True)
    assert list(tmp_path.iterdir()) == []


def test_parts_are_not_asked_for_together_with_pickle(tmp_path):
    with pytest.raises(CheckpointError, match=r"sharded=True, safe_serialization=False\) can't be"):
        Run().accelerator.save_state(tmp_path / "ck", safe_serialization=False, sharded=True)


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path):
    draft = storage.Draft(tmp_path / "ck")
    draft.begin()
    (draft.path / ".rank1").touch()  # its lock went with its process
    begun = staging.Background(draft, 0, staging.Guard())
    begun.start(lambda _: pytest.fail("it was taken for whole"))
    with pytest.raises(CheckpointError, match="on rank1: the process ended before it had written its part"):
        begun.result()
    assert list(tmp_path.iterdir()) == []


# --- the optimizer's state is copied by a thread --------------------------------------------------------------------


@pytest.fixture
def copying(monkeypatch):
    """It is not copied until this is set, or somebody waits for it."""
    opened = threading.Event()

    def copy(self, original=staging.Memory.copy):
        assert opened.wait(LIMIT_S)
        original(self)

    def wait(self, *arguments, original=staging.Guard.wait):
        if self.copying is not None:
            opened.set()
        original(self, *arguments)

    monkeypatch.setattr(staging.Memory, "copy", copy)
    monkeypatch.setattr(staging.Guard, "wait", wait)
    yield opened
    opened.set()


def fill(tensors):
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(3.0)


def moments(run):
    return [value for one in run.optimizer.state.values() for value in one.values()]


CHANGES = {
    "the prepared optimizer's step": lambda run: run.optimizer.step(),
    "the given optimizer's step": lambda run: run.optimizer.optimizer.step(),
    "its state": lambda run: fill(moments(run)),
    "its state_dict": lambda run: fill(one["momentum_buffer"] for one in run.optimizer.state_dict()["state"].values()),
    "load_state_dict": lambda run: run.optimizer.load_state_dict(Run(3.0).optimizer.state_dict()),
    "weights by hand": lambda run: [one.data.clamp_(5.0, 6.0) for one in run.model.parameters()],
}


@pytest.mark.parametrize("way", CHANGES)
def test_whoever_changes_it_waits_for_the_copy(tmp_path, copying, way):
    run = Run(1.0)
    run.accelerator.save_state(tmp_path / "first", async_=True)  # the second uses its memory again
    copying.set()
    run.accelerator.wait_for_save()
    run.set(2.0)
    copying.clear()
    run.accelerator.save_state(tmp_path / "ck", async_=True)
    run.model(torch.ones(1, 8)).sum().backward()
    CHANGES[way](run)
    assert copying.is_set() == (way != "weights by hand")
    copying.set()
    run.accelerator.wait_for_save()
    assert loaded(tmp_path / "ck") == 2.0


def test_a_change_that_can_t_wait_makes_no_checkpoint(tmp_path, copying):
    run = Run(1.0)
    run.accelerator.save_state(tmp_path / "ck")
    run.set(2.0)
    held = moments(run)
    copying.clear()
    run.accelerator.save_state(tmp_path / "ck", async_=True)
    fill(held)
    copying.set()
    message = "as it was before: the state of an optimizer was changed while it was copied, by other code than its step"
    with pytest.raises(CheckpointError, match=message):
        run.accelerator.wait_for_save()
    assert loaded(tmp_path / "ck") == 1.0


def no_hooks(self, closure=None):
    for one in self.state.values():
        one["momentum_buffer"].add_(1.0)


def remember_weights(self, closure=None):
    for parameter in self.param_groups[0]["params"]:
        self.state[parameter]["momentum_buffer"] = parameter.data


@pytest.mark.parametrize("step", [no_hooks, remember_weights])
def test_what_may_change_outside_of_a_step_is_copied_at_once(tmp_path, copying, step):
    run = Run(1.0)
    kind = type("Odd", (torch.optim.SGD,), {"step": step})
    run.optimizer.optimizer.__class__ = kind
    run.optimizer.step()  # not called by __init__, torch has put no hooks around it
    kind.step.hooked = step is remember_weights
    run.set(2.0)
    copying.clear()
    run.accelerator.save_state(tmp_path / "ck", async_=True)
    run.optimizer.optimizer.step() if step is no_hooks else [one.data.fill_(3.0) for one in run.model.parameters()]
    assert not copying.is_set()
    copying.set()
    run.accelerator.wait_for_save()
    assert loaded(tmp_path / "ck") == 2.0


# --- on ranks --------------------------------------------------------------------------------------------------------


def parts(value):
    return Run(value, fsdp_plugin=FullyShardedDataParallelPlugin())


def fail_on_one(folder, failing):
    run = parts(1.0)
    run.accelerator.save_state(folder)
    run.set(2.0)
    if run.accelerator.process_index == failing:
        fail(pytest.MonkeyPatch())
    run.accelerator.save_state(folder, async_=True)
    messages = []
    for wait in (run.accelerator.end_training, run.accelerator.wait_for_save):
        try:
            wait()
            messages.append("")
        except CheckpointError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_is_raised_on_all_and_keeps_none_waiting(on_ranks, tmp_path, failing):
    folder = tmp_path / "ck"
    ranks = on_ranks(fail_on_one, folder, failing)
    assert ranks[0][1] == ranks[1][1]
    assert ranks[failing][0]
    cause = "before: OSError" if failing == 0 else "before: on rank1: OSError"
    assert ranks[0][1].startswith("wait_for_save failed on rank 0: ")
    assert f"{cause}(28, 'No space left on device')" in ranks[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    assert on_ranks(load_parts, folder) == [1.0, 1.0]


def load_parts(folder):
    run = parts(9.0)
    run.accelerator.load_state(folder)
    return run.value()


def save_and_leave(folder, how):
    run = parts(1.0)
    run.accelerator.save_state(folder, async_=True)
    run.set(2.0)
    if how == "raise":
        raise KeyError("the function's own error")


@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_rank_ends_when_its_part_is_written(on_ranks, tmp_path, how):
    expected = pytest.raises(KeyError) if how == "raise" else contextlib.nullcontext()
    with expected:
        on_ranks(save_and_leave, tmp_path / "ck", how)
    assert on_ranks(load_parts, tmp_path / "ck") == [1.0, 1.0]


SCRIPT = """
import sys, torch
from notebook_launcher import Accelerator
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(300, 300))
accelerator.save_state(sys.argv[1], async_=True)
"""


def script(text, *arguments):
    return subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )


def test_a_script_ends_when_all_is_written(tmp_path):
    assert script(SCRIPT, tmp_path / "ck").stderr == ""
    assert storage.checked(tmp_path / "ck")["counts"]["models"] == 1


WITHOUT_LOCKS = f"""
import mmap, os, shutil, sys
sys.modules["fcntl"] = None  # as on Windows
import torch

open_any = os.open
def open_no_folder(path, *arguments, **options):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return open_any(path, *arguments, **options)
os.open = open_no_folder
shutil._use_fd_functions = False
del mmap.MAP_PRIVATE
{SCRIPT}
accelerator.wait_for_save()
accelerator.save_state(sys.argv[1])
accelerator.load_state(sys.argv[1])
"""


def test_a_system_without_flock_saves_too(tmp_path):
    assert script(WITHOUT_LOCKS, tmp_path / "ck").stderr == ""
    assert storage.checked(tmp_path / "ck")["counts"]["models"] == 1


def test_where_ranks_can_t_tell_one_another_that_they_write_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "fcntl", None)
    draft = storage.Draft(tmp_path, writes=False, memory=staging.Memory())
    draft.put("part", [b"1"])
    draft.path.mkdir()
    begun = staging.Background(draft, 1, staging.Guard())
    with pytest.raises(CheckpointError, match=r"a file system with locks.*this system has no flock; leave it out"):
        begun.claim()
    begun.give_up()
    assert (draft.path / ".rank1").exists()
