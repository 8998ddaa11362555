"""Hadamard matrices by construction, checked in integers."""

from __future__ import annotations

import numpy as np
import pytest

from graphrot.rotation.construct import (
    construct,
    is_hadamard,
    jacobsthal,
    paley_one,
    paley_two,
    prime_power,
    williamson,
)


@pytest.mark.parametrize(
    ("q", "expected"),
    [(1, None), (2, (2, 1)), (9, (3, 2)), (27, (3, 3)), (49, (7, 2)), (343, (7, 3)), (461, (461, 1)), (45, None)],
)
def test_prime_powers(q: int, expected: tuple[int, int] | None) -> None:
    assert prime_power(q) == expected


@pytest.mark.parametrize("q", [9, 25, 27, 49, 81, 121, 343, 13, 461])
def test_jacobsthal_matrices_over_fields_of_prime_power(q: int) -> None:
    matrix = jacobsthal(q).astype(np.int64)
    assert np.array_equal(matrix @ matrix.T, q * np.eye(q, dtype=np.int64) - 1)
    assert not matrix.sum(axis=0).any()
    assert np.array_equal(matrix, matrix.T if q % 4 == 1 else -matrix.T)


@pytest.mark.parametrize("q", [7, 11, 19, 27, 43, 59, 67, 83, 107, 131, 139, 163, 179, 211, 283, 311, 343])
def test_paley_one(q: int) -> None:
    matrix = paley_one(q)
    assert is_hadamard(matrix)
    assert not np.array_equal(matrix, matrix.T)


@pytest.mark.parametrize("q", [5, 9, 17, 25, 37, 49, 61, 73, 461])
def test_paley_two(q: int) -> None:
    matrix = paley_two(q)
    assert is_hadamard(matrix)
    assert np.array_equal(matrix, matrix.T)


@pytest.mark.parametrize("m", [3, 9, 23, 37, 43])
def test_williamson(m: int) -> None:
    matrix = williamson(m)
    assert matrix is not None
    assert matrix.shape == (4 * m, 4 * m)
    assert is_hadamard(matrix)


def test_a_field_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="15 is not an odd prime power"):
        jacobsthal(15)


@pytest.mark.parametrize("order", [6, 188, 428])
def test_orders_out_of_reach_give_none(order: int) -> None:
    assert construct(order) is None


def test_one_flipped_entry_is_seen() -> None:
    matrix = paley_one(11)
    matrix[3, 4] *= -1
    assert not is_hadamard(matrix)
    assert not is_hadamard(np.zeros((4, 4), np.int8))


@pytest.mark.parametrize(
    ("order", "name"),
    [
        (12, "paley1(11)"), (20, "paley1(19)"), (28, "paley1(27)"), (36, "paley2(17)"), (44, "paley1(43)"),
        (52, "paley2(25)"), (60, "paley1(59)"), (68, "paley1(67)"), (76, "paley2(37)"), (84, "paley1(83)"),
        (92, "williamson(23)"), (100, "paley2(49)"), (108, "paley1(107)"), (124, "paley2(61)"), (132, "paley1(131)"),
        (140, "paley1(139)"), (148, "paley2(73)"), (164, "paley1(163)"), (172, "williamson(43)"), (180, "paley1(179)"),
        (212, "paley1(211)"), (284, "paley1(283)"), (312, "paley1(311)"), (344, "paley1(343)"), (924, "paley2(461)"),
    ],
)  # fmt: skip
def test_every_order_by_its_method(order: int, name: str) -> None:
    built = construct(order)
    assert built is not None
    assert built[0] == name
    assert built[1].dtype == np.int8
    wide = built[1].astype(np.float64)  # exact for integers, and a fast product
    assert np.array_equal(wide @ wide.T, order * np.eye(order))
    assert np.array_equal(np.abs(wide), np.ones((order, order)))
