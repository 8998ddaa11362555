"""Constants of a narrowed graph: which are stored in half, and the numbers of those that are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphrot.emit.half_rules import has_kernel, is_rotated_matmul, kind_of, reads_any_type
from graphrot.emit.half_states import States, limits
from graphrot.errors import InputRefused
from graphrot.folded import rounded_numbers, used_names
from graphrot.graph import WeightStore, add_initializer, unique_name
from graphrot.model.floats import is_standard
from graphrot.progress import Progress

_FLOAT = ir.DataType.FLOAT
_SMALL = 4096
"""Constants of so many elements are stored once for each type that is read; larger ones are cast."""


class Constants:
    """Stored types of constants.

    Wishes come together at a constant: ``half`` from a node that runs in half, ``stored`` from one that
    stands for half and runs in float32 (a cast follows, which runtimes fold), ``single`` from all others. Scales and
    biases of packed matmuls never come through a cast: ``half scales`` and ``single scales``.

    Attributes:
        types: the type of each constant float, after :meth:`decide`.
    """

    def __init__(self, model: ir.Model, states: States, store: WeightStore, progress: Progress) -> None:
        self.model = model
        self.states = states
        self.types: dict[ir.Value, ir.DataType] = {}
        self._store = store
        self._progress = progress
        self._wishes: dict[ir.Value, set[str]] = {}
        self._copies: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._kept: dict[ir.Value, ir.TensorProtocol] = {}

    def decide(self, nodes: Sequence[ir.Node], runs_half: set[ir.Node]) -> None:
        """Collect the wishes of all nodes, and write the weights that become half.

        Args:
            nodes: of the main graph, sorted.
            runs_half: those that run in half.
        """
        for node in reversed(nodes):
            if all(output in self.states.constants for output in node.outputs):
                self._pass_on(node)
                continue
            for index, value in enumerate(node.inputs):
                if value in self.states.constants & self.states.floats and not reads_any_type(node):
                    assert value is not None
                    self._wishes.setdefault(value, set()).add(self._wish(node, index, value, node in runs_half))
        stored = [
            v for v in self.model.graph.initializers.values() if v in self.states.floats and not v.is_graph_input()
        ]
        for done, value in enumerate(stored):
            self._progress("narrowing the weights", done, len(stored))
            self._store_value(value)

    def store_default(self, value: ir.Value, dtype: ir.DataType) -> None:
        """Give the default of an optional graph input, if it has one, the input's type."""
        if value.const_value is not None and dtype != _FLOAT:
            value.const_value = self._narrowed(value.const_value, value.name or "", dtype)

    def _wish(self, node: ir.Node, index: int, value: ir.Value, in_half: bool) -> str:
        packed = is_rotated_matmul(node) or (node.op_type == "MatMulNBits" and index == 2)
        if self.states.keeps_float32(node, index):
            return "single scales" if packed else "single"
        if packed:
            return "half scales" if in_half else "single scales"
        if in_half:
            return "half"
        stands_for_half = node in self.states.in_half or _makes_output(node)
        return "stored" if stands_for_half and not _is_single(value) else "single"

    def _pass_on(self, node: ir.Node) -> None:
        """What a node that only moves or decodes constants is asked for, its operands are asked for."""
        wishes = set().union(*(self._wishes.get(output, set()) for output in node.outputs))
        moves = kind_of(node) == "move"
        decodes = is_standard(node) and node.op_type == "DequantizeLinear"
        half = bool(wishes & {"half", "half scales", "stored"}) if moves else decodes and "half" in wishes
        runs = half and has_kernel(node, self.states.half)
        for output in node.outputs:
            if output in self.states.floats:
                self.types[output] = self.states.half if runs else _FLOAT
        for value in node.inputs:
            if value in self.states.floats:
                assert value is not None
                wish = "half" if runs else "stored" if half and moves else "single"
                self._wishes.setdefault(value, set()).add(wish)

    def _store_value(self, value: ir.Value) -> None:
        content = value.const_value
        wishes = self._wishes.get(value, set())
        wanted = {"half scales"} if "single scales" in wishes else {"half", "half scales", "stored"}
        if content is None or not wishes & wanted:
            self.types[value] = _FLOAT
            return
        if "single scales" in wishes or ("single" in wishes and content.size <= _SMALL):
            self._kept[value] = content
        value.const_value = self._narrowed(content, value.name or "", self.states.half)
        self.types[value] = self.states.half

    def _narrowed(self, content: ir.TensorProtocol, name: str, half: ir.DataType) -> ir.TensorProtocol:
        numbers = rounded_numbers(content, half)
        if not np.isfinite(numbers).all() and np.isfinite(content.numpy()).all():
            raise InputRefused(
                f"A weight is too large for {half.name.lower()}",
                where=f"tensor {name!r}",
                why=f"its largest number is over {limits(half)[1]:g}",
                do="use --dtype bfloat16 or float32",
            )
        return self._store.put(name, numbers)

    def copy(self, value: ir.Value, wanted: ir.DataType) -> ir.Value | None:
        """The constant in the wanted type, if it is stored so; else None (a cast does it)."""
        if self.types.get(value, _FLOAT) == wanted:
            return value
        if wanted != _FLOAT or value not in self._kept:
            return None
        key = (value, wanted)
        if key not in self._copies:
            name = unique_name(used_names(self.model), f"{value.name}.float")
            self._copies[key] = add_initializer(self.model, name, self._kept[value].numpy())
        return self._copies[key]


def _is_single(value: ir.Value) -> bool:
    content = value.const_value
    return content is not None and content.size == 1


def _makes_output(node: ir.Node) -> bool:
    return kind_of(node) == "product" and node.outputs[0].is_graph_output()
