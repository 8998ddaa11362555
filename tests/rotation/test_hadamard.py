"""The fast transform against the matrix written out, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrot.errors import UsageError
from graphrot.rotation.hadamard import (
    decomposition,
    dense,
    factor_matrix,
    hadamard_decomposition,
    sylvester,
    transform,
)

SIZES = [12, 20, 28, 36, 40, 44, 52, 60, 64, 76, 84, 92, 96, 100, 124, 128, 148, 172, 344, 576, 924, 1536]
LARGE = [4864, 13696, 18944, 29568]


def vectors(size: int, count: int = 3) -> np.ndarray:
    return np.random.default_rng(size).standard_normal((count, size))


@pytest.mark.parametrize("size", [1, 2, 3, 10, 13, 428, *SIZES])
def test_fast_and_dense_agree_and_are_orthogonal(size: int) -> None:
    split = decomposition(size)
    matrix, x = dense(split), vectors(size)
    y = transform(x, split)
    assert np.abs(matrix @ matrix.T - np.eye(size)).max() <= 1e-12
    assert np.abs(y - x @ matrix).max() <= 1e-12
    assert np.abs(transform(y, split, transpose=True) - x).max() <= 1e-12
    assert np.abs(transform(x, split, transpose=True) - x @ matrix.T).max() <= 1e-12


@pytest.mark.parametrize("size", LARGE)
def test_large_sizes_invert_and_keep_lengths(size: int) -> None:
    split, x = decomposition(size), vectors(size)
    y = transform(x, split)
    assert np.abs(transform(y, split, transpose=True) - x).max() <= 1e-12
    assert np.allclose(np.linalg.norm(y, axis=1), np.linalg.norm(x, axis=1), rtol=1e-13)
    impulse = np.zeros((1, size))
    impulse[0, size // 3] = 1.0
    column = factor_matrix(split)[size // 3 >> split.levels].astype(np.float64)
    row = np.kron(column, sylvester(split.levels)[size // 3 & ((1 << split.levels) - 1)]) / np.sqrt(size)
    assert np.abs(transform(impulse, split) - row).max() <= 1e-12


@pytest.mark.parametrize("size", [n for n in SIZES + LARGE if n != 13696])
def test_sizes_are_hadamard_with_the_smallest_factor(size: int) -> None:
    split = hadamard_decomposition(size)
    assert split is not None
    assert split.order << split.levels == size
    assert split.order == 1 or split.order % 4 == 0
    assert np.array_equal(np.abs(factor_matrix(split)), np.ones((split.order, split.order)))
    odd = size // (size & -size)
    assert split.order in {1, 4 * odd}


def test_where_there_is_none_the_odd_part_is_hartley() -> None:
    assert hadamard_decomposition(13696) is None
    split = decomposition(13696)
    assert (split.order, split.levels, split.construction, split.is_hadamard) == (107, 7, "hartley(107)", False)
    entries = np.abs(factor_matrix(split)) * 107**-0.5
    assert entries.max() <= 1.4143 * 107**-0.5


def test_the_factor_is_not_its_transpose() -> None:
    split, x = decomposition(96), vectors(96)
    assert np.abs(transform(x, split) - transform(x, split, transpose=True)).max() > 0.1


@given(
    size=st.sampled_from([1, 2, 5, 12, 24, 80, 64]),
    lead=st.lists(st.integers(0, 3), min_size=0, max_size=2),
    blocks=st.integers(1, 3),
    axis=st.integers(0, 2),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_any_shape_axis_and_dtype(size: int, lead: list[int], blocks: int, axis: int, dtype: type) -> None:
    axis %= len(lead) + 1
    shape = [*lead[:axis], blocks * size, *lead[axis:]]
    x = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    before = x.copy()
    split = decomposition(size)
    y = transform(x, split, axis=axis)
    moved = np.moveaxis(x.astype(np.float64), axis, -1)
    expected = (moved.reshape(*lead, blocks, size) @ dense(split)).reshape(moved.shape)
    assert y.dtype == np.float64
    assert y.shape == x.shape
    assert np.abs(np.moveaxis(y, axis, -1) - expected).max(initial=0.0) <= 1e-12
    assert np.array_equal(x, before)


def test_signs_and_scale() -> None:
    split, x = decomposition(24), vectors(24)
    signs = np.where(np.arange(24) % 3, 1.0, -1.0)
    matrix = dense(split)
    assert np.abs(transform(x, split, signs=signs) - (x * signs) @ matrix).max() <= 1e-12
    assert np.abs(transform(x, split, signs=signs, transpose=True) - (x @ matrix.T) * signs).max() <= 1e-12
    assert np.abs(transform(x, split, scale=2.0) - 2 * np.sqrt(24) * x @ matrix).max() <= 1e-12


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    split, x = decomposition(96), vectors(192, 50)
    whole = transform(x, split)
    monkeypatch.setattr("graphrot.rotation.hadamard._CHUNK", 1000)
    assert np.abs(transform(x, split) - whole).max() <= 1e-14


def test_errors() -> None:
    with pytest.raises(UsageError, match="size 12 cannot act on 13 channels"):
        transform(np.ones((2, 13)), decomposition(12))
    with pytest.raises(UsageError, match="odd part 2051 is larger than 1024"):
        decomposition(2051)
    with pytest.raises(UsageError, match="positive size"):
        decomposition(0)
