import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn

from notebook_launcher import Accelerator
from notebook_launcher.runtime.models import AutocastView

PRECISIONS = ("no", "bf16")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen = []

    def forward(self, x, *, scale: float = 1.0):
        hidden = self.linear(x) * scale
        self.seen.append(str(hidden.dtype))
        return {"hidden": hidden, "nested": [(hidden, "text")]}

    def generate(self, x):
        return self(x)["hidden"]


def facts(mixed_precision):
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    given = Model()
    model = accelerator.prepare(given)
    outputs = model(torch.ones(1, 2), scale=2.0)
    unwrapped = accelerator.unwrap_model(model)
    return {
        "computed": given.seen[0],
        "outputs": {str(outputs["hidden"].dtype), str(outputs["nested"][0][0].dtype)},
        "generate": str(model.generate(torch.ones(1, 2)).dtype),
        "generated_in": given.seen[-1],
        "signature": str(inspect.signature(model.forward)),
        "is_given": unwrapped is given and type(unwrapped) is Model,
        "attribute": model.linear is given.linear,
        "pickles": sorted(pickle.loads(pickle.dumps(unwrapped)).state_dict()),
        "again": accelerator.prepare(model) is model and accelerator.prepare(given) is model,
        "precision": accelerator.mixed_precision,
    }


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize(("precision", "dtype"), [("no", "torch.float32"), ("bf16", "torch.bfloat16")])
def test_a_prepared_model_is_the_same_on_any_number_of_processes(on_ranks, num_processes, precision, dtype):
    for found in on_ranks(facts, precision, num_processes=num_processes):
        assert found == {
            "computed": dtype,
            "outputs": {"torch.float32"},
            "generate": "torch.float32",
            "generated_in": dtype,
            "signature": "(x, *, scale: float = 1.0)",
            "is_given": True,
            "attribute": True,
            "pickles": ["linear.bias", "linear.weight"],
            "again": True,
            "precision": precision,
        }


def bf16_model():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    given = Model()
    return accelerator, given, accelerator.prepare(given)


def test_a_view_and_its_module_are_one():
    accelerator, given, model = bf16_model()
    assert isinstance(model, Model)
    model.eval()
    assert not given.training
    model.extra = nn.Linear(1, 1)
    assert "extra.weight" in given.state_dict()
    assert list(model.state_dict()) == list(given.state_dict())
    model.load_state_dict({name: torch.zeros_like(value) for name, value in given.state_dict().items()})
    assert given.linear.weight.abs().sum() == 0
    assert "AutocastView" not in repr(model)
    assert accelerator.unwrap_model(given) is given


def test_a_view_copies_and_pickles_as_a_view_of_its_own_module():
    accelerator, given, model = bf16_model()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin, AutocastView)
        assert accelerator.unwrap_model(twin) is not given
        twin(torch.ones(1, 2))
        assert accelerator.unwrap_model(twin).seen[-1] == "torch.bfloat16"
        assert torch.equal(twin.linear.weight, given.linear.weight)


def test_a_copy_has_attributes_of_its_own_and_a_replica_computes():
    view = Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Sequential(nn.Linear(2, 2)))
    twin = copy.copy(view)
    twin.note = "of the copy"
    assert not hasattr(view, "note")
    assert twin[0] is view[0]
    for model in (twin, view._replicate_for_data_parallel()):
        assert isinstance(model, AutocastView)
        assert model(torch.ones(1, 2)).dtype == torch.float32


def test_an_exception_in_forward_ends_autocast():
    _, _, model = bf16_model()
    for _ in range(2):
        with pytest.raises(TypeError):
            model(torch.ones(1, 2), unknown=1)
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_alone():
    with Accelerator(cpu=True, mixed_precision="bf16").autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with Accelerator(cpu=True).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


class Encoding(Model):
    def encode(self, x):
        return self.linear(x)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_method_that_does_not_call_the_model_computes_as_the_code_around_it(on_ranks, num_processes):
    def encoded():
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare(Encoding())
        with accelerator.autocast():
            inside = model.encode(torch.ones(1, 2))
        return str(model.encode(torch.ones(1, 2)).dtype), str(inside.dtype)

    assert on_ranks(encoded, num_processes=num_processes) == [("torch.float32", "torch.bfloat16")] * num_processes


def compiled():
    found = []
    for precision in PRECISIONS:
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        plain = nn.Sequential(nn.Linear(2, 2))
        before = torch.compile(plain, backend="eager")
        prepared = accelerator.prepare(before)
        after = torch.compile(accelerator.prepare(nn.Linear(2, 2)), backend="eager")
        found.append(
            (
                str(prepared(torch.ones(1, 2)).dtype),
                str(after(torch.ones(1, 2)).dtype),
                accelerator.unwrap_model(prepared) is before,
                accelerator.unwrap_model(prepared, keep_torch_compile=False) is plain,
                type(accelerator.unwrap_model(after)) is nn.Linear,
            )
        )
    return found


@pytest.mark.parametrize("num_processes", [1, 2])
def test_compiled_before_or_after_prepare(on_ranks, num_processes):
    for found in on_ranks(compiled, num_processes=num_processes):
        assert found == [("torch.float32", "torch.float32", True, True, True)] * 2


def test_a_model_is_let_go():
    accelerator, given, model = bf16_model()
    reference = weakref.ref(given)
    del accelerator, given, model
    gc.collect()
    assert reference() is None


def frozen_beside_trained():
    accelerator = Accelerator(cpu=True)
    teacher, student = nn.Linear(1, 1).requires_grad_(requires_grad=False), nn.Linear(1, 1)
    teacher, student = accelerator.prepare(teacher, student)
    accelerator.backward((teacher(torch.ones(1, 1)) - student(torch.ones(1, 1))).square().sum())
    return student.weight.grad.item()


def test_frozen_models_need_no_gradient_exchange(on_ranks):
    first, second = on_ranks(frozen_beside_trained)
    assert first == second


def local_gradients():
    accelerator = Accelerator(cpu=True)
    given = nn.Linear(1, 1, bias=False)
    model = accelerator.prepare(given)
    x = torch.full((1, 1), 1.0 + accelerator.process_index)
    with accelerator.no_sync(model):
        accelerator.backward(model(x).sum())
    return given.weight.grad.item()


def test_no_sync_keeps_gradients_here(on_ranks):
    assert on_ranks(local_gradients) == [1.0, 2.0]
    assert local_gradients() == 1.0
