"""What a user with type hints writes: checked by ``mypy --strict``, and run, in test_typed_script.py."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, assert_type

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    find_executable_batch_size,
    init_empty_weights,
    set_seed,
    skip_first_batches,
)

if TYPE_CHECKING:
    from pathlib import Path


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.inner(x))

    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def new_accelerator(folder: Path) -> Accelerator:
    return Accelerator(
        cpu=True,
        mixed_precision="bf16",
        dataloader_config=DataLoaderConfiguration(data_seed=3),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False),
            AutocastKwargs(cache_enabled=True),
            GradScalerKwargs(),
            ProfileKwargs(output_trace_dir=folder / "traces"),
        ],
        rng_types=["torch", "generator"],
    )


def say(accelerator: Accelerator) -> None:
    @accelerator.on_main_process
    def only_once(text: str) -> str:
        return text

    @accelerator.on_process(process_index=0)
    def there(text: str) -> str:
        return text

    @find_executable_batch_size(starting_batch_size=4)
    def half(batch_size: int) -> int:
        return batch_size // 2

    accelerator.print(there("first"), half())
    only_once("main")
    accelerator.print(accelerator.process_index, accelerator.num_processes, accelerator.device)
    alone: bool = accelerator.distributed_type == DistributedType.NO
    accelerator.print(alone, accelerator.is_main_process, accelerator.project_dir, accelerator.logging_dir)
    with accelerator.main_process_first():
        accelerator.print("first")
    accelerator.wait_for_everyone()
    with accelerator.split_between_processes([1, 2, 3]) as part:
        accelerator.print(part)


def train(accelerator: Accelerator) -> list[float]:
    data = TensorDataset(torch.randn(10, 2), torch.randn(10, 1))
    net = Net()
    adam = torch.optim.AdamW(net.parameters(), lr=0.1)
    model, optimizer, loader, scheduler = accelerator.prepare(
        net, adam, DataLoader(data, batch_size=2, shuffle=True), StepLR(adam, 1)
    )
    assert_type(model, Net)
    assert_type(optimizer, torch.optim.AdamW)
    assert_type(scheduler, StepLR)
    assert_type(accelerator.prepare(model), Net)
    assert_type(accelerator.unwrap_model(model), Net)
    assert_type(accelerator.prepare_model(model, evaluation_mode=True), Net)
    losses: list[float] = []
    with accelerator.profile() as profiler, accelerator.join_uneven_inputs([model]):
        for x, y in loader:
            with accelerator.accumulate(model), accelerator.autocast(AutocastKwargs(enabled=True)):
                loss = nn.functional.mse_loss(model(x), y, reduction="sum")
                accelerator.backward(loss, num_items=len(x))
                if accelerator.sync_gradients:
                    norm: torch.Tensor = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    accelerator.clip_grad_value_(model.parameters(), 1.0)
                    losses.append(norm.item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            profiler.step()
    accelerator.log({"loss": losses[-1]}, step=len(losses))
    kept = [accelerator.gather_for_metrics((x, {"y": y})) for x, y in loader]
    accelerator.print(len(kept), accelerator.optimizer_step_was_skipped)
    with accelerator.no_sync(model), accelerator.maybe_context_parallel():
        late = model(torch.ones(1, 2)).sum()
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(late)
    for batch in skip_first_batches(loader, 3):
        accelerator.print(len(batch))
    accelerator.free_memory(model, optimizer)
    accelerator.end_training()
    return losses


def main(folder: Path) -> list[float]:
    set_seed(1, device_specific=True)
    with init_empty_weights():
        sys.stdout.write(f"{Net().size()}\n")
    accelerator = new_accelerator(folder)
    say(accelerator)
    return train(accelerator)
