import pytest

from notebook_launcher.core.precisions import PRECISIONS, DeviceFacts, refusals, usable

T4 = DeviceFacts(name="Tesla T4", capability=(7, 5))
A100 = DeviceFacts(name="A100", capability=(8, 0))


@pytest.mark.parametrize(
    ("kind", "facts", "refused"),
    [
        ("cpu", None, {"fp16"}),
        ("cuda", None, set()),
        ("cuda", A100, set()),
        ("cuda", T4, {"bf16"}),
        ("cuda", DeviceFacts(capability=(7, 5), is_rocm=True), set()),
        ("mps", DeviceFacts(macos=(14, 0), torch=(2, 8)), set()),
        ("mps", DeviceFacts(macos=(13, 6), torch=(2, 13)), {"bf16"}),
        ("mps", DeviceFacts(macos=(15, 1), torch=(2, 6)), {"fp16"}),
        ("mps", DeviceFacts(name="Apple M1", macos=(15, 1), torch=(2, 13)), {"bf16"}),
        ("mps", DeviceFacts(name="Apple M2 Ultra", macos=(15, 1), torch=(2, 13)), {"bf16"}),
        ("mps", DeviceFacts(name="Apple M3", macos=(15, 1), torch=(2, 13)), set()),
        ("mps", DeviceFacts(name="Apple M10", macos=(15, 1), torch=(2, 13)), set()),
        ("xpu", DeviceFacts(has_native_bf16=False), {"bf16"}),
        ("xpu", DeviceFacts(has_native_bf16=True), set()),
        ("tpu", None, {"fp16"}),
    ],
)
def test_what_a_device_can_not_do(kind, facts, refused):
    found = refusals(kind, facts)
    assert set(found) == set(PRECISIONS)
    assert {name for name, reason in found.items() if reason} == refused


def test_a_reason_names_the_device_and_the_fact():
    reason = refusals("cuda", T4)["bf16"]
    assert "Tesla T4" in reason
    assert "7.5" in reason


def test_what_can_be_used_instead():
    assert usable(refusals("cpu")) == "'bf16' or 'no'"
    assert usable(refusals("cuda", T4)) == "'fp16' or 'no'"
