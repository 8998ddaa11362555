"""``RotatedAttention`` by the library's kernels, as ONNX Runtime runs them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument, RuntimeException

from graphrot.ops.library import describe
from tests.ops.attention import OUTPUTS, Case, check, run
from tests.ops.test_hadamard_op import session

ROUNDED = 5e-4
"""Queries and weights are rounded to 16 bits: some hundred of them make that of the largest result at most."""

CASES = [
    Case(),
    Case(head_size=64, bits=8, past=300, total=303, lengths=(303,)),
    Case(head_size=80, heads=6, kv_heads=1, past=20, total=23, lengths=(23,)),
    Case(head_size=96, bits=8, rotate=False),
    Case(head_size=128, past=0, total=1, lengths=(1,), tokens=1),
    Case(head_size=64, past=0, total=20, lengths=(20, 3, 11), tokens=20),
    Case(head_size=64, past=600, total=513, lengths=(513, 4, 256), tokens=1, mask=(3, 1, 1, 513)),
    Case(head_size=32, softcap=2.0, window=5, past=30, total=33, lengths=(33,)),
    Case(head_size=32, causal=False, mask=(2, 4, 3, 7), lengths=(7, 5)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_the_kernel_is_its_definition(case: Case, dtype: ir.DataType) -> None:
    made = case.but(dtype=dtype)
    given = made.inputs()
    tolerance = None if dtype == ir.DataType.BFLOAT16 else ROUNDED if dtype == ir.DataType.FLOAT else 1e-3
    check(made, given, run(session(made.model(), library=True), given), tolerance)


def test_on_the_path_for_every_machine_it_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHROT_ISA", "scalar")
    for case in CASES:
        given = case.inputs()
        check(case, given, run(session(case.model(), library=True), given))


def test_threads_change_nothing() -> None:
    for tokens in (1, 40):
        case = Case(head_size=64, past=2000, total=2000 + tokens, lengths=(2000 + tokens,), tokens=tokens)
        given = case.inputs()
        one, two = (run(session(case.model(), library=True, threads=threads), given) for threads in (1, 2))
        for first, second in zip(one, two, strict=True):
            np.testing.assert_array_equal(first, second)


def test_one_buffer_is_written_in_place() -> None:
    case = Case(head_size=64, past=300, total=260, lengths=(260, 9))
    given = case.inputs()
    ready = session(case.model(), library=True)
    want = run(ready, given)
    binding = ready.io_binding()
    buffers = {name: ort.OrtValue.ortvalue_from_numpy(given[name].copy()) for name in ("past_key", "past_value")}
    for name, array in given.items():
        binding.bind_ortvalue_input(name, buffers.get(name) or ort.OrtValue.ortvalue_from_numpy(array))
    binding.bind_output(OUTPUTS[0])
    for name, buffer in zip(OUTPUTS[1:], buffers.values(), strict=True):
        binding.bind_ortvalue_output(name, buffer)
    ready.run_with_iobinding(binding)
    got = [binding.get_outputs()[0], *buffers.values()]
    for found, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("past_key", lambda x: x[:, :1], "'past_key' has the shape .*kv_num_heads = 2"),
        ("past_value", lambda x: x[:, :, 1:], "'past_value' has the shape"),
        ("key", lambda x: x[:, :2], "'key' has the shape"),
        ("value", lambda x: x[..., :16], "'value' has the shape"),
        ("query", lambda x: x[..., :48], "'query' has the shape .*num_heads . head_size = 64"),
        ("seqlens_k", lambda x: np.concatenate([x, x]), "'seqlens_k' has the shape"),
        ("seqlens_k", lambda x: x + 1, "'seqlens_k' is 7 for row 0: the cache has 7 slots"),
        ("seqlens_k", lambda x: x - 8, "'seqlens_k' is -2 for row 0"),
        ("total", lambda x: x - 9, "'total_sequence_length' is -2"),
        ("mask", lambda x: x[..., :6], "'mask' has 6 slots in its last axis, and row 0 uses 7"),
        ("mask", lambda x: np.concatenate([x] * 3, axis=1), "'mask' has the shape .*each of the first three is 1"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(name: str, change: object, words: str) -> None:
    assert callable(change)
    case = Case(mask=(1, 1, 1, 7))
    made = case.model()
    for value in made.graph.inputs:  # so that it is the kernel that sees it
        value.shape = ir.Shape([None] * len(value.shape or ()))
    given = case.inputs()
    given[name] = np.ascontiguousarray(change(given[name]))
    with pytest.raises(InvalidArgument, match=words):
        run(session(made, library=True), given)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("row_bytes", 13, "'row_bytes' is 13, and by 'head_size' and 'bits' a row has 12"),
        ("bits", 5, "'bits' is 5"),
        ("num_heads", 5, "no multiple of 'kv_num_heads' 2"),
        ("causal", 2, "'causal' is 2"),
        ("local_window_size", -3, "'local_window_size' is -3"),
    ],
)
def test_a_node_that_contradicts_itself_is_refused_by_its_name(name: str, value: int, words: str) -> None:
    case = Case()
    made = case.model()
    node = next(iter(made.graph))
    node.name = "attention of layer 3"
    node.attributes[name] = ir.AttrInt64(name, value)
    if name == "bits":
        node.attributes["row_bytes"] = ir.AttrInt64("row_bytes", case.head_size + 4)
    with pytest.raises(RuntimeException, match=f"attention of layer 3.*{words}"):
        session(made, library=True)


def test_it_is_among_what_the_library_says_it_has() -> None:
    kernels = [kernel["type"] for kernel in describe()["kernels"] if kernel["op"] == "RotatedAttention"]
    assert kernels == ["float", "float16", "bfloat16"]
