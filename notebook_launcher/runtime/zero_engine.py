"""DeepSpeed itself: imported quietly, one engine a model, and what it doesn't document, which is used only here."""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.core import config
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.runtime import trees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher.runtime.process import Process

WHOLE, WEIGHTS = 0, 3  # stages: nothing is spread; weights are


class Engine:
    """DeepSpeed's engine for one model and the twin of its optimizer."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self.engine = engine
        self.stage = int(engine.zero_optimization_stage())
        self.clipping: float = engine.gradient_clipping()  # where nobody calls clip
        self.num_collecting = 0  # contexts entered for a micro-batch that doesn't end its group
        self.is_open = False  # the last backward was in such a micro-batch
        self.is_final = False  # the group's gradients are exchanged, and the next thing is a step
        self._graph = -1  # the number of the last backward
        self.is_heard = True  # False as a backward begins, until it is heard of
        self._norm: Any = None  # of the gradients as they are, once it is known
        self._exchanged: list[tuple[torch.Tensor | None, int]] = []  # whole gradients as they were left then
        self.held = tuple(engine.module.parameters())  # found once: each step would walk through all modules
        self.parameters = set(map(id, self.held))
        self._trained = {id(one) for one in self.held if one.requires_grad}
        given = {id(one) for group in optimizer.param_groups for one in group["params"]}
        self._left_out = [  # DeepSpeed's optimizer has only what is trained when it is made
            (name, one)
            for name, one in engine.module.named_parameters()
            if self.stage != WHOLE and id(one) in given - self._trained
        ]
        self._adapt()

    def _adapt(self) -> None:
        """Hear of each backward, and have the exchange at a step not repeat what ``clip`` has done."""
        engine, zero = self.engine, self.engine.optimizer
        reduce, begin = engine.allreduce_gradients, engine._backward_prologue  # noqa: SLF001

        def backward_prologue() -> None:
            graph = torch._C._current_graph_task_id()  # noqa: SLF001 - nothing public tells one backward from another
            self.is_heard = True
            if graph != self._graph and any(one.requires_grad for one in self.held):  # all frozen: not its backward
                self._graph = graph  # the same in a second forward in one loss: DeepSpeed would never end this backward
                self._begin_backward()
                begin()

        engine._backward_prologue = backward_prologue  # noqa: SLF001

        def allreduce_gradients(*args: Any, **kwargs: Any) -> None:
            if not engine.is_gradient_accumulation_boundary():
                reduce(*args, **kwargs)
            elif not (self.is_final or self._is_exchanged()):
                if hasattr(zero, "setup_buckets"):  # else an IndexError where no backward had gradients
                    zero.setup_buckets()
                with self._unfrozen():
                    reduce(*args, **kwargs)
                self.is_final = self.stage != WHOLE  # no engine hears of a backward there

        engine.allreduce_gradients = allreduce_gradients
        if hasattr(zero, "finalize_gradient_accumulation_boundary"):
            finalize = zero.finalize_gradient_accumulation_boundary

            def finalize_gradient_accumulation_boundary() -> None:
                if not self.is_final:
                    self._finalize_all(finalize)
                    self.is_final = True

            zero.finalize_gradient_accumulation_boundary = finalize_gradient_accumulation_boundary
            self._adapt_end()
            self._adapt_hooks()
        self._measure_once("_get_norm_groups" if self.stage == WEIGHTS else "scaled_global_norm")

    def _adapt_end(self) -> None:
        """Have a backward that reached no parameter, as one for the inputs' gradients, leave everything as it was."""
        engine, zero, end = self.engine, self.engine.optimizer, self.engine._backward_epilogue  # noqa: SLF001

        def backward_epilogue() -> None:
            if zero._hooks_fired_this_backward:  # noqa: SLF001
                end()
                return
            for timers in (engine.engine_timers.backward_inner_timers, engine.engine_timers.backward_timers):
                engine._stop_timers(timers)  # noqa: SLF001
            zero.exit_backward()
            zero.clear_backward_seen_flag()

        engine._backward_epilogue = backward_epilogue  # noqa: SLF001

    def _adapt_hooks(self) -> None:
        """Hear of a backward from a parameter's gradient at the latest: methods of the model pass ``forward`` by."""
        zero = self.engine.optimizer
        expects = zero.should_refresh_expected_hook_count

        def should_refresh_expected_hook_count() -> bool:  # what a gradient's hook asks first
            if not self.is_heard:
                if self.stage == WEIGHTS:
                    raise RuntimeError(
                        "backward was given a loss that doesn't come from calling the model: another of its methods "
                        "was called, or forward gave an object that its tensors can't be found in. ZeRO stage 3 needs "
                        "the call: have forward do what the method does and return tensors, tuples or dictionaries, or "
                        "use zero_stage=2 or lower"
                    )
                self.engine._backward_prologue()  # noqa: SLF001
            return bool(expects())

        zero.should_refresh_expected_hook_count = should_refresh_expected_hook_count

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's outputs; a backward from any of them is heard of, also from those of an earlier backward."""
        outputs = self.engine(*inputs, **kwargs)
        backward: list[tuple[int, bool]] = []  # the one through these outputs, and whether another may follow

        def hear(_: torch.Tensor) -> None:
            graph = torch._C._current_graph_task_id()  # noqa: SLF001
            is_second = bool(backward) and backward[0][0] != graph and backward[0][1]
            if self.stage == WEIGHTS and (is_second or torch.is_grad_enabled()):
                what = "a second backward through one forward" if is_second else "a backward with create_graph=True"
                raise RuntimeError(
                    f"There was {what}, and ZeRO stage 3 has given the weights up after the first, which the second "
                    "needs. Add the losses up and call backward once, do a forward for each backward, or use "
                    "zero_stage=2 or lower"
                )
            backward[:] = [(graph, torch._C._autograd._get_current_graph_task_keep_graph())]  # noqa: SLF001
            self.engine._backward_prologue()  # noqa: SLF001 - DeepSpeed calls it for the first only

        for output in trees.leaves(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(hear)  # type: ignore[no-untyped-call]
        return outputs

    def _begin_group(self) -> None:
        """Forget an earlier group's gradients, which DeepSpeed leaves where this group has none for a parameter."""
        zero = self.engine.optimizer
        is_new = zero.micro_step_id == 0 if self.stage == WEIGHTS else zero.micro_step_id < 0
        if not is_new:
            return
        if self.stage == WEIGHTS:
            zero.grad_partitions_flat_buffer.zero_()
            zero.micro_step_id = 1  # or the first backward, not each parameter's first gradient, replaces
        if getattr(zero, "offload_optimizer", False) or getattr(zero, "cpu_offload", False):
            zero.reset_cpu_buffers()
            for kept in getattr(zero, "accumulated_grads_in_cpu", {}).values():
                kept.zero_()
            for flat in self._flat():
                if flat.grad is not None:
                    flat.grad.zero_()

    @contextlib.contextmanager
    def _unfrozen(self) -> Iterator[None]:
        """With nothing frozen since it was prepared: DeepSpeed would pass over gradients that it has from before."""
        frozen = [one for one in self.held if not one.requires_grad and id(one) in self._trained]
        for one in frozen:
            one.requires_grad_()
        try:
            yield
        finally:
            for one in frozen:
                one.requires_grad_(requires_grad=False)

    def _flat(self) -> Any:
        """DeepSpeed's fp32 share of the weights, one tensor a group."""
        zero = self.engine.optimizer
        return getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_partitioned_groups_flat

    def _finalize_all(self, finalize: Callable[[], None]) -> None:
        """``finalize`` what the group's backwards left, also for parameters that were frozen in some or are now."""
        zero = self.engine.optimizer
        self._begin_group()  # where no backward has
        if self.stage != WEIGHTS and not zero.cpu_offload:
            for group, parameters in enumerate(zero.params_in_partition):
                if zero.all_grad_tensors.get(group) is None:
                    zero.all_grad_tensors[group] = zero.get_all_grad_tensors(
                        parameters, dtype=zero.gradient_accumulation_dtype
                    )
        with self._unfrozen():
            finalize()
        if self.stage == WEIGHTS and not zero.offload_optimizer:
            kept = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition  # noqa: SLF001
            for group, parameters in enumerate(zero.fp16_groups):
                zero.averaged_gradients[group] = [kept[one.ds_id] for one in parameters]

    def _measure_once(self, name: str) -> None:
        """Have the step not measure again what ``clip`` has measured."""
        measure = getattr(self.engine.optimizer, name, None)
        if measure is None:
            return

        def measured(*args: Any, **kwargs: Any) -> Any:
            if self._norm is None or not self.is_final:
                self._norm = measure(*args, **kwargs)
            return self._norm

        setattr(self.engine.optimizer, name, measured)

    def finalize(self) -> None:
        """Exchange the group's gradients now, ahead of the step."""
        self.engine._running_engine_step = True  # noqa: SLF001
        try:
            if self.engine.zero_optimization_partition_gradients():
                self.engine.optimizer.finalize_gradient_accumulation_boundary()
            else:
                self.engine.allreduce_gradients()
        finally:
            self.engine._running_engine_step = False  # noqa: SLF001

    def note_exchanged(self) -> None:
        """The whole gradients are exchanged: as long as they stay so, the step need not do it again."""
        gradients = [parameter.grad for parameter in self.held]
        self._exchanged = [(one, -1 if one is None else one._version) for one in gradients]  # noqa: SLF001

    def _is_exchanged(self) -> bool:
        gradients = (parameter.grad for parameter in self.held)
        return bool(self._exchanged) and all(
            one is noted and (one is None or one._version == version)  # noqa: SLF001
            for one, (noted, version) in zip(gradients, self._exchanged, strict=True)
        )

    def _begin_backward(self) -> None:
        """Be ready for one more backward of the group; raise where it comes too late."""
        if unfrozen := [name for name, one in self._left_out if one.requires_grad]:
            raise ConfigError(
                f"{unfrozen[0]} and {len(unfrozen) - 1} other parameters were frozen when they were prepared, and are "
                f"not now: ZeRO stage {self.stage} has no place for their gradients and would never train them. "
                "Prepare a model and an optimizer anew when something is unfrozen, or use zero_stage=0, which has one"
            )
        self.is_open = self.num_collecting > 0
        zero = self.engine.optimizer
        if self.is_final:
            raise RuntimeError(
                f"backward was called after clip_grad_norm_ and before the step, and ZeRO stage {self.stage} has "
                "exchanged and spread the gradients by then. Clip after the group's last backward."
            )
        if zero._epilogue_ran_this_backward:  # noqa: SLF001
            zero.clear_backward_seen_flag()  # else a second backward in stage 3 replaces the first
        if hasattr(zero, "ipg_buckets"):  # stages 1 to 3 as they are, not another optimizer
            self._begin_group()

    def norm(self) -> torch.Tensor:
        """The 2-norm of the gradients over all ranks, 0-d fp32; NaN where it isn't finite."""
        zero = self.engine.optimizer
        if self.stage == WEIGHTS:
            norms = torch.stack([torch.as_tensor(norm).float() for norm in zero._get_norm_groups()])  # noqa: SLF001
            norm = norms.square().sum().sqrt() if bool((norms >= 0).all()) else norms.min()
        else:
            norm = torch.as_tensor(zero.scaled_global_norm())
        norm = norm.float().to(self.engine.device)
        return torch.where(norm < 0, torch.nan, norm)

    def collected(self) -> Iterator[torch.Tensor]:
        """This rank's share of the gradients, wherever the stage keeps them, to be changed."""
        self._norm = None
        return (gradient for gradient in self._places() if gradient is not None)

    def _places(self) -> Iterator[torch.Tensor | None]:
        zero = self.engine.optimizer
        for parameter in self.held:
            yield parameter.grad
            yield getattr(parameter, "grad_accum", None)
        if self.stage == WEIGHTS:
            yield zero.grad_partitions_flat_buffer
        elif self.stage != WHOLE:
            yield from getattr(zero, "accumulated_grads_in_cpu", {}).values()
            kept = zero.averaged_gradients if self.is_final else zero.all_grad_tensors
            for group in kept.values():
                yield from group or ()
        if self.is_final and self.stage != WHOLE:  # offloaded ones have their own place by then
            for flat in self._flat():
                yield flat.grad

    def discard(self, *_: Any, **__: Any) -> None:
        """Drop what was collected: ``zero_grad``."""
        zero = self.engine.optimizer
        self.is_final = False
        self._norm, self._exchanged = None, []
        for parameter in self.held:
            parameter.grad = None
        if self.stage == WHOLE:
            return
        zero.zero_grad()
        if self.stage != WEIGHTS:
            zero.micro_step_id = -1
            for kept in (zero.averaged_gradients, zero.all_grad_tensors):
                kept.update(dict.fromkeys(kept))
            if zero.cpu_offload:
                zero._offload_accumulated_param_ids = set()  # noqa: SLF001

    def take_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the twin the learning rates of ``optimizer``, unless DeepSpeed's scheduler gives them."""
        if self.engine.lr_scheduler is None:
            copy_options(optimizer, self.engine.basic_optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step, with the options that ``optimizer`` has; then it has those that the step left."""
        self.take_options(optimizer)
        self.engine.step()
        self.is_final = False
        self._norm, self._exchanged = None, []
        if self.stage != WHOLE:
            self.engine.optimizer.clip_grad = self.clipping
        copy_options(self.engine.basic_optimizer, optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - schedulers ask for it

    def destroy(self) -> None:
        """Have DeepSpeed take out its hooks, through which neither model nor engine could be freed."""
        from deepspeed.runtime.zero import parameter_offload

        self.engine.destroy()
        module, stack = self.engine.module, parameter_offload.FWD_MODULE_STACK
        stack[:] = [one for one in stack if one is not module]  # where stage 3 has put it for good


def twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One of the same class and options, with groups and state of its own."""
    one: torch.optim.Optimizer = type(optimizer).__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name not in {"step", "stands_for_scheduler"}}
    one.__dict__.update(own)
    one.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    one.state = collections.defaultdict(dict)
    return one


def copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give the groups of ``target`` all that those of ``source`` have, but for the parameters."""
    for theirs, own in zip(source.param_groups, target.param_groups, strict=True):
        own.update({name: value for name, value in theirs.items() if name != "params"})


def imported(process: Process) -> Any:
    """DeepSpeed, quiet, ready for this process; ``ConfigError`` where it isn't installed."""
    config.set_default("LOCAL_RANK", str(process.world.local_rank))
    if process.device.type == "cpu":
        config.set_default("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        from deepspeed.runtime import engine
    except ImportError as error:
        raise ConfigError(
            f"strategy='deepspeed' needs the package deepspeed, which can't be imported ({error}). Install it with: "
            f"{sys.executable} -m pip install 'deepspeed>=0.19' torch=={torch.__version__.partition('+')[0]}"
        ) from error
    if not hasattr(engine.DeepSpeedEngine, "managed_gradient_accumulation"):
        raise ConfigError(
            f"strategy='deepspeed' needs a newer deepspeed than {deepspeed.__version__}: one that lets the caller end "
            f"a group of micro-batches. Install it with: {sys.executable} -m pip install -U 'deepspeed>=0.19'"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # importing it sets its own
    # An operation that training never uses, compiled at the first start; an interrupt then leaves a lock for ever.
    getattr(deepspeed.ops, "__compatible_ops__", {}).pop("deepspeed_shm_comm", None)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*is deprecated", category=FutureWarning)
    return deepspeed


_group: Callable[[], Any] = lambda: None  # noqa: E731 - the process group that DeepSpeed knows; a weak reference


def meet(process: Process) -> None:
    """Have DeepSpeed know this process group, which it wants of one process too, and no earlier one."""
    global _group  # noqa: PLW0603 - DeepSpeed's own is a global too
    import deepspeed
    from deepspeed.utils import groups

    if process.num_processes == 1 and not dist.is_initialized():
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(process.backend.process_group, store=alone, rank=0, world_size=1)
    if _group() is not dist.group.WORLD:
        deepspeed.comm.comm.cdb = None
        groups._release_process_group_references(group=None)  # noqa: SLF001
        deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
        _group = weakref.ref(dist.group.WORLD)
