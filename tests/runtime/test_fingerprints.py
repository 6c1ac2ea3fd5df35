"""Whether ranks have the same values is seen without sending them; FSDP sends only what differs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from notebook_launcher import Accelerator, ConfigError
from notebook_launcher.runtime import fingerprints

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("size", [1, 7, 300, 70_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_changed_element_shows(size, dtype):
    tensor = torch.randn(size, dtype=torch.float64).mul(9).to(dtype)
    before = fingerprints.of([torch.ones(3), tensor])
    assert fingerprints.of([torch.ones(3), tensor.clone()]) == before
    for place in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed[place] = ~changed[place] if dtype == torch.bool else changed[place] + 1
        assert fingerprints.of([torch.ones(3), changed]) != before


def test_exchanged_rows_and_tensors_show():
    table = torch.randn(64, 512)
    before = fingerprints.of([table])
    assert fingerprints.of([table[torch.arange(64).roll(1)]]) != before
    large = [torch.randn(1 << 17) for _ in range(2)]
    assert fingerprints.of(large) != fingerprints.of(large[::-1])


def test_any_layout_will_do():
    tensor = torch.randn(6, 40)
    assert fingerprints.of([tensor.t().contiguous().t()]) == fingerprints.of([tensor])
    assert fingerprints.of([torch.cat([torch.zeros(1), tensor.view(-1)])[1:]]) == fingerprints.of([tensor.view(-1)])
    large = torch.randn(1 << 17)
    assert fingerprints.of([torch.cat([torch.zeros(1), large])[1:]]) == fingerprints.of([large])
    assert fingerprints.of([]) == []
    assert fingerprints.of([torch.tensor(2.5), torch.zeros(0)]) != fingerprints.of([torch.tensor(2.25), torch.zeros(0)])


def prepared(*seeds):
    """For each seed of rank 1's: how many tensors travelled, and the weights after that."""
    accelerator = Accelerator(cpu=True)
    found, broadcast = [], dist.broadcast
    for seed in seeds:
        calls = []
        dist.broadcast = lambda *args, calls=calls, **options: [calls.append(1), broadcast(*args, **options)][1]
        torch.manual_seed(seed * accelerator.process_index)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model = accelerator.prepare(model)
        dist.broadcast = broadcast
        found.append((len(calls), accelerator.get_state_dict(model)))
    return found


def test_equal_weights_do_not_travel(on_ranks):
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).state_dict()
    for found in on_ranks(prepared, 0, 1, strategy="fsdp"):
        assert [num_travelled for num_travelled, _ in found] == [0, len(expected)]
        for _, state in found:
            assert all(torch.equal(state[name], value) for name, value in expected.items())


def another_model():
    accelerator = Accelerator(cpu=True)
    texts = []
    for other in (nn.Linear(4, 5), nn.Linear(4, 4, bias=False), nn.Linear(4, 4).double()):
        with pytest.raises(ConfigError) as caught:
            accelerator.prepare(nn.Linear(4, 4) if accelerator.is_main_process else other)
        texts.append(str(caught.value))
    return texts


def test_another_model_on_a_rank_is_refused(on_ranks):
    for shape, fewer, dtype in on_ranks(another_model, strategy="fsdp"):
        assert "on rank 1 is another model than that on rank 0: it has weight of shape (5, 4)" in shape
        assert "there it is weight of shape (4, 4)" in shape
        assert "it has no further parameter, and there it is bias of shape (4,)" in fewer
        assert "torch.float64" in dtype
