"""Narrow a finished float32 model to float16 or bfloat16, with the casts written out.

``half_states`` decides what is kept in half and what runs in float32. Here the graph is rewritten:

* weights are stored in half, rounded once (those that a rotation touched, from float64);
* a float16 node without a kernel on the CPU is left to the runtime, which computes it in float32. bfloat16 nodes
  have hardly any kernels there: they get casts around them, except where a value would only
  be rounded on its way from one float32 operator to the next. So do, of either type, those without one in ONNX
  Runtime's CUDA provider, for which the runtime would leave the GPU;
* what leaves float32 and may hold numbers beyond half, such as a mask, is limited first.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphrot.emit.cuda.kernels import cuda_kernels
from graphrot.emit.half_constants import Constants
from graphrot.emit.half_rules import Provider, has_kernel, kind_of, reads_any_type
from graphrot.emit.half_states import States, assign, has_graph, limits
from graphrot.folded import used_names
from graphrot.graph import (
    WeightStore,
    add_initializer,
    drop_unused_initializers,
    inner_nodes,
    read_constant,
    unique_name,
)
from graphrot.model.floats import is_standard
from graphrot.model.widen import forget_shapes
from graphrot.progress import Progress, silent

_FLOAT = ir.DataType.FLOAT


def narrow(
    model: ir.Model,
    half: ir.DataType,
    ends: Mapping[str, ir.DataType],
    *,
    store: WeightStore,
    provider: Provider = "cpu",
    progress: Progress = silent,
) -> None:
    """Rewrite ``model`` in place.

    Args:
        model: float32, sorted, as an emitter left it.
        half: FLOAT16 or BFLOAT16.
        ends: types of graph inputs and outputs by name; float ones that are not named stay float32.
        store: where the narrowed weights go.
        provider: whose kernels decide which nodes run in half.
        progress: told of each weight.

    Raises:
        InputRefused: a weight is too large for the half type.
    """
    model.graph.sort()
    forget_shapes(model)
    _lift_constants(model)
    states = assign(model, half, dict(ends), provider)
    _Narrowing(model, states, dict(ends), store, progress).run()
    drop_unused_initializers(model)
    model.graph.sort()


def _lift_constants(model: ir.Model) -> None:
    """Float Constant nodes become initializers, which can be stored in either type."""
    for node in list(model.graph):
        output = node.outputs[0] if node.op_type == "Constant" and is_standard(node) else None
        if output is None or output.is_graph_output() or not output.name:
            continue
        numbers = read_constant(output)
        if numbers.dtype == np.float32:
            name = output.name
            output.name = f"{name}.node"
            output.replace_all_uses_with(add_initializer(model, name, numbers))
            model.graph.remove(node, safe=True)


class _Narrowing:
    def __init__(
        self, model: ir.Model, states: States, ends: dict[str, ir.DataType], store: WeightStore, progress: Progress
    ) -> None:
        self.model = model
        self.states = states
        self.half = states.half
        self.opset = model.opset_imports.get("", 1)
        self.ends = ends
        self.names = used_names(model) | {node.name for node in model.graph if node.name}
        self.runs_half: set[ir.Node] = set()
        self.exact: set[ir.Value] = set()
        self.alone = {v for v in states.floats if len(list(v.uses())) == 1 and not v.is_graph_output()}
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self.types: dict[ir.Value, ir.DataType] = {}
        self.constants = Constants(model, states, store, progress)

    def run(self) -> None:
        nodes = list(self.model.graph)
        for value in self.model.graph.inputs:
            if value in self.states.floats:
                self.types[value] = self.ends.get(value.name or "", _FLOAT)
                self.constants.store_default(value, self.types[value])
        for node in nodes:
            if not self._constant(node):
                self._place(node)
        self.constants.decide(nodes, self.runs_half)
        self.types.update(self.constants.types)
        for node in nodes:
            self._rewire(node)
        self._outputs()
        self._declare()

    def _constant(self, node: ir.Node) -> bool:
        return all(output in self.states.constants for output in node.outputs)

    def _place(self, node: ir.Node) -> None:
        """In which type a node runs, and so the type of what it makes."""
        data = [v for v in node.inputs if v in self.states.floats and v not in self.states.constants]
        # What has not been rounded yet moves on as it is.
        loose = bool(data) and all(self._is_loose(value, node) for value in data)
        if node in self.states.in_half and self._has_kernel(node) and not (kind_of(node) == "move" and loose):
            self.runs_half.add(node)
        made = self.half if node in self.runs_half else _FLOAT
        for output in node.outputs:
            if output in self.states.floats:
                self.types[output] = made
        if made == _FLOAT and kind_of(node) == "move" and data and all(self._is_rounded(value) for value in data):
            self.exact.update(node.outputs)

    def _has_kernel(self, node: ir.Node) -> bool:
        """Whether a node runs in half by itself, where the model is for."""
        if self.states.provider == "cpu":
            return has_kernel(node, self.half)

        def dtype(value: ir.Value | None, *, single: bool) -> ir.DataType | None:
            if value is None or not value.name or value not in self.states.floats:
                return None
            return _FLOAT if single else self.half

        kept = self.states.keeps_float32
        inputs = [dtype(value, single=kept(node, index)) for index, value in enumerate(node.inputs)]
        outputs = [dtype(value, single=False) for value in node.outputs]
        return cuda_kernels().serves(node, self.opset, inputs, outputs)

    def _is_loose(self, value: ir.Value, reader: ir.Node) -> bool:
        """A half value that is still float32, and that only ``reader`` reads, element by element."""
        if self.states.state[value] != "half" or self.types[value] != _FLOAT:
            return False
        return value in self.alone and not has_graph(reader) and kind_of(reader) in ("move", "elements")

    def _is_rounded(self, value: ir.Value) -> bool:
        if self.states.state[value] != "half":
            return False
        return self.types[value] == self.half or value in self.exact or value not in self.alone

    def _rewire(self, node: ir.Node) -> None:
        if has_graph(node):
            self._capture(node)
        if self._constant(node):
            made = self.constants.types.get(node.outputs[0], _FLOAT)
        else:
            made = self.half if node in self.runs_half else _FLOAT
        for index, value in enumerate(node.inputs):
            if value is None or value not in self.states.floats or reads_any_type(node):
                continue
            wanted = _FLOAT if self.states.keeps_float32(node, index) else made
            node.replace_input_with(index, self._operand(value, wanted, node))
        self._name_type(node, made)

    def _name_type(self, node: ir.Node, made: ir.DataType) -> None:
        """Attributes that name the type of a float result."""
        if not is_standard(node) or node.outputs[0] not in self.states.floats:
            return
        for name in ("to", "output_dtype"):
            if name in node.attributes and node.attributes[name].as_int() == _FLOAT:
                node.attributes[name] = ir.AttrInt64(name, int(made))
        if made != _FLOAT and node.op_type == "Attention" and "softmax_precision" not in node.attributes:
            node.attributes["softmax_precision"] = ir.AttrInt64("softmax_precision", int(_FLOAT))
        content = node.attributes.get("value")
        if made != _FLOAT and node.op_type in ("Constant", "ConstantOfShape") and content is not None:
            numbers = content.as_tensor().numpy().astype(made.numpy())
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(numbers))

    def _operand(self, value: ir.Value, wanted: ir.DataType, reader: ir.Node) -> ir.Value:
        if value in self.states.constants:
            ready = self.constants.copy(value, wanted)
            return ready if ready is not None else self._cast(value, wanted, before=reader)
        if self.states.state[value] != "half" or self.types[value] == self.half or wanted != _FLOAT:
            return self._cast(value, wanted, before=reader)
        if value in self.exact or self._is_loose(value, reader):
            return value
        return self._cast(self._cast(value, self.half, before=reader), wanted, before=reader)

    def _cast(self, value: ir.Value, wanted: ir.DataType, *, before: ir.Node | None) -> ir.Value:
        """``value`` in another type; made once, right after ``value`` or, for what no node makes, at its reader."""
        if self.types.get(value, _FLOAT) == wanted:
            return value
        key = (value, wanted)
        if key not in self.casts:
            source = value
            if wanted != _FLOAT and value in self.states.large:
                source = self._limit(value, before)
            name = unique_name(self.names, f"{value.name}.{wanted.name.lower()}")
            node = ir.node("Cast", [source], {"to": int(wanted)}, name=name)
            self._finish(node, value, name, wanted)
            self._insert(node, source, before)
            self.casts[key] = node.outputs[0]
        return self.casts[key]

    def _limit(self, value: ir.Value, before: ir.Node | None) -> ir.Value:
        most = limits(self.half)[1]
        bounds = []
        for bound in (-most, most):
            name = f"{'least' if bound < 0 else 'largest'}_{self.half.name.lower()}"
            if name not in self.model.graph.initializers:
                add_initializer(self.model, name, np.array(bound, np.float32))
                self.names.add(name)
            bounds.append(self.model.graph.initializers[name])
        name = unique_name(self.names, f"{value.name}.limited")
        node = ir.node("Clip", [value, *bounds], name=name)
        self._finish(node, value, name, _FLOAT)
        self._insert(node, value, before)
        return node.outputs[0]

    def _finish(self, node: ir.Node, like: ir.Value, name: str, dtype: ir.DataType) -> None:
        output = node.outputs[0]
        output.name = name
        output.shape = like.shape if like.type is not None else None
        output.type = ir.TensorType(dtype) if like.type is not None else None
        self.types[output] = dtype

    def _insert(self, node: ir.Node, value: ir.Value, before: ir.Node | None) -> None:
        maker = value.producer()
        if maker is not None:
            self.model.graph.insert_after(maker, node)
        elif before is not None:
            self.model.graph.insert_before(before, node)
        else:
            self.model.graph.append(node)

    def _capture(self, node: ir.Node) -> None:
        """Subgraphs stay float32, and so does what they read from outside."""
        for inner in inner_nodes(node):
            for index, value in enumerate(inner.inputs):
                if value is not None and value in self.states.floats:
                    inner.replace_input_with(index, self._operand(value, _FLOAT, node))

    def _outputs(self) -> None:
        for index, value in enumerate(self.model.graph.outputs):
            wanted = self.ends.get(value.name or "", _FLOAT)
            if value not in self.states.floats or self.types.get(value, _FLOAT) == wanted:
                continue
            name = value.name
            stored = value
            if self.states.state[value] == "half" and value not in self.exact:
                stored = self._cast(value, self.half, before=None)
            result = self._cast(stored, wanted, before=None)
            if result.name != name:
                result.name, value.name = name, unique_name(self.names, f"{name}.{self.types[value].name.lower()}")
            result.type, result.shape = ir.TensorType(wanted), value.shape
            self.model.graph.outputs[index] = result

    def _declare(self) -> None:
        for value, dtype in self.types.items():
            if value.type is not None or value.is_graph_input() or value.is_graph_output():
                value.type = ir.TensorType(dtype)
