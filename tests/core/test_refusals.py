import io
import socket
import threading

import pytest

from notebook_launcher.core.refusals import RefusedError, refuse, rule_of, type_name


def _type(module, name):
    return type(name, (), {"__module__": module})


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (type(threading.Lock()), "create it inside"),
        (threading.Thread, "create it inside"),
        (io.TextIOWrapper, "pass its path"),
        (io.BufferedReader, "pass its path"),
        (socket.socket, "pass the address"),
        (type(i for i in ()), "pass a list"),
        (_type("accelerate.accelerator", "Accelerator"), "create it inside"),
        (_type("torch.distributed.distributed_c10d", "ProcessGroup"), "lives in this process"),
        (_type("torch.nn.parallel.distributed", "DistributedDataParallel"), "wrap the model inside"),
        (_type("torch._dynamo.eval_frame", "DynamoTLS"), "call torch.compile inside"),
        (_type("ipywidgets.widgets.widget", "Widget"), "pass its value"),
        (type("Mine", (_type("ipywidgets.widgets.widget", "Widget"),), {}), "pass its value"),
    ],
)
def test_what_to_do_instead_is_known(kind, advice):
    assert advice in rule_of(kind).advice


@pytest.mark.parametrize("kind", [int, dict, io.BytesIO, _type("mine", "Accelerator"), _type("torchmetrics", "Store")])
def test_other_types_have_no_rule(kind):
    assert rule_of(kind) is None


def test_advice_differs_for_a_result():
    model = _type("torch.nn.parallel.distributed", "DistributedDataParallel")()
    with pytest.raises(RefusedError, match="wrap the model inside"):
        refuse(model, is_result=False)
    with pytest.raises(RefusedError, match="unwrap_model") as caught:
        refuse(model, is_result=True)
    assert caught.value.value is model


def test_types_have_the_names_that_people_know():
    assert [type_name(kind) for kind in (int, socket.socket, io.TextIOWrapper)] == [
        "int",
        "socket.socket",
        "io.TextIOWrapper",
    ]
