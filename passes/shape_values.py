"""Shapes of tensors and contents of small integer tensors, in symbols (``sizes``), from one walk over a graph.

One name of an input's dimension is one size, as ONNX defines it. Tensors whose shape or content is not
understood are left out.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.graph import is_constant, read_constant
from graphrot.passes.sizes import (
    Shape,
    Size,
    broadcast,
    const,
    elementwise,
    is_size,
    linear,
    number,
    product,
    quotient,
    sliced,
)

_SAME = frozenset(
    "Abs Cast CastLike Ceil Clip Cos CumSum DequantizeLinear Elu Erf Exp Floor Gelu HadamardTransform HardSigmoid "
    "HardSwish Identity IsNaN LayerNormalization LeakyRelu Log LogSoftmax Neg Not QuantizeLinear RMSNormalization "
    "Reciprocal Relu RotaryEmbedding Round Sigmoid Sign Sin Softmax Softplus Sqrt Tanh Trilu".split()
)
_BROADCAST = frozenset(
    "Add And BitShift BitwiseAnd Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Or Pow Sub Sum "
    "Where Xor".split()
)
_REDUCE = frozenset("ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare".split())
_DOMAINS = frozenset({"", "ai.onnx", "graphrot"})
_LONGEST = 32
"""Elements of a tensor that is looked into."""


class ShapeValues:
    """Shapes of values, and contents of small integer tensors, collected node by node.

    Attributes:
        shapes: value -> shape, where it is understood.
        contents: value -> elements in row-major order, for integer and boolean tensors of up to 32.
        dtypes: the types of these.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.shapes: dict[ir.Value, Shape] = {}
        self.contents: dict[ir.Value, Shape] = {}
        self.dtypes: dict[ir.Value, ir.DataType] = {}
        for value in graph.inputs:
            if value.shape is not None:
                self.shapes[value] = tuple(_declared(value, axis) for axis in range(len(value.shape)))
        for node in graph:
            if node.domain in _DOMAINS:
                self._visit(node)

    def shape(self, value: ir.Value | None) -> Shape | None:
        if value is None:
            return None
        if value not in self.shapes and value.const_value is not None:
            self.shapes[value] = tuple(const(n) for n in value.const_value.shape.numpy())
        return self.shapes.get(value)

    def content(self, value: ir.Value | None) -> Shape | None:
        if value is None:
            return None
        tensor = value.const_value
        if tensor is not None and tensor.dtype.is_floating_point():
            self.shape(value)  # no sizes: the numbers of weights, which may be pending edits, are not read
        elif value not in self.contents and is_constant(value, depth=0):
            array = read_constant(value)
            if array.dtype.kind in "iub" and array.size <= _LONGEST:
                self.contents[value] = tuple(const(n) for n in array.ravel().tolist())
                self.dtypes[value] = ir.DataType.from_numpy(array.dtype)
            self.shapes.setdefault(value, tuple(const(n) for n in array.shape))
        return self.contents.get(value)

    def _visit(self, node: ir.Node) -> None:
        if node.op_type == "Split":
            self._split(node)
            return
        output = node.outputs[0]
        found = self._shape_of(node)
        if found is not None:
            self.shapes[output] = found
        inside = self._content_of(node)
        dtype = self._dtype_of(node)
        if inside is not None and dtype is not None and len(inside) <= _LONGEST:
            self.contents[output] = inside
            self.dtypes[output] = dtype

    def _dtype_of(self, node: ir.Node) -> ir.DataType | None:
        if node.op_type == "Shape":
            return ir.DataType.INT64
        if node.op_type == "Equal":
            return ir.DataType.BOOL
        if node.op_type == "Cast":
            return ir.DataType(node.attributes["to"].as_int())
        if node.op_type == "ConstantOfShape":
            return node.attributes["value"].as_tensor().dtype if "value" in node.attributes else None
        source = node.inputs[1 if node.op_type == "Where" else 0] if node.inputs else None
        return None if source is None else self.dtypes.get(source)

    # Shapes -----------------------------------------------------------------------------------------

    def _shape_of(self, node: ir.Node) -> Shape | None:
        op = node.op_type
        x = self.shape(node.inputs[0]) if node.inputs else None
        if op == "Constant":
            self.content(node.outputs[0])
            return self.shapes.get(node.outputs[0])
        if op == "Shape":
            return None if x is None else (const(len(_cut(node, x))),)
        if op == "Size":
            return ()
        if op in _SAME:
            return x
        if op in _BROADCAST:
            shapes = [self.shape(value) for value in node.inputs]
            known = [shape for shape in shapes if shape is not None]
            return broadcast(known) if len(known) == len(shapes) else None
        if op in ("Reshape", "Expand", "ConstantOfShape", "Range"):
            return self._shape_from_content(node, x)
        if x is None:
            return None
        if op in _REDUCE:
            return self._reduced(node, x)
        if op in ("Unsqueeze", "Squeeze"):
            return self._squeezed(node, x)
        if op in ("MatMul", "Gemm"):
            return self._multiplied(node, x)
        if op == "Flatten":
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
            return (product(x[:axis]), product(x[axis:]))
        if op == "Transpose":
            perm = node.attributes.get("perm")
            order = list(perm.as_ints()) if perm is not None else list(range(len(x)))[::-1]
            return tuple(x[axis] for axis in order)
        if op in ("Concat", "Gather", "GatherND", "Slice"):
            return self._picked(node, x)
        return None

    def _shape_from_content(self, node: ir.Node, x: Shape | None) -> Shape | None:
        if node.op_type == "Range":
            bounds = [self.content(value) for value in node.inputs]
            if any(bound is None for bound in bounds):
                return None
            start, limit, step = (bound[0] for bound in bounds if bound is not None)
            plain = number(start) == 0 and number(step) == 1 and is_size(limit)
            return (limit if plain else ("range", start, limit, step),)
        target = self.content(node.inputs[0 if node.op_type == "ConstantOfShape" else 1])
        if target is None or (x is None and node.op_type != "ConstantOfShape"):
            return None
        if node.op_type == "ConstantOfShape":
            return target
        assert x is not None
        if node.op_type == "Expand":
            return broadcast([x, target])
        zero_is_copy = "allowzero" not in node.attributes or not node.attributes["allowzero"].as_int()
        if zero_is_copy:
            target = tuple(x[k] if number(size) == 0 and k < len(x) else size for k, size in enumerate(target))
        if any(not is_size(size) and number(size) != -1 for size in target):
            return None
        rest = [k for k, size in enumerate(target) if number(size) == -1]
        others = [size for size in target if number(size) != -1]
        return tuple(quotient(x, others) if k in rest else size for k, size in enumerate(target))

    def _reduced(self, node: ir.Node, x: Shape) -> Shape | None:
        keep = "keepdims" not in node.attributes or bool(node.attributes["keepdims"].as_int())
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            axes = _numbers(self.content(node.inputs[1]))
        elif "axes" in node.attributes:
            axes = list(node.attributes["axes"].as_ints())
        else:
            return None
        if not axes:
            return None
        gone = {axis % len(x) for axis in axes}
        return tuple(const(1) if k in gone else size for k, size in enumerate(x) if keep or k not in gone)

    def _squeezed(self, node: ir.Node, x: Shape) -> Shape | None:
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            axes = _numbers(self.content(node.inputs[1]))
        else:  # Squeeze of whatever is 1
            axes = [k for k, size in enumerate(x) if number(size) == 1] if None not in map(number, x) else None
        if axes is None:
            return None
        if node.op_type == "Squeeze":
            gone = {axis % len(x) for axis in axes}
            return tuple(size for k, size in enumerate(x) if k not in gone)
        rank = len(x) + len(axes)
        added = {axis % rank for axis in axes}
        rest = iter(x)
        return tuple(const(1) if k in added else next(rest) for k in range(rank))

    def _multiplied(self, node: ir.Node, x: Shape) -> Shape | None:
        y = self.shape(node.inputs[1])
        if y is None or len(x) < 2 or len(y) < 2:
            return None
        if node.op_type == "Gemm":
            flips = [bool(node.attributes[n].as_int()) if n in node.attributes else False for n in ("transA", "transB")]
            return (x[1] if flips[0] else x[0], y[0] if flips[1] else y[1])
        return (*broadcast([x[:-2], y[:-2]] if len(x) > 2 or len(y) > 2 else [(), ()]), x[-2], y[-1])

    def _picked(self, node: ir.Node, x: Shape) -> Shape | None:
        if node.op_type == "Concat":
            shapes = [self.shape(value) for value in node.inputs]
            if any(shape is None for shape in shapes):
                return None
            axis = node.attributes["axis"].as_int() % len(x)
            total = linear([(shape[axis], 1) for shape in shapes if shape is not None])
            return (*x[:axis], total, *x[axis + 1 :])
        if node.op_type == "Gather":
            axis = _axis(node) % len(x)
            index = self.shape(node.inputs[1])
            return None if index is None else (*x[:axis], *index, *x[axis + 1 :])
        if node.op_type == "GatherND":
            index = self.shape(node.inputs[1])
            depth = None if index is None else number(index[-1])
            batched = "batch_dims" in node.attributes and node.attributes["batch_dims"].as_int()
            return None if index is None or depth is None or batched else (*index[:-1], *x[depth:])
        bounds = [self.content(value) for value in node.inputs[1:]]
        if any(bound is None for bound in bounds):
            return None
        starts, ends, *more = [bound for bound in bounds if bound is not None]
        axes = _numbers(more[0]) if more else list(range(len(starts)))
        steps = more[1] if len(more) > 1 else tuple(const(1) for _ in starts)
        if axes is None:
            return None
        result = list(x)
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            result[axis % len(x)] = sliced(x[axis % len(x)], start, end, step)
        return tuple(result)

    def _split(self, node: ir.Node) -> None:
        x = self.shape(node.inputs[0])
        if x is None:
            return
        axis = _axis(node) % len(x)
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            parts = self.content(node.inputs[1])
        else:
            whole, count = number(x[axis]), len(node.outputs)
            parts = None if whole is None or whole % count else (const(whole // count),) * count
        for output, size in zip(node.outputs, parts or (), strict=False):
            self.shapes[output] = (*x[:axis], size, *x[axis + 1 :])

    # Contents ---------------------------------------------------------------------------------------

    def _content_of(self, node: ir.Node) -> Shape | None:
        op = node.op_type
        if op == "Shape":
            x = self.shape(node.inputs[0])
            return None if x is None else _cut(node, x)
        if op == "ConstantOfShape":
            return self._filled(node)
        inputs = [self.content(value) for value in node.inputs]
        if not inputs or inputs[0] is None:
            return None
        first = inputs[0]
        if op in ("Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten"):
            return first
        if op == "Cast":
            to = ir.DataType(node.attributes["to"].as_int())
            return first if to in (ir.DataType.INT64, ir.DataType.INT32) else None
        known = [content for content in inputs if content is not None]
        if len(known) < len(inputs):
            return None
        if op == "Concat":
            return tuple(size for content in known for size in content)
        if op == "Gather":
            index = _numbers(known[1])
            if index is None or len(self.shape(node.inputs[0]) or (0, 0)) != 1:
                return None
            inside = all(-len(first) <= k < len(first) for k in index)
            return tuple(first[k] for k in index) if inside else None
        if op == "Slice" and len(self.shape(node.inputs[0]) or (0, 0)) == 1:
            start, end, *more = (_numbers(content) for content in known[1:])
            if start is None or end is None or any(part is None for part in more):
                return None
            step = more[1][0] if len(more) > 1 and more[1] else 1
            return first[slice(start[0], end[0], step)] if step > 0 else None
        if op == "Expand":
            wanted = self.shape(node.outputs[0])
            length = None if wanted is None or len(wanted) != 1 else number(wanted[0])
            return first * length if len(first) == 1 and length is not None else None
        return elementwise(op, known)

    def _filled(self, node: ir.Node) -> Shape | None:
        shape = _numbers(self.content(node.inputs[0]))
        if shape is None or np.prod(shape, dtype=np.int64) > _LONGEST:
            return None
        value = node.attributes.get("value")
        array = np.zeros(1, np.float32) if value is None else value.as_tensor().numpy()
        if array.dtype.kind not in "iub":
            return None
        return (const(array.ravel()[0]),) * int(np.prod(shape, dtype=np.int64))


def _declared(value: ir.Value, axis: int) -> Size:
    size = value.shape[axis] if value.shape is not None else None
    if isinstance(size, int):
        return const(size)
    name = getattr(size, "value", None)
    return ("dim", name if name else f"{value.name}[{axis}]", name is not None)


def _axis(node: ir.Node) -> int:
    return node.attributes["axis"].as_int() if "axis" in node.attributes else 0


def _cut(node: ir.Node, shape: Shape) -> Shape:
    start = node.attributes["start"].as_int() if "start" in node.attributes else None
    end = node.attributes["end"].as_int() if "end" in node.attributes else None
    return shape[slice(start, end)]


def _numbers(content: Shape | None) -> list[int] | None:
    if content is None or any(size[0] != "const" for size in content):
        return None
    return [size[1] for size in content]
