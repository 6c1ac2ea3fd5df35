"""Whose gradients are whose: an accelerator's accumulation groups, their optimizers, and what each has collected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.runtime.accumulation import Group

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from notebook_launcher.runtime.accumulation import Accumulation, Progress
    from notebook_launcher.runtime.optim import PreparedOptimizer
    from notebook_launcher.runtime.strategies import Strategy

Models = tuple["nn.Module", ...]


class Groups(dict[Models, Group]):
    """The group of each set of models that was accumulated; asking for another makes it."""

    def __init__(
        self,
        accumulation: Accumulation,
        progress: Progress,
        strategy: Strategy,
        optimizers: Sequence[PreparedOptimizer],
        models: Sequence[tuple[nn.Module, nn.Module]],
    ) -> None:
        """``optimizers`` and ``models`` (as given, as prepared) are the accelerator's own lists, which grow."""
        super().__init__()
        self._accumulation = accumulation
        self._progress = progress
        self._strategy = strategy
        self._optimizers = optimizers
        self._models = models

    def __missing__(self, models: Models) -> Group:
        """A group for ``models``, with the optimizers that train them."""

        def rescale(factor: float) -> None:
            for gradient in self._gradients(models):
                gradient.mul_(factor)

        def abandon() -> None:
            for gradient in self._gradients(models):
                gradient.zero_()

        contexts: Iterable[AbstractContextManager[Any] | None] = map(self._strategy.no_sync, models)
        self[models] = Group(
            self._accumulation,
            self._progress,
            local=[context for context in contexts if context is not None],
            rescale=rescale,
            abandon=abandon,
        )
        self.link()
        return self[models]

    def link(self) -> None:
        """Have each group lead the optimizers that hold parameters of its models."""
        owned: set[int] = set()
        for models, group in self.items():
            held = _identities(models)
            group.optimizers = [one for one in self._optimizers if any(id(p) in held for p in _parameters(one))]
            for optimizer in group.optimizers:
                owned.add(id(optimizer))
                if not optimizer.is_led:
                    optimizer.window = group
        for optimizer in self._optimizers:
            optimizer.is_led = id(optimizer) in owned

    def _gradients(self, models: Models) -> Iterator[torch.Tensor]:
        """What the group of ``models`` has collected: no other group's, and nothing that was trained beside it.

        It is the gradients of its models, and those of optimizers that step with it: a temperature that belongs to no
        model, a text encoder that nobody thought of naming in ``accumulate``.
        """
        group = self[models]
        found: dict[int, torch.Tensor] = {id(p): p for model in models for p in model.parameters()}
        of_groups = {identity for others in self if others != models for identity in _identities(others)}
        of_models = _identities(prepared for _, prepared in self._models)
        for optimizer in self._optimizers:
            if optimizer.window is group:
                foreign = of_groups
            elif not isinstance(optimizer.window, Group):  # it has not stepped in any group yet
                foreign = of_groups | of_models
            else:
                continue
            for parameter in _parameters(optimizer):
                if id(parameter) not in foreign:
                    found[id(parameter)] = parameter
        return (parameter.grad for parameter in found.values() if parameter.grad is not None)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _identities(models: Iterable[nn.Module]) -> set[int]:
    return {id(parameter) for model in models for parameter in model.parameters()}
