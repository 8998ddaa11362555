"""Take rotary positions out of GroupQueryAttention, so that a rotation can stand behind them.

With ``do_rotary=1`` the operator turns queries and keys by their positions itself, and nothing can be put
between that and the attention. Here it becomes ``com.microsoft::RotaryEmbedding`` on queries and keys, and
GroupQueryAttention with ``do_rotary=0``. Packed queries, keys and values are split first.

The operator makes the positions itself too: a row that ends with ``n`` tokens in the cache, ``S`` of them
new, starts at ``n - S``; or at 0 for a prompt whose shorter rows are padded on the right.
"""

from __future__ import annotations

import onnx_ir as ir

from graphrot.model.rewrite import MICROSOFT, Rewriter, integer, operand, opset_of

_OLDEST = 13
"""From this opset on Split and Squeeze take what they split as an input."""
_SIZES_AT, _COS_AT, _SIN_AT, _POSITIONS_AT = 5, 7, 8, 9
_OTHER_POSITIONS = (14, 15, 16)
"""Inputs that normalize queries and keys inside, in front of the positions, or say how many tokens of a row are new."""


def unfuse_rotary(model: ir.Model) -> tuple[str, ...]:
    """Rewrite every GroupQueryAttention of the main graph that applies rotary positions.

    Interleaved and partial rotation stay as they are. Left alone are nodes whose positions follow other
    rules (norms of queries and keys inside, a sliding cache) or whose rotated width is not in the graph.

    Args:
        model: changed in place; its inputs, outputs and the names of tensors that were there stay.

    Returns:
        First outputs of the nodes that were rewritten.
    """
    if opset_of(model) < _OLDEST:
        return ()
    rewriter = _Unfuser(model)
    done = []
    for node in list(model.graph):
        width = _rotated_width(node)
        if width is not None:
            rewriter.rewrite(node, width)
            done.append(node.outputs[0].name or "")
    return tuple(done)


def _rotated_width(node: ir.Node) -> int | None:
    """How many channels of a head the node turns; None for nodes that are not to be rewritten."""
    if node.op_type != "GroupQueryAttention" or node.domain != MICROSOFT or not integer(node, "do_rotary"):
        return None
    if not integer(node, "num_heads") or not integer(node, "kv_num_heads") or integer(node, "sliding_window_cache"):
        return None
    if any(operand(node, position) is not None for position in _OTHER_POSITIONS):
        return None
    cos, sin, sizes = operand(node, _COS_AT), operand(node, _SIN_AT), operand(node, _SIZES_AT)
    if cos is None or sin is None or sizes is None:
        return None
    half = _last_size(cos)
    return None if half is None else 2 * half


class _Unfuser(Rewriter):
    def __init__(self, model: ir.Model) -> None:
        super().__init__(model, "rotary")
        self.positions: dict[ir.Value, ir.Value] = {}

    def rewrite(self, node: ir.Node, width: int) -> None:
        heads, kv = integer(node, "num_heads"), integer(node, "kv_num_heads")
        query, key, value = self._parts(node, heads, kv)
        positions = self._positions(node)
        interleaved = integer(node, "rotary_interleaved")
        turned = []
        for part, count in ((query, heads), (key, kv)):
            attributes = {"interleaved": interleaved, "num_heads": count, "rotary_embedding_dim": width}
            operands = [part, positions, node.inputs[_COS_AT], node.inputs[_SIN_AT]]
            label = "query_rotary" if part is query else "key_rotary"
            turned.append(self.op(node, "RotaryEmbedding", operands, label, attributes, domain=MICROSOFT))
        rest = list(node.inputs[3:])
        for position in (_COS_AT, _SIN_AT, _POSITIONS_AT):
            if position - 3 < len(rest):
                rest[position - 3] = None
        while rest and rest[-1] is None:
            rest.pop()
        operands = [*turned, value, *rest]
        node.resize_inputs(len(operands))
        for position, value_in in enumerate(operands):
            node.replace_input_with(position, value_in)
        node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 0)
        node.attributes.pop("rotary_interleaved", None)

    def _parts(self, node: ir.Node, heads: int, kv: int) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values; the size of a head need not be known."""
        query, key, value = (operand(node, position) for position in range(3))
        assert query is not None
        if key is not None and value is not None:
            return query, key, value
        rows = self.op(node, "Reshape", [query, self.constant((0, 0, heads + 2 * kv, -1))], "heads")
        sizes = self.constant((heads, kv, kv))
        labels = [f"{name}_heads" for name in ("query", "key", "value")]
        parts = self.ops(node, "Split", [rows, sizes], labels, {"axis": 2})
        flat = self.constant((0, 0, -1))
        first, second, third = (
            self.op(node, "Reshape", [part, flat], name)
            for part, name in zip(parts, ("query", "key", "value"), strict=True)
        )
        return first, second, third

    def _positions(self, node: ir.Node) -> ir.Value:
        """``[B, S] int64``; nodes with the same lengths share them."""
        given = operand(node, _POSITIONS_AT)
        if given is not None:
            return given
        sizes, query = node.inputs[_SIZES_AT], node.inputs[0]
        assert sizes is not None and query is not None
        if sizes not in self.positions:
            shape = self.op(node, "Shape", [query], "query_shape")
            count = self.op(node, "Gather", [shape, self.constant(1)], "new_tokens", {"axis": 0})
            last = self.op(node, "Cast", [sizes], "last_position", {"to": int(ir.DataType.INT64)})
            rows = self.op(node, "Reshape", [last, self.constant((-1, 1))], "last_positions")
            stored = self.op(node, "Add", [rows, self.constant(1)], "tokens")
            before = self.op(node, "Sub", [stored, count], "tokens_before")
            start = self.op(node, "Max", [before, self.constant(0)], "first_positions")
            steps = self.op(node, "Range", [self.constant(0), count, self.constant(1)], "steps")
            self.positions[sizes] = self.op(node, "Add", [start, steps], "positions")
        return self.positions[sizes]


def _last_size(value: ir.Value) -> int | None:
    """The size of the last axis, from the value or from the graphs that an If chooses from."""
    shape = value.const_value.shape if value.const_value is not None else value.shape
    if shape is not None and len(shape) and isinstance(shape[-1], int):
        return shape[-1]
    node = value.producer()
    if node is None:
        return None
    index = list(node.outputs).index(value)
    if node.op_type == "Constant" and "value" in node.attributes:
        dims = node.attributes["value"].as_tensor().shape
        return int(dims.numpy()[-1]) if len(dims) else None
    graphs = [
        attribute.as_graph() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH
    ]
    found = {_last_size(graph.outputs[index]) for graph in graphs} if node.op_type == "If" else set()
    return found.pop() if len(found) == 1 else None
