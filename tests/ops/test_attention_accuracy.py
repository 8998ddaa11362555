"""What a cache of few bits costs in accuracy, what the rotation saves, and how many bytes a token takes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.ops.attention_reference import attend, load_rows, visible_slots
from graphrot.ops.rotated_attention import row_bytes
from graphrot.rotation.orthogonal import build_matrix, choose_matrix
from tests.ops.attention import Arrays, Case, expected, run
from tests.ops.test_hadamard_op import session

TOKENS = 96
HEAD_SIZES = (64, 80, 96, 128)


def planted(case: Case) -> Arrays:
    """Normal numbers; two channels of the keys are 30 times larger in every token, as models have them."""
    given = case.inputs()
    rng = np.random.default_rng(case.head_size)
    keys = given["key"].reshape(1, TOKENS, case.kv_heads, case.head_size)
    keys[..., rng.choice(case.head_size, 2, replace=False)] *= 30
    return given


def heads(x: np.ndarray, count: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2).astype(np.float64)


def exact(case: Case, given: Arrays) -> np.ndarray:
    """Attention in float64 over keys and values that nobody stored."""
    queries, keys, values = (
        heads(given[name], count)
        for name, count in (("query", case.heads), ("key", case.kv_heads), ("value", case.kv_heads))
    )
    seen = visible_slots([0], TOKENS, TOKENS)
    found = attend(queries, keys, values, seen, scale=case.head_size**-0.5)
    return found.swapaxes(1, 2).reshape(given["query"].shape)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_the_rotation_halves_the_error_of_attention(head_size: int, bits: int) -> None:
    case = Case(head_size=head_size, bits=bits, past=0, tokens=TOKENS, total=TOKENS, lengths=(TOKENS,))
    given = planted(case)
    want = exact(case, given)
    errors = {}
    for rotate in (False, True):
        each = case.but(rotate=rotate)
        outputs = expected(each, given)[0], run(session(each.model(), library=False), given)[0]
        errors[rotate] = [np.linalg.norm(output - want) / np.linalg.norm(want) for output in outputs]
    for rotated, plain in zip(errors[True], errors[False], strict=True):
        assert rotated <= plain / 2
        assert rotated < (0.4 if bits == 4 else 0.025)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_the_rotation_keeps_scores(head_size: int) -> None:
    case = Case(head_size=head_size, past=0, tokens=TOKENS, total=TOKENS, lengths=(TOKENS,))
    given = planted(case)
    queries, keys = (heads(given[name], case.kv_heads)[:, :, :, :head_size] for name in ("key", "value"))
    matrix = build_matrix(choose_matrix(head_size, rotations="hadamard", seed=None))
    plain = queries @ keys.swapaxes(-1, -2)
    rotated = matrix.rotate(queries, -1) @ matrix.rotate(keys, -1).swapaxes(-1, -2)
    assert np.abs(rotated - plain).max() <= 1e-12 * np.abs(plain).max()


def test_bytes_of_a_token() -> None:
    """Scales and minima included: the rows are all that is stored."""
    assert 4 * 64 / row_bytes(64, 4) >= 7.1
    assert 2 * 64 / row_bytes(64, 4) >= 3.5
    for bits, size in ((4, 36), (8, 68)):
        case = Case(head_size=64, bits=bits, past=0, total=3, lengths=(3,))
        made, given = case.model(), case.inputs()
        _, *presents = run(session(made, library=False), given)
        assert {value.dtype for value in made.graph.outputs[1:]} == {ir.DataType.UINT8}
        for present in presents:
            assert present.nbytes == case.kv_heads * 3 * size
        rows = presents[1][0, :, :, :]
        assert np.abs(load_rows(rows, bits) - heads(given["value"], 2)[0]).max() < (0.2 if bits == 4 else 0.012)
