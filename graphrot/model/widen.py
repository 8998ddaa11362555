"""Half models become float32 when they are read; what types they had is remembered.

Analysis, folding and calibration then know one type. Every half number is a float32 number, so nothing
is lost; the widened weights are written to a file, tensor by tensor, and mapped from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.graph import plain_shape
from graphrot.model.floats import float_values, is_standard
from graphrot.model.save import save_model

FloatName = Literal["float32", "float16", "bfloat16"]

HALVES: dict[ir.DataType, FloatName] = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}

_FLOAT = ir.DataType.FLOAT
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "stash_type", "softmax_precision"})
"""Integer attributes that name an element type."""


@dataclass(frozen=True)
class FloatTypes:
    """The float types of a source, before it was widened.

    Args:
        name: the type that most of its float weights have, by bytes; where it has none, a half type that inputs or
            outputs have.
        ends: graph inputs and outputs of a half type, by name.
        weight_bytes: bytes of all initializers; None: they were not changed.
    """

    name: FloatName = "float32"
    ends: dict[str, ir.DataType] = field(default_factory=dict)
    weight_bytes: int | None = None


def float_types(model: ir.Model) -> FloatTypes | None:
    """The types of a model that has half floats anywhere, None for one that has none.

    Raises:
        InputRefused: an input or output is a sequence or an optional value of half floats.
    """
    sizes = dict.fromkeys([_FLOAT, *HALVES], 0)
    total = 0
    for graph in _graphs(model):
        for value in graph.initializers.values():
            content = value.const_value
            if content is not None:
                total += content.nbytes
                if content.dtype in sizes:
                    sizes[content.dtype] += content.nbytes
    tensors = list(_constants(model))
    for tensor in tensors:
        if tensor.dtype in sizes:
            sizes[tensor.dtype] += tensor.nbytes
    ends: dict[str, ir.DataType] = {}
    for value in (*model.graph.inputs, *model.graph.outputs):
        dtype = value.dtype
        if value.name and dtype is not None and dtype in HALVES:
            if not isinstance(value.type, ir.TensorType):
                raise InputRefused(
                    f"A {HALVES[dtype]} input or output of the model is not a tensor",
                    where=f"{value.name!r}: {value.type}",
                    why="the types of sequences and optional values at its ends would change",
                    do="take it out of the model, or export it in float32",
                )
            ends[value.name] = dtype
    if not ends and not any(sizes[half] for half in HALVES) and not _names_half(model):
        return None
    most = max(sizes, key=lambda dtype: sizes[dtype])
    if ends and not any(sizes.values()):
        most = next(iter(ends.values()))
    return FloatTypes(HALVES.get(most, "float32"), ends, total)


def widen(model: ir.Model, folder: Path) -> tuple[ir.Model, Path]:
    """A float32 twin of a model with half floats, written to ``folder`` and mapped from there.

    Initializers, constants, casts, inputs, outputs, subgraphs and functions are widened; casts that are
    left without a meaning go.

    Args:
        model: changed on the way, and not to be used any more.
        folder: takes ``widened.onnx`` and its data; must stay while the result is used.
    """
    for graph in _graphs(model):
        for value in _values(graph):
            if value.const_value is not None and value.const_value.dtype in HALVES:
                value.const_value = _wider(value.const_value)
            _widen_type(value)
        for node in graph:
            _widen_attributes(node)
    for function in model.functions.values():
        for value in (*function.inputs, *(output for node in function for output in node.outputs)):
            _widen_type(value)
        for node in function:
            _widen_attributes(node)
    forget_shapes(model)
    _drop_idle_casts(model)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "widened.onnx"
    save_model(model, path)
    return ir.load(path), path


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph and all subgraphs, those in bodies of functions too."""
    yield from model.graphs()
    for function in model.functions.values():
        yield from function.subgraphs()


def forget_shapes(model: ir.Model) -> None:
    """Drop the declared shapes of what nodes make; a runtime infers them.

    Some builders declare wrong ones, by which ONNX Runtime plans its buffers. With casts in other places a model
    that ran would fail.
    """
    for node in model.graph:
        for output in node.outputs:
            if not output.is_graph_output():
                output.shape = None


def _values(graph: ir.Graph | ir.GraphView) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    for graph in _graphs(model):
        yield from graph
    for function in model.functions.values():
        yield from function


def _attributes(node: ir.Node) -> Iterable[ir.Attr]:
    return [attribute for attribute in node.attributes.values() if not attribute.is_ref()]


def _constants(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    for node in _nodes(model):
        for attribute in _attributes(node):
            if attribute.type == ir.AttributeType.TENSOR:
                yield attribute.as_tensor()


def _names_half(model: ir.Model) -> bool:
    return any(_names_type(attribute) in HALVES for node in _nodes(model) for attribute in _attributes(node))


def _names_type(attribute: ir.Attr) -> ir.DataType | None:
    if attribute.name not in _TYPE_ATTRIBUTES or attribute.type != ir.AttributeType.INT:
        return None
    number = attribute.as_int()
    return ir.DataType(number) if number in {int(dtype) for dtype in HALVES} else None


def _wider(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    """Read when it is written, so that one widened tensor is in memory at a time."""

    def read() -> ir.TensorProtocol:
        return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)

    return ir.LazyTensor(read, dtype=_FLOAT, shape=plain_shape(tensor), name=tensor.name)


def _widen_type(value: ir.Value) -> None:
    if value.type is not None and value.dtype in HALVES:
        value.type = _wider_type(value.type)


def _wider_type(kind: ir.TypeProtocol) -> ir.TypeProtocol:
    """The type with float32 for its half type, inside sequences and optionals too."""
    if isinstance(kind, ir.SequenceType | ir.OptionalType):
        return type(kind)(_wider_type(kind.elem_type))
    return type(kind)(_FLOAT) if isinstance(kind, ir.TensorType | ir.SparseTensorType) else kind


def _widen_attributes(node: ir.Node) -> None:
    for attribute in _attributes(node):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALVES:
            wide = ir.tensor(attribute.as_tensor().numpy().astype(np.float32), name=attribute.as_tensor().name)
            node.attributes[attribute.name] = ir.AttrTensor(attribute.name, wide)
        elif _names_type(attribute) is not None:
            node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(_FLOAT))


def _drop_idle_casts(model: ir.Model) -> None:
    """Remove casts of the main graph from float32 to float32."""
    floats = float_values(model)
    for node in list(model.graph):
        if node.op_type != "Cast" or not is_standard(node) or node.outputs[0].is_graph_output():
            continue
        source = node.inputs[0]
        if source in floats and node.attributes["to"].as_int() == int(_FLOAT):
            assert source is not None
            node.outputs[0].replace_all_uses_with(source)
            model.graph.remove(node, safe=True)
