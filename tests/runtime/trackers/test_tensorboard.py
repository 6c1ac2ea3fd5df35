import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from notebook_launcher import Accelerator


def read(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


@pytest.fixture
def accelerator(tmp_path):
    one = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    yield one
    one.end_training()


def test_scalars_texts_and_groups(accelerator, tmp_path):
    accelerator.init_trackers("project")
    accelerator.log(
        {"loss": torch.tensor(0.5), "epoch": 1, "note": "good", "both": {"a": 1, "b": torch.tensor(2.0)}}, 3
    )
    accelerator.log({"loss": 0.25}, step=4)
    found = read(tmp_path / "project")  # before the end: a run that is killed has its curve
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(3, 0.5), (4, 0.25)]
    assert found.Scalars("epoch")[0].value == 1
    assert found.Tensors("note/text_summary")[0].tensor_proto.string_val == [b"good"]
    assert read(tmp_path / "project" / "both_b").Scalars("both")[0].value == 2


def test_hyperparameters_are_in_the_runs_own_file(accelerator, tmp_path):
    accelerator.init_trackers("project", config={"lr": 0.1, "layers": [3, 4], "name": "x", "none": None})
    accelerator.log({"loss": 1})
    content = read(tmp_path / "project").summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for part in (b"lr", b"[3, 4]", b"None"):
        assert part in content
    assert len(list((tmp_path / "project").iterdir())) == 1


def test_what_it_cannot_show_is_a_warning(accelerator):
    accelerator.init_trackers("project")
    with pytest.warns(UserWarning, match="tensorboard does not record 'values', a list; give it to the library itself"):
        accelerator.log({"values": torch.ones(2)})


def test_images(accelerator, tmp_path):
    accelerator.init_trackers("project")
    accelerator.get_tracker("tensorboard").log_images({"digits": torch.zeros(2, 3, 4, 4)}, step=5)
    accelerator.trackers[0].writer.add_images("by_hand", torch.zeros(2, 3, 4, 4), 6)
    accelerator.end_training()
    found = read(tmp_path / "project")
    assert [event.step for name in ("digits", "by_hand") for event in found.Images(name)] == [5, 6]


def test_options_reach_the_writer_and_its_calls(accelerator, tmp_path):
    accelerator.init_trackers("project", init_kwargs={"tensorboard": {"filename_suffix": ".mine"}})
    accelerator.log({"loss": 1}, step=0, log_kwargs={"tensorboard": {"walltime": 5.0}})
    assert isinstance(accelerator.get_tracker("tensorboard", unwrap=True), SummaryWriter)
    (file,) = (tmp_path / "project").iterdir()
    assert file.name.endswith(".mine")
    assert read(file).Scalars("loss")[0].wall_time == 5


def logs(folder):
    accelerator = Accelerator(log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("project")
    accelerator.log({"loss": accelerator.process_index}, step=0)


def test_ranks_write_one_run(on_ranks, tmp_path):
    on_ranks(logs, str(tmp_path))
    assert len(list((tmp_path / "project").iterdir())) == 1
    assert [event.value for event in read(tmp_path / "project").Scalars("loss")] == [0]
