import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator
from notebook_launcher.runtime.memory import init_empty_weights


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.inner.weight
        self.register_parameter("absent", None)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("table", torch.arange(3.0))


@pytest.mark.parametrize(("options", "table"), [({}, "cpu"), ({"include_buffers": True}, "meta")])
def test_models_without_memory(options, table):
    with init_empty_weights(**options):
        model = Net()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.tied.weight is model.inner.weight
    assert (model.frozen.requires_grad, model.inner.weight.requires_grad) == (False, True)
    assert model.table.device.type == table
    real = Net()
    assert real.inner.weight.device.type == "cpu"
    model.load_state_dict(real.state_dict(), assign=True)
    assert torch.equal(model.inner.weight, real.inner.weight)


def test_parameters_are_made_as_before_when_making_a_model_fails():
    register = nn.Module.register_parameter
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        _ = 1 / 0
    assert nn.Module.register_parameter is register


def train_and_free():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    given = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(given.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler, loader = accelerator.prepare(given, optimizer, scheduler, DataLoader(torch.ones(6, 2)))
    references = [weakref.ref(thing) for thing in (given, optimizer.optimizer, loader)]
    iterator = iter(loader)
    with accelerator.accumulate(model):  # a group that is never finished
        accelerator.backward(model(next(iterator)).sum())
        optimizer.step()
        optimizer.zero_grad()
    del given, iterator
    model, optimizer, scheduler, loader = accelerator.free_memory(model, optimizer, scheduler, loader)
    gc.collect()
    alive = [reference() is not None for reference in references]
    again = accelerator.prepare(nn.Linear(1, 1, bias=False))
    accelerator.backward(again(torch.ones(1, 1)).sum())
    return alive, next(again.parameters()).grad.item(), (model, loader)


def test_nothing_that_was_prepared_is_kept(on_ranks):
    assert train_and_free() == ([False] * 3, 0.5, (None, None))
    assert on_ranks(train_and_free) == [([False] * 3, 0.5, (None, None))] * 2
    assert Accelerator(cpu=True).clear() == []
