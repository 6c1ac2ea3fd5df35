"""DeepSpeed's ZeRO: optimizer state (stage 1), gradients too (2) and weights too (3) are spread over the ranks.

An engine is made when a model and its optimizer have both been prepared. DeepSpeed gets a twin of the optimizer, whose
parameters it replaces by this rank's flat share: the one that the user has keeps the model's, with the learning rates,
which go over to the twin at each step. Gradients are collected by any number of backwards, until the optimizer steps
(``managed_gradient_accumulation`` off), so that groups of micro-batches may have any length.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from pydantic import ValidationError
from torch import nn

from notebook_launcher.core import deepspeed_options
from notebook_launcher.core.deepspeed_options import DeepSpeedPlugin
from notebook_launcher.core.errors import CheckpointError, ConfigError
from notebook_launcher.runtime import agreement, models, zero_checkpoint, zero_config, zero_engine
from notebook_launcher.runtime.optim import PreparedOptimizer
from notebook_launcher.runtime.stand_ins import DummyOptim
from notebook_launcher.runtime.strategies import single
from notebook_launcher.runtime.zero_engine import WEIGHTS, WHOLE, Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from notebook_launcher.runtime.plugins import Keywords
    from notebook_launcher.runtime.process import Process
    from notebook_launcher.runtime.shards import Models, Optimizers
    from notebook_launcher.runtime.storage import Draft


class ZeroModel(models.Wrapper):
    """A model that is trained by a DeepSpeed engine, once its optimizer is there."""

    trained: Engine | None = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        if self.trained is None or self.trained.stage == WHOLE:
            return self.module(*inputs, **kwargs)
        agreement.check("the forward of a sharded model")
        if torch.is_inference_mode_enabled():  # weights that are gathered in it could not be trained any more
            with torch.inference_mode(mode=False), torch.no_grad():
                return self.trained.forward(*inputs, **kwargs)
        return self.trained.forward(*inputs, **kwargs)

    def train(self, mode: bool = True) -> ZeroModel:  # noqa: FBT001, FBT002 - torch's
        """Also tell the module, which may be a view."""
        super().train(mode)
        return self


class _Collecting:
    """A micro-batch that doesn't end its group. What it says is only for ``clip``: ZeRO has no exchange to put off."""

    def __init__(self, model: ZeroModel) -> None:
        self._model = model
        self._engine: Engine | None = None  # the one that was told, since it may be made within the context

    def __enter__(self) -> None:
        self._engine = self._model.trained
        if self._engine is not None:
            self._engine.num_collecting += 1

    def __exit__(self, *exception: object) -> None:
        if self._engine is not None:
            self._engine.num_collecting -= 1


@final
class DeepSpeed:
    """DeepSpeed's ZeRO, stages 0 to 3."""

    name = "deepspeed"
    layout = "deepspeed"
    trains_apart = False
    go_on = staticmethod(single.go_on)
    held = staticmethod(zero_config.held)

    def __init__(self, process: Process, keywords: Keywords) -> None:
        """Train on the process's device, as the plugin and the launch's section say; ``ConfigError`` for a slip."""
        self._process = self.data_process = process
        self.plugin = deepspeed_options.with_section(keywords[DeepSpeedPlugin], process.world.strategy_config)
        self._wrapped: weakref.WeakSet[ZeroModel] = weakref.WeakSet()
        self._unpaired: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._trained: weakref.WeakKeyDictionary[torch.optim.Optimizer, Engine] = weakref.WeakKeyDictionary()
        self._deepspeed = zero_engine.imported(process)

    def place(self, model: nn.Module) -> Any:
        """The model on the device."""
        return single.moved(model, self._process.backend)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as its engine will train it; one without anything to train as it is."""
        if isinstance(model, ZeroModel) or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        wrapped = ZeroModel(model)
        self._wrapped.add(wrapped)
        for optimizer in [one for one in self._unpaired if _shared(one, wrapped)]:
            self._unpaired.discard(optimizer)
            self.pair(optimizer)
        return wrapped

    def pair(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the engine of ``optimizer`` and its model, once both are there; ``ConfigError`` where it can't be."""
        if isinstance(optimizer, PreparedOptimizer):
            optimizer = optimizer.optimizer
        if optimizer in self._trained:
            return
        owners = [model for model in self._wrapped if _shared(optimizer, model)]
        if not owners:
            self._unpaired.add(optimizer)
            return
        kind, names = type(optimizer).__name__, ", ".join(type(model.module).__name__ for model in owners)
        if len(owners) > 1:
            raise ConfigError(
                f"{kind} trains {len(owners)} models ({names}), and DeepSpeed's engine holds one: put them into one "
                "nn.Module, or give each an optimizer of its own"
            )
        if owners[0].trained is not None:
            raise ConfigError(f"{names} has an optimizer, and {kind} is a second one: DeepSpeed's engine holds one")
        foreign = len(_parameters(optimizer)) - _shared(optimizer, owners[0])
        if foreign:
            raise ConfigError(
                f"{kind} trains {names} and {foreign} parameters that are not in it, which DeepSpeed's engine can't: "
                "register them in the model, or give them an optimizer of their own"
            )
        if optimizer.state:
            raise ConfigError(
                f"{kind} has stepped before it was prepared, and DeepSpeed can't take over its state: prepare it new"
            )
        trained = self._start(owners[0], optimizer)
        owners[0].__dict__["trained"] = trained
        self._trained[optimizer] = trained
        optimizer.zero_grad = trained.discard  # type: ignore[method-assign]

    def _start(self, model: ZeroModel, optimizer: torch.optim.Optimizer) -> Engine:
        inner = models.compiled_from(model.module)
        precision = inner._precision.name if isinstance(inner, models.AutocastView) else "no"  # noqa: SLF001
        process = self._process
        on_cpu = process.device.type == "cpu"
        options = zero_config.build(self.plugin, precision, process.num_processes, models.unwrap(model), on_cpu=on_cpu)
        plain = models.unwrap(model, keep_torch_compile=False)
        if options["zero_optimization"]["stage"] == WEIGHTS and plain is not models.unwrap(model):
            raise ConfigError(
                f"prepare was given a {type(plain).__name__} that torch.compile has wrapped, and ZeRO stage 3 puts its "
                "hooks into modules, which DeepSpeed can't do there: call model.compile(), which wraps nothing, or "
                "torch.compile what prepare returns"
            )
        stand_in = getattr(optimizer, "stands_for_scheduler", None)
        group = optimizer.param_groups[0]
        numbers = (stand_in.total_num_steps, stand_in.warmup_num_steps) if stand_in else (None, None)
        zero_config.fill_optimizer(options, group["lr"], group, *numbers)
        given: dict[str, Any] = {"lr_scheduler": stand_in.lr_scheduler_callable if stand_in else None}
        if isinstance(optimizer, DummyOptim):
            if "optimizer" not in options:
                raise ConfigError(
                    "DummyOptim stands for an optimizer in DeepSpeed's configuration, which has none; add the section "
                    "'optimizer', or prepare a torch optimizer"
                )
            groups = [{"params": list(one["params"])} for one in optimizer.param_groups]
            given["model_parameters"] = groups if len(groups) > 1 else groups[0]["params"]
        elif "optimizer" in options:
            raise ConfigError(
                f"DeepSpeed's configuration has an optimizer, {options['optimizer'].get('type')!r}, and prepare was "
                f"given a {type(optimizer).__name__}: prepare a DummyOptim in its place, or take the section out"
            )
        else:
            given["optimizer"] = zero_engine.twin(optimizer)
        zero_engine.meet(process)
        try:
            engine, *_ = self._deepspeed.initialize(
                model=model.module, config=options, dist_init_required=False, **given
            )
        except ValidationError as error:  # of DeepSpeed's configuration classes
            told = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            raise ConfigError(f"DeepSpeed refuses its configuration's {error.title}: {'; '.join(told)}") from None
        return Engine(engine, optimizer)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Add the gradients; engines hear of it from their models' outputs or, at the latest, their parameters."""
        for trained in self._trained.values():
            trained.is_heard = False
        single.backward(loss, **options)  # type: ignore[no-untyped-call]

    def no_sync(self, model: nn.Module) -> _Collecting | None:
        """A context for a micro-batch that doesn't end its group; gradients are exchanged as the stage does it."""
        inner = models.compiled_from(model)
        return _Collecting(inner) if isinstance(inner, ZeroModel) else None

    def sync_in_backward(self, model: nn.Module) -> None:
        """None: any backward is exchanged at the step."""

    def join(self, models_: Sequence[nn.Module]) -> None:
        """None for models without an engine; raises ``ConfigError`` for others, since each step needs every rank."""
        if any(isinstance(models.compiled_from(one), ZeroModel) for one in models_):
            raise ConfigError(
                "join_uneven_inputs can't be with strategy='deepspeed': all ranks are needed for each step, so that "
                "one with fewer batches would leave the others waiting. Leave it out; even_batches=True, the default, "
                "fills up the last batch."
            )

    def _engines_of(
        self, parameters: Sequence[torch.Tensor], *, finalize: bool = True
    ) -> tuple[list[Engine], list[torch.Tensor]]:
        """The engines that hold ``parameters``, and those that none holds or that are whole: then ``finalize`` them."""
        found = {id(p) for p in parameters}
        engines = [one for one in self._trained.values() if not one.parameters.isdisjoint(found)]
        spread = [one for one in engines if one.stage != WHOLE]
        for one in engines:
            if one.stage == WHOLE and finalize and not one.is_open:
                one.finalize()
        held = set().union(*(one.parameters for one in spread))
        return spread, [p for p in parameters if id(p) not in held]

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Have the coming step scale the gradients; return their norm, NaN within an unfinished group.

        Raises ``ConfigError`` for a norm other than 2, and for a part of a model: an engine clips all of it.
        """
        spread, rest = self._engines_of(parameters := list(parameters))
        if not spread:
            norm = single.clip(parameters, max_norm, norm_type)
            found = {id(p) for p in parameters}
            for one in self._trained.values():
                if not one.parameters.isdisjoint(found):
                    one.note_exchanged()
            return norm
        if any(one.is_open for one in spread):
            return torch.full((), torch.nan, device=spread[0].engine.device)
        one, found = spread[0], {id(p) for p in parameters}
        if norm_type != 2:  # noqa: PLR2004 - the 2-norm
            raise ConfigError(
                f"clip_grad_norm_(norm_type={norm_type}): ZeRO stage {one.stage} clips by the 2-norm only"
            )
        wanted = {id(p) for p in one.held if p.requires_grad}
        if len(spread) > 1 or rest or not wanted <= found:
            raise ConfigError(
                f"clip_grad_norm_ was given {len(found & wanted)} of the {len(wanted)} parameters of one model and "
                f"{len(found - wanted)} others, and ZeRO stage {one.stage} clips one model as a whole; call it for "
                "each model with all of model.parameters()"
            )
        one.finalize()
        norm = one.norm()
        one.engine.optimizer.clip_grad = 0.0 if max_norm == float("inf") else max_norm
        return norm

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip elements, of all gradients of the models that ``parameters`` are of."""
        spread, rest = self._engines_of(list(parameters))
        if rest:
            single.clip_value(rest, clip_value)
        for one in spread:
            one.finalize()
            for gradient in one.collected():
                gradient.clamp_(-clip_value, clip_value)

    def gradients(self, parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """What was collected by engines of these parameters, as a whole; and the parameters' own."""
        spread, rest = self._engines_of(list(parameters), finalize=False)
        yield from single.gradients(rest)
        for one in spread:
            yield from one.collected()

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """The engine's step; that of ``optimizer`` itself where it trains no model that was prepared."""
        trained = self._trained.get(optimizer)
        if trained is None:
            return single.step(optimizer, closure)
        if closure is not None:
            raise ConfigError(
                f"{type(optimizer).__name__}.step was given a closure, and DeepSpeed can't call it; step without one"
            )
        trained.step(optimizer)
        return None

    def full_state(self, model: nn.Module) -> dict[str, Any]:
        """The whole state, in stage 3 gathered, one parameter after another; every rank calls it."""
        return zero_checkpoint.full_state(models.unwrap(model, keep_torch_compile=False))

    def save(self, draft: Draft, models_: Models, optimizers: Optimizers, *, safe: bool) -> None:
        """DeepSpeed's own files in ``<name>.deepspeed``, written by every rank; other models and optimizers whole."""
        engines, other_models, other_optimizers = self._sorted(models_, optimizers)
        for optimizer, trained in self._trained.items():
            trained.take_options(optimizer)
        for name, trained in engines.items():
            zero_checkpoint.save(trained.engine, draft.path, name)
        single.save(draft, other_models, other_optimizers, safe=safe)

    def load(self, folder: Path, models_: Models, optimizers: Optimizers, *, strict: bool) -> Callable[[], None]:
        """What ``save`` wrote, on as many ranks as wrote it."""
        engines, other_models, other_optimizers = self._sorted(models_, optimizers)
        for name, trained in engines.items():
            zero_checkpoint.check(trained.stage, folder, name, self._process)
        rest = single.load(folder, other_models, other_optimizers, strict=strict)
        pairs = [(one, trained) for one, trained in self._trained.items() if trained in engines.values()]

        def take_up() -> None:
            for name, trained in engines.items():
                zero_checkpoint.load(trained.engine, folder, name, strict=strict)
                trained.discard()
            for optimizer, trained in pairs:
                zero_engine.copy_options(trained.engine.basic_optimizer, optimizer)
            rest()

        return take_up

    def forget(self) -> None:
        """Destroy the engines, which would otherwise hold their models for as long as the process lives."""
        for trained in self._trained.values():
            trained.destroy()
        self._trained.clear()
        self._wrapped.clear()
        self._unpaired.clear()

    def _sorted(self, models_: Models, optimizers: Optimizers) -> tuple[dict[str, Engine], Models, Optimizers]:
        """The engines, by their models' names; the models and the optimizers that are in none."""
        trained = {name: getattr(models.compiled_from(model), "trained", None) for name, model in models_.items()}
        engines = {name: one for name, one in trained.items() if isinstance(one, Engine)}
        others = {name: model for name, model in models_.items() if name not in engines}
        own = {name: getattr(one, "optimizer", one) for name, one in optimizers.items()}
        missing = [
            name for name, one in own.items() if one in self._trained and self._trained[one] not in engines.values()
        ]
        if missing:
            raise CheckpointError(
                f"{', '.join(missing)}: DeepSpeed keeps an optimizer with its model, which is left out"
            )
        return engines, others, {name: optimizers[name] for name, one in own.items() if one not in self._trained}


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _shared(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """How many of the optimizer's parameters are the model's."""
    own = {id(parameter) for parameter in model.parameters()}
    return sum(id(parameter) in own for parameter in _parameters(optimizer))
