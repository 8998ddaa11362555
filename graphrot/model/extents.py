"""How much a graph would unfold to: sizes, counts and calls that no machine can follow are refused early."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from graphrot.errors import InputRefused

MOST_NODES = 1_000_000
"""Nodes of a model when every call of a function is replaced by the function's nodes."""

DEEPEST = 100
"""Functions that call each other in a row; onnx's checker and ONNX Runtime stop there, too."""

MOST_ELEMENTS = 2**31
"""Elements of a declared input, or of a tensor that is filled to a constant shape."""

MOST_ROUNDS = 2**31
"""Rounds of a loop."""

_SHAPES = {"ConstantOfShape": 0, "Expand": 1, "RandomNormal": None, "RandomUniform": None}
Functions = Mapping[tuple[str, str], onnx.FunctionProto]


def check_extents(proto: onnx.ModelProto, functions: Functions, where: str) -> None:
    """Refuse a model that is small in its file and without bounds when it runs.

    Args:
        proto: the model, whose functions do not call themselves.
        functions: its functions by domain and name.
        where: the file's name, for messages.

    Raises:
        InputRefused: an input with an impossible size, too many nodes behind calls of functions, a constant
            shape of too many elements, or a loop with too many rounds.
    """
    for value in proto.graph.input:
        _check_input(value, where)
    if (count := unfolded(proto, functions, where)) > MOST_NODES:
        shown = f"{count:.3g}" if count < 10**300 else "more than 1e300"
        raise _refuse(f"with the calls of its functions unfolded it has {shown} nodes, over {MOST_NODES:,}", where)
    small: dict[str, onnx.TensorProto] = {}
    _check_nodes(proto.graph.node, proto.graph.initializer, small, where)
    for function in proto.functions:
        _check_nodes(function.node, (), {}, f"{where}: function {function.name!r}")


def unfolded(proto: onnx.ModelProto, functions: Functions, where: str = "") -> int:
    """Nodes of the model, those of called functions counted once for every call.

    Raises:
        InputRefused: functions call each other too deeply.
    """
    counts: dict[tuple[str, str], int] = {}

    def nodes(part: Sequence[onnx.NodeProto], depth: int) -> int:
        total = 0
        for node in part:
            total += call((node.domain, node.op_type), depth)
            for graph in _graphs(node):
                total += nodes(graph.node, depth)
        return total

    def call(name: tuple[str, str], depth: int) -> int:
        if name not in functions:
            return 1
        if depth >= DEEPEST:
            raise _refuse(f"more than {DEEPEST} of its functions call each other in a row", where)
        if name not in counts:
            counts[name] = 1 + nodes(functions[name].node, depth + 1)
        return counts[name]

    return nodes(proto.graph.node, 0)


def _check_input(value: onnx.ValueInfoProto, where: str) -> None:
    declared = value.type.tensor_type.shape.dim
    sizes = [dim.dim_value for dim in declared if dim.HasField("dim_value")]
    if any(size < 0 for size in sizes) or math.prod(size for size in sizes if size) > MOST_ELEMENTS:
        shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in declared]
        raise _refuse(f"its input {value.name!r} is declared with shape {shape}", where)


def _check_nodes(
    nodes: Sequence[onnx.NodeProto],
    initializers: Sequence[onnx.TensorProto],
    outer: Mapping[str, onnx.TensorProto],
    where: str,
) -> None:
    known = dict(outer)
    known.update((tensor.name, tensor) for tensor in initializers if _is_small(tensor))
    for node in nodes:
        if node.domain not in ("", "ai.onnx"):
            continue
        name = f"{node.op_type} {node.name or next(iter(node.output), '')!r}"
        if node.op_type == "Constant":
            tensor = next((a.t for a in node.attribute if a.name == "value" and a.HasField("t")), None)
            if tensor is None:
                ints = next((a for a in node.attribute if a.name in ("value_int", "value_ints")), None)
                numbers = [] if ints is None else list(ints.ints) or [ints.i]
                tensor = numpy_helper.from_array(np.array(numbers, np.int64))
            if _is_small(tensor):
                known[node.output[0]] = tensor
        elif node.op_type in _SHAPES:
            _check_shape(node, known, f"{where}: {name}")
        elif node.op_type == "Loop" and node.input and node.input[0] in known:
            rounds = _numbers(known[node.input[0]])
            if rounds and rounds[0] > MOST_ROUNDS:
                raise _refuse(f"a loop of it goes {rounds[0]} rounds", f"{where}: {name}")
        elif node.op_type == "Range" and all(each in known for each in node.input):
            _check_range([_numbers(known[each]) for each in node.input], f"{where}: {name}")
        for graph in _graphs(node):
            _check_nodes(graph.node, graph.initializer, known, where)


def _check_shape(node: onnx.NodeProto, known: Mapping[str, onnx.TensorProto], where: str) -> None:
    place = _SHAPES[node.op_type]
    if place is None:
        shape = next((list(a.ints) for a in node.attribute if a.name == "shape"), [])
    elif len(node.input) > place and node.input[place] in known:
        shape = _numbers(known[node.input[place]])
    else:
        return
    if math.prod(dim for dim in shape if dim > 0) > MOST_ELEMENTS and 0 not in shape:
        raise _refuse(f"it makes a tensor of shape {shape}", where)


def _check_range(numbers: Sequence[Sequence[int]], where: str) -> None:
    if [len(part) for part in numbers] == [1, 1, 1] and numbers[2][0] != 0:
        (start,), (limit,), (step,) = numbers
        if (limit - start) // step > MOST_ELEMENTS:
            raise _refuse(f"it counts from {start} to {limit}", where)


def _numbers(tensor: onnx.TensorProto) -> list[int]:
    try:
        return [int(number) for number in numpy_helper.to_array(tensor).reshape(-1)]
    except (ValueError, TypeError):
        return []


def _is_small(tensor: onnx.TensorProto) -> bool:
    """Whether it can be a shape or a count, and lies in the file itself."""
    integers = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    external = tensor.data_location == onnx.TensorProto.EXTERNAL
    return tensor.data_type in integers and not external and 0 <= math.prod(tensor.dims) <= 16


def _graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def _refuse(why: str, where: str) -> InputRefused:
    return InputRefused(
        "The file is not a usable ONNX model", where=where, why=why, do="export it again, or check the download"
    )
