"""Whose gradients are whose: an accelerator's accumulation groups, their optimizers, and what each has collected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import checks
from notebook_launcher.runtime.accumulation import Group
from notebook_launcher.runtime.optim import PreparedOptimizer, parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from notebook_launcher.runtime.accumulation import Accumulation, Progress
    from notebook_launcher.runtime.strategies import Strategy

Models = tuple[nn.Module, ...]


class Groups(dict[Models, Group]):
    """The group of each set of models that was accumulated; asking for another makes it."""

    def __init__(
        self,
        accumulation: Accumulation,
        progress: Progress,
        strategy: Strategy,
        optimizers: list[PreparedOptimizer],
        models: list[tuple[nn.Module, nn.Module]],
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
        self.refuse_others(models)

        def rescale(factor: float | torch.Tensor) -> None:
            for gradient in self._gradients(models):
                gradient.mul_(factor)

        def abandon() -> None:
            for gradient in self._gradients(models):
                gradient.zero_()

        apart = () if self._accumulation.sync_each_batch else models
        local = [context for model in apart if (context := self._strategy.no_sync(model)) is not None]
        self[models] = Group(self._accumulation, self._progress, local=local, rescale=rescale, abandon=abandon)
        self.link()
        return self[models]

    @staticmethod
    def refuse_others(things: Iterable[object]) -> None:
        """Raise ``TypeError`` where ``accumulate`` was given what is no model."""
        for thing in things:
            checks.instance("accumulate", thing, nn.Module, "prepared models, each as an argument of its own")

    def link(self) -> None:
        """Have each group lead the optimizers that hold parameters of its models."""
        held = {group: _identities(models) for models, group in self.items()}
        for group in self.values():
            group.optimizers = []
        for optimizer in self._optimizers:
            leaders = [group for group in held if any(id(p) in held[group] for p in parameters_of(optimizer))]
            if leaders and not optimizer.is_led:
                optimizer.window = leaders[-1]
            optimizer.is_led = bool(leaders)
            if len(leaders) > 1:  # the group that the code is in is told to it each time
                for group in leaders:
                    group.optimizers.append(optimizer)

    def forget(self) -> None:
        """Let go of all groups, models and optimizers."""
        for held in (self, self._models, self._optimizers):
            held.clear()
        self._accumulation.forget()
        self._progress.open.clear()
        self._progress.latest = None

    def check(self, things: Sequence[Any]) -> None:
        """Raise ``ConfigError`` for an optimizer that ``prepare`` was given with a model, but was made from another.

        So are an optimizer that trains no prepared model and a model that no optimizer trains.
        """
        optimizers = [one for one in things if isinstance(one, Optimizer)]
        for one in optimizers:
            if one not in self._optimizers:
                self._strategy.pair(one)
        trained = {id(p) for one in (*optimizers, *self._optimizers) for p in parameters_of(one)}
        given = [thing for thing in things if isinstance(thing, nn.Module)]
        alone = [one for one in given if _trainable(one) and _trainable(one).isdisjoint(trained)]
        known = _identities(prepared for _, prepared in self._models)
        for one in optimizers if alone else ():
            shapes = [tuple(p.shape) for p in parameters_of(one)]
            if one in self._optimizers or not shapes or any(id(p) in known for p in parameters_of(one)):
                continue
            raise ConfigError(
                f"prepare was given {', '.join(type(model).__name__ for model in alone)}, and {type(one).__name__} "
                f"over {len(shapes)} other parameters, the first of the shape {shapes[0]}: none is in a prepared "
                "model, so it would not train that. Make it from the model's parameters, or, if it is for parameters "
                "of no model, prepare it in a call of its own."
            )

    def _gradients(self, models: Models) -> Iterable[torch.Tensor]:
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
            for parameter in parameters_of(optimizer):
                if id(parameter) not in foreign:
                    found[id(parameter)] = parameter
        return self._strategy.gradients(found.values())


def _trainable(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def _identities(models: Iterable[nn.Module]) -> set[int]:
    return {id(parameter) for model in models for parameter in model.parameters()}
