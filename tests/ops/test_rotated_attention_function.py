"""``RotatedAttention``: the function body against the float64 reference, without the library."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from graphrot.errors import InputRefused, UsageError
from graphrot.ops.attention_reference import load_rows, store_rows
from graphrot.ops.hadamard import DOMAIN, transform_attributes
from graphrot.ops.rotated_attention import (
    ATTRIBUTES,
    OP_TYPE,
    AttentionForm,
    ensure_rotated_attention,
    rotated_attention_node,
    row_bytes,
)
from graphrot.rotation.orthogonal import choose_matrix
from tests.ops.attention import OUTPUTS, Arrays, Case, check, run
from tests.ops.test_hadamard_op import session

LEVELS = (0, 1, 2, 99)
"""Optimizations of ONNX Runtime: none, basic, extended, all."""

FORMS = [
    Case(),
    Case(bits=8, rotate=False),
    Case(heads=6, kv_heads=1, head_size=12, rotate=False),
    Case(heads=3, kv_heads=3, bits=8, softcap=2.0),
    Case(window=2, past=9),
    Case(causal=False, window=4),
    Case(causal=False, past=12, total=12, lengths=(9,)),
    Case(past=0, total=3, lengths=(3,)),
    Case(past=0, total=1, lengths=(1,), tokens=1),
    Case(past=6, total=7, lengths=(7,), tokens=1),
    Case(past=20, total=7, lengths=(7, 4, 2), mask=(3, 1, 1, 7)),
    Case(mask=(1, 1, 1, 7), softcap=3.0),
    Case(mask=(1, 4, 3, 11), causal=False, bits=8),
    Case(mask=(2, 1, 3, 7), lengths=(7, 5), rotate=False),
    Case(mask=(2, 4, 1, 20), lengths=(7, 5), past=9),
]


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_every_form_at_every_level(case: Case) -> None:
    proto, given = ir.to_proto(case.model()), case.inputs()
    onnx.checker.check_model(proto, full_check=True)
    for level in LEVELS if case in FORMS[:4] else (0, 99):
        check(case, given, run(session(proto, library=False, level=level), given))


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_half_types(dtype: ir.DataType) -> None:
    for case in (Case(dtype=dtype), Case(dtype=dtype, bits=8, mask=(1, 1, 1, 7), softcap=2.0)):
        given = case.inputs()
        for level in (0, 99):
            check(case, given, run(session(case.model(), library=False, level=level), given))


@pytest.mark.parametrize("opset", [23, 24])
def test_later_opsets(opset: int) -> None:
    case = Case(mask=(1, 1, 1, 7))
    check(case, case.inputs(), run(session(case.model(opset), library=False), case.inputs()))


@pytest.mark.parametrize("past", [0, 1, 8191])
def test_long_pasts_and_a_padded_batch(past: int) -> None:
    """One new token in one row; and three rows, two of them padded, whose free slots hold what was there before."""
    case = Case(heads=2, kv_heads=1, head_size=8, past=past, total=past + 1, lengths=(past + 1,), tokens=1)
    padded = case.but(lengths=(past + 4, past // 2 + 4, 4), tokens=4, total=past + 4)
    for each in (case, padded):
        check(each, each.inputs(), run(session(each.model(), library=False), each.inputs()))


@pytest.mark.parametrize("bits", [4, 8])
def test_chunks_and_one_shot_agree(bits: int) -> None:
    whole = Case(bits=bits, past=0, total=12, lengths=(12, 12), tokens=12)
    ready, given = session(whole.model(), library=False), whole.inputs()
    output, *presents = run(ready, given)
    parts, rows = [], [given["past_key"], given["past_value"]]
    for start, end in ((0, 5), (5, 6), (6, 12)):
        chunk = {name: given[name][:, start:end] for name in ("query", "key", "value")}
        chunk |= {"past_key": rows[0], "past_value": rows[1]}
        chunk |= {"seqlens_k": np.full(2, end - 1, np.int32), "total": np.array(end, np.int32)}
        part, *rows = run(ready, chunk)
        parts.append(part)
    for row, present in zip(rows, presents, strict=True):
        np.testing.assert_array_equal(row, present)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), output, atol=1e-6)


@pytest.mark.parametrize("level", [0, 99])
@pytest.mark.parametrize("rotate", [False, True])
def test_past_and_present_in_one_buffer(level: int, rotate: bool) -> None:
    case = Case(past=16, total=9, lengths=(9, 6), tokens=2, rotate=rotate)
    ready, given = session(case.model(), library=False, level=level), case.inputs()
    separate = run(ready, given)
    check(case, given, separate)
    binding = ready.io_binding()
    buffers = {name: ort.OrtValue.ortvalue_from_numpy(given[f"past_{name}"]) for name in ("key", "value")}
    for name in ("query", "key", "value", "seqlens_k", "total"):
        binding.bind_cpu_input(name, given[name])
    for name, buffer in buffers.items():
        binding.bind_ortvalue_input(f"past_{name}", buffer)
        binding.bind_ortvalue_output(f"present_{name}", buffer)
    binding.bind_output("output")
    ready.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs()[2].numpy(), separate[0])
    for name, present in zip(buffers, separate[1:], strict=True):
        np.testing.assert_array_equal(buffers[name].numpy(), present)


@pytest.mark.parametrize("level", [0, 99])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_that_are_not_finite_reach_only_who_sees_them(bits: int, level: int) -> None:
    case = Case(bits=bits, past=12, total=8, lengths=(8, 4), tokens=4, window=3, rotate=False)
    given = case.inputs()
    given["key"][0, 2, 1], given["value"][1, 1, 20], given["query"][0, 0, 17] = np.inf, np.nan, np.nan
    given["past_value"][1, 0, 8:], given["past_key"][0, 1, 9:] = 255, 255  # no row has these bytes
    given["past_value"][0, 0, 0, -1] = 0x7E  # outside of every query's window
    got = run(session(case.model(), library=False, level=level), given)
    check(case, given, got)
    lost = np.isnan(got[0].reshape(2, 4, 4, 16)).any(axis=-1)
    assert lost[0].tolist() == [[False, True, False, False], [False] * 4, *[[True, True, False, False]] * 2]
    assert lost[1, 1:].tolist() == [[False, False, True, True]] * 3


@pytest.mark.parametrize("level", [0, 99])
def test_a_query_that_sees_nothing_gives_zeros(level: int) -> None:
    case = Case(mask=(1, 1, 3, 7))
    given = case.inputs()
    given["mask"][0, 0, 1] = -np.inf
    given["mask"][0, 0, 2] = np.finfo(np.float32).min
    given["query"][0, 1, 0] = np.nan
    got = run(session(case.model(), library=False, level=level), given)
    assert np.abs(got[0][0, 0]).max() > 0 and (got[0][0, 1:] == 0).all()
    check(case, given, got)


def test_lengths_with_two_axes_and_a_total_with_one() -> None:
    case, given = Case(lengths=(7, 5)), Case(lengths=(7, 5)).inputs()
    made = case.model()
    made.graph.inputs[5].shape, made.graph.inputs[6].shape = ir.Shape(["batch", 1]), ir.Shape([1])
    changed = given | {"seqlens_k": given["seqlens_k"][:, None], "total": given["total"][None]}
    check(case, given, run(session(made, library=False), changed))


def test_more_tokens_than_the_buffer_has_room_for() -> None:
    case = Case(past=8, total=8, lengths=(7,))
    given = case.inputs() | {"seqlens_k": np.array([8], np.int32)}
    with pytest.raises(InvalidArgument, match="invalid indice"):
        run(session(case.model(), library=False), given)


def halves() -> np.ndarray:
    """All finite float16 numbers, their midpoints, and the float32 numbers next to those; and beyond both ends."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    known = np.unique(bits.view(np.float16)[np.isfinite(bits.view(np.float16))].astype(np.float32))
    middles = (known[1:] + known[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(end)) for end in (-np.inf, np.inf)]
    ends = np.array([65504, 65519, 65520, 1e5, 3e38, 1e-10, 1e-42], np.float32)
    return np.concatenate([known, middles, *beside, ends, -ends])


def one_by_one(z: np.ndarray) -> Arrays:
    """A call with each row of ``z`` ``[n, 2]`` as the value of a batch's row."""
    zeros = np.zeros((len(z), 1, 2), np.float32)
    past = np.zeros((len(z), 1, 0, row_bytes(2, 8)), np.uint8)
    names = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total")
    values = (zeros, zeros, z[:, None], past, past, np.zeros(len(z), np.int32), np.array(1, np.int32))
    return dict(zip(names, values, strict=True))


def test_every_half_as_a_minimum_and_as_a_step() -> None:
    ready = session(Case(heads=1, kv_heads=1, head_size=2, bits=8, rotate=False).model(), library=False)
    numbers = halves()
    steps = np.abs(numbers)[np.abs(numbers) < 1e36]
    for z in (np.stack([numbers, numbers], axis=-1), np.stack([np.zeros_like(steps), steps * 255], axis=-1)):
        output, _, rows = run(ready, one_by_one(z))
        np.testing.assert_array_equal(rows[:, 0, 0], store_rows(z, 8))
        np.testing.assert_array_equal(output[:, 0], load_rows(rows[:, 0, 0], 8).astype(np.float32))


def test_bytes_of_halves_are_read_exactly() -> None:
    """All that a stored row may hold: the new token is masked, the one of the cache is the answer."""
    case = Case(heads=1, kv_heads=1, head_size=2, bits=8, rotate=False, mask=(1, 1, 1, 2))
    bits = np.arange(1 << 16, dtype="<u2")
    for at in (0, 1):
        given = one_by_one(np.zeros((len(bits), 2), np.float32))
        stored = np.zeros((len(bits), 2), "<u2")
        stored[:, at] = bits
        codes = np.tile(np.array([0, 255], np.uint8), (len(bits), 1))
        given["past_value"] = np.concatenate([codes, stored.view(np.uint8)], axis=-1)[:, None, None]
        given["past_key"] = np.zeros_like(given["past_value"])
        given |= {"seqlens_k": np.ones(len(bits), np.int32), "total": np.array(2, np.int32)}
        given["mask"] = np.array([[[[0, -np.inf]]]], np.float32)
        output = run(session(case.model(), library=False), given)[0][:, 0]
        want = load_rows(given["past_value"][:, 0, 0], 8).astype(np.float32)
        finite = np.isfinite(bits.view(np.float16))
        np.testing.assert_array_equal(output[finite], want[finite])
        assert np.isnan(output[~finite]).all()


def test_stored_rows_by_hand() -> None:
    np.testing.assert_array_equal(store_rows([0, 1, 14, 15], 4), [0xE0, 0xF1, 0, 0x3C, 0, 0])
    np.testing.assert_array_equal(store_rows([-1, 254], 8), [0, 255, 0, 0x3C, 0, 0xBC])
    np.testing.assert_array_equal(store_rows([3, np.inf], 4), [0, 0, 0, 0, 0x7E])
    np.testing.assert_array_equal(store_rows([0.5, 0.5], 4), [0, 0, 0, 0, 0x38])
    np.testing.assert_array_equal(load_rows([0xE0, 0xF1, 0, 0x3C, 0, 0xC0], 4), [-2, -1, 12, 13])


def test_the_function_is_added_once_and_old_opsets_are_refused() -> None:
    made = Case().model()
    ensure_rotated_attention(made)
    assert [key for key in made.functions if key[1] == OP_TYPE] == [(DOMAIN, OP_TYPE, "")]
    assert made.opset_imports[DOMAIN] == 1
    assert {function.opset_imports[""] for function in made.functions.values()} == {21}
    assert {node.domain for function in made.functions.values() for node in function} == {""}
    made.opset_imports[""] = 20
    with pytest.raises(InputRefused, match="needs 21 or later"):
        ensure_rotated_attention(made)


def test_every_attribute_stands_on_the_node() -> None:
    for case in (Case(), Case(rotate=False)):
        node = case.node()
        assert {name: attribute.type for name, attribute in node.attributes.items()} == ATTRIBUTES
        assert [output.name for output in node.outputs] == list(OUTPUTS)
        assert node.outputs[1].shape == ir.Shape(["batch", 2, None, 12])
        assert node.attributes["size"].as_int() == (16 if case.rotate else 1)


def test_forms_that_are_refused() -> None:
    for change, words in (
        ({"num_heads": 5}, "share 2 heads of keys among 5"),
        ({"head_size": 15}, "heads of 15 channels"),
        ({"bits": 3}, "caches of 3 bits"),
        ({"softcap": -1.0}, "bound scores by -1"),
        ({"window": -2}, "window of -2"),
    ):
        known = {"num_heads": 4, "kv_num_heads": 2, "head_size": 16, "bits": 4, "score_scale": 1.0}
        with pytest.raises(UsageError, match=words):
            AttentionForm(**(known | change))
    case = Case()
    rotation = transform_attributes(choose_matrix(12, rotations="hadamard", seed=None))
    with pytest.raises(UsageError, match="rotate heads of 16 channels in blocks of 12"):
        rotated_attention_node(*case.node().inputs, OUTPUTS, case.form, rotation=rotation)


def test_bfloat16_inputs_are_taken_as_they_are() -> None:
    """What is stored is what the rounded input says, not more."""
    case = Case(dtype=ir.DataType.BFLOAT16, rotate=False)
    given = case.inputs()
    assert given["value"].dtype == ml_dtypes.bfloat16
    rows = run(session(case.model(), library=False), given)[2]
    exact = given["value"].astype(np.float32).reshape(1, 3, 2, 16).swapaxes(1, 2)
    np.testing.assert_array_equal(rows[:, :, 4:], store_rows(exact, 4))
