"""Random small graphs of the operators that the analysis knows, and a few that it does not.

Every choice comes from a callable ``pick(n)`` that returns a number below ``n``, so that a test can shrink a
failure. Graphs run; some of them are then broken on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from tests.analysis.graphs import FLOAT, INT64, VOCAB, Builder

Pick = Callable[[int], int]
Dim = int | str

BATCH, LENGTH = 2, 3
WIDTHS = (4, 6, 8)


@dataclass(frozen=True)
class Tensor:
    """A float tensor and its shape; ``B`` and ``S`` are the dynamic batch and sequence."""

    name: str
    shape: tuple[Dim, ...]

    @property
    def width(self) -> int:
        assert isinstance(self.shape[-1], int)
        return self.shape[-1]


class RandomGraph:
    """Builds one graph, step by step; ``tensors`` may be read by later steps.

    Args:
        pick: the source of all choices.
        steps: how many steps.
    """

    def __init__(self, pick: Pick, steps: int) -> None:
        self._pick = pick
        self.b = Builder(seed=pick(1 << 16), opset=(18, 21, 23)[pick(3)])
        self._ids = self.b.input("ids", ["B", "S"], INT64)
        self.tensors: list[Tensor] = []
        self._embed()
        for _ in range(steps):
            self._step()
        self._finish()

    def model(self) -> ir.Model:
        return self.b.model()

    def feeds(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(1)
        feeds: dict[str, np.ndarray] = {"ids": rng.integers(0, VOCAB, (BATCH, LENGTH))}
        for value in self.b.inputs[1:]:
            dims = [{"B": BATCH, "S": LENGTH}.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
            feeds[value.name] = rng.standard_normal(dims)
        return feeds

    def _one(self, *options: Callable[[], None]) -> None:
        options[self._pick(len(options))]()

    def _any(self, rank: int | None = None) -> Tensor | None:
        """A tensor, more often a late one."""
        fit = [t for t in self.tensors if rank is None or len(t.shape) == rank]
        if not fit:
            return None
        return fit[-1 - min(self._pick(len(fit)), self._pick(len(fit)))]

    def _add(self, name: str, *shape: Dim) -> None:
        self.tensors.append(Tensor(name, shape))

    def _embed(self) -> None:
        width = WIDTHS[self._pick(3)]
        self._add(
            self.b.op("Gather", self.b.constant(self.b.rng.standard_normal((VOCAB, width))), self._ids), "B", "S", width
        )
        if self._pick(4) == 0:
            self._add(self.b.input("states", ["B", "S", width]), "B", "S", width)
        if self._pick(4) == 0:
            self._add(self._known(width), 1, "S", width)

    def _known(self, width: int) -> str:
        """Learned positions that follow from the shape."""
        b = self.b
        length = b.op("Gather", b.op("Shape", self._ids), b.constant(1, np.int64))
        index = b.op("Range", b.constant(0, np.int64), length, b.constant(1, np.int64))
        rows = b.op("Gather", b.constant(b.rng.standard_normal((16, width))), index)
        return b.op("Unsqueeze", rows, b.ints(0))

    def _step(self) -> None:
        self._one(
            *[self._linear] * 4, self._residual, self._residual, self._norm, self._norm, self._by_constant, self._gate,
            self._nonlinear, self._move, self._move, self._parts, self._join, self._heads, self._attention,
            self._attention, self._block, self._odd, self._reduce, self._branch,
        )  # fmt: skip

    def _linear(self) -> None:
        x = self._any()
        if x is None or len(x.shape) < 2:
            return
        b, width = self.b, WIDTHS[self._pick(3)]
        kind = self._pick(6)
        if kind == 0 and x.shape[:-1] == ("B", "S"):
            flat = b.op("Reshape", x.name, b.ints(-1, x.width))
            turned = self._pick(2)
            weight = b.matrix(width, x.width) if turned else b.matrix(x.width, width)
            bias = [b.vector(width)] if self._pick(2) else []
            y = b.op("Gemm", flat, weight, *bias, transB=turned)
            like = b.op("Concat", b.op("Shape", self._ids), b.ints(width), axis=0)
            y = b.op("Reshape", y, like)
        elif kind == 1:
            y = b.op("MatMul", x.name, b.op("Transpose", b.matrix(width, x.width), perm=[1, 0]))
        elif kind == 2:
            half = b.constant(b.rng.standard_normal((x.width, width)) / 2, np.float16)
            y = b.op("MatMul", x.name, b.op("Cast", half, to=FLOAT))
        else:
            y = b.linear(x.name, x.width, width, bias=kind == 3)
        self._add(y, *x.shape[:-1], width)

    def _residual(self) -> None:
        """Add or Sub of two tensors that fit; a scalar, or a row, or a column."""
        x = self._any()
        fit = [] if x is None else [t for t in self.tensors if t.shape == x.shape]
        if x is None or not fit:
            return
        other = fit[self._pick(len(fit))]
        self._add(self.b.op(("Add", "Sub")[self._pick(4) == 0], x.name, other.name), *x.shape)

    def _norm(self) -> None:
        x = self._any()
        if x is None:
            return
        b, width = self.b, x.width
        kind = self._pick(4)
        if kind == 0:
            y = b.op("LayerNormalization", x.name, b.vector(width, around=1), b.vector(width), axis=-1, epsilon=1e-2)
        elif kind == 1 and b.opset >= 23:
            y = b.op("RMSNormalization", x.name, b.vector(width, around=1), axis=-1, epsilon=1e-2)
        else:
            squares = b.op("Mul", x.name, x.name) if kind == 2 else b.op("Pow", x.name, b.constant(2.0))
            root = b.op("Sqrt", b.op("Add", b.op("ReduceMean", squares, b.ints(-1)), b.constant(1e-2)))
            y = b.op("Div", x.name, root)
            y = b.op("Mul", y, b.vector(width, around=1)) if self._pick(3) else y
        self._add(y, *x.shape)

    def _by_constant(self) -> None:
        x = self._any()
        if x is None:
            return
        b = self.b
        size = ((x.width,), (), (1,), (*[1] * (len(x.shape) - 1), x.width))[self._pick(4)]
        constant = b.constant(1 + 0.3 * b.rng.standard_normal(size))
        op = ("Mul", "Add", "Sub", "Div")[self._pick(4)]
        operands = [constant, x.name] if op != "Div" and self._pick(2) else [x.name, constant]
        self._add(b.op(op, *operands), *x.shape)

    def _gate(self) -> None:
        """A product of two run-time tensors: elements, or one number per row."""
        x = self._any()
        if x is None:
            return
        b = self.b
        if self._pick(2):
            row = (
                b.op("MatMul", x.name, b.matrix(x.width, 1)) if self._pick(2) else b.op("ReduceMax", x.name, b.ints(-1))
            )
            self._add(b.op("Mul", x.name, b.op("Sigmoid", row)), *x.shape)
            return
        fit = [t for t in self.tensors if t.shape == x.shape]
        self._add(b.op("Mul", x.name, fit[self._pick(len(fit))].name), *x.shape)

    def _nonlinear(self) -> None:
        x = self._any()
        if x is None:
            return
        op = ("Tanh", "Sigmoid", "Relu", "Neg", "Identity", "Softmax", "Cast", "Abs")[self._pick(8)]
        attributes = {"axis": -1} if op == "Softmax" else {"to": FLOAT} if op == "Cast" else {}
        self._add(self.b.op(op, x.name, **attributes), *x.shape)

    def _move(self) -> None:
        """Transpose two axes, reverse or roll channels, split the last axis in two, or join the last two."""
        x = self._any()
        if x is None:
            return
        b, rank = self.b, len(x.shape)
        kind = self._pick(5)
        if kind == 0:
            first, second = self._pick(rank), self._pick(rank)
            order = list(range(rank))
            order[first], order[second] = order[second], order[first]
            shape = tuple(x.shape[k] for k in order)
            if isinstance(shape[-1], int):
                self._add(b.op("Transpose", x.name, perm=order), *shape)
        elif kind == 1:
            order = list(range(x.width))
            rest = [order.pop(self._pick(len(order))) for _ in range(x.width)]
            self._add(b.op("Gather", x.name, b.constant(rest, np.int64), axis=-1), *x.shape)
        elif kind == 2 and x.width % 2 == 0 and rank == 3:
            self._add(b.op("Reshape", x.name, b.ints(0, 0, 2, x.width // 2)), *x.shape[:2], 2, x.width // 2)
        elif kind == 3 and rank == 4 and isinstance(x.shape[2], int) and x.shape[2] * x.width <= 32:
            self._add(b.op("Reshape", x.name, b.ints(0, 0, x.shape[2] * x.width)), *x.shape[:2], x.shape[2] * x.width)
        else:
            step = self._pick(x.width)
            head = b.op("Slice", x.name, b.ints(0), b.ints(step), b.ints(-1))
            tail = b.op("Slice", x.name, b.ints(step), b.ints(x.width), b.ints(-1))
            if step > 0:
                self._add(b.op("Concat", tail, head, axis=-1), *x.shape)

    def _parts(self) -> None:
        x = self._any()
        if x is None or x.width < 2:
            return
        cut = 1 + self._pick(x.width - 1)
        first = self.b.op("Split", x.name, self.b.ints(cut, x.width - cut), outputs=2, axis=-1)
        self._add(first, *x.shape[:-1], cut)
        self._add(f"t{int(first[1:]) + 1}", *x.shape[:-1], x.width - cut)

    def _join(self) -> None:
        x = self._any()
        fit = [] if x is None else [t for t in self.tensors if t.shape[:-1] == x.shape[:-1] and t.width + x.width <= 24]
        if x is not None and fit:
            other = fit[self._pick(len(fit))]
            self._add(self.b.op("Concat", x.name, other.name, axis=-1), *x.shape[:-1], x.width + other.width)

    def _heads(self) -> None:
        x = self._any(3)
        if x is not None and x.width % 2 == 0:
            y = self.b.op("Reshape", x.name, self.b.ints(0, 0, 2, x.width // 2))
            self._add(self.b.op("Transpose", y, perm=[0, 2, 1, 3]), x.shape[0], 2, x.shape[1], x.width // 2)

    def _attention(self) -> None:
        """q, k and v, new linears or tensors that are there; by hand, or the operator."""
        b, x = self.b, self._any(3)
        if x is None or x.shape[:2] != ("B", "S"):
            return
        heads, width = (2, 4) if self._pick(2) else (1, 6)
        q, k, v = (b.linear(x.name, x.width, heads * width, bias=self._pick(2) == 0) for _ in range(3))
        if b.opset >= 23 and self._pick(3) == 0:
            y = b.op("Attention", q, k, v, q_num_heads=heads, kv_num_heads=heads)
            self._add(y, "B", "S", heads * width)
            return
        q, k, v = (b.op("Reshape", t, b.ints(0, 0, heads, width)) for t in (q, k, v))
        q, v = (b.op("Transpose", t, perm=[0, 2, 1, 3]) for t in (q, v))
        scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 2, 3, 1]))
        y = b.op("MatMul", b.op("Softmax", scores, axis=-1), v)
        y = b.op("Reshape", b.op("Transpose", y, perm=[0, 2, 1, 3]), b.ints(0, 0, heads * width))
        self._add(y, "B", "S", heads * width)

    def _block(self) -> None:
        """What a network does most: a norm, two linears with something between, back to the stream."""
        x = self._any(3)
        if x is None:
            return
        b = self.b
        h = b.op("LayerNormalization", x.name, b.vector(x.width, around=1), axis=-1, epsilon=1e-2)
        gate = b.linear(h, x.width, 8, bias=True)
        act = b.op("Mul", gate, b.op("Sigmoid", gate))
        self._add(b.op("Add", x.name, b.linear(act, 8, x.width)), *x.shape)

    def _odd(self) -> None:
        """Operators that look at rows, places or order."""
        x = self._any()
        if x is None:
            return
        b = self.b
        kind = self._pick(5)
        if kind == 0:
            self._add(b.op("CumSum", x.name, b.constant(len(x.shape) - 1, np.int64)), *x.shape)
        elif kind == 1:
            top = b.op("TopK", x.name, b.ints(2 if x.width > 1 else 1), outputs=2, axis=-1)
            self._add(top, *x.shape[:-1], 2 if x.width > 1 else 1)
        elif kind == 2:
            self._add(b.op("Where", b.op("Greater", x.name, b.constant(0.0)), x.name, b.constant(0.5)), *x.shape)
        elif kind == 3:
            self._add(b.op("Tile", x.name, b.ints(*[1] * (len(x.shape) - 1), 2)), *x.shape[:-1], 2 * x.width)
        else:
            self._add(b.op("Expand", b.op("Unsqueeze", x.name, b.ints(0)), b.ints(2, *[1] * len(x.shape))), 2, *x.shape)

    def _reduce(self) -> None:
        x = self._any()
        if x is None or len(x.shape) < 2:
            return
        op = ("ReduceMean", "ReduceSum", "ReduceL2")[self._pick(3)]
        axis = self._pick(len(x.shape))
        keep = axis == len(x.shape) - 1 or self._pick(2)
        shape = [*x.shape[:axis], *([1] if keep else []), *x.shape[axis + 1 :]]
        self._add(self.b.op(op, x.name, self.b.ints(axis), keepdims=int(keep)), *shape)

    def _branch(self) -> None:
        """An If whose branches capture a tensor of the graph."""
        x = self._any()
        if x is None:
            return
        b = self.b
        condition = b.op("Greater", b.op("ReduceSum", x.name, keepdims=0), b.constant(0.0))
        graphs = []
        for op in ("Tanh", "Identity"):
            name = b.name()
            graphs.append(
                helper.make_graph(
                    [helper.make_node(op, [x.name], [name])],
                    op,
                    [],
                    [helper.make_tensor_value_info(name, FLOAT, None)],
                )
            )
        self._add(b.op("If", condition, then_branch=graphs[0], else_branch=graphs[1]), *x.shape)

    def _finish(self) -> None:
        """Outputs: the last tensor, and sometimes another."""
        chosen = {self.tensors[-1].name: self.tensors[-1]}
        if self._pick(2):
            other = self._any()
            assert other is not None
            chosen[other.name] = other
        b = self.b
        for number, tensor in enumerate(chosen.values()):
            name = f"out{number}"
            if self._pick(2) and len(tensor.shape) > 1:
                b.nodes.append(helper.make_node("MatMul", [tensor.name, b.matrix(tensor.width, 5)], [name]))
                b.output(name, [*tensor.shape[:-1], 5])
            else:
                b.nodes.append(helper.make_node("Identity", [tensor.name], [name]))
                b.output(name, list(tensor.shape))


def broken(proto: onnx.ModelProto, pick: Pick) -> None:
    """Damage a model in one place: it may not run any more, or not mean what it says."""
    graph = proto.graph
    node = graph.node[pick(len(graph.node))]
    constant = graph.initializer[pick(len(graph.initializer))]
    match pick(8):
        case 0 if node.input:
            node.input[pick(len(node.input))] = ""
        case 1 if node.input:
            other = graph.node[pick(len(graph.node))]
            node.input[pick(len(node.input))] = other.output[0]
        case 2:
            node.op_type = ("Unknown", "MatMul", "Add", "Reshape", "Split", "Gather", "Concat")[pick(7)]
        case 3 if node.attribute:
            del node.attribute[pick(len(node.attribute))]
        case 4 if node.attribute and node.attribute[0].type == onnx.AttributeProto.INT:
            node.attribute[0].i = pick(9) - 4
        case 5:
            constant.dims[:] = [*constant.dims, 1] if pick(2) else list(constant.dims)[::-1]
        case 6:
            constant.data_type = TensorProto.DOUBLE if constant.data_type == FLOAT else FLOAT
        case _:
            del graph.node[pick(len(graph.node))]
