"""What a program says once, not once a process: ``get_logger`` and ``tqdm``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_launcher.core import config

if TYPE_CHECKING:
    from collections.abc import MutableMapping


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that is heard once a run. Each of its calls takes ``main_process_only`` and ``in_order``, too.

    ``main_process_only`` False: every rank logs. ``in_order`` True: every rank logs, one after another; all must call.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """As ``logging.Logger.log``."""
        everywhere = not kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line, not this one
        have_met = dist.is_available() and dist.is_initialized()
        if in_order and have_met:
            for turn in range(dist.get_world_size()):  # whatever each rank's level is: all must meet
                if turn == dist.get_rank():
                    super().log(level, msg, *args, **kwargs)
                dist.barrier()
        elif everywhere or in_order or (dist.get_rank() if have_met else config.world().rank) == 0:
            super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The message as it is, with the caller's own ``extra``."""
        return msg, kwargs

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Warn, unless this logger has warned of the very same before."""
        said: set[str] = self.__dict__.setdefault("_said", set())
        words = repr((msg, args))  # what isn't hashable may be warned of too
        if words not in said:
            said.add(words)
            self.warning(msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """The logger ``name`` of ``logging``, heard from rank 0 alone unless a call says otherwise; see ``RankLogger``.

    ``log_level``: "DEBUG", "info" ...; without it, that of the variable ``ACCELERATE_LOG_LEVEL``, or the logger's own.
    Works before there is an ``Accelerator``; only ``in_order`` needs the process group, and without it keeps no order.
    """
    logger = logging.getLogger(name)
    if level := log_level or config.snapshot().get("ACCELERATE_LOG_LEVEL"):
        logger.setLevel(level.upper())
    return RankLogger(logger, {})


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.auto.tqdm``, shown by the first process of each machine only, unless ``main_process_only`` is False.

    Raises ``ModuleNotFoundError`` where tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm as bar  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "notebook_launcher.tqdm shows a progress bar with the package 'tqdm', which is not installed here: pip "
            "install tqdm",
            name="tqdm",
        ) from error
    if args and isinstance(args[0], bool):  # how older versions of Accelerate took it
        main_process_only, *args = args  # type: ignore[assignment]
    if main_process_only and config.world().local_rank != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
