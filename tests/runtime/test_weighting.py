import pytest
import torch
from torch import nn

from notebook_launcher import Accelerator, ConfigError
from notebook_launcher.runtime.plugins import GradientAccumulationPlugin

LENGTHS = (7, 1, 4, 9, 0, 3, 5, 2, 6, 8, 3, 1)  # tokens of the sentences, two a micro-batch over all processes


def sentences():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 3, generator=generator), torch.randn(n, 1, generator=generator)) for n in LENGTHS]


def new_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_sum(model, sentence):
    x, y = sentence
    return nn.functional.mse_loss(model(x), y, reduction="sum")


def by_hand(num_steps, num_processes):
    """Weights after an epoch of plain torch, each update the gradient of the mean over all of its tokens."""
    model, data = new_model(), sentences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    per_update = num_steps * num_processes
    for start in range(0, len(data), per_update):
        update = data[start : start + per_update]
        loss = sum(loss_sum(model, sentence) for sentence in update)
        (loss / max(1, sum(len(x) for x, _ in update))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return sentences()[index]


def weighted(num_steps, *, uses_accumulate=True, **options):
    plugin = GradientAccumulationPlugin(num_steps=num_steps, **options)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = new_model()
    loader = torch.utils.data.DataLoader(Sentences(), batch_size=1, collate_fn=lambda samples: samples[0])
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    def train(sentence):
        accelerator.backward(loss_sum(model, sentence), num_items=len(sentence[0]))
        optimizer.step()
        optimizer.zero_grad()

    for sentence in loader:
        if uses_accumulate:
            with accelerator.accumulate(model):
                train(sentence)
        else:
            train(sentence)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("num_steps", [1, 2, 4, 5])
def test_tokens_weigh_alike_wherever_they_are(on_ranks, num_steps, num_processes):
    expected = by_hand(num_steps, num_processes)
    for weights in on_ranks(weighted, num_steps, num_processes=num_processes):
        assert torch.allclose(weights, expected, rtol=0, atol=1e-6)


def test_tokens_weigh_alike_without_accumulate(on_ranks):
    for weights in on_ranks(lambda: weighted(1, uses_accumulate=False)):
        assert torch.allclose(weights, by_hand(1, 2), rtol=0, atol=1e-6)


def test_tokens_weigh_alike_where_gradients_are_exchanged_each_time(on_ranks):
    for weights in on_ranks(lambda: weighted(4, sync_each_batch=True)):
        assert torch.allclose(weights, by_hand(4, 2), rtol=0, atol=1e-6)


def test_several_losses_of_a_micro_batch_are_one_mean():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    given = nn.Linear(1, 1, bias=False)
    model = accelerator.prepare(given)
    for x in (1.0, 4.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), x)).sum(), num_items=torch.tensor(1))
            accelerator.backward(model(torch.full((3, 1), x)).sum(), num_items=torch.tensor(3))
    assert given.weight.grad.item() == pytest.approx((4 * 1.0 + 4 * 4.0) / 8)


def test_groups_with_and_without_items_follow_one_another():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    given = nn.Linear(1, 1, bias=False)
    model = accelerator.prepare(given)
    gradients = []
    for options in ({}, {"num_items": 5}, {}):
        given.weight.grad = None
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum(), **options)
        gradients.append(round(given.weight.grad.item(), 6))
    assert gradients == [1.0, 0.2, 1.0]


@pytest.mark.parametrize("first", [{"num_items": 2}, {}])
def test_a_group_is_weighed_throughout_or_not_at_all(first):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    second = {} if first else {"num_items": 2}
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum(), **first)
    with accelerator.accumulate(model), pytest.raises(ValueError, match=r"num_items for some.*not for others"):
        accelerator.backward(model(torch.ones(1, 1)).sum(), **second)


def test_what_comes_after_a_group_is_none_of_its_losses():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    given = nn.Linear(1, 1, bias=False)
    model = accelerator.prepare(given)
    gradients = []
    for first, second in (({"num_items": 4}, {}), ({}, {"num_items": 4})):
        for options in (first, first):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum(), **options)
        given.weight.grad = None
        accelerator.backward(model(torch.ones(1, 1)).sum(), **second)
        gradients.append(given.weight.grad.item())
        given.weight.grad = None
    assert gradients == [0.5, 0.25]


@pytest.mark.parametrize("num_items", [-1, float("nan"), float("inf")])
def test_a_number_of_items_that_is_none(num_items):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=rf"backward\(num_items={num_items}\).*give their number, 0 or more"):
        accelerator.backward(model(torch.ones(1, 1)).sum(), num_items=num_items)
    assert model.weight.grad is None


def test_groups_are_needed_to_weigh_them():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"steps=2 must know.*accelerator.accumulate"):
        accelerator.backward(nn.Linear(1, 1)(torch.ones(1, 1)).sum(), num_items=3)
