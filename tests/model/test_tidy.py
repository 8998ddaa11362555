"""Each cleaning step alone, on graphs small enough to read."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphrot.errors import InputRefused
from graphrot.model.tidy import drop_idle_casts, raise_opset, share_tables, store_transposed


def _parse(text: str, **weights: np.ndarray) -> ir.Model:
    model = ir.from_proto(onnx.parser.parse_model(text))
    for value in list(model.graph.inputs):
        if value.name in weights:
            model.graph.inputs.remove(value)
            value.const_value = ir.tensor(weights[value.name], name=value.name)
            model.graph.initializers[value.name] = value
    return model


def _text(model: ir.Model) -> list[str]:
    return [f"{node.op_type}({', '.join(str(i.name) for i in node.inputs if i is not None)})" for node in model.graph]


def _head(opset: int) -> str:
    return f'<ir_version: 9, opset_import: ["" : {opset}]>'


def test_a_weight_read_only_transposed_is_stored_transposed() -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    model = _parse(
        _head(20)
        + "g (float[n,3] x, float[2,3] w) => (float[n,2] y) { t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t) }",
        w=weight,
    )
    assert store_transposed(model) == 1
    assert _text(model) == ["MatMul(x, w)"]
    stored = model.graph.initializers["w"].const_value
    assert stored is not None
    np.testing.assert_array_equal(stored.numpy(), weight.T)


@pytest.mark.parametrize(
    "body",
    [
        "t = Transpose <perm = [1, 0]> (w) a = MatMul(x, t) b = MatMul(a, w) y = Identity(b)",  # also read as it is
        "t = Transpose <perm = [0, 1]> (w) a = MatMul(x, t) y = Identity(a)",  # not a transposition
    ],
)
def test_other_weights_stay(body: str) -> None:
    model = _parse(
        _head(20) + f"g (float[n,3] x, float[3,3] w) => (float[n,3] y) {{ {body} }}", w=np.eye(3, dtype=np.float32)
    )
    before = _text(model)
    assert store_transposed(model) == 0
    assert _text(model) == before


def test_a_head_equal_to_the_table_is_read_from_it() -> None:
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    text = "g (int64[n] i, float[3,2] e, float[2,3] h) => (float[n,3] y) { x = Gather(e, i) y = MatMul(x, h) }"
    model = _parse(_head(20) + text, e=table, h=table.T.copy())
    assert share_tables(model) == 1
    assert _text(model) == ["Gather(e, i)", "Transpose(e)", "MatMul(x, e.transposed)"]
    assert list(model.graph.initializers) == ["e"]


def test_a_head_that_differs_in_one_value_stays() -> None:
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    head = table.T.copy()
    head[1, 2] += 1e-3
    text = "g (int64[n] i, float[3,2] e, float[2,3] h) => (float[n,3] y) { x = Gather(e, i) y = MatMul(x, h) }"
    assert share_tables(_parse(_head(20) + text, e=table, h=head)) == 0


def test_only_casts_to_the_same_type_go() -> None:
    model = _parse(
        _head(20) + "g (float[n] x) => (float16[n] y) { a = Cast <to = 1> (x) b = Neg(a) y = Cast <to = 10> (b) }"
    )
    for node in model.graph:
        if node.op_type != "Cast":
            node.outputs[0].dtype = ir.DataType.FLOAT
    assert drop_idle_casts(model) == 1
    assert _text(model) == ["Neg(x)", "Cast(b)"]


def test_the_opset_rises_where_operators_only_took_more_types() -> None:
    model = _parse(_head(20) + "g (float[n,4] x, int64[2] s) => (float[a,b] y) { y = Reshape(x, s) }")
    raise_opset(model, 21)
    assert model.opset_imports[""] == 21
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_the_opset_does_not_rise_over_a_redefinition() -> None:
    body = "y = GroupNormalization <num_groups = 2> (x, s, b)"
    model = _parse(_head(20) + f"g (float[n,4,h] x, float[2] s, float[2] b) => (float[n,4,h] y) {{ {body} }}")
    with pytest.raises(InputRefused, match="cannot be moved from opset 20 to 21") as caught:
        raise_opset(model, 21)
    assert "GroupNormalization" in str(caught.value)
    assert model.opset_imports[""] == 20
