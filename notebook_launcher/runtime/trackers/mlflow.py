"""MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.runtime.trackers.general import LibraryTracker, plain, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_PARAMS = 100  # in one request to a server


class MLflow(LibraryTracker):
    """One run of the experiment, stored where MLflow's own settings say; ``tracker`` is the ``mlflow.ActiveRun``."""

    name = "mlflow"
    requires_logging_directory = False
    package = "mlflow"
    active_run = LibraryTracker.tracker  # Accelerate's name

    def start(self) -> None:
        """``mlflow.start_run``, which takes ``init_kwargs``; the experiment is made where there is none."""
        if "nested_run" in self._init_kwargs:
            self._init_kwargs["nested"] = self._init_kwargs.pop("nested_run")  # Accelerate's name
        self.library().set_experiment(self._project_name)
        self.run = self.library().start_run(**self._init_kwargs)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """As the run's parameters."""
        items = list(values.items())
        for start in range(0, len(items), _MAX_PARAMS):
            self.library().log_params(dict(items[start : start + _MAX_PARAMS]))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics; ``kwargs`` are those of ``mlflow.log_metrics``."""
        metrics = plain(values)
        for name in [name for name, value in metrics.items() if not isinstance(value, int | float)]:
            refuse(self, name, metrics.pop(name))
        self.library().log_metrics(metrics, step=step, **kwargs)

    def finish(self) -> None:
        """Mark the run as finished."""
        self.library().end_run()

    def fail(self) -> None:
        """Mark the run as failed."""
        self.library().MlflowClient().set_terminated(self.run.info.run_id, "FAILED")  # end_run knows its own thread's
        self.library().end_run("FAILED")
