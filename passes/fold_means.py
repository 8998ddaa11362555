"""Take the mean out of what makes channels, and turn the LayerNorms that read them into RMS norms.

With ``P = I - 1 1^T / n``, ``LayerNorm(x) = RMSNorm(x P)``, exactly and with the same epsilon: the variance of x is the
mean square of ``x P``. So producers become ``W P``, and the norm stops subtracting (SliceGPT, section 3.2,
arXiv:2401.15024). After this every orthogonal matrix may act on the channels.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import MeanNorm, decode_runs
from graphrot.errors import InputRefused
from graphrot.folded import Center, used_names
from graphrot.graph import (
    FLOATS,
    add_initializer,
    drop_unused_initializers,
    is_constant,
    node_of,
    read_constant,
    unique_name,
    value_map,
)
from graphrot.passes.base import GraphPass, record_provenance
from graphrot.passes.quantize_nodes import NodeWriter, remove_unused
from graphrot.passes.rotate import edit_operands
from graphrot.passes.split_gains import behind_gain
from graphrot.plan.types import CentredLookup, CentredTensor, MeanFold

_AXES_ARE_INPUTS = 18
"""The opset from which ReduceMean takes its axes as an input."""


class FoldMeans(GraphPass):
    """Centre every producer that the plan's mean folds name, and rewrite their norms.

    1. Weights, biases and tables: centred along their channels, in float64, with the later edits.
    2. Run-time tensors: a ReduceMean and a Sub behind them, in front of their transform.
    3. A table that a head shares: two vectors behind the lookup, which rotate with the space.
    4. LayerNormalization becomes Pow, ReduceMean, Add, Sqrt, Div, Mul (which ONNX Runtime fuses); a
       SkipLayerNormalization a SkipSimplifiedLayerNormalization; a decomposed norm loses its Sub.

    The norms' gains and shifts must have been folded (:class:`FoldGains`), but for gains of one number.
    """

    def apply(self, model: ir.Model, done: set[str]) -> None:
        for fold in self.plan.mean_folds:
            if fold.space in done:
                self.report.skipped.append((fold.space, "centred already"))
                continue
            _Fold(model, fold, {end.tensor for r in self.plan.rotations for end in r.space.exits}).run()
            done.add(fold.space)
            self.report.changed += [use.node for use in fold.producers] + [norm.node for norm in fold.norms]
        drop_unused_initializers(model)


class _Fold:
    """One mean fold on its way into a model."""

    def __init__(self, model: ir.Model, fold: MeanFold, kept: set[str]) -> None:
        self.model = model
        self.fold = fold
        self.kept = kept
        """Tensors that later passes look for by name."""
        self.writer = NodeWriter(model)
        self.names = used_names(model)
        self.made: dict[tuple[ir.Value, float, bytes | ir.Value], ir.Value] = {}
        self.opset = model.graph.opset_imports.get("", model.graph.opset_imports.get("ai.onnx", 0))

    def run(self) -> None:
        values = value_map(self.model)
        edit_operands(self.model, self.fold.space, Center, self.fold.producers, values=values, names=self.names)
        for norm in self.fold.norms:
            self._norm(norm, node_of(values, norm.node))
        for tensor in self.fold.online:
            self._centre(tensor, self._tensor(tensor.tensor))
        values = value_map(self.model)  # a norm's output may be the tensor below
        if self.fold.lookup is not None:
            self._look_up(self.fold.lookup, node_of(values, self.fold.lookup.tensor))

    def _tensor(self, name: str) -> ir.Value:
        value = behind_gain(self.model, name)
        if value is None:
            raise InputRefused(
                "The plan names a tensor that this model does not have",
                where=f"tensor {name!r}",
                do="make the plan again from this model",
            )
        return value

    # Norms

    def _norm(self, norm: MeanNorm, node: ir.Node) -> None:
        if norm.form == "chain":
            self._bypass(node)
        elif norm.form == "skip":
            self._simplify(node)
        else:
            self._decompose(node)

    def _bypass(self, subtraction: ir.Node) -> None:
        """A Sub of a mean that is zero now: what read the difference reads the tensor."""
        kept, mean = subtraction.inputs
        assert kept is not None
        if subtraction.outputs[0].name in self.kept:
            same = self._before(subtraction, "Identity", [kept], f"{subtraction.outputs[0].name}__same", kept.dtype)
            self.writer.take_over(subtraction.outputs[0], same)
            return
        subtraction.outputs[0].replace_all_uses_with(kept)
        self.model.graph.remove(subtraction, safe=True)
        remove_unused(self.model, mean)

    def _simplify(self, node: ir.Node) -> None:
        """``(input, skip, gain[, shift][, bias])`` to ``(input, skip, gain[, bias])``."""
        inputs = list(node.inputs)[:3]
        if len(node.inputs) > 4 and node.inputs[4] is not None:
            inputs.append(node.inputs[4])
        unread = {k for k, old in enumerate(node.outputs) if k and not old.uses() and not old.is_graph_output()}
        outputs = [
            ir.Value(name="") if k in unread else ir.Value(name=old.name, type=old.type, shape=old.shape)
            for k, old in enumerate(node.outputs)
        ]
        attributes = [ir.AttrFloat32("epsilon", _epsilon(node, default=1e-12))]
        fresh = ir.Node(
            node.domain, "SkipSimplifiedLayerNormalization", inputs, attributes, outputs=outputs, name=node.name
        )
        fresh.metadata_props.update(node.metadata_props)
        record_provenance(fresh, self.fold.space)
        self.model.graph.insert_before(node, fresh)
        for old, new in zip(list(node.outputs), outputs, strict=True):
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        self.model.graph.remove(node, safe=True)

    def _decompose(self, node: ir.Node) -> None:
        """``gain * x / sqrt(mean(x**2) + epsilon)``, in the form that ONNX Runtime knows as an RMS norm.

        Norms of one tensor (parallel branches) are one once their gains were folded; ONNX Runtime would join them in
        part, and not know the rest as a norm.
        """
        x, gain = node.inputs[0], node.inputs[1]
        assert x is not None and gain is not None
        key = (x, _epsilon(node, default=1e-5), read_constant(gain).tobytes() if is_constant(gain) else gain)
        free = not node.outputs[0].is_graph_output() and node.outputs[0].name not in self.kept
        if key in self.made and free:
            node.outputs[0].replace_all_uses_with(self.made[key])
            self.model.graph.remove(node, safe=True)
            return
        dtype = _float_type(gain, x)
        name = node.outputs[0].name or ""
        two = self.writer.constant(np.asarray(2, dtype.numpy()), "two")
        epsilon = self.writer.constant(np.asarray(_epsilon(node, default=1e-5), dtype.numpy()), "epsilon")
        squares = self._before(node, "Pow", [x, two], f"{name}__squares", dtype)
        mean = self._before(node, "ReduceMean", [squares], f"{name}__mean", dtype)
        shifted = self._before(node, "Add", [mean, epsilon], f"{name}__shifted", dtype)
        root = self._before(node, "Sqrt", [shifted], f"{name}__root", dtype)
        normed = self._before(node, "Div", [x, root], f"{name}__normed", dtype)
        self.made[key] = self._before(node, "Mul", [normed, gain], f"{name}__gained", dtype)
        self.writer.take_over(node.outputs[0], self.made[key])

    # Run-time tensors

    def _centre(self, tensor: CentredTensor, value: ir.Value) -> None:
        users = [(use.node, use.idx) for use in value.uses()]
        mean = self._behind(value, "ReduceMean", [value], f"{tensor.tensor}__mean", value.dtype)
        self._take(users, value, mean, tensor.centred)

    def _look_up(self, lookup: CentredLookup, producer: ir.Node) -> None:
        value = producer.outputs[0]
        users = [(use.node, use.idx) for use in value.uses()]
        dtype = _float_type(producer.inputs[0], value)
        vectors = np.zeros((len(lookup.groups), lookup.width), dtype.numpy())
        for row, group in enumerate(lookup.groups):
            positions = decode_runs(group)
            vectors[row, positions] = len(positions) ** -0.5
        number = self._by_vector(value, vectors.T, lookup.number, dtype)
        part = self._by_vector(number, vectors, lookup.part, dtype)
        self._take(users, value, part, lookup.centred)

    def _by_vector(self, x: ir.Value, vectors: np.ndarray, name: str, dtype: ir.DataType) -> ir.Value:
        vector = add_initializer(self.model, self._free(f"{name}_vector"), np.ascontiguousarray(vectors))
        return self._behind(x, "MatMul", [x, vector], name, dtype, exactly=True)

    def _take(self, users: list[tuple[ir.Node, int]], value: ir.Value, mean: ir.Value, name: str) -> None:
        """Let the users of ``value`` read what is left without ``mean``."""
        centred = self._behind(mean, "Sub", [value, mean], name, value.dtype, exactly=True)
        centred.shape = value.shape
        for user, index in users:
            user.replace_input_with(index, centred)

    # Nodes

    def _before(
        self, anchor: ir.Node, op_type: str, inputs: list[ir.Value], name: str, dtype: ir.DataType | None
    ) -> ir.Value:
        node = self._node(op_type, inputs, unique_name(self.names, name), dtype)
        self.model.graph.insert_before(anchor, node)
        return node.outputs[0]

    def _behind(
        self,
        place: ir.Value,
        op_type: str,
        inputs: list[ir.Value],
        name: str,
        dtype: ir.DataType | None,
        *,
        exactly: bool = False,
    ) -> ir.Value:
        """Behind what makes ``place``, or in front of all nodes; ``exactly``: the plan names the output, so the name
        must be free."""
        free = self._free(name) if exactly else unique_name(self.names, name)
        node = self._node(op_type, inputs, free, dtype)
        producer = place.producer()
        if producer is None:
            self.model.graph.insert_before(self.model.graph[0], node)
        else:
            self.model.graph.insert_after(producer, node)
        return node.outputs[0]

    def _node(self, op_type: str, inputs: list[ir.Value], name: str, dtype: ir.DataType | None) -> ir.Node:
        """A node that is in no graph yet; a ReduceMean is one of the last axis."""
        operands, attributes = list(inputs), []
        if op_type == "ReduceMean" and self.opset >= _AXES_ARE_INPUTS:
            operands.append(self.writer.integers([-1], "last_axis"))
        elif op_type == "ReduceMean":
            attributes.append(ir.AttrInt64s("axes", [-1]))
        output = ir.Value(name=name, type=None if dtype is None else ir.TensorType(dtype))
        node = ir.Node("", op_type, operands, attributes, outputs=[output], name=name)
        record_provenance(node, self.fold.space)
        return node

    def _free(self, name: str) -> str:
        if name in self.names:
            raise InputRefused(
                "The model has a tensor of a name that the plan gives to a new one",
                where=f"tensor {name!r}",
                do="rename that tensor",
            )
        self.names.add(name)
        return name


def _epsilon(node: ir.Node, *, default: float) -> float:
    return node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else default


def _float_type(first: ir.Value | None, second: ir.Value) -> ir.DataType:
    """The type of an operand, or else of a tensor; float32 where neither is declared."""
    if first is not None and is_constant(first):
        return ir.DataType.from_numpy(read_constant(first).dtype)
    dtype = second.dtype if first is None or first.dtype is None else first.dtype
    return dtype if dtype in FLOATS else ir.DataType.FLOAT
