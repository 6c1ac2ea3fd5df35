"""One small training, in plain torch and with ``Accelerator``: what the launched ones are compared with."""

from __future__ import annotations

import torch
from torch import nn

NUM_STEPS = 4
BATCH = 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def samples() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_STEPS * BATCH, 8, generator=generator)
    targets = torch.randint(0, 4, (NUM_STEPS * BATCH,), generator=generator)
    return torch.utils.data.TensorDataset(inputs, targets)


def plain():
    """The losses of every step, and the weights after them."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for inputs, targets in torch.utils.data.DataLoader(samples(), batch_size=BATCH):
        loss = nn.functional.cross_entropy(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict()


def prepared(accelerator):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)  # before prepare, so that it knows host parameters
    loader = torch.utils.data.DataLoader(samples(), batch_size=BATCH)
    return accelerator.prepare(net, optimizer, loader)


def steps(accelerator, net, optimizer, loader, num_steps=NUM_STEPS):
    """The losses of the next steps."""
    losses = []
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(net(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == num_steps:
            break
    return losses


def difference(one, other):
    """The largest, over all tensors of two states."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def marks(net):
    """How each parameter is split over devices, as XLA writes it."""
    import torch_xla

    return [torch_xla._XLAC._get_xla_sharding_spec(parameter) for parameter in net.parameters()]
