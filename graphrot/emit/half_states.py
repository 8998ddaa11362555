"""Decide for every float of a graph whether it is kept in half, and for every node in what it runs.

One walk from inputs to outputs gives each value a state:

* ``constant``: made of initializers only;
* ``whole``: made of integers and constants only (positions, their angles, masks). Float32;
* ``single``: what a wide operator made of data. Float32;
* ``half``: everything else.

A node by elements that gets both half and float32 inputs runs in float32; its result goes to half, unless
all readers run in float32 (scores + mask -> Softmax).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.emit.half_rules import (
    LOOKUPS,
    Provider,
    is_rotated_matmul,
    kind_of,
    needs_constant_scales,
    reads_any_type,
    runs_alone,
    stays_float32,
)
from graphrot.graph import is_constant, read_constant
from graphrot.model.floats import float_values, is_standard, takes_half

State = Literal["constant", "whole", "single", "half"]


@dataclass
class States:
    """The decisions.

    Attributes:
        half: the half type.
        floats: all float32 values of the working graph.
        constants: values, of any type, that are made of initializers and constants only.
        state: of each float.
        in_half: nodes that run in half; all others run in float32.
        large: floats in float32 that may hold numbers beyond the half type, such as masks of -3.4e38.
        provider: where the model is to run.
    """

    half: ir.DataType
    floats: set[ir.Value]
    constants: set[ir.Value] = field(default_factory=set)
    state: dict[ir.Value, State] = field(default_factory=dict)
    in_half: set[ir.Node] = field(default_factory=set)
    large: set[ir.Value] = field(default_factory=set)
    provider: Provider = "cpu"

    def keeps_float32(self, node: ir.Node, index: int) -> bool:
        """Whether an input stays float32 where its node runs in half: by the operator, or because half cannot hold it.

        Scales of RotatedMatMul are float32 or float16, never bfloat16.
        """
        if is_rotated_matmul(node) and index == 2:
            narrow = self.half != ir.DataType.FLOAT16 or _too_small(node.inputs[2], self.half)
            return narrow or stays_float32(node, index)
        return stays_float32(node, index)


def limits(half: ir.DataType) -> tuple[float, float]:
    """The smallest normal and the largest number of a half type."""
    found = {
        ir.DataType.FLOAT16: (2.0**-14, 65504.0),
        ir.DataType.BFLOAT16: (2.0**-126, (2.0 - 2.0**-7) * 2.0**127),
    }
    return found[half]


def assign(model: ir.Model, half: ir.DataType, ends: dict[str, ir.DataType], provider: Provider = "cpu") -> States:
    """Make the decisions for ``model``, which is not changed.

    Args:
        model: float32, sorted.
        half: FLOAT16 or BFLOAT16.
        ends: the types of float graph inputs and outputs by name.
        provider: where it is to run.
    """
    states = States(half, float_values(model), provider=provider)
    opset = model.opset_imports.get("", 1)
    states.constants |= {v for v in model.graph.initializers.values() if not v.is_graph_input()}
    for value in states.constants & states.floats:
        states.state[value] = "constant"
    for value in model.graph.inputs:
        if value in states.floats:
            states.state[value] = "half" if ends.get(value.name or "") == half else "single"
    mixed: list[ir.Value] = []
    for node in model.graph:
        _Step(states, node, opset, ends).run(mixed)
    for value in mixed:
        readers = [use.node for use in value.uses()]
        if readers and not value.is_graph_output() and not any(reader in states.in_half for reader in readers):
            states.state[value] = "single"
    return states


class _Step:
    """One node of the walk."""

    def __init__(self, states: States, node: ir.Node, opset: int, ends: dict[str, ir.DataType]) -> None:
        self.states = states
        self.node = node
        self.opset = opset
        self.ends = ends
        self.inputs = [value for value in node.inputs if value is not None]
        floats = [value for value in self.inputs if value in states.floats]
        self.fixed = [value for value in floats if value in states.constants]
        self.data = [value for value in floats if value not in states.constants]
        self.found = {states.state[value] for value in self.data}

    def run(self, mixed: list[ir.Value]) -> None:
        node, states = self.node, self.states
        outputs = [value for value in node.outputs if value in states.floats]
        if has_graph(node):
            self._set(outputs, "single")
            return
        if all(value in states.constants for value in self.inputs) and "Random" not in node.op_type:
            states.constants.update(node.outputs)
            self._set(outputs, "constant")
            return
        state, in_half = self._decide()
        if in_half:
            states.in_half.add(node)
        elif state == "half":
            mixed += outputs
        self._set(outputs, state)
        if state != "half" or not in_half:
            self._mark_large(outputs)

    def _set(self, outputs: Iterable[ir.Value], state: State) -> None:
        self.states.state.update(dict.fromkeys(outputs, state))

    def _decide(self) -> tuple[State, bool]:
        """The state of the outputs, and whether the node runs in half."""
        node, kind = self.node, kind_of(self.node)
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and is_standard(node):
            return self._decide_scaled()
        if kind == "wide" or not self._allowed():
            return self._wide(), False
        if kind == "move":
            return self._decide_move()
        if kind == "product":
            if self.found == {"whole"} or not self._fits(every=False):
                return self._wide(), False
            return ("single", False) if self._makes_float32_output() else ("half", True)
        if reads_any_type(node):
            return "whole", "half" in self.found
        if self.found == {"half"} and self._fits(every=True):
            return "half", True
        if "half" in self.found:
            return "half", False
        return self._wide(), False

    def _wide(self) -> State:
        return "single" if self.found - {"whole"} else "whole"

    def _decide_move(self) -> tuple[State, bool]:
        if not self.data and self.node.op_type in LOOKUPS and self.inputs[0] in self.fixed:
            lost = _scales(self.node.outputs[0]) and _too_small(self.inputs[0], self.states.half)
            return ("single", False) if lost else ("half", True)
        if "half" in self.found:
            return "half", True
        return self._wide(), False

    def _decide_scaled(self) -> tuple[State, bool]:
        """Q/DQ run in the type of their scale; quantizing is always float32, where scales cannot vanish."""
        scale = self.node.inputs[1]
        if self.node.op_type == "DequantizeLinear" and scale is not None and self.states.state.get(scale) == "half":
            return "half", True
        return "single", False

    def _allowed(self) -> bool:
        return all(
            takes_half(self.node, index, self.opset, self.states.half)
            for index, value in enumerate(self.node.inputs)
            if value in self.states.floats
        )

    def _makes_float32_output(self) -> bool:
        """A product that is a float32 output of the graph is not rounded to half on the way.

        On CUDA that is so where weights are packed; float ones would be held, and multiplied, in float32 there.
        """
        if self.states.provider == "cuda" and self.node.op_type not in ("MatMulNBits", "RotatedMatMul"):
            return False
        first = self.node.outputs[0]
        kept = self.ends.get(first.name or "", ir.DataType.FLOAT) == ir.DataType.FLOAT
        return first.is_graph_output() and not first.uses() and kept

    def _fits(self, *, every: bool) -> bool:
        """Whether half holds the node's constants: all of them, or the scales of packed weights.

        Those of a packed matmul that would run in float32 anyway stay in float32.
        """
        if every:
            return not any(_beyond(value, self.states.half) for value in self.fixed)
        alone = self.states.provider == "cpu" and needs_constant_scales(self.node) and runs_alone(self.node)
        if self.states.half == ir.DataType.FLOAT16 and alone:
            return False
        scales = self.node.inputs[2:3] if self.node.op_type == "MatMulNBits" else []
        return not any(value in self.fixed and _too_small(value, self.states.half) for value in scales)

    def _mark_large(self, outputs: list[ir.Value]) -> None:
        if kind_of(self.node) not in ("move", "elements"):
            return
        if any(value in self.states.large for value in self.data) or any(
            _beyond(value, self.states.half, small=False) for value in self.fixed
        ):
            self.states.large.update(outputs)


def _scales(value: ir.Value) -> bool:
    """Whether a value ends as the scale of a DequantizeLinear."""
    for use in value.uses():
        if use.node.op_type == "DequantizeLinear" and use.idx == 1:
            return True
        if kind_of(use.node) == "move" and use.idx == 0 and _scales(use.node.outputs[0]):
            return True
    return False


def has_graph(node: ir.Node) -> bool:
    """Whether a node has subgraphs (If, Loop, Scan)."""
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(not attribute.is_ref() and attribute.type in kinds for attribute in node.attributes.values())


def _numbers(value: ir.Value | None) -> np.ndarray | None:
    return read_constant(value) if value is not None and is_constant(value) else None


def _beyond(value: ir.Value, half: ir.DataType, *, small: bool = True) -> bool:
    """A constant with a finite number too large for half, or (``small``) a single number too small for it."""
    array = _numbers(value)
    if array is None or not array.size:
        return False
    least, most = limits(half)
    size = np.abs(array[np.isfinite(array)])
    return bool(size.size and (size.max() > most or (small and array.size == 1 and 0 < size.max() < least)))


def _too_small(value: ir.Value | None, half: ir.DataType) -> bool:
    """Scales of which half would lose digits: below its normal numbers."""
    array = _numbers(value)
    if array is None or not array.size:
        return False
    size = np.abs(array)
    return bool(((size > 0) & (size < limits(half)[0])).any()) and half == ir.DataType.FLOAT16
