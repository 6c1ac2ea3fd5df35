"""W&B offline: what a run has written is read back from its file."""

import numpy as np
import pytest

from notebook_launcher import Accelerator

wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb, then this runs offline")


@pytest.fixture
def accelerator(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    one = Accelerator(cpu=True, log_with="wandb")
    one.init_trackers("project", {"lr": 0.1}, {"wandb": {"dir": str(tmp_path), "name": "mine"}})
    yield one
    one.end_training()
    wandb.teardown()


def test_values_and_configuration_reach_the_run(accelerator, tmp_path):
    run = accelerator.get_tracker("wandb", unwrap=True)
    assert (run.project, run.name, run.config["lr"]) == ("project", "mine", 0.1)
    accelerator.log({"loss": 0.5}, step=3, log_kwargs={"wandb": {"commit": True}})
    assert (run.summary["loss"], run.step) == (0.5, 4)
    accelerator.get_tracker("wandb").log_images({"digits": np.zeros((1, 4, 4))}, step=4)
    accelerator.end_training()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"loss" in file.read_bytes()
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/digits*"))


def test_a_run_that_failed_says_so(accelerator, monkeypatch):
    codes = []
    run = accelerator.get_tracker("wandb", unwrap=True)
    monkeypatch.setattr(run, "finish", lambda exit_code=None: codes.append(exit_code))
    accelerator.trackers[0].fail()
    assert codes == [1]
    monkeypatch.undo()
