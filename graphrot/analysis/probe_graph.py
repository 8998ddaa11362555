"""A copy of the graph that runs without its big weights, and shows the tensors we ask for.

What the probe wants are shapes and the values of index tensors; the numbers of float tensors do not
matter. So a matmul by a constant ``[K, N]`` becomes "first element of the last axis, repeated N times",
a lookup in a table ``[V, D]`` becomes a lookup in ``[V, 1]``, repeated D times, and any other big
constant is made at run time from one number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from graphrot.analysis.scope import Scope, constant_dtype, constant_shape, is_standard
from graphrot.graph import FLOATS

_BIG = 1 << 14
"""Constants of rank 2 and more with more elements than this are not loaded."""


class ProbeGraph:
    """Builds the stand-in model.

    Args:
        scope: the graph.
        inputs: the graph inputs that it takes.
        exposed: values that become outputs.
    """

    def __init__(self, scope: Scope, inputs: Sequence[ir.Value], exposed: Collection[ir.Value]) -> None:
        self._scope = scope
        self._inputs = inputs
        self._exposed = [v for v in exposed if v.name]
        self._names = {v.name for node in scope.nodes for v in node.outputs} | set(scope.model.graph.initializers)
        self._names |= {v.name for v in scope.model.graph.inputs}
        self._counter = 0
        self._initializers: list[TensorProto] = []
        self._done: set[str] = set()

    def build(self) -> bytes:
        """Serialize the stand-in model; its outputs are the exposed values, in order."""
        needed = {v for v in self._exposed if v.producer() is not None}
        kept: list[ir.Node] = []
        for node in reversed(self._scope.nodes):
            if needed.isdisjoint(node.outputs):
                continue
            kept.append(node)
            needed.update(self._reads(node))
        nodes: list[onnx.NodeProto] = []
        for value in needed:
            if value.is_initializer():
                nodes.extend(self._initializer(value))
        for node in reversed(kept):
            nodes.extend(self._stand_in(node) or [ir.serde.serialize_node(node)])
        model = self._scope.model
        graph = helper.make_graph(
            nodes,
            "probe",
            [ir.serde.serialize_value(v) for v in self._inputs],
            [_declared(v) for v in self._exposed],
            initializer=self._initializers,
        )
        proto = helper.make_model(
            graph,
            opset_imports=[
                helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()
            ],
            functions=[ir.serde.serialize_function(f) for f in model.functions.values()],
        )
        proto.ir_version = model.ir_version
        return bytes(proto.SerializeToString())

    def _reads(self, node: ir.Node) -> Iterable[ir.Value]:
        data = data_input(self._scope, node)
        if data is not None:
            value = node.inputs[data]
            return [value] if value is not None else []
        return [*(i for i in node.inputs if i is not None), *self._scope.captured(node)]

    def _stand_in(self, node: ir.Node) -> list[onnx.NodeProto] | None:
        data = data_input(self._scope, node)
        if data is None:
            return None
        operand, source = node.inputs[1 - data], node.inputs[data]
        assert operand is not None and source is not None and source.name
        shape, dtype = constant_shape(operand), constant_dtype(operand)
        assert shape is not None and dtype is not None
        output = node.outputs[0].name
        assert output is not None
        if node.op_type == "Gather":
            thin = self._constant(np.ones((shape[0], 1)), dtype)
            single = helper.make_node("Gather", [thin, source.name], [self._name()], axis=0)
            width = shape[1]
        else:
            ints = [self._constant(np.array([k]), ir.DataType.INT64) for k in (0, 1, -1)]
            single = helper.make_node("Slice", [source.name, *ints], [self._name()])
            width = shape[0] if _transposed(node) else shape[1]
        repeat = self._constant(np.array([width]), ir.DataType.INT64)
        return [single, helper.make_node("Expand", [single.output[0], repeat], [output])]

    def _initializer(self, value: ir.Value) -> list[onnx.NodeProto]:
        tensor = value.const_value
        assert tensor is not None and value.name
        if not self._is_thin(value):
            proto = ir.serde.serialize_tensor(ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name))
            self._initializers.append(proto)
            return []
        number = np.full(1, 0.01).astype(tensor.dtype.numpy())
        fill = ir.serde.serialize_tensor(ir.Tensor(number, dtype=tensor.dtype))
        shape = self._constant(np.array(list(tensor.shape)), ir.DataType.INT64)
        return [helper.make_node("ConstantOfShape", [shape], [value.name], value=fill)]

    def _is_thin(self, value: ir.Value) -> bool:
        """Whether one number stands in for all of a constant."""
        tensor = value.const_value
        assert tensor is not None
        return len(tensor.shape) >= 2 and tensor.size > _BIG and tensor.dtype in FLOATS

    def _constant(self, array: np.ndarray, dtype: ir.DataType) -> str:
        name = self._name()
        proto = ir.serde.serialize_tensor(ir.Tensor(array.astype(dtype.numpy()), dtype=dtype, name=name))
        self._initializers.append(proto)
        return name

    def _name(self) -> str:
        while True:
            self._counter += 1
            name = f"probe_{self._counter}"
            if name not in self._names:
                return name


def _declared(value: ir.Value) -> onnx.ValueInfoProto:
    """The value with the type that the model declares for it: ONNX Runtime refuses one that is wrong."""
    info = onnx.ValueInfoProto(name=value.name)
    if isinstance(value.type, ir.TensorType):
        info.type.tensor_type.elem_type = int(value.type.dtype)
    return info


def data_input(scope: Scope, node: ir.Node) -> int | None:
    """Which input a stand-in reads, if the node is a matmul by, or a lookup in, a constant matrix."""
    if not is_standard(node) or node.op_type not in ("MatMul", "Gemm", "Gather"):
        return None
    operand = 0 if node.op_type == "Gather" else 1
    value, other = node.inputs[operand], node.inputs[1 - operand]
    if not scope.readable(value) or other is None or scope.readable(other):
        return None
    assert value is not None
    shape = constant_shape(value)
    if shape is None or len(shape) != 2 or constant_dtype(value) not in FLOATS:
        return None
    if node.op_type == "Gemm" and "transA" in node.attributes and node.attributes["transA"].as_int():
        return None
    if node.op_type == "Gather" and "axis" in node.attributes and node.attributes["axis"].as_int() != 0:
        return None
    return 1 - operand


def contracted(scope: Scope, node: ir.Node) -> tuple[ir.Value, int] | None:
    """For a matmul that a stand-in replaces: what it multiplies, and how long its last axis must be."""
    data = data_input(scope, node)
    if data is None or node.op_type == "Gather":
        return None
    value, weight = node.inputs[data], node.inputs[1 - data]
    assert value is not None and weight is not None
    shape = constant_shape(weight)
    assert shape is not None
    return value, shape[1] if _transposed(node) else shape[0]


def _transposed(node: ir.Node) -> bool:
    return node.op_type == "Gemm" and "transB" in node.attributes and bool(node.attributes["transB"].as_int())
