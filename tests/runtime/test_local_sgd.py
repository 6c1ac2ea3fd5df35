import pytest
import torch
from torch import nn

from notebook_launcher import Accelerator, ConfigError, LocalSGD


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        self.mean += x.mean()
        self.count += 1
        return self.layer(x)


def by_hand(data, steps, num_local):
    """The weights at each step of two models that are averaged after every ``num_local`` steps, and at the end."""
    torch.manual_seed(0)
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    history = []
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(data[step, rank]).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
        if (step + 1) % num_local == 0 or step == steps - 1:
            with torch.no_grad():
                for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    mean = (first + second) / 2
                    first.copy_(mean)
                    second.copy_(mean)
        history.append([model.layer.weight.detach().clone() for model in models])
    return history


def trained(data, num_local, accumulates):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    history = []
    with LocalSGD(accelerator, model, num_local) as local_sgd:
        for batch in data:
            with accelerator.accumulate(model) if accumulates else accelerator.autocast():
                accelerator.backward(model(batch[accelerator.process_index]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            history.append(model.module.layer.weight.detach().clone())
    history[-1] = model.module.layer.weight.detach().clone()
    exchanges = model.require_backward_grad_sync
    return history, (model.module.mean.item(), model.module.count.item()), exchanges


@pytest.mark.parametrize("accumulates", [True, False])
def test_ranks_train_apart_and_become_their_mean(on_ranks, accumulates):
    data = torch.randn(5, 2, 4, 2, generator=torch.Generator().manual_seed(1))
    expected = by_hand(data, 5, 2)
    results = on_ranks(trained, data, 2, accumulates)
    for rank, (history, _, exchanges) in enumerate(results):
        for weight, by_step in zip(history, expected, strict=True):
            torch.testing.assert_close(weight, by_step[rank])
        assert exchanges
    assert not torch.equal(results[0][0][0], results[1][0][0])  # apart in between
    assert torch.equal(results[0][0][1], results[1][0][1])
    assert results[0][1] == results[1][1]  # the running mean too, and the count is none
    assert results[0][1][1] == 5


def fails_inside(enabled):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    if not enabled:
        with LocalSGD(accelerator, model, 1, enabled=False) as local_sgd:
            local_sgd.step()
            return model.require_backward_grad_sync
    if accelerator.process_index:
        return model.require_backward_grad_sync
    try:
        with LocalSGD(accelerator, model, 1):
            {}["key"]
    except KeyError:
        return model.require_backward_grad_sync


@pytest.mark.parametrize("enabled", [True, False])
def test_an_error_waits_for_nobody_and_disabled_it_does_nothing(on_ranks, enabled):
    assert on_ranks(fails_inside, enabled) == [True, True]


def test_alone_it_changes_nothing():
    model = nn.Linear(1, 1)
    before = model.weight.clone()
    with LocalSGD(Accelerator(cpu=True), model, 1) as local_sgd:
        local_sgd.step()
    assert torch.equal(model.weight, before)


def wrong_model():
    LocalSGD(Accelerator(cpu=True), Net(), 4)


def test_a_model_that_was_not_prepared_is_refused(on_ranks):
    with pytest.raises(ConfigError, match="LocalSGD was given a Net that has no gradient exchange to put off; give it"):
        on_ranks(wrong_model)


@pytest.mark.parametrize("steps", [0, 1.5, "2"])
def test_a_number_of_steps_is_asked_for(steps):
    with pytest.raises(ConfigError, match=f"local_sgd_steps={steps!r} is no number of steps"):
        LocalSGD(Accelerator(cpu=True), nn.Linear(1, 1), steps)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="LocalSGD takes a prepared model, and was given 3"):
        LocalSGD(Accelerator(cpu=True), 3, 2)
