"""Apply facts to a float64 copy of a model with random dense matrices, in the plainest way.

Independent of the passes on purpose: facts that are wrong or incomplete must show here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from graphrot.analysis.norms import NORM_OPS, gain_and_shift
from graphrot.analysis.types import Facts, GainFold, OnlineExit, RotationSpace, WeightUse, decode_runs
from graphrot.evaluate.double import to_double
from graphrot.graph import node_of, read_constant, value_map


@dataclass(frozen=True)
class Rotated:
    """A rotated float64 model and the matrix that each cache is rotated by, by tensor name."""

    model: ir.Model
    caches: dict[str, np.ndarray]


def random_orthogonal(dim: int, rng: np.random.Generator, *, mean_preserving: bool = False) -> np.ndarray:
    """Dense orthogonal ``[dim, dim]``; with ``mean_preserving`` it maps the all-ones vector to itself."""
    if not mean_preserving:
        return np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    ones = np.ones((dim, 1))
    basis = np.linalg.qr(np.concatenate([ones, rng.standard_normal((dim, dim - 1))], axis=1))[0]
    inner = np.eye(dim)
    inner[1:, 1:] = random_orthogonal(dim - 1, rng)
    return basis @ inner @ basis.T


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All outputs of a model, without graph optimizations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def rotated(
    model: ir.Model,
    facts: Facts,
    *,
    seed: int = 0,
    spaces: tuple[RotationSpace, ...] | None = None,
    double: bool = True,
) -> Rotated:
    """Fold all gains of ``facts`` and rotate ``spaces`` (all of them by default) in a copy.

    The copy is in float64; with ``double=False``, for operators without float64 kernels, in float32.
    """
    work = _Work(to_double(model) if double else model.clone(), np.random.default_rng(seed), double)
    for fold in facts.gains:
        work.fold(fold)
    for space in facts.spaces if spaces is None else spaces:
        work.rotate(space)
    work.finish(facts.gains)
    return Rotated(work.model, work.caches)


def relative_error(
    model: ir.Model,
    facts: Facts,
    feeds: dict[str, np.ndarray],
    *,
    spaces: tuple[RotationSpace, ...] | None = None,
    double: bool = True,
) -> float:
    """Largest relative error over all outputs of the rotated copy against the original.

    ``feeds`` hold caches in the original basis; those that rotate are rotated on the way in, and
    compared in the rotated basis on the way out.
    """
    floats = np.float64 if double else np.float32
    expected = run(to_double(model) if double else model, _as_floats(feeds, floats))
    result = rotated(model, facts, spaces=spaces, double=double)
    turned = {name: x @ result.caches[name] if name in result.caches else x for name, x in feeds.items()}
    found = run(result.model, _as_floats(turned, floats))
    worst = 0.0
    for name, reference in expected.items():
        goal = reference @ result.caches[name] if name in result.caches else reference
        worst = max(worst, float(np.abs(found[name] - goal).max() / np.abs(goal).max()))
    return worst


def _as_floats(feeds: dict[str, np.ndarray], dtype: type) -> dict[str, np.ndarray]:
    return {n: x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x for n, x in feeds.items()}


class _Work:
    def __init__(self, model: ir.Model, rng: np.random.Generator, double: bool) -> None:
        self._dtype = np.float64 if double else np.float32
        self.model = model
        self.caches: dict[str, np.ndarray] = {}
        self._rng = rng
        self._values = value_map(model)
        self._operands: dict[tuple[str, int], np.ndarray] = {}
        self._shifts: dict[str, np.ndarray] = {}
        self._online: list[tuple[str, np.ndarray]] = []
        self._exits: list[tuple[OnlineExit, np.ndarray]] = []

    def _operand(self, use: WeightUse) -> np.ndarray:
        key = (use.node, use.input)
        if key not in self._operands:
            value = node_of(self._values, use.node).inputs[use.input]
            assert value is not None and value.name == use.tensor
            self._operands[key] = np.array(read_constant(value), dtype=np.float64)
        return self._operands[key]

    def fold(self, fold: GainFold) -> None:
        gain = np.asarray(read_constant(self._values[fold.gain])).reshape(-1)
        shift = None if fold.shift is None else np.asarray(read_constant(self._values[fold.shift])).reshape(-1)
        for consumer in fold.consumers:
            weight, index = self._operand(consumer.use), decode_runs(consumer.index)
            moved = np.moveaxis(weight, consumer.use.axis, -1)
            assert moved.shape[-1] == len(index)
            if shift is not None:
                old = self._shifts.get(consumer.use.node, 0.0)
                self._shifts[consumer.use.node] = old + moved @ shift[index]
            moved *= gain[index]

    def rotate(self, space: RotationSpace) -> None:
        matrix = random_orthogonal(space.dim, self._rng, mean_preserving=space.mean_preserving)
        for use in (*space.producers, *space.consumers):
            target = np.moveaxis(self._operand(use), use.axis, -1)
            for group in use.groups:
                positions = decode_runs(group)
                target[..., positions] = target[..., positions] @ matrix
        for use in space.producers:
            if use.role == "weight" and use.node in self._shifts:
                for group in use.groups:
                    positions = decode_runs(group)
                    self._shifts[use.node][positions] = self._shifts[use.node][positions] @ matrix
        for online in space.online:
            full = np.eye(online.width)
            for group in online.groups:
                positions = decode_runs(group)
                full[np.ix_(positions, positions)] = matrix
            self._online.append((online.tensor, full))
        for end in space.exits:
            full = np.eye(end.width)
            for group in end.groups:
                positions = decode_runs(group)
                full[np.ix_(positions, positions)] = matrix.T
            self._exits.append((end, full))
        for name in (*space.cache_inputs, *space.cache_outputs):
            self.caches[name] = matrix

    def finish(self, gains: tuple[GainFold, ...]) -> None:
        for (node, position), array in self._operands.items():
            node_of(self._values, node).replace_input_with(position, self._constant(array))
        for fold in gains:
            node = node_of(self._values, fold.node)
            if fold.form == "norm":
                self._fill(node, fold.gain_input, 1.0)
                if fold.shift_input is not None:
                    self._fill(node, fold.shift_input, 0.0)
                continue
            self._fill(node, fold.gain_input, 1.0)
            if fold.shift_node is not None and fold.shift_input is not None:
                self._fill(node_of(self._values, fold.shift_node), fold.shift_input, 0.0)
        for name, shift in self._shifts.items():
            self._behind(name, "Add", shift)
        for end, matrix in self._exits:
            self._leave(end, matrix)
        for name, matrix in self._online:
            self._behind(name, "MatMul", matrix, ends=False)

    def _leave(self, end: OnlineExit, matrix: np.ndarray) -> None:
        """The inverse in front of a reader; for a norm, between it and its gain."""
        if not end.node or end.op not in NORM_OPS:
            value = self._values[end.tensor]
            product = ir.node("MatMul", [value, self._constant(matrix)])
            made = product.outputs[0]
            made.type = value.type
            if end.node:
                reader = node_of(self._values, end.node)
                for k, operand in enumerate(reader.inputs):
                    if operand is value:
                        reader.replace_input_with(k, made)
            else:
                outputs = self.model.graph.outputs
                outputs[next(k for k, o in enumerate(outputs) if o is value)] = made
                value.name, made.name = f"{end.tensor}_rotated", end.tensor
            self._insert(value, product)
            return
        node = node_of(self._values, end.node)
        gain, shift = gain_and_shift(node)
        numbers = [None if k is None else read_constant(cast(ir.Value, node.inputs[k])) for k in (gain, shift)]
        self._fill(node, gain, 1.0)
        if shift is not None:
            self._fill(node, shift, 0.0)
        name = end.node
        if numbers[1] is not None:
            self._behind(name, "Add", numbers[1])
            name = f"{end.node}_before_Add"
            self._values[name] = node.outputs[0]
        self._behind(name, "Mul", cast(np.ndarray, numbers[0]))
        self._values[f"{name}_before_Mul"] = node.outputs[0]
        self._behind(f"{name}_before_Mul", "MatMul", matrix)

    def _fill(self, node: ir.Node, position: int, number: float) -> None:
        value = node.inputs[position]
        assert value is not None
        node.replace_input_with(position, self._constant(np.full(read_constant(value).shape, number)))

    def _behind(self, name: str, op: str, operand: np.ndarray, *, ends: bool = True) -> None:
        """A node behind a value, for all its readers; with ``ends``, also for the graph output that it is."""
        value = self._values[name]
        node = ir.node(op, [value, self._constant(operand)])
        made = node.outputs[0]
        made.type = value.type
        if ends:
            value.replace_all_uses_with(made, replace_graph_outputs=True)
        else:
            for use in list(value.uses()):
                use.node.replace_input_with(use.idx, made)
        node.replace_input_with(0, value)
        if value.is_graph_output():
            made.name = f"{value.name}_behind_{op}"
        elif not value.is_graph_input():
            value.name, made.name = f"{value.name}_before_{op}", value.name
        self._insert(value, node)
        self._values[name] = made

    def _insert(self, value: ir.Value, node: ir.Node) -> None:
        producer = value.producer()
        if producer is None:
            self.model.graph.insert_before(self.model.graph[0], node)
        else:
            self.model.graph.insert_after(producer, node)

    def _constant(self, array: np.ndarray) -> ir.Value:
        name = f"constant_{len(self.model.graph.initializers)}"
        tensor = ir.tensor(np.ascontiguousarray(array, dtype=self._dtype), name=name)
        value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
        self.model.graph.initializers[name] = value
        return value
