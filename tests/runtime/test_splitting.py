"""Pieces of what is split between processes: pure, without processes."""

from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from notebook_launcher.runtime.splitting import piece


class Table:
    """What ``datasets.Dataset`` offers."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def select(self, indices):
        return Table([self.rows[index] for index in indices])


def pieces(inputs, num_ranks, **options):
    return [piece(inputs, rank, num_ranks, **options) for rank in range(num_ranks)]


@given(st.lists(st.integers(), max_size=20), st.integers(1, 6))
def test_the_pieces_are_the_whole_in_order_and_sizes_differ_by_one_at_most(items, num_ranks):
    found = pieces(items, num_ranks)
    assert [item for part in found for item in part] == items
    sizes = [len(part) for part in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.lists(st.integers(), max_size=20), st.integers(1, 6))
def test_padding_makes_the_pieces_equally_long(items, num_ranks):
    bare, padded = pieces(items, num_ranks), pieces(items, num_ranks, pad=True)
    for short, long in zip(bare, padded, strict=True):
        assert len(long) == -(-len(items) // num_ranks)
        assert long[: len(short)] == short
        assert set(long[len(short) :]) <= set((short or items)[-1:])


@pytest.mark.parametrize(
    ("inputs", "rows"),
    [
        ((1, 2, 3), list),
        (torch.tensor([[1], [2], [3]]), lambda part: part.flatten().tolist()),
        (np.array([1, 2, 3]), lambda part: part.tolist()),
        (Table([1, 2, 3]), lambda part: part.rows),
        (range(1, 4), lambda part: part),
    ],
)
def test_kinds_keep_their_type(inputs, rows):
    expected = {False: [[1], [2], [3], []], True: [[1], [2], [3], [3]]}
    for pad, wanted in expected.items():
        found = pieces(inputs, 4, pad=pad)
        assert [rows(part) for part in found] == wanted
        assert isinstance(inputs, range) or all(type(part) is type(inputs) for part in found)


def test_dictionaries_are_split_side_by_side_in_any_nesting():
    inputs = UserDict(words=list("abc"), more={"x": torch.arange(3)})
    first, second = pieces(inputs, 2)
    assert isinstance(first, UserDict)
    assert (first["words"], first["more"]["x"].tolist()) == (["a", "b"], [0, 1])
    assert (second["words"], second["more"]["x"].tolist()) == (["c"], [2])


def test_unequal_lengths_are_named():
    with pytest.raises(ValueError, match=r"\['a'\]: 2, \['b'\]\['c'\]: 3"):
        piece({"a": [1, 2], "b": {"c": (1, 2, 3)}}, 0, 2)


@pytest.mark.parametrize("inputs", [3, "text", {"a": [1], "b": None}])
def test_what_has_no_items_is_refused(inputs):
    with pytest.raises(TypeError, match=r" \((int|str|NoneType)\) can't be split between processes; give a list"):
        piece(inputs, 0, 2)


def test_nothing_splits_into_nothing():
    assert pieces([], 2, pad=True) == [[], []]
    assert pieces({}, 2) == [{}, {}]
