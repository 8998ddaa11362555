"""``HadamardTransform``: kernel, function body, reference evaluator and fold agree."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from graphrot.errors import InputRefused, UsageError
from graphrot.ops.hadamard import DOMAIN, OP_TYPE, ensure_function, hadamard_node
from graphrot.ops.library import describe, register
from graphrot.ops.reference import evaluate_hadamard, hadamard_transform
from graphrot.plan.types import MatrixRef
from graphrot.rotation.orthogonal import build_matrix, choose_matrix

SIZES = [12, 20, 28, 36, 44, 76, 100, 148, 172, 344, 924, 13696]
TOLERANCE = {ir.DataType.FLOAT: 4e-6, ir.DataType.FLOAT16: 4e-3, ir.DataType.BFLOAT16: 3e-2}
"""Largest error for normal inputs: results reach about 5; a few units of the last place of the dtype."""


def reference(dim: int) -> MatrixRef:
    return choose_matrix(dim, rotations="hadamard", seed=None)


def model(ref: MatrixRef, *, dtype: ir.DataType = ir.DataType.FLOAT, blocks: int = 1, opset: int = 21) -> ir.Model:
    shape = ir.Shape(["batch", "tokens", ref.dim * blocks])
    x = ir.Value(name="x", shape=shape, type=ir.TensorType(dtype))
    node = hadamard_node(x, ref, "y")
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": opset}, name="g")
    result = ir.Model(graph, ir_version=10)
    ensure_function(result)
    return result


def session(
    source: ir.Model | onnx.ModelProto, *, library: bool, threads: int = 1, level: int = 99
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel(level)
    if library:
        register(options)
    proto = ir.to_proto(source) if isinstance(source, ir.Model) else source
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(ready: ort.InferenceSession, x: np.ndarray, width: int | None = None) -> np.ndarray:
    """``y``, whose last axis is ``width`` long, or as long as that of ``x``."""
    if x.dtype != ml_dtypes.bfloat16:
        return np.asarray(ready.run(None, {"x": x})[0])
    binding = ready.io_binding()
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy_with_onnx_type(x.view(np.uint16), 16))
    y = np.empty((*x.shape[:-1], width or x.shape[-1]), np.uint16)
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy_with_onnx_type(y, 16))
    ready.run_with_iobinding(binding)
    return y.view(ml_dtypes.bfloat16)


def tokens(dim: int, *, shape: tuple[int, ...] = (2, 3), dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(dim).standard_normal((*shape, dim)).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_kernel_body_reference_and_fold_agree(size: int) -> None:
    ref = reference(size)
    made, x = model(ref), tokens(size)
    folded = build_matrix(ref).rotate(x, -1)
    assert np.abs(evaluate_hadamard(made.graph[0], x) - folded).max() <= 1e-6
    if ref.construction == "hadamard":  # the scale and Hartley's factor are rounded to float32 in the node
        factor = made.graph[0].attributes["factor"].as_tensor().numpy()
        exact = hadamard_transform(x, size=size, factor=factor, scale=size**-0.5)
        assert np.abs(exact - folded).max() <= 1e-12
    by_body = run(session(made, library=False), x)
    by_kernel = run(session(made, library=True), x)
    assert by_body.dtype == by_kernel.dtype == np.float32
    assert np.abs(by_body - folded).max() <= TOLERANCE[ir.DataType.FLOAT]
    assert np.abs(by_kernel - folded).max() <= TOLERANCE[ir.DataType.FLOAT]
    back = build_matrix(ref).rotate_back(by_kernel, -1)
    assert np.abs(back - x).max() <= TOLERANCE[ir.DataType.FLOAT]


@pytest.mark.parametrize("size", [12, 64, 96, 344, 13696])
def test_checker_and_reference_evaluator(size: int) -> None:
    ref = reference(size)
    proto = ir.to_proto(model(ref))
    onnx.checker.check_model(proto, full_check=True)
    x = tokens(size)
    y = ReferenceEvaluator(proto).run(None, {"x": x})[0]
    assert np.abs(y - build_matrix(ref).rotate(x, -1)).max() <= TOLERANCE[ir.DataType.FLOAT]


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
@pytest.mark.parametrize("size", [1, 12, 96, 512, 13696])
def test_half_types(dtype: ir.DataType, library: bool, size: int) -> None:
    ref = reference(size)
    x = tokens(size, dtype=dtype.numpy())
    y = run(session(model(ref, dtype=dtype), library=library), x)
    assert y.dtype == x.dtype
    assert np.abs(y.astype(np.float64) - build_matrix(ref).rotate(x, -1)).max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("library", [False, True])
def test_large_halves_do_not_overflow_on_the_way(library: bool) -> None:
    x = np.full((1, 1, 1536), 1500.0, np.float16)
    y = run(session(model(reference(1536), dtype=ir.DataType.FLOAT16), library=library), x)
    assert np.isfinite(y).all()
    assert np.abs(y.astype(np.float64)).max() > 10_000


@pytest.mark.parametrize("level", [0, 99])
@pytest.mark.parametrize("opset", [15, 18, 21, 23])
def test_body_at_both_ends_of_opsets_and_optimizations(opset: int, level: int) -> None:
    ref, x = reference(96), tokens(96)
    y = run(session(model(ref, opset=opset), library=False, level=level), x)
    assert np.abs(y - build_matrix(ref).rotate(x, -1)).max() <= TOLERANCE[ir.DataType.FLOAT]


def test_blocks_along_the_axis_and_block_diagonal_matrices() -> None:
    x = tokens(80 * 3)
    for ref, blocks in [(reference(80), 3), (choose_matrix(240, rotations="block-hadamard", seed=None), 1)]:
        made = model(ref, blocks=blocks)
        rotation = build_matrix(ref)
        expected = np.concatenate([rotation.rotate(part, -1) for part in np.split(x, blocks, axis=-1)], axis=-1)
        for library in (False, True):
            assert np.abs(run(session(made, library=library), x) - expected).max() <= TOLERANCE[ir.DataType.FLOAT]


@pytest.fixture(scope="module")
def sessions() -> dict[tuple[int, bool, int], ort.InferenceSession]:
    sizes = [1, 2, 12, 24, 40, 64, 96, 256, 344]
    return {
        (size, library, threads): session(anywhere(model(reference(size))), library=library, threads=threads)
        for size in sizes
        for library, threads in [(False, 1), (True, 1), (True, 2)]
    }


def anywhere(made: ir.Model) -> onnx.ModelProto:
    """The same with inputs and outputs of any shape."""
    proto = ir.to_proto(made)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    return proto


@given(
    size=st.sampled_from([1, 2, 12, 24, 40, 64, 96, 256, 344]),
    lead=st.lists(st.integers(0, 7), min_size=0, max_size=3),
    blocks=st.integers(1, 3),
)
def test_any_shape(
    sessions: dict[tuple[int, bool, int], ort.InferenceSession], size: int, lead: list[int], blocks: int
) -> None:
    x = np.random.default_rng(blocks).standard_normal((*lead, size * blocks)).astype(np.float32)
    split = x.reshape(*lead, blocks, size)
    expected = build_matrix(reference(size)).rotate(split, -1).reshape(x.shape)
    for library, threads in [(False, 1), (True, 1), (True, 2)]:
        y = run(sessions[size, library, threads], x)
        assert y.shape == x.shape
        assert np.abs(y - expected).max(initial=0.0) <= TOLERANCE[ir.DataType.FLOAT]


@pytest.mark.parametrize("size", [12, 576, 4864])
def test_threads_change_no_bit(size: int) -> None:
    made, x = model(reference(size)), tokens(size, shape=(7, 67))
    one = run(session(made, library=True, threads=1), x)
    two = run(session(made, library=True, threads=2), x)
    assert np.array_equal(one, two)
    assert np.abs(one - build_matrix(reference(size)).rotate(x, -1)).max() <= TOLERANCE[ir.DataType.FLOAT]


def test_values_that_are_not_finite_stay_in_their_block() -> None:
    x = tokens(48, shape=(1, 5))
    x[0, 1, 3] = np.nan
    x[0, 3, 0] = np.inf
    y = run(session(model(reference(48)), library=True), x)
    assert np.isnan(y[0, 1]).all()
    assert not np.isfinite(y[0, 3]).any()
    assert np.isfinite(y[0, [0, 2, 4]]).all()


def test_the_input_is_kept_when_it_is_used_again() -> None:
    """In place is allowed, and must not reach a tensor that others read."""
    made = model(reference(64))
    x = made.graph.inputs[0]
    start = ir.Node("", "Neg", [x], outputs=[ir.Value(name="n", shape=x.shape, type=x.type)])
    node = made.graph[0]
    node.replace_input_with(0, start.outputs[0])
    z = ir.Value(name="z", shape=x.shape, type=x.type)
    last = ir.Node("", "Add", [start.outputs[0], node.outputs[0]], outputs=[z])
    made.graph.insert_before(node, start)
    made.graph.append(last)
    made.graph.outputs[0] = last.outputs[0]
    values = tokens(64)
    y = run(session(made, library=True), values)
    assert np.abs(y - (-values - build_matrix(reference(64)).rotate(values, -1))).max() <= 1e-5


def run_with(isa: str, code: str) -> str:
    """What the code prints in a process of its own with ``GRAPHROT_ISA``."""
    environment = {**os.environ, "GRAPHROT_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("isa", [*(isa["name"] for isa in describe()["isas"] if isa["available"]), ""])
def test_paths_by_environment(isa: str) -> None:
    used = run_with(
        isa,
        "import ctypes, numpy as np\n"
        "from graphrot.ops.library import library_path\n"
        "from tests.ops import test_hadamard_op as t\n"
        "library = ctypes.CDLL(str(library_path()))\n"
        "library.graphrot_isa.restype = ctypes.c_char_p\n"
        "x = t.tokens(4864)\n"
        "y = t.run(t.session(t.model(t.reference(4864)), library=True), x)\n"
        "assert np.abs(y - t.build_matrix(t.reference(4864)).rotate(x, -1)).max() <= 4e-6\n"
        "print(library.graphrot_isa().decode())\n",
    )
    best = next(entry["name"] for entry in describe()["isas"] if entry["available"])
    assert used == (isa or best)


def replace_attributes(node: onnx.NodeProto, attributes: dict[str, object]) -> None:
    """Give the node, which is called "here" then, other attributes (None: take it away)."""
    kept = [a for a in node.attribute if a.name not in attributes]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in attributes.items() if v is not None)
    node.name = "here"


def changed(**attributes: object) -> onnx.ModelProto:
    """A model with a node of size 96 whose attributes were replaced (None: removed)."""
    proto = ir.to_proto(model(reference(96)))
    replace_attributes(proto.graph.node[0], attributes)
    return proto


FACTOR = model(reference(96)).graph[0].attributes["factor"].as_tensor().numpy()


def tensor(array: np.ndarray) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.ascontiguousarray(array))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"size": None}, r"attribute 'size' \(int\) is missing"),
        ({"size": "big"}, r"attribute 'size' \(int\) is missing or of another type"),
        ({"factor": None}, r"attribute 'factor' \(tensor\) is missing"),
        ({"size": 90}, "'size' is 90, which is not the order 12 of the factor times a power of two"),
        ({"size": 0}, "'size' is 0"),
        ({"scale": -1.0}, "'scale' must be a positive number"),
        ({"factor": tensor(FACTOR[:, :6])}, "'factor' must be a square matrix"),
        ({"factor": tensor(FACTOR.astype(np.float64))}, "'factor' must hold int8 or float"),
        ({"factor": tensor(np.abs(FACTOR))}, r"'factor' is not orthogonal: factor \* factor\^T must be 12 \* I"),
        ({"left": tensor(np.ones((2, 2), np.int8))}, "'left' must be a Sylvester matrix"),
        ({"right": tensor(np.ones((1, 1), np.int8))}, "do not fit together"),
        ({"shape": [-1, 12, 4, 2]}, "do not fit together"),
    ],
)
def test_kernels_refuse_wrong_attributes(attributes: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=words) as caught:
        session(changed(**attributes), library=True)
    assert "node 'here'" in str(caught.value)


def test_a_wrong_axis_is_refused_at_run_time() -> None:
    ready = session(anywhere(model(reference(12))), library=True)
    with pytest.raises(Exception, match="13 channels, which is no multiple of size 12"):
        ready.run(None, {"x": np.ones((2, 13), np.float32)})
    with pytest.raises(Exception, match="no channels"):
        ready.run(None, {"x": np.array(1.0, np.float32)})


def test_nodes_take_no_signs_and_no_dense_matrices() -> None:
    x = ir.Value(name="x")
    for ref in (choose_matrix(12, rotations="hadamard", seed=0), choose_matrix(12, rotations="random", seed=0)):
        with pytest.raises(UsageError, match="takes no signs"):
            hadamard_node(x, ref, "y")
    with pytest.raises(UsageError, match="'file' has no fast transform"):
        hadamard_node(x, MatrixRef("file", 12, file="f", key="k"), "y")


def test_the_function_is_added_once_and_old_opsets_are_refused() -> None:
    made = model(reference(12))
    function = made.functions[DOMAIN, OP_TYPE, ""]
    ensure_function(made)
    assert made.functions[DOMAIN, OP_TYPE, ""] is function
    assert made.opset_imports[DOMAIN] == 1
    made.graph.opset_imports[""] = 14
    with pytest.raises(InputRefused, match="opset 14"):
        ensure_function(made)


def test_reference_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="does not divide size 18"):
        hadamard_transform(np.ones(18), size=18, factor=np.eye(3) * 3**0.5, scale=1.0)
    with pytest.raises(UsageError, match="size 12 cannot act"):
        hadamard_transform(np.ones((2, 13)), size=12, factor=FACTOR, scale=1.0)


@pytest.mark.parametrize("library", [True, False])
def test_an_input_of_unknown_rank(library: bool) -> None:
    """The shape inference of the runtime knows nothing of ``r``; that is no scalar."""
    node = ir.serde.serialize_node(hadamard_node(ir.Value(name="r"), reference(20), "h"))
    built = ir.to_proto(model(reference(20)))
    del built.graph.node[:], built.graph.input[:], built.graph.output[:]
    built.graph.node.extend(
        [
            onnx.helper.make_node("Concat", ["u", "v", "width"], ["shape"], axis=0),
            onnx.helper.make_node("Reshape", ["x", "shape"], ["r"]),
            node,
            onnx.helper.make_node("Reshape", ["h", "rows"], ["y"]),
        ]
    )
    built.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, kind, [f"{name}{axis}" for axis in range(rank)])
        for name, kind, rank in (("x", onnx.TensorProto.FLOAT, 2), ("u", onnx.TensorProto.INT64, 1))
    )
    built.graph.input.append(onnx.helper.make_tensor_value_info("v", onnx.TensorProto.INT64, ["v0"]))
    built.graph.output.append(onnx.ValueInfoProto(name="y"))
    built.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(numbers), name) for name, numbers in (("width", [20]), ("rows", [-1, 20]))
    )
    x = np.random.default_rng(0).standard_normal((6, 20), np.float32)
    (y,) = session(built, library=library).run(None, {"x": x, "u": np.array([2]), "v": np.array([3])})
    np.testing.assert_allclose(y, run(session(model(reference(20)), library=False), x[None])[0], atol=4e-6)
