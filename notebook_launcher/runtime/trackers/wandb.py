"""Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.runtime.trackers.general import LibraryTracker

if TYPE_CHECKING:
    from collections.abc import Mapping


class WandB(LibraryTracker):
    """One run of the project; ``tracker`` is the ``wandb.Run``."""

    name = "wandb"
    requires_logging_directory = False
    package = "wandb"

    def start(self) -> None:
        """``wandb.init``, which takes ``init_kwargs``."""
        self.run = self.library().init(**{"project": self._project_name, **self._init_kwargs})

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Into the run's ``config``."""
        self.run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Whatever ``Run.log`` takes; ``kwargs`` are its own."""
        self.run.log(dict(values), step=step, **kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Lists of images, as ``wandb.Image`` takes them."""
        image = self.library().Image
        self.log({name: [image(one) for one in images] for name, images in values.items()}, step, **kwargs)

    def finish(self) -> None:
        """Mark the run as finished, and send what is left."""
        self.run.finish()

    def fail(self) -> None:
        """Mark the run as failed, and send what is left."""
        self.run.finish(exit_code=1)
