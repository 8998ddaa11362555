"""Take the projections out of attention operators, so that their weights are matmuls like any other.

``com.microsoft::Attention`` multiplies by one weight for queries, keys and values inside. Here it becomes MatMul,
Add and Split in front of ``com.microsoft::MultiHeadAttention``, which computes the rest by the same rules. A
MultiHeadAttention that takes queries, keys and values in one tensor ``[B, S, H, 3, D]`` (or keys and values in
``[B, S, H, 2, D]``) gets them one by one, in the form that kernels of every provider take.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphrot.graph import is_constant, read_constant
from graphrot.model.rewrite import MICROSOFT, Rewriter, integer, is_read, kept, operand

_WEIGHT, _BIAS, _MASK, _PAST, _SCORES, _LENGTH = range(1, 7)
_RULES = ("num_heads", "scale", "mask_filter_value", "unidirectional")
_HANDED_ON = frozenset({"Cast", "Identity"})
_DEPTH = 8


def unfuse_attention(model: ir.Model) -> bool:
    """Rewrite every Attention of com.microsoft in the main graph, where that is exact; see :func:`obstacle`.

    Args:
        model: changed in place; its inputs and outputs stay, and the weights are those that were there.

    Returns:
        Whether there was one.
    """
    found = [node for node in model.graph if _is(node, "Attention") and obstacle(node) is None]
    rewriter = _Unfuser(model, "attention")
    for node in found:
        rewriter.rewrite(node)
    return bool(found)


def unpack_attention(model: ir.Model) -> bool:
    """Give every MultiHeadAttention of the main graph its queries, keys and values one by one.

    Args:
        model: changed in place; its inputs and outputs stay.

    Returns:
        Whether there was one.
    """
    found = [node for node in model.graph if _is(node, "MultiHeadAttention") and _packed(node)]
    rewriter = _Unfuser(model, "heads")
    for node in found:
        rewriter.unpack(node)
    return bool(found)


def obstacle(node: ir.Node) -> str | None:
    """Why an Attention of com.microsoft cannot be rewritten; None if it can."""
    if integer(node, "do_rotary"):
        return "it applies rotary positions inside (do_rotary=1), where no transform can stand behind them"
    if integer(node, "past_present_share_buffer") or operand(node, _LENGTH) is not None:
        return "it writes keys and values into one buffer for past and present (past_present_share_buffer)"
    if _sizes(node) is None:
        return "its weight is no constant matrix for queries, keys and values"
    queries, keys, values = _sizes(node) or (0, 0, 0)
    cached = operand(node, _PAST) is not None or is_read(node, 1)
    if queries != keys or (cached and keys != values):
        return "its cache cannot hold keys and values of different sizes"
    mask = operand(node, _MASK)
    return None if mask is None else _unlike(mask)


def _sizes(node: ir.Node) -> tuple[int, int, int] | None:
    """Widths of queries, keys and values."""
    weight = operand(node, _WEIGHT)
    heads = integer(node, "num_heads")
    if weight is None or not is_constant(weight) or heads <= 0:
        return None
    shape = read_constant(weight).shape
    if len(shape) != 2:
        return None
    third = shape[1] // 3
    given = list(node.attributes["qkv_hidden_sizes"].as_ints()) if "qkv_hidden_sizes" in node.attributes else []
    sizes = given or [third] * 3
    fits = len(sizes) == 3 and sum(sizes) == shape[1] and all(size % heads == 0 for size in sizes)
    return (sizes[0], sizes[1], sizes[2]) if fits else None


def _unlike(mask: ir.Value) -> str | None:
    """Why MultiHeadAttention would not take the mask of Attention, if so.

    Both take lengths ``[B]``, ``[3 * B + 2]``, and masks ``[B, T]`` and ``[B, S, T]``; Attention alone takes ends and
    starts ``[2 * B]``, ``[B, 1]`` and ``[B, 1, M, M]``.
    """
    for _ in range(_DEPTH):
        node = mask.producer()
        if node is None or node.op_type not in _HANDED_ON or node.inputs[0] is None:
            break
        mask = node.inputs[0]
    if mask.const_value is not None and not mask.is_graph_input():
        shape: Sequence[int | ir.SymbolicDim] = list(mask.const_value.shape.numpy())
    elif mask.shape is not None:
        shape = list(mask.shape)
    else:
        shape = []
    unknown = "the form of its mask_index cannot be read off the graph"
    if len(shape) == 3 or (len(shape) == 2 and shape[1] != 1):
        return None
    if len(shape) > 1:
        return f"its mask_index has the form {[str(size) for size in shape]}, which MultiHeadAttention does not take"
    if node is not None:
        counted = node.op_type == "ReduceSum" and not integer(node, "keepdims", 1)
        return None if counted or _is(node, "EmbedLayerNormalization") else unknown
    return None if len(shape) == 1 and _is_batch(mask) else f"{unknown}: lengths [B], or ends and starts [2 * B]"


def _is_batch(lengths: ir.Value) -> bool:
    """A graph input of rank 1 whose size is the first size of another input."""
    if lengths.graph is None or lengths.shape is None:
        return False
    others = [v for v in lengths.graph.inputs if v is not lengths and v.shape is not None and len(v.shape) > 1]
    size = lengths.shape[0]
    known = isinstance(size, int) or size.value is not None
    return known and any(other.shape is not None and other.shape[0] == size for other in others)


def _packed(node: ir.Node) -> int:
    """How many of queries, keys and values one tensor holds: 3, 2, or 0 where each has its own.

    Without keys the queries' tensor holds all; without values the keys' tensor holds both.
    """
    if integer(node, "num_heads") <= 0:
        return 0
    if operand(node, 1) is None:
        return 3
    return 2 if operand(node, 2) is None else 0


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain == MICROSOFT


class _Unfuser(Rewriter):
    def rewrite(self, node: ir.Node) -> None:
        sizes = _sizes(node)
        assert sizes is not None
        rows = self.op(node, "MatMul", [node.inputs[0], node.inputs[_WEIGHT]], "projected")
        bias = operand(node, _BIAS)
        if bias is not None:
            rows = self.op(node, "Add", [rows, bias], "biased")
        query, key, value = self.split(node, rows, sizes, ("query", "key", "value"), 2)
        past = operand(node, _PAST)
        pasts: list[ir.Value | None] = [None, None]
        if past is not None:
            pasts = [
                self.op(node, "Gather", [past, self.constant(half)], label, {"axis": 0})
                for half, label in enumerate(("past_key", "past_value"))
            ]
        caches = past is not None or is_read(node, 1)
        made = self.ops(
            node,
            "MultiHeadAttention",
            [query, key, value, None, operand(node, _MASK), operand(node, _SCORES), *pasts],
            ["attended", "present_key", "present_value"] if caches else ["attended"],
            kept(node, *_RULES),
            domain=MICROSOFT,
        )
        outputs = {0: made[0]}
        if is_read(node, 1):
            halves = [self.along(node, "Unsqueeze", half, 0, f"{half.name}.half") for half in made[1:]]
            outputs[1] = self.op(node, "Concat", halves, "present", {"axis": 0})
        self.replace(node, outputs)

    def unpack(self, node: ir.Node) -> None:
        held = _packed(node)
        at = 3 - held
        packed = node.inputs[at]
        assert packed is not None
        labels = ("query", "key", "value")[at:]
        parts = self.split(node, packed, [1] * held, [f"{label}_heads" for label in labels], 3)
        flat = self.constant((0, 0, -1))
        own = [self.op(node, "Reshape", [part, flat], label) for part, label in zip(parts, labels, strict=True)]
        if len(node.inputs) < 3:
            node.resize_inputs(3)
        for position, value in enumerate(own, start=at):
            node.replace_input_with(position, value)
