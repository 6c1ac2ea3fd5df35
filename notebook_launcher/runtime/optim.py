"""Prepared optimizers and schedulers: the user's own, acting only when a group of micro-batches is complete."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.runtime.accumulation import Accumulation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from notebook_launcher.runtime.accumulation import Window
    from notebook_launcher.runtime.staging import Guard


def plain_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
    """``optimizer.step``."""
    return optimizer.step() if closure is None else optimizer.step(closure)


def _evaluate(closure: Callable[[], Any], window: Window) -> Any:
    """Call ``closure``, which an optimizer may do more than once: its loss is not a further part of the group."""
    window.is_pending, window.items = False, None
    return closure()


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``step`` and ``zero_grad`` wait for the end of an accumulation group.

    The group is that of the models whose parameters it holds; where none of them is accumulated, the one that the code
    is in. ``optimizer`` is the one that was given to ``prepare``; all else is its. A copy, or one that was pickled,
    stands for itself: it belongs to no accelerator, so it acts at every call.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        accumulation: Accumulation,
        step: Callable[[torch.optim.Optimizer, Callable[[], Any] | None], Any] = plain_step,
    ) -> None:
        """Not the base's: this one has no parameters, state or hooks of its own."""
        self.optimizer = optimizer
        self.step_was_skipped = False
        self.window: Window = accumulation.alone  # the group that it acted in last
        self.is_led = False  # the groups of its models say which group it is in
        self.guard: Guard | None = None  # of its state, which a save in the background copies
        self._accumulation = accumulation
        self._step = step

    def current_window(self) -> Window:
        """The accumulation group that a call now belongs to."""
        return self.window if self.is_led else self._accumulation.current

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step when the group is complete, and return what the optimizer returns; before that do nothing."""
        own = self.__dict__  # each attribute of a class that has __getattr__ takes its time to read
        window: Window
        window = own["window"] = own["window"] if own["is_led"] else own["_accumulation"].current
        if not window.sync:
            return None
        window.has_run = True
        if window.scaling is not None:
            if closure is not None:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__}.step was given a closure, and in mixed precision fp16 it must be "
                    "known before a step whether the gradients are finite. Use mixed_precision='bf16' or 'no', or an "
                    "optimizer that steps without a closure."
                )
            self.step_was_skipped = not window.scaling.unscale(self.optimizer)
            if self.step_was_skipped:
                return None
        return own["_step"](own["optimizer"], closure and functools.partial(_evaluate, closure, window))

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's
        """Clear the gradients. Those of an unfinished group are kept until it is finished, then cleared."""
        own = self.__dict__
        window: Window = own["window"] if own["is_led"] else own["_accumulation"].current
        if window.zeroing_waits():
            window.owed[id(self)] = functools.partial(own["optimizer"].zero_grad, set_to_none)
            return
        own["optimizer"].zero_grad(set_to_none)
        if window.owed:
            window.owed.pop(id(self), None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own groups, shared, not copied."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The optimizer's own state, shared, not copied."""
        self._settle()
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Hand on to the optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        self._settle()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand on to the optimizer."""
        self._settle()
        self.optimizer.load_state_dict(state_dict)

    def _settle(self) -> None:
        if self.guard is not None:
            self.guard.wait()

    def __getattr__(self, name: str) -> Any:
        """What is not ours is the optimizer's: hooks, ``train`` and ``eval`` of schedule-free ones."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["optimizer"], Accumulation(1))  # type: ignore[misc]


class PreparedScheduler:
    """A learning-rate scheduler that steps once per real optimizer step (or ``num_repeats`` times).

    ``scheduler`` is the one that was given to ``prepare``; what is not defined here is its.
    """

    def __init__(
        self,
        scheduler: Any,
        accumulation: Accumulation,
        optimizers: list[PreparedOptimizer],
        *,
        with_optimizer: bool = True,
        num_repeats: int = 1,
    ) -> None:
        """That one of ``optimizers`` which ``scheduler`` drives must have stepped.

        ``with_optimizer`` False leaves stepping to the caller.
        """
        self.scheduler = scheduler
        self._accumulation = accumulation
        target = getattr(scheduler, "optimizer", None)
        self._optimizers = [one for one in optimizers if target in (one, one.optimizer)]
        self._with_optimizer = with_optimizer
        self._num_repeats = num_repeats

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, unless the optimizer did not: within a group, or where fp16 skipped its step."""
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        windows = [optimizer.current_window() for optimizer in self._optimizers] or [self._accumulation.current]
        if not all(window.sync for window in windows) or any(one.step_was_skipped for one in self._optimizers):
            return
        for _ in range(self._num_repeats):
            total = getattr(self.scheduler, "total_steps", None)
            # OneCycleLR refuses to go on past its end, which repeating can overshoot.
            if self._num_repeats == 1 or total is None or self.scheduler.last_epoch + 1 < total:
                self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What is not ours is the scheduler's."""
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"PreparedScheduler({self.scheduler!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["scheduler"], Accumulation(1), [])  # type: ignore[misc]


def is_scheduler(thing: object) -> bool:
    """Whether ``thing`` is a learning-rate scheduler: torch's, or one that looks like it."""
    looks_like_one = all(hasattr(thing, name) for name in ("step", "optimizer", "state_dict"))
    is_optimizer = isinstance(thing, torch.optim.Optimizer)
    return isinstance(thing, torch.optim.lr_scheduler.LRScheduler) or (looks_like_one and not is_optimizer)


def holders_of(parameters: Iterable[torch.Tensor], optimizers: Iterable[PreparedOptimizer]) -> list[PreparedOptimizer]:
    """The prepared optimizers that step any of ``parameters``."""
    wanted = {id(parameter) for parameter in parameters}
    return [one for one in optimizers if any(id(parameter) in wanted for parameter in parameters_of(one))]


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that ``optimizer`` steps."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
