"""Labels act as numbers do, on broadcast views too; partitions are the coarsest that keys and edges allow."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrot.analysis.labels import (
    Labels,
    SourceTable,
    combine,
    coordinates,
    first_positions,
    fresh_labels,
    mix,
    other_axes,
)
from graphrot.analysis.partition import Partition
from graphrot.analysis.types import decode_runs, encode_runs
from graphrot.analysis.visit import Block, Edge, Key, Record, sum_by


@given(st.lists(st.integers(0, 40), max_size=30))
@settings(max_examples=60, deadline=None)
def test_runs_round_trip(positions: list[int]) -> None:
    assert decode_runs(encode_runs(positions)) == positions


def test_hashes_of_views_equal_hashes_of_copies() -> None:
    rng = np.random.default_rng(0)
    small = rng.integers(0, 99, (1, 5, 1))
    view = np.broadcast_to(small, (3, 5, 4))
    other = coordinates((3, 5, 4), [0, 2])
    expected = combine(view.copy(), other.copy())
    assert np.array_equal(combine(view, other), expected)
    assert combine(view).strides[0] == 0
    assert np.unique(mix(np.arange(10000))).size == 10000
    assert not np.array_equal(combine(view, other), combine(other, view))


def test_coordinates_number_in_row_major_order() -> None:
    numbers = coordinates((2, 3, 4), [0, 2])
    assert numbers.shape == (2, 3, 4)
    assert numbers[1, 2, 3] == 7 and (numbers[:, :1] == numbers).all()
    assert other_axes(4, -1, 0) == [1, 2]


def _labels(shape: tuple[int, ...], axes: list[int]) -> Labels:
    table = SourceTable()
    return fresh_labels(table.get("opaque", ir.Value(name="x"), None, shape, axes))


@given(st.permutations(range(4)), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_labels_move_as_numbers_do(order: list[int], axis: int, size: int) -> None:
    labels = _labels((2, 3, 4, 2), [1, 3])
    numbers = np.arange(48).reshape(2, 3, 4, 2)
    which = {
        int(n): (int(i), int(c)) for n, i, c in zip(numbers.flat, labels.ids.flat, labels.copies.flat, strict=True)
    }
    assert len(set(which.values())) == 48
    index = list(range(min(size, 2)))[::-1]
    moved = np.take(numbers.transpose(order), index, axis=axis).reshape(-1)
    turned = labels.transpose(order).take(index, axis).reshape((-1,))
    found = list(zip(turned.ids.tolist(), turned.copies.tolist(), strict=True))
    assert found == [which[int(n)] for n in moved]


def test_repetitions_are_copies_of_their_own() -> None:
    labels = _labels((1, 3), [1])
    wide = labels.broadcast((2, 4, 3), 5)
    assert np.array_equal(wide.ids, np.broadcast_to(labels.ids, (2, 4, 3)))
    assert np.unique(wide.copies).size == 8
    assert (wide.copies == wide.copies[..., :1]).all()
    assert labels.broadcast((1, 3), 5).same_as(labels)


def test_uniform_axes_have_the_same_channels_and_pattern() -> None:
    labels = _labels((2, 3, 4), [2])
    assert labels.uniform(0) and labels.uniform(1) and not labels.uniform(2)
    assert labels.varies(2) and not labels.varies(1)
    mixed = labels.copies.copy()
    mixed[0, 0, 1] = mixed[1, 0, 0]
    assert not Labels(labels.ids, mixed).uniform(1)
    assert first_positions(np.array([7, 3, 7, 3, 9])).tolist() == [0, 1, 0, 1, 4]


def test_a_source_is_made_once() -> None:
    table = SourceTable()
    value, other = ir.Value(name="x"), ir.Value(name="y")
    first = table.get("opaque", value, None, (2, 3), [1])
    second = table.get("opaque", other, None, (2, 5), [1])
    assert table.get("opaque", value, None, (2, 3), [1]) is first
    assert (first.base, first.count, second.base, table.total) == (0, 3, 3, 8)
    assert table.index_of(np.array([0, 2, 3, 7])).tolist() == [0, 0, 1, 1]
    assert [s.index for s in table.owners(np.array([7, 4]))] == [1]


def test_sums_do_not_depend_on_order() -> None:
    groups, numbers = np.array([3, 1, 3, 1, 1]), np.array([5, 6, 7, 8, 9])
    shuffle = np.array([4, 2, 0, 3, 1])
    first, second = sum_by(groups, numbers), sum_by(groups[shuffle], numbers[shuffle])
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].tolist() == [1, 3]


def _table(*sizes: int) -> SourceTable:
    table = SourceTable()
    for number, size in enumerate(sizes):
        table.get("weight", ir.Value(name=str(number)), None, (size,), [0])
    return table


def _edge(left: list[int], right: list[int]) -> Edge:
    return Edge(np.array(left), np.array(right), np.ones(len(left), dtype=np.uint64))


def _blocks(table: SourceTable, *records: Record) -> list[list[int]]:
    partition = Partition(table, records)
    return sorted(block.tolist() for block in partition.blocks.values())


def test_keys_split_and_edges_carry_the_split() -> None:
    table = _table(4, 4, 4)
    key = Key(np.arange(4), np.array([1, 1, 2, 2], dtype=np.uint64), "")
    chain = Record(edges=[_edge([0, 1, 2, 3], [4, 5, 6, 7]), _edge([4, 5, 6, 7], [8, 9, 10, 11])])
    assert _blocks(table, chain) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    split = _blocks(table, Record(keys=[key]), chain)
    assert split == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_blocked_channels_take_their_partners_along() -> None:
    table = _table(3, 3)
    assert _blocks(table, Record(blocks=[Block(np.array([1]), "")], edges=[_edge([0, 1, 2], [3, 4, 5])])) == [
        [0, 2],
        [3, 5],
    ]


def test_a_channel_that_meets_two_of_one_block_breaks_it() -> None:
    table = _table(2, 2)
    crossed = Record(edges=[_edge([0, 1], [2, 3]), _edge([0, 1], [3, 2])])
    assert _blocks(table, crossed) == []


def test_coordinates_pair_positions_across_sources() -> None:
    table = _table(3, 3)
    partition = Partition(table, [Record(edges=[_edge([0, 1, 2], [5, 3, 4])])])
    first, second = sorted(partition.blocks.values(), key=lambda ids: int(ids.min()))
    assert first.tolist() == [0, 1, 2] and second.tolist() == [5, 3, 4]


@pytest.mark.parametrize("length", [2, 60])
def test_long_chains_settle(length: int) -> None:
    table = _table(*[4] * length)
    chain = [
        Record(edges=[_edge([4 * n + k for k in range(4)], [4 * n + 4 + k for k in range(4)])])
        for n in range(length - 1)
    ]
    end = 4 * (length - 1)
    alone = Record(blocks=[Block(np.array([end]), "")])
    blocks = _blocks(table, *chain, alone)
    assert len(blocks) == length and all(len(block) == 3 for block in blocks)
