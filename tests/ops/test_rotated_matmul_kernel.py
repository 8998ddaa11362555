"""``RotatedMatMul`` with the library: against the float64 reference, its function, and itself on threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrot.ops.library import describe
from graphrot.ops.reference import integer_product, weight_codes
from tests.ops.test_hadamard_op import replace_attributes, run, run_with, session
from tests.ops.test_rotated_matmul_function import LEVELS, OTHERS, SMALL, Case, check

WIDE = Case(k=576, n=200, group=128, block=128, rotate=True, bias=True)
AVAILABLE = [isa["name"] for isa in describe()["isas"] if isa["available"]]


@pytest.mark.parametrize("case", [*SMALL, *OTHERS, WIDE], ids=str)
def test_every_form(case: Case) -> None:
    proto, x = ir.to_proto(case.model()), case.rows(2, 3)
    for level in LEVELS[::3]:
        check(case, run(session(proto, library=True, level=level), x), x)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_half_types(dtype: ir.DataType, bits: Literal[4, 8]) -> None:
    case = Case(bits=bits, dtype=dtype, bias=True, rotate=True, half_scales=True)
    x = case.rows(2, 3)
    check(case, run(session(case.model(), library=True), x, case.n), x)


@pytest.fixture(scope="module")
def sessions() -> dict[tuple[Case, int], ort.InferenceSession]:
    cases = [Case(), Case(k=100, n=33, bits=8, group=64, block=64, zeros=True), WIDE]
    return {
        (case, threads): session(case.model(anywhere=True), library=True, threads=threads)
        for case in cases
        for threads in (1, 2, 4)
    }


@given(data=st.data(), lead=st.lists(st.integers(0, 9), max_size=3))
def test_any_shape_on_any_number_of_threads(
    sessions: dict[tuple[Case, int], ort.InferenceSession], data: st.DataObject, lead: list[int]
) -> None:
    case = data.draw(st.sampled_from(sorted({case for case, _ in sessions}, key=str)))
    x = np.random.default_rng(len(lead)).standard_normal((*lead, case.k)).astype(np.float32)
    results = [run(sessions[case, threads], x) for threads in (1, 2, 4)]
    assert results[0].shape == (*lead, case.n)
    if x.size:
        check(case, results[0], x)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("rows", [255, 256, 257, 700])
def test_panels_of_rows(rows: int) -> None:
    x = WIDE.rows(rows)
    results = [run(session(WIDE.model(anywhere=True), library=True, threads=n), x) for n in (1, 2)]
    check(WIDE, results[0], x)
    np.testing.assert_array_equal(results[0], results[1])


def test_many_callers_of_one_session() -> None:
    ready = session(WIDE.model(anywhere=True), library=True, threads=2)
    inputs = [WIDE.rows(rows + 3)[3:] for rows in (1, 5, 64, 3, 129, 1, 17, 300)]
    alone = [run(ready, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for expected, found in zip(alone, pool.map(lambda x: run(ready, x), inputs), strict=True):
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("case", SMALL[::3], ids=str)
def test_rows_that_are_not_finite_and_rows_of_zeros(case: Case) -> None:
    x = case.rows(1, 6)
    x[0, 3, 5], x[0, 4, 0] = np.nan, -np.inf
    y = run(session(case.model(), library=True), x)
    assert np.isnan(y[0, 3:5]).all()
    check(case, y[:, [0, 1, 2, 5]], x[:, [0, 1, 2, 5]])
    np.testing.assert_array_equal(y[0, 1], case.inputs().get("bias", np.zeros(case.n)))


def whole_rows(case: Case, *shape: int) -> np.ndarray:
    """Rows that are their own codes: whole numbers, the largest of them the largest code."""
    levels = (1 << (case.activation_bits - 1)) - 1
    x = np.random.default_rng(1).integers(-levels, levels + 1, (*shape, case.k)).astype(np.float32)
    x[..., case.k // 2] = levels
    return x


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize(
    "case", [replace(case, rotate=False, bias=False) for case in (*SMALL[::4], Case(k=600, n=130), OTHERS[1])], ids=str
)
def test_sums_are_those_of_integers_to_the_bit(case: Case, rows: int) -> None:
    """With scales of one, float32 shows the sums as they are."""
    proto = ir.to_proto(case.model(anywhere=True))
    (scales,) = (tensor for tensor in proto.graph.initializer if tensor.name == "scales")
    scales.CopyFrom(onnx.numpy_helper.from_array(np.ones_like(case.inputs()["scales"]), "scales"))
    x, known = whole_rows(case, rows), case.inputs()
    weights = weight_codes(known["B"], known.get("zero_points"), in_features=case.k, bits=case.bits)
    want = integer_product(x, 1, weights, np.ones_like(known["scales"]), group=case.group)
    assert np.abs(want).max() < 1 << 24
    np.testing.assert_array_equal(run(session(proto, library=True), x), want)


def test_kernel_and_function_agree() -> None:
    x = WIDE.rows(4, 7)
    by_kernel, by_function = (run(session(WIDE.model(), library=library), x) for library in (True, False))
    slack = 4e-6 * np.abs(by_function).max() + WIDE.slack(x)
    assert (np.abs(by_kernel - by_function) <= slack).all()


@pytest.mark.parametrize("isa", AVAILABLE)
def test_paths_by_environment(isa: str) -> None:
    used = run_with(
        isa,
        "from graphrot.ops.library import describe\n"
        "from tests.ops import test_rotated_matmul_kernel as t\n"
        "for case in (t.WIDE, t.Case(k=100, n=33, bits=8, zeros=True)):\n"
        "    for rows in (1, 3, 70):\n"
        "        x = case.rows(rows + 3)[3:]\n"
        "        t.check(case, t.run(t.session(case.model(anywhere=True), library=True), x), x)\n"
        "print(describe()['selected'])\n",
    )
    assert used == isa


ATTRIBUTES: list[tuple[dict[str, object], str]] = [
    ({"K": None}, r"attribute 'K' \(int\) is missing"),
    ({"K": 0}, "'K' is 0; it must be from 1"),
    ({"K": 97}, r"attributes 'levels' and 'scales_shape' do not go with|input 'B' has the shape"),
    ({"N": 25}, "do not go with"),
    ({"bits": 5}, r"input 'B' has the shape|weights have 4 or 8 bits"),
    ({"bits": 2}, "'bits' is 2; it must be from 4 to 8"),
    ({"activation_bits": 5}, "'activation_bits' is 5; it must be 4 or 8"),
    ({"activation_bits": 4}, "do not go with"),
    ({"block_size": 64}, "'block' is 32, and 'block_size' 64"),
    ({"block": 24, "scales_shape": [24, 4]}, r"'B' has the shape"),
    ({"rotate": 2}, "'rotate' is 2; it must be from 0 to 1"),
    ({"levels": 63.0}, "do not go with"),
    ({"scales_shape": [24, 4]}, "do not go with"),
    ({"size": 40}, "no multiple of the transform's size 40|do not fit together|not the order"),
]


@pytest.mark.parametrize(("attributes", "words"), ATTRIBUTES)
def test_wrong_attributes_are_refused(attributes: dict[str, object], words: str) -> None:
    proto = ir.to_proto(Case(rotate=True).model())
    replace_attributes(proto.graph.node[0], attributes)
    with pytest.raises(Exception, match=words) as caught:
        session(proto, library=True)
    assert "node 'here'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        (
            "B",
            np.zeros((24, 3, 15), np.uint8),
            r"'B' has the shape \[24, 3, 15\]; by the attributes",
        ),
        ("B", np.zeros((24, 3, 16), np.int8), r"'tensor\(int8\)' of input parameter \(B\)"),
        ("scales", np.ones((24, 3), np.float32), r"'scales' has the shape \[24, 3\]; by the attributes it is \[24\]"),
        ("scales", np.ones(24, np.float64), "'scales' must hold float or float16"),
        ("zero_points", np.full((24, 2), 0x87, np.uint8), "'zero_points' differs within row 0, which has one scale"),
        ("bias", np.ones(23, np.float32), r"'bias' has the shape \[23\]"),
    ],
)
def test_wrong_inputs_are_refused(name: str, array: np.ndarray, words: str) -> None:
    proto = ir.to_proto(Case(zeros=True, bias=True).model())
    (tensor,) = (tensor for tensor in proto.graph.initializer if tensor.name == name)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
    with pytest.raises(Exception, match=words):
        session(proto, library=True)


@pytest.mark.parametrize("name", ["B", "scales", "bias"])
def test_weights_must_be_initializers(name: str) -> None:
    proto = ir.to_proto(Case(bias=True).model())
    (tensor,) = (tensor for tensor in proto.graph.initializer if tensor.name == name)
    shape = onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
    proto.graph.initializer.remove(tensor)
    proto.graph.input.append(shape)
    with pytest.raises(Exception, match=f"input '{name}' must be an initializer"):
        session(proto, library=True)


def test_a_wrong_axis_is_refused_at_run_time() -> None:
    ready = session(Case().model(anywhere=True), library=True)
    with pytest.raises(Exception, match="the last axis of the input has 95 channels, and K is 96"):
        ready.run(None, {"x": np.ones((2, 95), np.float32)})


def test_shapes_are_inferred(tmp_path: Path) -> None:
    proto = ir.to_proto(Case().model())
    (output,) = proto.graph.output
    output.type.tensor_type.ClearField("shape")
    ready = session(proto, library=True)
    assert ready.get_outputs()[0].shape == ["batch", "tokens", 24]


MEMORY = """
import sys
import onnxruntime as ort
from graphrot.ops.library import register

def own():  # memory that is no mapped file, in bytes
    lines = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024

options = ort.SessionOptions()
options.intra_op_num_threads = 1
register(options)
before = own()
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
print(own() - before)
"""


def test_memory_holds_the_weights_once(tmp_path: Path) -> None:
    """What was repacked is the only copy; the original stays a mapped file."""
    case = Case(k=4096, n=16384, group=128, block=128)  # 32 MiB of codes, 2 MiB of scales
    proto = ir.to_proto(case.model())
    path = tmp_path / "model.onnx"
    onnx.save_model(proto, path, save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command: Sequence[str] = [sys.executable, "-c", MEMORY, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    packed = case.k * case.n // 2 + 4 * case.n * case.layout.blocks
    assert packed <= int(done.stdout) <= 1.3 * packed + (4 << 20)
