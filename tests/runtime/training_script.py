"""A script as a person would write it, which doesn't know who started it: ``python training_script.py FOLDER``."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator

GLOBAL_BATCH = 4


def train():
    """Facts of this rank, and the weights that it ends with."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, split_batches=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.randn(GLOBAL_BATCH * 7, 5)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=GLOBAL_BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.wait_for_everyone()
    return {
        "place": (accelerator.process_index, accelerator.local_process_index, accelerator.num_processes),
        "type": str(accelerator.distributed_type),
        "weights": nn.utils.parameters_to_vector(model.parameters()).detach(),
    }


if __name__ == "__main__":
    found = train()
    torch.save(found, Path(sys.argv[1]) / f"{found['place'][0]}.pt")
