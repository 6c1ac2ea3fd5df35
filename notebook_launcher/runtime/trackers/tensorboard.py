"""TensorBoard, through the writer that torch has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.runtime.trackers.general import LibraryTracker, plain, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping


class TensorBoard(LibraryTracker):
    """Event files in the folder ``logging_dir/project_name``; ``tracker`` is the ``SummaryWriter``."""

    name = "tensorboard"
    requires_logging_directory = True
    package = "tensorboard"
    writer = LibraryTracker.tracker  # Accelerate's name

    def start(self) -> None:
        """Begin an event file."""
        from torch.utils.tensorboard import SummaryWriter

        self.run = SummaryWriter(str(Path(self._logging_dir, self._project_name)), **self._init_kwargs)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Into the run's own file; what is no number, bool or string as text."""
        from torch.utils.tensorboard.summary import hparams

        shown = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in values.items()}
        for summary in hparams(shown, {}):  # type: ignore[no-untyped-call]
            self.run.file_writer.add_summary(summary)
        self.run.flush()

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, strings as text, dictionaries as a group of scalars: on disk when it returns."""
        for name, value in plain(values).items():
            if isinstance(value, int | float):
                self.run.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.run.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.run.add_scalars(name, plain(value), global_step=step, **kwargs)
            else:
                refuse(self, name, value)
        self.run.flush()

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Batches of images, (N, C, H, W) unless ``dataformats`` says otherwise."""
        for name, images in values.items():
            self.run.add_images(name, images, global_step=step, **kwargs)
        self.run.flush()

    def finish(self) -> None:
        """Close the event file."""
        self.run.close()
