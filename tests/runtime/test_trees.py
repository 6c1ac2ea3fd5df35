import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch

from notebook_launcher.runtime import trees


class Pair(NamedTuple):
    left: torch.Tensor
    right: None


@dataclasses.dataclass(frozen=True)
class Outputs:
    logits: torch.Tensor
    note: str = "kept"


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):
    """As in transformers: items and attributes are the same things."""

    loss: torch.Tensor | None = None

    def __post_init__(self):
        super().__setitem__("loss", self.loss)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def half():
    return torch.ones(2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("tree", "read"),
    [
        (half(), lambda t: t),
        ([half()], lambda t: t[0]),
        ((1, half()), lambda t: t[1]),
        ({"a": {"b": half()}}, lambda t: t["a"]["b"]),
        (Pair(half(), None), lambda t: t.left),
        (Outputs(half()), lambda t: t.logits),
        (collections.defaultdict(list, a=half()), lambda t: t["a"]),
        (collections.UserDict(a=half()), lambda t: t["a"]),
        (ModelOutput(half()), lambda t: t.loss),
    ],
)
def test_half_precision_becomes_fp32_in_any_nesting_and_types_are_kept(tree, read):
    result = trees.to_float32(tree)
    assert type(result) is type(tree)
    assert read(result).dtype == torch.float32
    assert read(tree).dtype == torch.bfloat16, "the original was changed"


def test_other_leaves_are_left_as_they_are():
    marker = object()
    tree = {"text": "abc", "none": None, "whole": torch.tensor([1]), "odd": marker, "empty": []}
    result = trees.to_float32(tree)
    assert result["odd"] is marker
    assert result["whole"].dtype == torch.int64
    assert (result["text"], result["none"], result["empty"]) == ("abc", None, [])


def test_a_frozen_dataclass_keeps_its_other_fields():
    assert trees.map_leaves(lambda leaf: leaf, Outputs(half(), note="x")).note == "x"


def test_leaves_come_in_order():
    assert list(trees.leaves([1, (2, {"a": 3}), []])) == [1, 2, 3]


def test_joining_and_cutting_batches():
    batch = {"x": torch.arange(4).view(2, 2), "names": ["a", "b"], "scale": 3}
    both = trees.concatenate([batch, batch])
    assert both["x"].shape == (4, 2)
    assert both["names"] == ["a", "b", "a", "b"]
    assert both["scale"] == 3
    assert trees.part(both, 1, 3)["names"] == ["b", "a"]
    assert trees.num_samples(both) == 4


def test_strings_that_torch_puts_in_a_tuple_are_samples_too():
    batch = torch.utils.data.default_collate([("a", 1), ("b", 2)])
    assert [trees.part(batch, 1, 2)[0], trees.concatenate([batch, batch])[0]] == [("b",), ("a", "b") * 2]


def test_batches_of_different_lengths_can_not_be_joined():
    with pytest.raises(ValueError, match=r"\(1, 3\).*\(1, 5\)"):
        trees.concatenate([torch.ones(1, 3), torch.ones(1, 5)])


def test_outlines_differ_where_shapes_or_types_do():
    one = {"x": torch.ones(2, 3), "y": ["a"]}
    assert trees.outline(one) == trees.outline({"x": torch.zeros(2, 3), "y": ["b"]})
    assert trees.outline(one) != trees.outline({"x": torch.ones(2, 4), "y": ["a"]})
    assert trees.outline(one) != trees.outline({"x": torch.ones(2, 3).long(), "y": ["a"]})
