"""Building blocks of the quantizing passes: new nodes before an anchor, shared constants, dead ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.folded import used_names
from graphrot.graph import WeightStore, add_initializer, is_constant, read_constant, unique_name

OLDEST_OPSET = 21
"""The first opset whose QuantizeLinear and DequantizeLinear have blocks and 4-bit types."""

SCALE_DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""Types that DequantizeLinear can return."""


class NodeWriter:
    """Adds nodes and initializers to one model under free names.

    Small constants are shared by content among everything one writer adds.
    """

    def __init__(self, model: ir.Model, store: WeightStore | None = None) -> None:
        self.model = model
        self._store = store
        self._names = used_names(model)
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def op(
        self,
        anchor: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: Mapping[str, int | str | Sequence[int] | ir.TensorProtocol] | None = None,
        *,
        domain: str = "",
    ) -> ir.Value:
        """Put a node with one output before ``anchor`` and return the output."""
        node = ir.node(op_type, inputs, attributes or {}, domain=domain)
        node.outputs[0].name = name
        return self.put(anchor, node)

    def put(self, anchor: ir.Node, node: ir.Node) -> ir.Value:
        """Put a ready node before ``anchor``, under a free name like that of its one output, which is returned."""
        output = node.outputs[0]
        output.name = unique_name(self._names, output.name or node.op_type)
        node.name = output.name
        self.model.graph.insert_before(anchor, node)
        return output

    def constant(self, array: np.ndarray, name: str) -> ir.Value:
        """A small initializer; equal arrays share one."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = add_initializer(self.model, unique_name(self._names, name), array)
        return self._constants[key]

    def integers(self, numbers: Sequence[int], name: str) -> ir.Value:
        """A small int64 vector: a shape, axes, bounds."""
        return self.constant(np.asarray(numbers, dtype=np.int64), name)

    def weight(self, array: np.ndarray, dtype: ir.DataType, name: str) -> ir.Value:
        """A large initializer, written to the scratch file and memory-mapped from there."""
        if self._store is None:
            raise AssertionError("this writer was made without a store")
        name = unique_name(self._names, name)
        packed = dtype in (ir.DataType.INT4, ir.DataType.UINT4)
        content = array if array.dtype == dtype.numpy() else array.astype(dtype.numpy())
        return add_initializer(self.model, name, self._store.put(name, content, dtype if packed else None))

    def free(self, name: str) -> str:
        """A name like this one that nothing has; it is taken from now on."""
        return unique_name(self._names, name)

    def stand_in(self, pairs: Iterable[tuple[ir.Value, ir.Value]]) -> None:
        """Let new values stand for old ones everywhere, under the old names; what only made the old ones goes.

        Args:
            pairs: old and new values, each made by a node. The new ones keep their own types and shapes.
        """
        made = list(pairs)
        for old, new in made:
            name = old.name
            if old.is_graph_output():
                new.shape = old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            old.name, new.name = None, name
        for old, new in made:
            source = new.producer()
            if source is not None and source.outputs[0] is new:
                source.name = new.name
            remove_unused(self.model, old)

    def take_over(self, old: ir.Value, new: ir.Value) -> None:
        """Let ``new`` stand for ``old`` everywhere, under the old name; the old node goes."""
        node, source = old.producer(), new.producer()
        if node is None or source is None or old.name is None:
            raise AssertionError("both values must be made by nodes")
        name = old.name
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        inputs = list(node.inputs)
        self.model.graph.remove(node, safe=True)
        new.name = source.name = name
        source.metadata_props.update(node.metadata_props)
        for value in inputs:
            remove_unused(self.model, value)


def remove_unused(model: ir.Model, value: ir.Value | None) -> None:
    """Remove the node or initializer that makes ``value`` if nothing reads it, and what only fed it."""
    pending = [value]
    while pending:
        current = pending.pop()
        if current is None or current.is_graph_input() or current.is_graph_output() or current.uses():
            continue
        node = current.producer()
        if node is None:
            if current.name is not None and current.name in model.graph.initializers:
                del model.graph.initializers[current.name]
            continue
        if node.graph is None or any(out.uses() or out.is_graph_output() for out in node.outputs):
            continue
        pending += node.inputs
        model.graph.remove(node, safe=True)


def require_opset(model: ir.Model) -> None:
    """Refuse a model whose opset has no blocked, 4-bit QuantizeLinear.

    Raises:
        InputRefused: the opset is below 21.
    """
    opset = model.opset_imports.get("", 0)
    if opset < OLDEST_OPSET:
        raise InputRefused(
            f"Quantization needs opset {OLDEST_OPSET} and the model has {opset}",
            where="opset import of the standard domain",
            why="4-bit types and blocked scales came with opset 21",
            do="raise the opset first (graphrot.passes.raise_opset), or export the model again",
        )


def float_type(value: ir.Value, what: str) -> ir.DataType:
    """The float type that a weight stands in for.

    Raises:
        InputRefused: a type that DequantizeLinear cannot return.
    """
    dtype = value.dtype
    if dtype is None and is_constant(value):
        dtype = ir.DataType.from_numpy(read_constant(value).dtype)
    if dtype not in SCALE_DTYPES:
        raise InputRefused(
            f"{what} has type {dtype.name if dtype is not None else 'unknown'}",
            where=f"tensor {value.name!r}",
            why="DequantizeLinear returns float32, float16 or bfloat16 only",
            do="convert the model to float32 first",
        )
    assert dtype is not None
    return dtype


def channel_block(in_features: int, *, most: int = 256) -> int:
    """Block length for one scale per output channel, where a runtime insists on blocks.

    The power of two from 16 to ``most`` that needs the least padding of ``in_features``, and the largest of
    those: fewer blocks are faster and need fewer repeated scales.
    """
    return min((block for block in (256, 128, 64, 32, 16) if block <= most), key=lambda block: -in_features % block)


def unfused_block(in_features: int) -> int:
    """A block length that covers the whole axis and is no power of two (see ``quantize_weights``)."""
    return in_features + 1 if in_features & (in_features - 1) == 0 else in_features
