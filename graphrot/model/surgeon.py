"""Read an onnx-graphsurgeon graph as an ``onnx_ir.Model``. The only file that knows its classes.

Not by way of ``gs.export_onnx``: that renames tensors of the graph it is given, extends its list of
domains, and writes 4-bit arrays with one byte per number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues
from onnx_graphsurgeon.util import misc

from graphrot.graph import plain_shape

_STANDARD = ("", "ai.onnx")
_CUSTOM_VERSION = 1
"""The version that graphsurgeon writes for domains that a graph does not import."""


def import_graph(graph: gs.Graph) -> ir.Model:
    """The graph with its functions as a new model, nodes in topological order; arrays are shared.

    The metadata is taken from the graph's attribute ``metadata_props``, if it has one.

    Raises:
        ValueError, TypeError: the graph is not valid (a cycle, a value of no ONNX type).
    """
    result = _graph(graph, {}, _opsets(graph))
    result.sort()
    return ir.Model(
        result,
        ir_version=graph.ir_version or onnx.helper.find_min_ir_version_for(_imports(graph), True),
        producer_name=graph.producer_name or None,
        producer_version=graph.producer_version or None,
        functions=[_function(function) for function in graph.functions],
        metadata_props=dict(vars(graph).get("metadata_props") or {}),
    )


def _graph(graph: gs.Graph, outer: Mapping[str, ir.Value], opsets: dict[str, int]) -> ir.Graph:
    values = {t.name: _value(t) for t in graph.inputs}
    inputs = [values[t.name] for t in graph.inputs]
    for node in graph.nodes:
        for tensor in node.outputs:
            if tensor.name and tensor.name not in values:
                values[tensor.name] = _value(tensor)
    initializers: list[ir.Value] = []

    def look_up(tensor: gs.Tensor) -> ir.Value | None:
        if not tensor.name:
            return None
        found = values.get(tensor.name) or outer.get(tensor.name)
        if found is None:
            found = values[tensor.name] = _value(tensor)
            if isinstance(tensor, gs.Constant):
                initializers.append(found)
        return found

    # Weights first: subgraphs of earlier nodes may read what later nodes name.
    for node in graph.nodes:
        for tensor in node.inputs:
            look_up(tensor)
    nodes = [_node(node, look_up, {**outer, **values}) for node in graph.nodes]
    outputs = [found for found in map(look_up, graph.outputs) if found is not None]
    return ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=initializers,
        name=graph.name,
        doc_string=graph.doc_string or None,
        opset_imports=opsets,
    )


def _node(node: gs.Node, look_up: Any, scope: Mapping[str, ir.Value]) -> ir.Node:
    inputs = [look_up(tensor) for tensor in node.inputs]
    while inputs and inputs[-1] is None:
        inputs.pop()  # an omitted optional input at the end: some runtimes do not take its empty name
    outputs = [scope.get(tensor.name) or ir.Value(name="") for tensor in node.outputs]
    attributes = [_attribute(name, value, scope) for name, value in node.attrs.items()]
    domain = "" if node.domain in (None, *_STANDARD) else node.domain
    return ir.Node(domain, node.op, inputs, attributes, outputs=outputs, name=node.name or None)


def _attribute(name: str, value: Any, scope: Mapping[str, ir.Value]) -> ir.Attr:
    if isinstance(value, gs.Node.AttributeRef):
        return ir.RefAttr(name, value.name, ir.AttributeType(int(misc.convert_to_onnx_attr_type(value.type))))
    if isinstance(value, gs.Constant):
        return ir.AttrTensor(name, _tensor(value))
    if isinstance(value, gs.Graph):
        return ir.AttrGraph(name, _graph(value, scope, {}))
    if isinstance(value, type | np.dtype):
        value = int(ir.DataType.from_numpy(np.dtype(value)))
    if isinstance(value, list | tuple | np.ndarray) and not len(value):
        return ir.AttrInt64s(name, [])
    return ir.serde.deserialize_attribute(onnx.helper.make_attribute(name, value))


def _function(function: gs.Function) -> ir.Function:
    graph = _graph(function, {}, _opsets(function))
    constants = []
    for value in list(graph.initializers.values()):
        # Functions have no initializers.
        assert value.const_value is not None
        fresh = ir.Value(name=value.name, type=value.type, shape=value.shape)
        constants.append(ir.Node("", "Constant", [], [ir.AttrTensor("value", value.const_value)], outputs=[fresh]))
        value.replace_all_uses_with(fresh)
        del graph.initializers[str(value.name)]
    if constants:
        graph.insert_before(graph[0], constants)
    graph.sort()
    attributes = [
        ir.Attr(name, ir.AttributeType.UNDEFINED, None) if default is None else _attribute(name, default, {})
        for name, default in function.attrs.items()
    ]
    return ir.Function(function.domain or "", function.name, graph=graph, attributes=attributes)


def _opsets(graph: gs.Graph) -> dict[str, int]:
    """Domain -> version; domains that nodes use and the graph does not import get version 1."""
    found = {"" if entry.domain in _STANDARD else entry.domain: entry.version for entry in _imports(graph)}
    for domain in _domains(graph):
        found.setdefault(domain, _CUSTOM_VERSION)
    return found


def _imports(graph: gs.Graph) -> list[Any]:
    if graph.import_domains is None:
        return [onnx.helper.make_opsetid("", graph.opset)]
    return list(graph.import_domains)


def _domains(graph: gs.Graph) -> set[str]:
    domains: set[str] = set()
    for node in graph.nodes:
        domains.add("" if node.domain in (None, *_STANDARD) else node.domain)
        for value in node.attrs.values():
            if isinstance(value, gs.Graph):
                domains |= _domains(value)
    return domains


def _value(tensor: gs.Tensor) -> ir.Value:
    if isinstance(tensor, gs.Constant):
        content = _tensor(tensor)
        return ir.Value(
            name=tensor.name, shape=plain_shape(content), type=ir.TensorType(content.dtype), const_value=content
        )
    if tensor.dtype is None:
        return ir.Value(name=tensor.name)
    kind: Any = ir.TensorType(_dtype(tensor.dtype))
    if tensor.type == "sequence_type":
        kind = ir.SequenceType(kind)
    return ir.Value(name=tensor.name, type=kind, shape=_shape(tensor.shape))


def _tensor(constant: gs.Constant) -> ir.TensorProtocol:
    values, name = constant._values, constant.name
    if isinstance(values, SparseValues):
        dense = values.load()
        return ir.tensor(dense.astype(_dtype(values.tensor.values.data_type).numpy()), name=name)
    if isinstance(values, LazyValues):
        return _stored(values.tensor, name)
    wanted = constant.export_dtype
    if wanted is not None and _dtype(wanted) != _dtype(values.dtype):
        values = values.astype(_dtype(wanted).numpy())
    return ir.tensor(np.asarray(values, order="C"), name=name)


def _stored(proto: onnx.TensorProto, name: str) -> ir.TensorProtocol:
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        entries = {entry.key: entry.value for entry in proto.external_data}
        return ir.ExternalTensor(
            entries["location"],
            int(entries.get("offset", 0)),
            int(entries["length"]) if "length" in entries else None,
            ir.DataType(proto.data_type),
            shape=ir.Shape(list(proto.dims)),
            name=name,
            base_dir=Path.cwd(),
        )
    tensor = ir.serde.deserialize_tensor(proto)
    if proto.name == name:
        return tensor
    # Renaming it in place would rename it in the graph that was given.
    return ir.LazyTensor(
        lambda: ir.serde.deserialize_tensor(proto),
        dtype=tensor.dtype,
        shape=ir.Shape(list(proto.dims)),
        name=name,
        cache=False,
    )


def _dtype(dtype: Any) -> ir.DataType:
    return ir.DataType(dtype) if isinstance(dtype, int) else ir.DataType.from_numpy(np.dtype(dtype))


def _shape(shape: Iterable[int | str | None] | None) -> ir.Shape | None:
    """Unknown, negative and nameless dimensions stay open."""
    if shape is None:
        return None
    return ir.Shape([None if d is None or d == "" or (isinstance(d, int) and d < 0) else d for d in shape])
