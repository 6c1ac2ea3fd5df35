import sys
import warnings

import pytest
import torch
from far_side import FarSide, Notebook

from notebook_launcher.core import pickling, torch_pickling


@pytest.fixture(scope="module")
def worker():
    one = FarSide()
    yield one
    one.close()


@pytest.fixture
def notebook(monkeypatch):
    one = Notebook()
    monkeypatch.setitem(sys.modules, "__main__", one.module)
    return one


def _copy(value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Sparse CSR")  # torch's own, once a process
        return pickling.loads(pickling.dumps(value))


def _shared(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class Tagged(torch.Tensor):
    pass


TENSORS = {
    "fp32": torch.arange(6.0).reshape(2, 3),
    "bf16": torch.ones(3, dtype=torch.bfloat16),
    "fp8": torch.ones(3).to(torch.float8_e4m3fn),
    "fp8_e5m2": torch.ones(3).to(torch.float8_e5m2),
    "uint16": torch.ones(3, dtype=torch.uint16),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(12.0)[1::3],
    "expanded": torch.ones(1).expand(4, 5),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "needs_grad": torch.ones(2, requires_grad=True),
    "large": torch.arange(50_000.0),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name):
    tensor = TENSORS[name]
    back = _copy(tensor)
    assert (back.dtype, back.layout, back.shape, back.requires_grad) == (
        tensor.dtype,
        tensor.layout,
        tensor.shape,
        tensor.requires_grad,
    )
    if tensor.layout == torch.strided:
        assert (back.stride(), back.storage_offset()) == (tensor.stride(), tensor.storage_offset())
        assert (back.is_conj(), back.is_contiguous()) == (tensor.is_conj(), tensor.is_contiguous())
    assert torch.equal(back.to_dense().to(torch.complex64), tensor.to_dense().to(torch.complex64))


def test_sparse_csr_arrives():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR")
        tensor = torch.eye(3).to_sparse_csr()
    back = _copy(tensor)
    assert back.layout == torch.sparse_csr
    assert torch.equal(back.to_dense(), torch.eye(3))


def test_meta_tensors_stay_without_data():
    back = _copy(torch.empty(3, 10**12, device="meta"))
    assert (back.device.type, back.shape) == ("meta", (3, 10**12))
    assert _copy(torch.UntypedStorage(5, device="meta")).nbytes() == 5


def test_subclasses_and_parameters_keep_their_type():
    tagged = torch.ones(2).as_subclass(Tagged)
    tagged.tag = "a"
    back = _copy(tagged)
    assert (type(back), back.tag) == (Tagged, "a")
    assert type(_copy(torch.ones(2).to(torch.float8_e4m3fn).as_subclass(Tagged))) is Tagged
    parameter = _copy(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    assert (type(parameter), parameter.requires_grad) == (torch.nn.Parameter, False)


def test_shared_storages_stay_shared_and_tied_weights_tied():
    base = torch.zeros(100_000)
    value = {"base": base, "view": base[10:20], "detached": base.detach(), "storage": base.untyped_storage()}
    packed = pickling.dumps(value)
    assert packed.mapping_bytes == base.nbytes  # once
    back = pickling.loads(packed)
    back["view"].fill_(3)
    assert back["base"].sum() == back["detached"].sum() == 30
    assert back["storage"].data_ptr() == back["base"].data_ptr()
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model = _copy(model)
    assert model[1].weight is model[0].weight
    model(torch.ones(1, 3)).sum().backward()
    assert model[0].weight.grad is not None


def test_what_shared_no_storage_does_not_share_it_afterwards():
    one, two = _copy([torch.zeros(3), torch.zeros(3)])
    assert not _shared(one, two)


def test_a_received_tensor_can_be_written_and_a_write_stays_here():
    tensor = torch.zeros(100_000)
    packed = pickling.dumps(tensor)
    first, second = pickling.loads(packed), pickling.loads(packed)
    first += 1
    assert (first.sum(), second.sum(), tensor.sum()) == (100_000, 0, 0)


def test_a_default_device_does_not_disturb():
    tensor = torch.arange(5.0)
    with torch.device("meta"):
        back = pickling.loads(pickling.dumps(tensor))
    assert torch.equal(back, tensor)


def test_models_of_the_notebook_go_and_come_back(worker, notebook):
    notebook.cell(
        "import io, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.layer = torch.nn.Linear(2, 1)\n"
        "    def forward(self, x): return self.layer(x)\n"
        "net = Net()\n"
        "big = torch.zeros(200_000)\n"
        "def square(x: torch.Tensor) -> torch.Tensor:\n    return x * x\n"
        "def go():\n"
        "    with torch.no_grad(): net.layer.weight.fill_(5)\n"
        "    big.add_(1)\n"
        "    file = io.BytesIO(); torch.save(net, file); file.seek(0)\n"
        "    again = torch.load(file, weights_only=False)\n"
        "    scripted = torch.jit.script(square)(torch.tensor([3.0]))\n"
        "    return net, float(big.sum()), type(again) is Net, scripted\n"
    )
    net, total, same, scripted = worker.run(notebook["go"])
    assert type(net) is notebook["Net"]
    assert net.layer.weight.tolist() == [[5.0, 5.0]]
    assert notebook["net"].layer.weight.tolist() != [[5.0, 5.0]]
    assert (total, same, scripted.item(), notebook["big"].sum()) == (200_000.0, True, 9.0, 0)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_loader_workers_find_the_notebooks_dataset(worker, notebook, method):
    notebook.cell(
        "import torch\n"
        "SCALE = 10\n"
        "class DS(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return i * SCALE\n"
        "def go(method):\n"
        "    loader = torch.utils.data.DataLoader(DS(), batch_size=2, num_workers=1, multiprocessing_context=method,\n"
        "        collate_fn=lambda items: torch.tensor(items))\n"
        "    return [int(x) for batch in loader for x in batch]\n"
    )
    assert worker.run(notebook["go"], method) == [0, 10, 20, 30]


# --- devices, without one -------------------------------------------------------------------------------------------


class DeviceStorage:
    """A storage that says it is on an accelerator."""

    def __init__(self, values):
        self._host = torch.tensor(values, dtype=torch.uint8).untyped_storage()
        self.device = torch.device("cuda", 3)
        self._cdata = id(self)

    def cpu(self):
        return self._host


def _arrive(reduced):
    make, args = reduced
    return make(*(memoryview(arg) if not isinstance(arg, str) else arg for arg in args))


def test_a_device_storage_arrives_on_the_ranks_own_device(monkeypatch):
    reduced = torch_pickling.StorageReducer(to_kernel=False).reduce_untyped(DeviceStorage([1, 2]))
    assert reduced[0] is torch_pickling.device_storage
    monkeypatch.setattr(torch_pickling, "own_device", lambda: torch.device("cpu"))
    assert _arrive(reduced).tolist() == [1, 2]
    monkeypatch.setattr(torch_pickling, "own_device", lambda: torch.device("meta"))
    assert _arrive(reduced).device.type == "meta"


def test_the_own_device_is_the_current_accelerator_or_the_host(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert torch_pickling.own_device() == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert torch_pickling.own_device() == torch.device("cuda")  # no index: whichever is current


class _Asks:
    def __reduce__(self):
        return torch_pickling.own_device, ()


def test_loads_can_be_told_the_device():
    packed = pickling.dumps(_Asks())
    assert pickling.loads(packed, device="meta") == torch.device("meta")
    assert pickling.loads(packed, device=None) == torch_pickling.own_device()


def test_a_result_arrives_in_host_memory():
    reduced = torch_pickling.StorageReducer(to_kernel=True).reduce_untyped(DeviceStorage([4]))
    assert reduced[0] is torch_pickling.host_storage
    assert _arrive(reduced).tolist() == [4]


@pytest.mark.gpu
def test_a_cuda_tensor_arrives_on_the_current_device():
    tensor = torch.arange(4.0, device="cuda")
    back = _copy(tensor)
    assert back.device == torch.device("cuda", torch.cuda.current_device())
    assert torch.equal(back, tensor)
    assert pickling.loads(pickling.dumps_result(tensor)).device.type == "cpu"
