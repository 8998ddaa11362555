"""Move per-channel gains (and shifts) of norms forward into the matmuls that read them.

``norm(x) * gamma @ W = norm(x) @ (diag(gamma) W)``, and a shift ``beta`` becomes ``beta @ W`` in the
consumer's bias, with the old ``W`` (never divided by gamma, which may be near zero). After this a
rotation may pass through the norm (QuaRot, section 4.1, arXiv:2404.00456).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import GainConsumer, GainFold, WeightUse, decode_runs
from graphrot.errors import InputRefused
from graphrot.folded import Scale, Shift, edit_operand, exact_numbers, used_names
from graphrot.graph import (
    RENAMED,
    add_initializer,
    drop_unused_initializers,
    is_constant,
    node_of,
    read_constant,
    unique_name,
    value_map,
)
from graphrot.passes.base import GraphPass, record_provenance

SHIFT_BIAS = "graphrot.shift_bias"
"""``node.meta`` key of a matmul: ``(first output, input)`` of the bias that took up a folded shift."""


class FoldGains(GraphPass):
    """Fold every gain of the plan.

    1. ``norm``: the norm's gain becomes ones and its shift zeros, as new initializers (an all-ones
       gain may be shared between norms, and is left alone by others).
    2. ``mul``: the Mul, and the Add of the shift behind it, are bypassed and removed.
    3. Consumers: ``W[p] *= gain[index(p)]``; the shift goes into the bias of a Gemm, of the Add that
       follows a matmul, or into a new Add.
    """

    def apply(self, model: ir.Model, done: set[str]) -> None:
        names, values = used_names(model), value_map(model)
        for fold in self.plan.gain_folds:
            if fold.node in done:
                self.report.skipped.append((fold.node, "folded already"))
                continue
            self._fold(model, fold, values, names)
            done.add(fold.node)
            self.report.changed.append(fold.node)
        drop_unused_initializers(model)

    def _fold(self, model: ir.Model, fold: GainFold, values: Mapping[str, ir.Value], names: set[str]) -> None:
        node = node_of(values, fold.node)
        gain = exact_numbers(_operand(node, fold.gain_input)).reshape(-1)
        shift = None
        if fold.shift is not None:
            assert fold.shift_node is not None and fold.shift_input is not None
            shift = exact_numbers(_operand(node_of(values, fold.shift_node), fold.shift_input)).reshape(-1)
        for consumer in fold.consumers:
            self._consume(model, consumer, gain, shift, values, names)
        if fold.form == "norm":
            make_neutral(model, node, fold.gain_input, 1.0, names)
            if fold.shift_input is not None:
                make_neutral(model, node, fold.shift_input, 0.0, names)
            return
        if fold.shift_node is not None:
            assert fold.shift_input is not None
            _bypass(model, node_of(values, fold.shift_node), fold.shift_input)
        _bypass(model, node, fold.gain_input)

    def _consume(
        self,
        model: ir.Model,
        consumer: GainConsumer,
        gain: np.ndarray,
        shift: np.ndarray | None,
        values: Mapping[str, ir.Value],
        names: set[str],
    ) -> None:
        use = consumer.use
        node = node_of(values, use.node)
        index = np.asarray(decode_runs(consumer.index), dtype=np.int64)
        _check(node, use, index, gain.size)
        if shift is not None:
            weight = exact_numbers(_operand(node, use.input))
            if weight.ndim != 2:
                raise InputRefused(
                    "A shift cannot be folded into an operand that is not a matrix",
                    where=f"input {use.input} of the {node.op_type} that makes {use.node!r}",
                    why=f"its shape is {list(weight.shape)}",
                )
            full = shift if shift.size > 1 else np.repeat(shift, int(index.max()) + 1)
            extra = np.tensordot(full[index], weight, axes=([0], [use.axis]))
            _add_bias(model, node, extra, names)
        factors = gain[index] if gain.size > 1 else np.repeat(gain, index.size)
        edit_operand(model, node, use.input, Scale(use.axis, tuple(float(f) for f in factors)), names)
        record_provenance(node, "gain")


def _check(node: ir.Node, use: WeightUse, index: np.ndarray, count: int) -> None:
    """The plan may come from a file: its numbers must fit the gain and the operand."""
    operand = _operand(node, use.input)
    shape = read_constant(operand).shape if operand.const_value is None else operand.const_value.shape.numpy()
    fits = 0 <= use.axis < len(shape) and index.size == shape[use.axis]
    if not fits or (count > 1 and not 0 <= index.min() <= index.max() < count):
        raise InputRefused(
            "The plan does not fit this model",
            where=f"input {use.input}, axis {use.axis} of the {node.op_type} that makes {use.node!r}",
            why=f"a gain of {count} numbers is to go there",
            do="make the plan again from this model",
        )


def _operand(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise InputRefused(
            "The plan names an operand that is absent", where=f"input {index} of {node.outputs[0].name!r}"
        )
    return value


def make_neutral(model: ir.Model, node: ir.Node, index: int, number: float, names: set[str]) -> None:
    """Exchange a constant operand for one of its shape that holds ``number`` throughout."""
    old = _operand(node, index)
    numbers = read_constant(old)
    fresh = add_initializer(
        model, unique_name(names, f"{old.name}__neutral"), np.full(numbers.shape, number, dtype=numbers.dtype)
    )
    node.replace_input_with(index, fresh)


def _bypass(model: ir.Model, node: ir.Node, constant_input: int) -> None:
    """Remove a two-input node whose other input takes over its users."""
    kept = node.inputs[1 - constant_input]
    assert kept is not None
    node.outputs[0].replace_all_uses_with(kept)
    model.graph.remove(node, safe=True)


def _add_bias(model: ir.Model, node: ir.Node, extra: np.ndarray, names: set[str]) -> None:
    """Add a vector to a matmul's output: in the bias that is there, else in a new one."""
    place = _bias_place(node, extra)
    if place is None:
        place = _insert_add(model, node, extra, names)
    else:
        holder, index = place
        edit_operand(model, holder, index, Shift(0, tuple(float(e) for e in extra.reshape(-1))), names)
    node.meta[SHIFT_BIAS] = (place[0].outputs[0].name, place[1])


def _bias_place(node: ir.Node, extra: np.ndarray) -> tuple[ir.Node, int] | None:
    """The constant bias of a Gemm, or of the Add that is a matmul's only reader, if it has the right shape."""
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        plain = "beta" not in node.attributes or node.attributes["beta"].as_float() == 1.0
        return (node, 2) if plain and _is_vector(node.inputs[2], extra) else None
    output = node.outputs[0]
    users = list(output.uses())
    if len(users) == 1 and users[0].node.op_type == "Add" and not output.is_graph_output():
        add, index = users[0].node, 1 - users[0].idx
        return (add, index) if _is_vector(add.inputs[index], extra) else None
    return None


def _is_vector(value: ir.Value | None, like: np.ndarray) -> bool:
    return value is not None and is_constant(value) and read_constant(value).shape == like.shape


def _as_weight(node: ir.Node, array: np.ndarray) -> np.ndarray:
    weight = _operand(node, 1)
    return array.astype(read_constant(weight).dtype)


def _insert_add(model: ir.Model, node: ir.Node, extra: np.ndarray, names: set[str]) -> tuple[ir.Node, int]:
    output = node.outputs[0]
    bias = add_initializer(model, unique_name(names, f"{output.name}__shift"), _as_weight(node, extra))
    add = ir.node("Add", [output, bias], name=unique_name(names, f"{output.name}__add_shift"))
    result = add.outputs[0]
    result.type, result.shape = output.type, output.shape
    if output.is_graph_output():
        # The model's output keeps its name, so the product behind it takes another one.
        result.name, output.name = output.name, unique_name(names, f"{output.name}__unshifted")
        model.meta.setdefault(RENAMED, {})[result.name] = output.name
    else:
        result.name = unique_name(names, f"{output.name}__shifted")
    output.replace_all_uses_with(result, replace_graph_outputs=True)
    add.replace_input_with(0, output)
    model.graph.insert_after(node, add)
    return add, 1
