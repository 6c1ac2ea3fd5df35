"""What ``Accelerator`` has for exchanging values between processes; the work is done in ``gather``."""

# ruff: noqa: FBT001, FBT002 - positional booleans where Accelerate has them

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.runtime import checks, gather
from notebook_launcher.runtime.identity import Identity

if TYPE_CHECKING:
    from notebook_launcher.runtime.accumulation import Progress


class Exchanging(Identity):
    """Collectives. Whoever inherits sets ``_progress``."""

    _progress: Progress
    _trigger = False

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes joined along dim 0, in rank order, in any nesting; a 0-d one becomes (processes,).

        They keep dtype and device. Raises ``ValueError`` where processes differ in shape or dtype.
        """
        return gather.gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Every tensor's "sum", "mean", "max", "min" or "prod" over the processes, times ``scale``, in any nesting.

        Shapes stay, and dtypes but for integers and bools: their sums and products are int64, their means fp32. "none"
        leaves all as it is. Raises ``ValueError`` where processes differ in shape or dtype, ``ConfigError`` for another
        reduction, ``TypeError`` for numbers and arrays.
        """
        return gather.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Every tensor as long in ``dim`` as the longest of all processes, filled with ``pad_index``, in any nesting.

        ``pad_first`` fills at the start. Tensors without that dim are left as they are.
        """
        return gather.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Have the next ``check_trigger`` say True on every process."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process has called ``set_trigger`` since the last check; every process calls this."""
        is_set, self._trigger = gather.any_is_set(self._trigger), False
        return is_set

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What was computed for the current batches of all processes: each sample once, in the data set's order.

        Tensors have samples along dim 0; lists of plain values are gathered too, and lists of containers one element a
        sample. ``use_gather_object`` takes every list as one of samples. Raises ``ValueError`` for tensors that differ
        in another dim.
        """
        checks.flags(use_gather_object=use_gather_object)
        return gather.gather_samples(
            input_data, self._progress.latest, self._data_process, as_objects=use_gather_object
        )
