"""What is known about a graph before it runs: constants, values that follow from shapes, users.

A *constant* depends on nothing. A *known* value depends on shapes only (or is constant): the probe may
read it and trust it for labels. Everything else depends on the data.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.graph import FLOATS, is_constant, read_constant, sliced, subgraphs

_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
_SHAPE_OPS = frozenset({"Shape", "Size"})
_GROWING = frozenset({"Expand", "Tile"})
_LOOKUPS = frozenset({"Gather", "GatherND", "Slice", *_GROWING})
_HANDED_ON = frozenset(
    {
        *("Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose"),
        *("Expand", "Slice", "Gather", "Concat", "Tile", "Split", "Add", "Sub", "Mul", "Div", "Neg"),
    }
)
_PRODUCTS = frozenset({"MatMul", "Gemm"})


def is_standard(node: ir.Node) -> bool:
    return node.domain in ("", "ai.onnx")


def is_shape_op(node: ir.Node) -> bool:
    """Shape and Size look at no element: they are no use of a tensor."""
    return node.op_type in _SHAPE_OPS and is_standard(node)


def node_name(node: ir.Node) -> str:
    """How facts name a node: by its first output. (One without a name there takes no part in any space.)"""
    return next((o.name for o in node.outputs if o.name), node.name or node.op_type)


def reads_type_only(node: ir.Node, position: int) -> bool:
    """The second input of CastLike gives its data type and nothing else."""
    return node.op_type == "CastLike" and position == 1 and is_standard(node)


class Scope:
    """Constants, known values and uses of the main graph of a model. The model is only read."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.nodes: list[ir.Node] = [node for node in model.graph if node.outputs]
        self.index: dict[ir.Node, int] = {node: i for i, node in enumerate(self.nodes)}
        self.constant: set[ir.Value] = set()
        self.known: set[ir.Value] = set()
        self.followed: set[ir.Value] = set()
        """Data-independent rows of a constant table (learned positions, for instance), products of such by a weight
        (relative positions, a learned query), and what moves, adds and multiplies them."""
        self.is_double = any(_is_double_matrix(value) for value in model.graph.initializers.values())
        """Weights are float64."""
        self._readable: dict[ir.Value, bool] = {}
        self._captured: dict[ir.Node, tuple[ir.Value, ...]] = {}
        self._classify()

    def _classify(self) -> None:
        for value in self.model.graph.initializers.values():
            if not value.is_graph_input():
                self.constant.add(value)
        for node in self.nodes:
            inputs = [i for k, i in enumerate(node.inputs) if i is not None and not reads_type_only(node, k)]
            captured = self._find_captured(node)
            if captured or any(True for _ in subgraphs(node)):
                self._captured[node] = captured
                continue
            if node.op_type in _RANDOM:
                continue
            if all(i in self.constant for i in inputs) and (inputs or node.op_type == "Constant"):
                self.constant.update(node.outputs)
            elif is_shape_op(node) or all(i in self.constant or i in self.known for i in inputs):
                self.known.update(node.outputs)

        self._find_followed()

    def _find_followed(self) -> None:
        for node in self.nodes:
            if not is_standard(node) or not node.inputs or not all(self.trusted(o) for o in node.outputs):
                continue
            first = node.inputs[0]
            least = 1 if node.op_type in _GROWING else 2
            starts = node.op_type in _LOOKUPS and self._is_table(first, least) and not self.readable(node.outputs[0])
            starts = starts or (node.op_type in _PRODUCTS and self._is_weighed(node))
            if starts or (node.op_type in _HANDED_ON and any(i in self.followed for i in node.inputs)):
                self.followed.update(node.outputs)

    def _is_table(self, value: ir.Value | None, least: int = 2) -> bool:
        if value is None or not self.readable(value) or constant_dtype(value) not in FLOATS:
            return False
        shape = constant_shape(value)
        return shape is not None and len(shape) >= least and shape[-1] > 1

    def _is_weighed(self, node: ir.Node) -> bool:
        """A product by a weight that is the same in every run, but no number that can be read."""
        return len(node.inputs) > 1 and self._is_table(node.inputs[1]) and not self.readable(node.outputs[0])

    def _find_captured(self, node: ir.Node) -> tuple[ir.Value, ...]:
        found: dict[ir.Value, None] = {}
        for graph in subgraphs(node):
            inner: set[ir.Value] = set(graph.inputs) | set(graph.initializers.values())
            for part in graph.all_nodes():
                inner.update(part.outputs)
                for sub in subgraphs(part):
                    inner |= set(sub.inputs) | set(sub.initializers.values())
            read = [i for part in graph.all_nodes() for i in part.inputs]
            for value in [*read, *graph.outputs]:
                if value is not None and value not in inner:
                    found[value] = None
        return tuple(found)

    def captured(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """Values of the main graph that the subgraphs of ``node`` read."""
        return self._captured.get(node, ())

    def trusted(self, value: ir.Value) -> bool:
        """The value does not depend on data."""
        return value in self.constant or value in self.known

    def readable(self, value: ir.Value | None) -> bool:
        """The value is a constant that passes can read and replace."""
        if value is None:
            return False
        if value not in self._readable:
            self._readable[value] = is_constant(value)
        return self._readable[value]

    def uses(self, value: ir.Value) -> list[tuple[ir.Node, int]]:
        """Uses that look at elements: Shape and Size do not count; subgraph nodes do."""
        return [
            (use.node, use.idx)
            for use in value.uses()
            if not is_shape_op(use.node) and not reads_type_only(use.node, use.idx)
        ]

    def single_use(self, value: ir.Value) -> bool:
        return len(self.uses(value)) == 1 and not value.is_graph_output()


def _is_double_matrix(value: ir.Value) -> bool:
    content = value.const_value
    return content is not None and content.dtype == ir.DataType.DOUBLE and len(content.shape.numpy()) > 1


def constant_shape(value: ir.Value) -> tuple[int, ...] | None:
    """Shape of a readable constant without reading a big one; None where that is not plain."""
    if value.const_value is not None:
        return tuple(value.const_value.shape.numpy())
    node = value.producer()
    if node is None or not is_standard(node):
        return None
    op = node.op_type
    if op == "Constant":
        return tuple(read_constant(value).shape)
    shapes = [None if i is None else constant_shape(i) for i in node.inputs]
    if not shapes or shapes[0] is None:
        return None
    first = shapes[0]
    if op in ("Identity", "Cast"):
        return first
    if op == "Transpose":
        perm = node.attributes.get("perm")
        order = tuple(reversed(range(len(first)))) if perm is None else tuple(perm.as_ints())
        return tuple(first[d] for d in order)
    if op == "Neg":
        return first
    if op in ("Mul", "Add", "Sub", "Div"):
        return None if shapes[1] is None else tuple(np.broadcast_shapes(first, shapes[1]))
    if op == "Concat":
        known = [s for s in shapes if s is not None]
        axis = node.attributes["axis"].as_int() % len(first)
        if len(known) != len(shapes):
            return None
        return (*first[:axis], sum(s[axis] for s in known), *first[axis + 1 :])
    if op == "Slice" and is_constant(value):
        return sliced(node, np.broadcast_to(np.zeros((), dtype=np.int8), first)).shape
    if op in ("Reshape", "Squeeze", "Unsqueeze", "Flatten") and is_constant(value):
        return _reshaped(node, first)
    return None


def constant_dtype(value: ir.Value) -> ir.DataType | None:
    """Data type of a readable constant, also where the graph does not declare it."""
    if value.const_value is not None:
        return value.const_value.dtype
    if value.dtype is not None:
        return value.dtype
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "Constant":
        return ir.DataType.from_numpy(read_constant(value).dtype)
    if node.op_type == "Cast":
        number = node.attributes["to"].as_int()
        return ir.DataType(number) if number in [int(t) for t in ir.DataType] else None
    first = node.inputs[0] if node.inputs else None
    return None if first is None else constant_dtype(first)


def _reshaped(node: ir.Node, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape after a movement op, by numpy on an array without memory behind it."""
    stand_in = np.broadcast_to(np.zeros((), dtype=np.int8), shape)
    operand = node.inputs[1] if len(node.inputs) > 1 else None
    axes = None if operand is None else read_constant(operand).reshape(-1).tolist()
    if node.op_type == "Reshape":
        target = [shape[k] if d == 0 else int(d) for k, d in enumerate(axes or [])]
        return stand_in.reshape(target).shape
    if node.op_type == "Flatten":
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
        return stand_in.reshape(int(np.prod(shape[:axis], dtype=np.int64)), -1).shape
    if axes is None and "axes" in node.attributes:
        axes = list(node.attributes["axes"].as_ints())
    if node.op_type == "Squeeze":
        return np.squeeze(stand_in, None if axes is None else tuple(int(a) for a in axes)).shape
    return np.expand_dims(stand_in, tuple(int(a) for a in axes or ())).shape
