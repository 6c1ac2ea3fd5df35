import pickle
import sys

import pytest

from notebook_launcher import Accelerator, ConfigError, GeneralTracker
from notebook_launcher.core import endings
from notebook_launcher.runtime.trackers import TRACKERS


class Notes(GeneralTracker):
    """Writes down what is done with it."""

    name = "notes"
    requires_logging_directory = False

    def __init__(self, name="notes"):
        super().__init__()
        self.name = name
        self.notes = []

    @property
    def tracker(self):
        return self.notes

    def start(self):
        self.notes.append("start")

    def store_init_configuration(self, values):
        self.notes.append(("config", values))

    def log(self, values, step=None, **kwargs):
        self.notes.append((values, step, kwargs))

    def finish(self):
        self.notes.append("finish")


class Everywhere(Notes):
    main_process_only = False

    def fail(self):
        self.notes.append("fail")


def test_a_tracker_of_ones_own():
    tracker = Notes()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project", {"lr": 1})
    assert accelerator.trackers == [tracker]
    assert accelerator.get_tracker("notes") is tracker
    assert accelerator.get_tracker("notes", unwrap=True) is tracker.notes
    accelerator.log({"loss": 0.5}, step=3, log_kwargs={"notes": {"commit": True}, "other": {"x": 1}})
    accelerator.end_training()
    accelerator.end_training()
    assert tracker.notes == ["start", ("config", {"lr": 1}), ({"loss": 0.5}, 3, {"commit": True}), "finish"]
    assert accelerator.trackers == []
    assert not endings.pending()


def test_several_trackers_and_a_name_twice():
    first, second, third = Notes("a"), Notes("b"), Notes("a")
    accelerator = Accelerator(cpu=True, log_with=[first, second, third])
    accelerator.init_trackers("project")
    assert {tracker.name for tracker in accelerator.trackers} == {"a", "b"}
    assert (first.notes, second.notes, third.notes) == ([], ["start"], ["start"])
    accelerator.end_training()


def test_a_second_project_closes_the_first():
    tracker = Notes()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("fold 1")
    accelerator.init_trackers("fold 2")
    accelerator.end_training()
    assert tracker.notes == ["start", "finish", "start", "finish"]


def test_one_that_cannot_be_closed_keeps_no_other_open():
    first, second = Notes("a"), Notes("b")
    first.finish = lambda: 1 / 0
    accelerator = Accelerator(cpu=True, log_with=[first, second])
    accelerator.init_trackers("project")
    with pytest.raises(ZeroDivisionError):
        accelerator.end_training()
    assert second.notes == ["start", "finish"]


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        ({}, "name, requires_logging_directory, tracker"),
        ({"name": "a", "tracker": None}, "requires_logging_directory"),
        ({"name": "a", "requires_logging_directory": False}, "tracker"),
    ],
)
def test_what_a_tracker_lacks_is_named(parts, missing):
    kind = type("Mine", (GeneralTracker,), parts)
    with pytest.raises(NotImplementedError, match=f"the tracker Mine lacks {missing}: a subclass"):
        kind()
    silent = type("Mine", (GeneralTracker,), {**parts, "__init__": lambda _: None})
    with pytest.raises(NotImplementedError, match=f"lacks {missing}:"):
        Accelerator(cpu=True, log_with=silent())


def test_an_unknown_tracker_says_which_there_are_and_what_to_do():
    with pytest.raises(ConfigError, match=r"(?s)log_with 'tensorbord' is not known. Did you mean 'tensorboard'\?"):
        Accelerator(cpu=True, log_with="tensorbord")
    with pytest.raises(ConfigError, match=r"Known: all, mlflow, tensorboard, wandb.*subclass of GeneralTracker"):
        Accelerator(cpu=True, log_with=["comet_ml"])


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"'wandb' needs the package 'wandb'.*pip install wandb"):
        Accelerator(cpu=True, log_with="wandb")
    assert Accelerator(cpu=True, log_with="all", project_dir=tmp_path)._trackers._chosen == []


def test_a_missing_folder_is_named():
    with pytest.raises(ConfigError, match=r"'tensorboard' writes to a folder.*Accelerator\(project_dir='runs'\)"):
        Accelerator(cpu=True, log_with="tensorboard")


def test_all_takes_what_is_installed_and_has_its_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "mlflow" or None)
    own = Notes()
    names = [one.name for one in Accelerator(cpu=True, log_with=[own, "all"])._trackers._chosen]
    assert names == ["notes", "wandb"]
    names = [one.name for one in Accelerator(cpu=True, log_with="all", project_dir=tmp_path)._trackers._chosen]
    assert names == ["tensorboard", "wandb"]


def test_a_log_that_no_run_takes_is_a_warning():
    accelerator = Accelerator(cpu=True, log_with=Notes())
    with pytest.warns(UserWarning, match=r"log\(\) reached no tracker: no run of notes is open. init_trackers") as seen:
        accelerator.log({"loss": 1})
    assert seen[0].filename == __file__


def test_no_run_and_no_such_tracker():
    accelerator = Accelerator(cpu=True, log_with=Notes())
    with pytest.raises(ConfigError, match=r"get_tracker\('notes'\) finds nothing: no run of notes is open"):
        accelerator.get_tracker("notes")
    with pytest.raises(ConfigError, match=r"tracker 'note' is not known. Did you mean 'notes'"):
        accelerator.get_tracker("note")


def test_without_trackers_whatever_is_done_with_one_does_nothing():
    blank = Accelerator(cpu=True).get_tracker("wandb", unwrap=True)
    blank.log({"a": 1})
    blank.add_figure("x", None).close()
    blank.config["lr"] = 1
    assert list(blank.config["lr"].anything) == []
    assert isinstance(blank, GeneralTracker)
    assert pickle.loads(pickle.dumps(blank)) is not None


def notes_of_each_rank(fail_on=None):
    tracker, everywhere = Notes(), Everywhere("everywhere")
    accelerator = Accelerator(cpu=True, log_with=[tracker, everywhere])
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1}, step=0)
    accelerator.get_tracker("notes").log({"by hand": 1})
    accelerator.get_tracker("notes", unwrap=True).append("by hand")
    accelerator.end_training()
    return tracker.notes, everywhere.notes


def test_rank_0_has_the_run(on_ranks):
    logged = ({"loss": 1}, 0, {})
    everywhere = ["start", logged, "finish"]
    assert on_ranks(notes_of_each_rank) == [
        (["start", logged, ({"by hand": 1}, None, {}), "by hand", "finish"], everywhere),
        ([], everywhere),
    ]


def leaves_its_run_open(error):
    accelerator = Accelerator(cpu=True, log_with=Everywhere())
    accelerator.init_trackers("project")
    tracker = accelerator.trackers[0]
    tracker.finish = lambda: sys.stdout.write(f"finished on {accelerator.process_index}\n")
    tracker.fail = lambda: sys.stdout.write(f"failed on {accelerator.process_index}\n")
    if error == "on rank 1" and accelerator.process_index == 1:
        raise ValueError(error)
    accelerator.wait_for_everyone()


def test_a_launch_closes_what_is_left_open(on_ranks, capsys):
    on_ranks(leaves_its_run_open, None)
    out = capsys.readouterr().out
    assert "finished on 0" in out
    assert "finished on 1" in out


def test_a_launch_closes_what_is_left_open_by_an_error(on_ranks, capsys):
    with pytest.raises(ValueError, match="on rank 1"):
        on_ranks(leaves_its_run_open, "on rank 1")
    out = capsys.readouterr().out
    assert "failed on 0" in out
    assert "failed on 1" in out


@pytest.mark.parametrize("name", TRACKERS.names)
def test_each_tracker_is_what_its_line_says(name):
    assert TRACKERS.load(name).name == name


@pytest.mark.parametrize(("name", "attribute"), [("tensorboard", "writer"), ("wandb", "run"), ("mlflow", "active_run")])
def test_the_librarys_object_has_accelerates_name_too(name, attribute):
    tracker = TRACKERS.load(name)("project", "logs")
    tracker.run = object()
    assert getattr(tracker, attribute) is tracker.tracker is tracker.run
