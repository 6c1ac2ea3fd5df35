"""MLflow in a local database."""

import os
import threading

import pytest

from notebook_launcher import Accelerator

mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow, then this runs offline")
_get_store = pytest.importorskip("mlflow.tracking._tracking_service.utils")._get_store

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its database library's


@pytest.fixture
def accelerator(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    one = Accelerator(cpu=True, log_with="mlflow")
    config = {f"option {number}": number for number in range(150)}
    one.init_trackers("project", config, {"mlflow": {"run_name": "mine", "nested_run": True}})
    yield one
    one.end_training()
    _get_store().engine.dispose()  # MLflow keeps its database open, and changes the environment
    os.environ.clear()
    os.environ.update(environment)


def stored(accelerator):
    return mlflow.get_run(accelerator.get_tracker("mlflow", unwrap=True).info.run_id)


def test_metrics_and_parameters_reach_the_run(accelerator):
    accelerator.log({"loss": 0.5}, step=3)
    with pytest.warns(UserWarning, match="mlflow does not record 'note', a str"):
        accelerator.log({"loss": 0.25, "note": "x"}, step=4)
    run = stored(accelerator)
    assert run.info.run_name == "mine"
    assert run.data.metrics == {"loss": 0.25}
    assert len(run.data.params) == 150
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(3, 0.5), (4, 0.25)]
    assert mlflow.get_experiment(run.info.experiment_id).name == "project"


def test_the_run_ends_as_the_function_did(accelerator):
    run_id = stored(accelerator).info.run_id
    accelerator.end_training()
    assert mlflow.get_run(run_id).info.status == "FINISHED"


def test_a_failure_may_be_told_by_another_thread(accelerator):
    run_id = stored(accelerator).info.run_id
    thread = threading.Thread(target=accelerator.trackers[0].fail)  # as for a rank that waits in a collective
    thread.start()
    thread.join()
    assert mlflow.get_run(run_id).info.status == "FAILED"
