"""The runtime computes on whatever device it was given: nowhere is one kind written into it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from notebook_launcher.core.precisions import refusals
from notebook_launcher.runtime import precision
from notebook_launcher.runtime.backends import Backend
from notebook_launcher.runtime.plugins import AutocastKwargs, GradScalerKwargs

RUNTIME = Path(__file__).resolve().parent.parent.parent / "notebook_launcher" / "runtime"
FILES = sorted(path for path in RUNTIME.rglob("*.py") if path.parent.name != "backends")
KINDS = ("cuda", "mps", "xpu", "xla", "tpu")


def hard_wired(source):
    """Calls and attributes that name one kind of accelerator: ``torch.cuda.x``, ``autocast("cuda")``, ``x.cuda()``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in KINDS:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call):
            given = [*node.args, *(one.value for one in node.keywords)]
            words = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            found += [f"line {node.lineno}: {ast.unparse(node)}" for word in words if word.partition(":")[0] in KINDS]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RUNTIME)))
def test_no_kind_is_written_into_the_code(path):
    assert path.parent.name == "strategies" or not hard_wired(path.read_text())


@pytest.mark.parametrize(
    "source",
    ["torch.cuda.synchronize()", "torch.autocast('cuda')", "x.cuda()", "torch.device(type='mps')", "to('cuda:0')"],
)
def test_the_rule_finds_what_breaks_it(source):
    assert hard_wired(source)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", "cpu"])
def test_autocast_and_loss_scaling_are_of_the_backends_kind(monkeypatch, kind):
    asked = []
    monkeypatch.setattr(torch, "autocast", lambda device_type, **_: asked.append(device_type))
    monkeypatch.setattr(precision, "LossScaling", lambda device_type, _: asked.append(device_type))
    backend = Backend(kind, torch.device("cpu"), "gloo", "NO", refusals(kind) | {"fp16": ""})
    keywords = {AutocastKwargs: AutocastKwargs(), GradScalerKwargs: GradScalerKwargs()}
    chosen = precision.choose("fp16", backend, "", keywords)
    chosen.autocast()
    chosen.new_scaling()
    assert asked == [kind, kind]
