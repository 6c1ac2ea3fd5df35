"""``DummyOptim`` and ``DummyScheduler``: for ``prepare``, where DeepSpeed's configuration defines the real ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class DummyOptim(torch.optim.Optimizer):
    """Stands for the optimizer that DeepSpeed's configuration defines; its options fill what is "auto" there."""

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **options: Any) -> None:
        """``options`` too are for the configuration: ``betas``, ``eps``."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **options})

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        """Raise: it is no optimizer by itself."""
        raise RuntimeError(
            "DummyOptim stands for the optimizer in DeepSpeed's configuration, and can't step by itself: prepare it "
            "together with its model under strategy='deepspeed', and step what prepare returns"
        )


class DummyScheduler:
    """Stands for the scheduler that DeepSpeed's configuration defines, which steps when the optimizer does."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        """The numbers fill what is "auto" there; ``lr_scheduler_callable`` makes one instead of the configuration."""
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        optimizer.stands_for_scheduler = self  # type: ignore[attr-defined]

    def step(self, *_: Any) -> None:
        """Do nothing: DeepSpeed steps it."""

    def get_last_lr(self) -> list[float]:
        """The learning rates in force."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Empty: DeepSpeed keeps it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""
