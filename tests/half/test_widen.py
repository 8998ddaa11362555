"""Half sources become float32, number by number, and their types are remembered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphrot.errors import InputRefused
from graphrot.model.widen import float_types, widen
from tests.half.graphs import BF16, F16, F32, HALVES, graph, made_by, narrowed, run, types_of

# The parser of ONNX text takes the bits of float16 numbers: 15360 is 1, 14336 a half, 16384 is 2.
MIXED = """(float16[n, 8] x) => (float16[n, 8] y) {
    wide = Cast<to = 1>(x)
    two = Constant<value_float = 2.0>()
    square = Pow(wide, two)
    narrow = Cast<to = 10>(square)
    h = MatMul(narrow, weight)
    one = Constant<value = float16 {15360}>()
    shape = Constant<value_ints = [8]>()
    filled = ConstantOfShape<value = float16[1] {14336}>(shape)
    s = Add(h, one)
    y = Mul(s, filled)
}"""


def mixed() -> ir.Model:
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float16)
    return graph(MIXED, weight=weight)


def test_a_graph_with_a_float32_island(tmp_path: Path) -> None:
    source = mixed()
    feeds = {"x": np.random.default_rng(1).standard_normal((3, 8)).astype(np.float16)}
    expected = run(source, tmp_path / "source", feeds)[0].astype(np.float32)
    found = float_types(source)
    assert found is not None and found.name == "float16" and found.ends == {"x": F16, "y": F16}
    assert found.weight_bytes == 128
    model, path = widen(source, tmp_path / "wide")
    assert path.parent == tmp_path / "wide" and path.is_file()
    types = types_of(model)
    assert not set(types.values()) & set(HALVES) and types["x"] == types["y"] == F32
    assert made_by(model, "Cast") == []
    np.testing.assert_allclose(run(model, tmp_path / "run", feeds)[0], expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.name)
def test_weights_keep_their_numbers(half: ir.DataType, tmp_path: Path) -> None:
    kind = {F16: "float16", BF16: "bfloat16"}[half]
    weight = (np.random.default_rng(2).standard_normal((16, 4)) * 1e-4).astype(half.numpy())
    text = f"({kind}[n, 16] x) => ({kind}[n, 4] y) {{ y = MatMul(x, weight) }}"
    model, _ = widen(graph(text, weight=weight), tmp_path)
    content = model.graph.initializers["weight"].const_value
    assert content is not None and content.dtype == F32
    assert np.array_equal(content.numpy(), weight.astype(np.float32))


def test_subgraphs_and_functions(tmp_path: Path) -> None:
    text = """(float16[n, 4] x, bool c) => (float16[n, 4] y) {
        y = If(c) <
            then_branch = t () => (float16[n, 4] a) { k = Constant<value = float16 {16384}>() a = Mul(x, k) },
            else_branch = e () => (float16[n, 4] b) { f = Cast<to = 1>(x) b = Cast<to = 10>(f) }
        >
    }"""
    model, _ = widen(graph(text), tmp_path / "wide")
    x = np.array([[1.5, -2, 3, 4]], np.float32)
    for choice, expected in ((True, 2 * x), (False, x)):
        found = run(model, tmp_path / str(choice), {"x": x, "c": np.array(choice)})[0]
        assert found.dtype == np.float32 and np.array_equal(found, expected)


def test_subgraphs_in_the_body_of_a_function(tmp_path: Path) -> None:
    head = '<ir_version: 10, opset_import: ["" : 21, "mine" : 1]>'
    text = f"""{head}
    g (float16[n, 4] x, bool c) => (float16[n, 4] y) {{ y = mine.choose(x, c) }}
    <domain: "mine", opset_import: ["" : 21]>
    choose (u, c) => (v) {{
        v = If(c) <
            then_branch = t () => (float16[n, 4] a) {{ k = Constant<value = float16 {{16384}}>() a = Mul(u, k) }},
            else_branch = e () => (float16[n, 4] b) {{ f = Cast<to = 1>(u) b = Cast<to = 10>(f) }}
        >
    }}"""
    source = ir.from_proto(onnx.parser.parse_model(text))
    found = float_types(source)
    assert found is not None and found.name == "float16"
    model, _ = widen(source, tmp_path / "wide")
    x = np.array([[1.5, -2, 3, 4]], np.float32)
    for choice, expected in ((True, 2 * x), (False, x)):
        assert np.array_equal(run(model, tmp_path / str(choice), {"x": x, "c": np.array(choice)})[0], expected)


SEQUENCE = """(float16[n] x, int64 i) => (float16[n] y)
<seq(float16[n]) some, seq(float16[n]) more>
{
    some = SequenceEmpty<dtype = 10>()
    more = SequenceInsert(some, x)
    y = SequenceAt(more, i)
}"""


def test_sequences_inside(tmp_path: Path) -> None:
    model, _ = widen(graph(SEQUENCE), tmp_path / "wide")
    feeds = {"x": np.array([1.5, -2.0]), "i": np.array(0)}
    assert np.array_equal(run(model, tmp_path / "run", feeds | {"x": feeds["x"].astype(np.float32)})[0], feeds["x"])
    narrowed(model, F16, tmp_path / "store", "x", "y")
    found = run(model, tmp_path / "half", feeds)[0]
    assert found.dtype == np.float16 and np.array_equal(found, feeds["x"])


def test_a_sequence_of_halves_as_an_output_is_refused() -> None:
    text = "(float16[n] x) => (seq(float16[n]) y) { y = SequenceConstruct(x) }"
    with pytest.raises(InputRefused, match="is not a tensor"):
        float_types(graph(text))


def test_a_cast_that_makes_an_output_stays(tmp_path: Path) -> None:
    model, _ = widen(graph("(float16[n] x) => (float[n] y) { y = Cast<to = 1>(x) }"), tmp_path)
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert np.array_equal(run(model, tmp_path / "run", {"x": np.ones(3, np.float32)})[0], np.ones(3))


def test_a_float32_model_is_left_alone() -> None:
    assert float_types(graph("(float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }")) is None


def test_a_file_with_float32_ends_counts_by_its_weights() -> None:
    text = """(float[n, 8] x) => (float[n, 8] y) {
        h = Cast<to = 10>(x) z = MatMul(h, weight) y = Cast<to = 1>(z)
    }"""
    found = float_types(graph(text, weight=np.ones((8, 8), np.float16)))
    assert found is not None and found.name == "float16" and found.ends == {}
