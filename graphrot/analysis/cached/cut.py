"""Run a part of a graph: from tensors that are given, or from the graph's inputs, to others, at sizes of our choice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphrot.analysis.probe import Probe
from graphrot.analysis.probe_graph import ProbeGraph, data_input
from graphrot.analysis.probe_sizes import Run
from graphrot.analysis.scope import Scope, is_shape_op, is_standard
from graphrot.graph import FLOATS
from graphrot.ops.foreign import register_custom_ops

_NUMBERED = frozenset(
    "ConstantOfShape Expand OneHot Pad Range Reshape Resize Slice Split Squeeze Tile TopK Unsqueeze".split()
)
"""Operators whose small operands say what shape they make; reductions are others."""
_WHOLLY = frozenset({"ConstantOfShape", "Range"})
"""Operators of which all operands do."""


LONGEST = 1 << 17
"""Tokens of the longest past at which a part is tried."""
_ELEMENTS = 1 << 26
"""Numbers that all tensors of a part may have together."""


class CutFailed(Exception):
    """The part does not run at these sizes."""


class Cut:
    """A part of a graph.

    Args:
        scope: the graph.
        probe: knows the shapes of its inputs.
        outputs: tensors to compute, each made by a node.
        given: tensors that are fed instead of being computed.

    Attributes:
        by_value: graph inputs whose numbers matter; of others only the shape does, or nothing.
    """

    def __init__(
        self, scope: Scope, probe: Probe, outputs: Sequence[ir.Value], given: Collection[ir.Value] = ()
    ) -> None:
        self._scope = scope
        self._probe = probe
        self._outputs = list(outputs)
        self._given = list(dict.fromkeys(given))
        reached = _Reached(scope, self._outputs, set(self._given))
        self.by_value = {value for value in reached.by_value if value.is_graph_input()} - set(self._given)
        self.products = [n for n in reached.exact if data_input(scope, n) is not None and n.op_type != "Gather"]
        """Matmuls by weights whose results matter: these numbers depend on the tokens."""
        self._inputs = [v for v in scope.model.graph.inputs if v in reached.inputs and v not in set(self._given)]
        self._exact = reached
        self._session: Any = None

    def run(self, run: Run, feeds: Mapping[ir.Value, np.ndarray]) -> list[np.ndarray]:
        """Compute the outputs.

        Args:
            run: sizes, for the graph inputs that ``feeds`` lacks.
            feeds: numbers for all given tensors, and for graph inputs.

        Raises:
            CutFailed: it does not run, with ONNX Runtime's own words.
        """
        shapes = self._probe.choice.shapes(run)
        filled = {value.name or "": array for value, array in feeds.items()}
        for value in self._inputs:
            if value not in feeds:
                assert value.dtype is not None
                make = np.zeros if value.dtype in FLOATS else np.ones
                filled[value.name or ""] = make(shapes[value.name or ""], value.dtype.numpy())
        try:
            if self._session is None:
                self._session = self._load(filled)
            wanted = {value.name for value in self._session.get_inputs()}
            found = self._session.run(None, {name: array for name, array in filled.items() if name in wanted})
        except Exception as error:  # onnxruntime raises types of its own, without a common base
            raise CutFailed(str(error).strip().splitlines()[0][:300]) from error
        return [np.asarray(array) for array in found]

    def affordable(self, given: Callable[[Run], Mapping[ir.Value, np.ndarray]]) -> int:
        """The longest past, up to :data:`LONGEST`, behind which one token runs without much memory.

        Some parts make tensors of all tokens by all tokens. How tensors grow is taken from two small sizes.

        Args:
            given: numbers to feed at a size, as :meth:`run` takes them.
        """
        made = [value for node in self._exact.exact for value in node.outputs if value.name]
        whole = Cut(self._scope, self._probe, list(dict.fromkeys([*self._outputs, *made])), self._given)
        small, large = Run(1, 1, 255), Run(1, 1, 511)
        try:
            first, second = (sum(a.size for a in whole.run(run, given(run))) for run in (small, large))
        except CutFailed:
            return large.past
        squares = max(second - 2 * first, 0) / 2**17
        line = first / 2**8
        past = LONGEST
        while past > large.past and squares * past * past + line * past > _ELEMENTS:
            past //= 2
        return past

    def _load(self, filled: Mapping[str, np.ndarray]) -> Any:
        import onnxruntime as ort

        inputs = [
            ir.Value(name=v.name, type=ir.TensorType(ir.DataType.from_numpy(filled[v.name or ""].dtype)))
            for v in (*self._given, *self._inputs)
        ]
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.enable_mem_pattern = False
        register_custom_ops(options)
        data = _PartGraph(self._scope, inputs, self._outputs, set(self._given), self._exact).build()
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


class _Reached:
    """What a part is made of: by its numbers, or only by its shape."""

    def __init__(self, scope: Scope, outputs: Iterable[ir.Value], given: set[ir.Value]) -> None:
        self.by_value: set[ir.Value] = set()
        self.inputs: set[ir.Value] = set()
        self.exact: set[ir.Node] = set()
        shaped: set[ir.Value] = set()
        stack = [(value, True) for value in outputs]
        while stack:
            value, exactly = stack.pop()
            if value in given or value in (self.by_value if exactly else self.by_value | shaped):
                continue
            (self.by_value if exactly else shaped).add(value)
            node = value.producer()
            if node is None:
                if value.is_graph_input():
                    self.inputs.add(value)
                continue
            if exactly and not is_shape_op(node):
                self.exact.add(node)
            stack += _operands(scope, node, exactly)


def _operands(scope: Scope, node: ir.Node, exactly: bool) -> list[tuple[ir.Value, bool]]:
    if is_shape_op(node):
        return [(value, False) for value in node.inputs if value is not None]
    found: list[tuple[ir.Value, bool]] = [(value, True) for value in scope.captured(node)]
    data = None if exactly else data_input(scope, node)
    if data is not None:
        value = node.inputs[data]
        return found if value is None else [*found, (value, False)]
    numbered = _numbered(node)
    for position, value in enumerate(node.inputs):
        if value is not None:
            found.append((value, exactly or position >= numbered))
    return found


def _numbered(node: ir.Node) -> int:
    """The first operand whose numbers say what shape a node makes."""
    if node.op_type == "GroupQueryAttention":
        return 5
    if not is_standard(node):
        return len(node.inputs)
    if node.op_type in _WHOLLY:
        return 0
    return 1 if node.op_type in _NUMBERED or node.op_type.startswith("Reduce") else len(node.inputs)


class _PartGraph(ProbeGraph):
    """Stand-ins only where nothing but a shape is read."""

    def __init__(
        self,
        scope: Scope,
        inputs: Sequence[ir.Value],
        outputs: Collection[ir.Value],
        given: set[ir.Value],
        reached: _Reached,
    ) -> None:
        super().__init__(scope, inputs, outputs)
        self._given = given
        self._reached = reached

    def _reads(self, node: ir.Node) -> Iterable[ir.Value]:
        exact = node in self._reached.exact
        read = (
            [*(i for i in node.inputs if i is not None), *self._scope.captured(node)] if exact else super()._reads(node)
        )
        return [value for value in read if value not in self._given]

    def _stand_in(self, node: ir.Node) -> list[onnx.NodeProto] | None:
        return None if node in self._reached.exact else super()._stand_in(node)

    def _is_thin(self, value: ir.Value) -> bool:
        return value not in self._reached.by_value and super()._is_thin(value)
