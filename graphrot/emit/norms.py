"""Residual Add and RMS norm in one node, ``com.microsoft::SkipSimplifiedLayerNormalization``.

ONNX Runtime recognizes a decomposed RMS norm by the multiplication with its gain, which is gone once
the gain was folded into the weights: the norm would then run as six passes over the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphrot.graph import is_constant, read_constant
from graphrot.passes.quantize_nodes import NodeWriter, remove_unused
from graphrot.passes.shape_values import ShapeValues
from graphrot.passes.sizes import number

DOMAIN = "com.microsoft"


@dataclass(frozen=True)
class _Norm:
    """``output = gain * x / sqrt(mean(x**2) + epsilon)`` over the last axis of ``x = a + b``."""

    add: ir.Node
    output: ir.Value
    epsilon: np.ndarray
    gain: ir.Value | None


@dataclass(frozen=True)
class _Fused:
    """A norm that was fused, and its new output."""

    norm: _Norm
    output: ir.Value

    def serves(self, other: _Norm) -> bool:
        """The other norm of the same sum makes the same numbers."""
        if self.norm.epsilon != other.epsilon or self.norm.epsilon.dtype != other.epsilon.dtype:
            return False
        own, theirs = self.norm.gain, other.gain
        if own is None or theirs is None:
            return all(gain is None or bool((read_constant(gain) == 1).all()) for gain in (own, theirs))
        return bool(np.array_equal(read_constant(own), read_constant(theirs)))


def fuse_residual_norms(model: ir.Model, writer: NodeWriter) -> int:
    """Fuse every decomposed RMS norm of a sum of two tensors of one shape.

    Two norms of one sum (parallel branches) with equal gains become one. Left alone are norms whose parts something
    else reads, further norms of one sum, and sums that broadcast or are graph outputs.

    Args:
        model: the model, changed in place.
        writer: adds the nodes.

    Returns:
        How many were fused.
    """
    found = ShapeValues(model.graph)
    norms = [norm for node in model.graph if (norm := _match(node, found)) is not None]
    first: dict[ir.Node, _Fused] = {}
    fused = 0
    for norm in norms:
        if norm.add not in first:
            first[norm.add] = _Fused(norm, _fuse(model, writer, norm, found))
        elif not first[norm.add].serves(norm):
            continue
        else:
            # Under its own name, which records of the quantizing passes may hold; ONNX Runtime drops an Identity.
            maker = norm.output.producer()
            assert maker is not None
            same = writer.op(maker, "Identity", [first[norm.add].output], f"{norm.output.name}.same")
            writer.take_over(norm.output, same)
        fused += 1
    if norms:
        model.opset_imports.setdefault(DOMAIN, 1)
        model.graph.sort()  # a gain may be computed from constants, after the sum
    return fused


def _match(power: ir.Node, found: ShapeValues) -> _Norm | None:
    x = power.inputs[0] if power.op_type == "Pow" and power.domain == "" else None
    if x is None or _scalar(power.inputs[1]) != 2 or not _is_plain_sum(x.producer(), found):
        return None
    mean = _only_user(power.outputs[0], "ReduceMean")
    if mean is None or not _over_last_axis(mean, found, x):
        return None
    shifted = _only_user(mean.outputs[0], "Add")
    if shifted is None:
        return None
    epsilon = _scalar(shifted.inputs[1] if shifted.inputs[0] is mean.outputs[0] else shifted.inputs[0])
    root = _only_user(shifted.outputs[0], "Sqrt")
    if root is None or epsilon is None or epsilon.dtype not in (np.float32, np.float16):
        return None
    output = _normalized(x, root.outputs[0])
    add = x.producer()
    if output is None or add is None or output.is_graph_output():
        return None
    gained = _gain(output, found.shapes[x][-1])
    return _Norm(add, output, epsilon, None) if gained is None else _Norm(add, gained[0], epsilon, gained[1])


def _is_plain_sum(node: ir.Node | None, found: ShapeValues) -> bool:
    """An Add of two tensors of one understood shape, whose last size is known, of rank 2 or 3."""
    if node is None or node.op_type != "Add" or node.domain != "" or node.outputs[0].is_graph_output():
        return False
    shapes = [found.shape(value) for value in node.inputs]
    first = shapes[0]
    return first is not None and first == shapes[1] and len(first) in (2, 3) and number(first[-1]) is not None


def _over_last_axis(mean: ir.Node, found: ShapeValues, x: ir.Value) -> bool:
    keep = "keepdims" not in mean.attributes or mean.attributes["keepdims"].as_int() == 1
    axes = found.content(mean.inputs[1]) if len(mean.inputs) > 1 else None
    rank = len(found.shapes[x])
    return keep and axes is not None and [number(axis) for axis in axes] in ([-1], [rank - 1])


def _normalized(x: ir.Value, root: ir.Value) -> ir.Value | None:
    """``x / root``, in one step or by the reciprocal."""
    direct = _only_user(root, "Div")
    if direct is not None and direct.inputs[0] is x:
        return direct.outputs[0]
    inverse = _only_user(root, "Reciprocal")
    if inverse is None and direct is not None and _scalar(direct.inputs[0]) == 1:
        inverse = direct
    product = None if inverse is None else _only_user(inverse.outputs[0], "Mul")
    return product.outputs[0] if product is not None and x in product.inputs else None


def _gain(normalized: ir.Value, width: tuple[object, ...]) -> tuple[ir.Value, ir.Value] | None:
    """The Mul by a constant vector that follows, if it is all that follows."""
    product = _only_user(normalized, "Mul")
    if product is None or product.outputs[0].is_graph_output():
        return None
    other = product.inputs[1] if product.inputs[0] is normalized else product.inputs[0]
    if other is None or not is_constant(other):
        return None
    array = read_constant(other)
    return (product.outputs[0], other) if array.ndim == 1 and ("const", array.size) == width else None


def _fuse(model: ir.Model, writer: NodeWriter, norm: _Norm, found: ShapeValues) -> ir.Value:
    total = norm.add.outputs[0]
    width = number(found.shapes[total][-1])
    assert width is not None and norm.output.name and total.name
    gain = writer.constant(np.ones(width, norm.epsilon.dtype), "no_gain") if norm.gain is None else norm.gain
    normalized, summed = ir.Value(name=norm.output.name), ir.Value(name=total.name)
    unused = [ir.Value(name=""), ir.Value(name="")]
    node = ir.node(
        "SkipSimplifiedLayerNormalization",
        [*norm.add.inputs, gain],
        {"epsilon": float(norm.epsilon)},
        domain=DOMAIN,
        outputs=[normalized, *unused, summed],
        name=norm.output.name,
    )
    for new, old in ((normalized, norm.output), (summed, total)):
        new.type, new.shape = old.type, old.shape
    model.graph.insert_before(norm.add, node)
    norm.output.replace_all_uses_with(normalized)
    remove_unused(model, norm.output)
    total.replace_all_uses_with(summed)
    remove_unused(model, total)
    return normalized


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = uses[0].node
    return node if node.op_type == op_type and node.domain == "" else None


def _scalar(value: ir.Value | None) -> np.ndarray | None:
    if value is None or not is_constant(value):
        return None
    array = read_constant(value)
    return array.reshape(()) if array.size == 1 else None
