"""Whatever happens while a checkpoint is saved, the last good one can be loaded."""

import errno
import os
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from notebook_launcher import Accelerator, CheckpointError
from notebook_launcher.runtime import storage
from notebook_launcher.runtime.plugins import ProjectConfiguration

_FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.scandir", "shutil.rmtree")


class Version:
    """A run whose model, optimizer and registered object are all of one version."""

    def __init__(self, version, **options):
        self.accelerator = Accelerator(cpu=True, **options)
        self.number = version
        self.model = nn.Linear(64, 64)
        nn.init.constant_(self.model.weight, version)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=float(version))
        self.accelerator.prepare(self.model, self.optimizer)
        self.accelerator.register_for_checkpointing(self)

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]

    def found(self):
        numbers = {self.number, self.optimizer.param_groups[0]["lr"], *self.model.weight.unique().tolist()}
        assert len(numbers) == 1, f"of several versions: {numbers}"
        return int(numbers.pop())


def kill_at(number):
    """Have this process killed at its ``number``-th step of work on files."""
    count = 0

    def step(*_):
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event, args):
        if event in _FILE_EVENTS:
            step()

    def write(self, data, original=storage._Counted.write):
        if len(data) < 64:  # torch writes many of these, and one is as good as another
            return original(self, data)
        half = len(data) // 2
        original(self, data[:half])
        self._file.flush()
        step()
        return half + original(self, data[half:])

    def sync(descriptor, original=os.fsync):
        original(descriptor)
        step()

    sys.addaudithook(audit)
    storage._Counted.write = write
    os.fsync = sync


def saves_killed(folder, can_exchange, automatic, in_background):
    """Saves of version 2 over version 1, killed at every step; what can be loaded after each."""
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # takes its time, and a killed process loses nothing that it has written
    if not can_exchange:
        storage._exchange = lambda *_: False
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1) if automatic else None
    place = None if automatic else folder / "ck"
    versions = []
    Version(1, project_config=project).accelerator.save_state(place)
    for number in range(1, 500):
        pid = os.fork()
        if pid == 0:
            kill_at(number)
            accelerator = Version(2, project_config=project).accelerator
            accelerator.save_state(place, async_=in_background)
            accelerator.wait_for_save()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        run = Version(0, project_config=project)
        run.accelerator.load_state(place)
        versions.append(run.found())
        if not os.WIFSIGNALED(status):
            return versions, os.WEXITSTATUS(status), sorted(path.name for path in folder.rglob("*") if path.is_dir())
        if versions[-1] == 2:  # back to version 1, over whatever the killed save has left
            Version(1, project_config=project).accelerator.save_state(place)
            run.accelerator.load_state(place)
            assert run.found() == 1
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("can_exchange", "automatic", "in_background"),
    [(True, False, False), (False, False, False), (True, True, False), (True, True, True)],
)
def test_a_save_killed_at_any_step_leaves_a_checkpoint(on_ranks, tmp_path, can_exchange, automatic, in_background):
    ((versions, status, folders),) = on_ranks(
        saves_killed, tmp_path, can_exchange, automatic, in_background, num_processes=1
    )
    assert status == 0
    assert len(versions) > 40
    assert set(versions) == {1, 2}
    assert versions[0] == 1
    assert versions[-1] == 2
    assert [name for name in folders if name.startswith(".")] == [], "nothing is left over"


@pytest.mark.parametrize("num_bytes", [0, 100, 10_000, 17_000, 25_000])
def test_a_full_disk_leaves_the_last_checkpoint(num_bytes, tmp_path, monkeypatch):
    Version(1).accelerator.save_state(tmp_path / "ck")
    left = num_bytes

    def write(self, data, original=storage._Counted.write):
        nonlocal left
        left -= len(data)
        if left < 0:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self._file = Failing(full)
        return original(self, data)

    class Failing:
        def __init__(self, error):
            self.error = error

        def write(self, *_):
            raise self.error

        flush = write

    with monkeypatch.context() as patched:
        patched.setattr(storage._Counted, "write", write)
        with pytest.raises(CheckpointError, match=r"save_state to .* failed: OSError\(28, 'No space left on device'\)"):
            Version(2).accelerator.save_state(tmp_path / "ck")
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    run = Version(0)
    run.accelerator.load_state(tmp_path / "ck")
    assert run.found() == 1


def save_with_little_room(folder):
    run = Version(1)
    run.accelerator.save_state(folder)
    run.number = 2
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    for safe in (True, False):
        with pytest.raises(CheckpointError, match=r"OSError\(27, 'File too large'\)"):
            run.accelerator.save_state(folder, safe_serialization=safe)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.accelerator.load_state(folder)
    return run.found()


def test_a_file_that_the_system_refuses_leaves_the_last_checkpoint(on_ranks, tmp_path):
    assert on_ranks(save_with_little_room, tmp_path, num_processes=1) == [1]


def fill_on_ranks(folder):
    run = Version(1)
    run.accelerator.save_state(folder)
    if run.accelerator.is_main_process:

        def open_file(path, *_):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        Path.open = open_file  # in this process, which ends with the function
    with pytest.raises(CheckpointError) as caught:
        run.accelerator.save_state(folder)
    return str(caught.value)


def test_a_folder_that_can_t_be_written_is_the_same_error_on_all_ranks(on_ranks, tmp_path):
    first, second = on_ranks(fill_on_ranks, tmp_path / "ck")
    assert first == second
    assert "failed on rank 0: OSError(30, 'Read-only file system')" in first
    run = Version(0)
    with pytest.warns(UserWarning, match="saved by 2 processes and is loaded by 1"):
        run.accelerator.load_state(tmp_path / "ck")
    assert run.found() == 1


def test_what_was_set_aside_comes_back(tmp_path):
    """Where folders can't change places in one step, a crash may come between the two steps."""
    folder = tmp_path / "ck"
    Version(1).accelerator.save_state(folder)
    folder.rename(tmp_path / ".ck.old")
    run = Version(0)
    run.accelerator.load_state(folder)
    assert run.found() == 1
    folder.mkdir()  # as code does that makes its folders first
    run.accelerator.load_state(folder)
    run.number = object()
    with pytest.raises(CheckpointError):
        run.accelerator.save_state(folder)
    run.accelerator.load_state(folder)
    assert run.found() == 1
    Version(2).accelerator.save_state(folder)
    run.accelerator.load_state(folder)
    assert run.found() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_folders_change_places_in_one_step(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / folder.name).write_text("")
    if not storage._exchange(one, other):
        pytest.skip("this system or file system has no renameat2 with RENAME_EXCHANGE")
    assert (one / "other").exists()
    assert (other / "one").exists()
    assert not storage._exchange(one, tmp_path / "nothing")
