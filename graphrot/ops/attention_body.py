"""RotatedAttention in standard operators: the new rows are stored, then all rows are decoded and attended to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphrot.ops import stored_rows
from graphrot.ops.body import FunctionBody
from graphrot.ops.hadamard import transform_nodes

_LOWEST = float(np.finfo(np.float32).min)
_UNSEEN = -1e30
"""Slots with a mask up to this are not seen."""


def attention_nodes(body: FunctionBody, inputs: Sequence[ir.Value]) -> list[ir.Value]:
    """Adds the nodes to ``body``.

    Args:
        body: of a function with the node's attributes.
        inputs: the node's eight inputs; the last may miss where the function is called.

    Returns:
        The node's three outputs.
    """
    query, key, value, past_key, past_value, seqlens, total, mask = inputs
    sizes = _Sizes(body, query, past_key, seqlens, total)
    queries = _heads(body, _rotated(body, query, "query"), sizes.heads, sizes.head, "query")
    highest = stored_rows.levels(body)
    slots = _slots(body, sizes)
    presents, decoded = [], []
    for name, new, past in (("key", _rotated(body, key, "key"), past_key), ("value", _single(body, value), past_value)):
        rows = stored_rows.encode(body, _heads(body, new, sizes.kv_heads, sizes.head, name), highest, f"new_{name}")
        present = body.add("ScatterND", f"present_{name}", [_grown(body, past, sizes, name), slots, rows])
        presents.append(present)
        decoded.append(stored_rows.decode(body, present, f"stored_{name}"))
    (keys, lost_keys), (values, lost_values) = decoded
    lost_queries = _lost_queries(body, queries)
    visible, added = _visible(body, sizes, _given_mask(body, mask, lost_queries))
    weights = _weights(body, sizes, queries, keys, visible, added)
    products = body.add("MatMul", "products", [weights, values])
    heads = body.add("Reshape", "heads", [products, _shape(body, "heads", 0, sizes.heads, -1, sizes.head)])
    lost = body.add("Or", "lost_rows", [lost_keys, lost_values])
    checked = _checked(body, sizes, heads, lost_queries, visible, lost)
    tokens = body.add("Transpose", "tokens", [checked], [ir.AttrInt64s("perm", [0, 2, 1, 3])])
    flat = body.add("Reshape", "flat", [tokens, body.constant(np.array([0, 0, -1]), "flat_shape")])
    return [body.add("CastLike", "output", [flat, query]), *presents]


class _Sizes:
    """Numbers that several parts read; int64 ``[1]`` if nothing else is said."""

    def __init__(self, body: FunctionBody, query: ir.Value, past: ir.Value, seqlens: ir.Value, total: ir.Value) -> None:
        vector = body.constant(np.array([-1]), "vector")
        self.heads, self.kv_heads, self.head = (
            body.add("Reshape", f"{name}_size", [body.attribute(name), vector])
            for name in ("num_heads", "kv_num_heads", "head_size")
        )
        self.row = body.add("Reshape", "row_size", [body.attribute("row_bytes"), vector])
        self.batch = _dimension(body, query, 0, "batch")
        self.tokens = _dimension(body, query, 1, "tokens_new")
        self.past = _dimension(body, past, 2, "past_size")
        whole = body.cast(body.add("Reshape", "total_size", [total, vector]), ir.DataType.INT64, "total")
        self.slots = body.add("Max", "slots_size", [whole, self.past])
        used = body.cast(body.add("Reshape", "seqlens_flat", [seqlens, vector]), ir.DataType.INT64, "seqlens_long")
        one = body.constant(np.array([1]), "one")
        before = body.add("Sub", "before", [body.add("Add", "used", [used, one]), self.tokens])
        start = body.add("Max", "start", [before, body.constant(np.array([0]), "nothing")])
        column = body.constant(np.array([-1, 1, 1, 1]), "column")
        self.start = body.add("Reshape", "starts", [start, column])
        """``[B, 1, 1, 1]``: the first new slot."""
        order = _range(body, self.tokens, "order")
        self.position = body.add(
            "Add", "positions", [self.start, body.add("Reshape", "order_column", [order, _four(body, 2, "order")])]
        )
        """``[B, 1, S, 1]``: the slots of the new tokens."""


def _dimension(body: FunctionBody, value: ir.Value, axis: int, name: str) -> ir.Value:
    return body.add("Shape", name, [value], [ir.AttrInt64("start", axis), ir.AttrInt64("end", axis + 1)])


def _range(body: FunctionBody, count: ir.Value, name: str) -> ir.Value:
    """``0 .. count - 1``, int64."""
    scalar = body.add("Squeeze", f"{name}_count", [count])
    ends = [body.constant(np.array(number), f"{name}_{part}") for number, part in ((0, "from"), (1, "by"))]
    return body.add("Range", name, [ends[0], scalar, ends[1]])


def _four(body: FunctionBody, axis: int, name: str) -> ir.Value:
    """The shape of a vector that runs along one of four axes."""
    shape = [1, 1, 1, 1]
    shape[axis] = -1
    return body.constant(np.array(shape), f"{name}_along_{axis}")


def _shape(body: FunctionBody, name: str, *sizes: ir.Value | int) -> ir.Value:
    """For Reshape and Expand."""
    parts = [
        body.constant(np.array([size]), f"{name}_size_{at}") if isinstance(size, int) else size
        for at, size in enumerate(sizes)
    ]
    return body.add("Concat", f"{name}_shape", parts, [ir.AttrInt64("axis", 0)])


def _single(body: FunctionBody, x: ir.Value) -> ir.Value:
    return body.cast(x, ir.DataType.FLOAT, f"{x.name}_single")


def _rotated(body: FunctionBody, x: ir.Value, name: str) -> ir.Value:
    """In float32, transformed if the node says so."""
    single = _single(body, x)
    rotate = body.add("Constant", f"{name}_rotate", [], [body.reference("rotate", "value_int")])
    return body.choose(
        f"{name}_rotated",
        body.cast(rotate, ir.DataType.BOOL, f"{name}_rotates"),
        lambda branch: transform_nodes(branch, single, single),
        lambda branch: branch.add("Identity", "same", [single]),
    )


def _heads(body: FunctionBody, x: ir.Value, heads: ir.Value, size: ir.Value, name: str) -> ir.Value:
    """``[B, S, H * D]`` as ``[B, H, S, D]``."""
    split = body.add("Reshape", f"{name}_split", [x, _shape(body, f"{name}_split", 0, 0, heads, size)])
    return body.add("Transpose", f"{name}_heads", [split], [ir.AttrInt64s("perm", [0, 2, 1, 3])])


def _slots(body: FunctionBody, sizes: _Sizes) -> ir.Value:
    """``[B, kv_num_heads, S, 3]``: where each new row goes."""
    shape = _shape(body, "slots", sizes.batch, sizes.kv_heads, sizes.tokens, 1)
    rows, heads = (
        body.add("Reshape", f"{name}_column", [_range(body, count, name), _four(body, axis, name)])
        for axis, (name, count) in enumerate((("rows", sizes.batch), ("row_heads", sizes.kv_heads)))
    )
    parts = [body.add("Expand", f"slots_{at}", [part, shape]) for at, part in enumerate((rows, heads, sizes.position))]
    return body.add("Concat", "slots", parts, [ir.AttrInt64("axis", -1)])


def _grown(body: FunctionBody, past: ir.Value, sizes: _Sizes, name: str) -> ir.Value:
    """Past and zeros up to the last slot. A copy also where nothing is added: present may lie in past's memory."""
    missing = body.add("Sub", f"{name}_missing", [sizes.slots, sizes.past])
    shape = _shape(body, f"{name}_free", sizes.batch, sizes.kv_heads, missing, sizes.row)
    zero = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.uint8)))
    free = body.add("ConstantOfShape", f"{name}_free", [shape], [zero])
    return body.add("Concat", f"{name}_grown", [past, free], [ir.AttrInt64("axis", 2)])


def _visible(body: FunctionBody, sizes: _Sizes, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Bool and float, broadcasting to ``[B, num_heads, S, T]``: the slots that are seen, and what is added."""
    slot = _range(body, sizes.slots, "slot")
    one = body.constant(np.array(1), "next")
    end = body.add("Add", "end", [sizes.start, sizes.tokens])
    causal = body.cast(body.attribute("causal"), ir.DataType.BOOL, "is_causal")
    limit = body.add("Where", "limit", [causal, body.add("Add", "after", [sizes.position, one]), end])
    window = body.attribute("local_window_size")
    zero, none = body.constant(np.array(0), "no_slots"), body.constant(np.array(-1), "no_window")
    windowed = body.add("GreaterOrEqual", "windowed", [window, zero])
    below = body.add("Where", "below", [windowed, body.add("Sub", "outside", [sizes.position, window]), none])
    before = body.add("Less", "before_limit", [slot, limit])
    inside = body.add("And", "inside", [before, body.add("Greater", "in_window", [slot, below])])
    added = _mask(body, sizes, mask)
    unseen = body.constant(np.array(_UNSEEN, np.float32), "unseen")
    return body.add("And", "visible", [inside, body.add("Greater", "unmasked", [added, unseen])]), added


def _lost_queries(body: FunctionBody, queries: ir.Value) -> ir.Value:
    """Float ``[B, num_heads, S, 1]``: 1 where a query is not finite, else 0."""
    differences = body.add("Sub", "query_differences", [queries, queries])
    sums = body.add("ReduceSum", "query_sums", [differences, body.constant(np.array([-1]), "channels")])
    return body.cast(body.add("IsNaN", "query_lost", [sums]), ir.DataType.FLOAT, "lost_queries")


def _given_mask(body: FunctionBody, mask: ir.Value, flags: ir.Value) -> ir.Value:
    """The mask, or a zero of four axes.

    Sum may miss an input, as the mask may in the call. Its other one is a zero that depends on the tokens: ONNX Runtime
    1.20 crashes when it folds a Sum of a constant and nothing, in the branch that it does not take.
    """
    zero = body.constant(np.zeros((1, 1, 1, 1), np.float32), "no_mask")
    none = body.add("ReduceMax", "zero", [body.add("Mul", "zeros", [flags, zero])])
    return body.choose(
        "mask_given",
        body.add("OptionalHasElement", "has_mask", [mask]),
        lambda branch: branch.add("Sum", "same", [none, mask]),
        lambda branch: branch.add("Identity", "nothing", [none]),
    )


def _mask(body: FunctionBody, sizes: _Sizes, given: ir.Value) -> ir.Value:
    """The last axis as long as the cache."""
    start, axis = body.constant(np.array([0]), "mask_start"), body.constant(np.array([3]), "mask_axis")
    cut = body.add("Slice", "mask_cut", [given, start, sizes.slots, axis])
    missing = body.add("Sub", "mask_missing", [sizes.slots, _dimension(body, cut, 3, "mask_size")])
    return body.add("Pad", "mask_whole", [cut, _shape(body, "mask_pads", 0, missing), None, axis])


def _weights(
    body: FunctionBody, sizes: _Sizes, queries: ir.Value, keys: ir.Value, visible: ir.Value, added: ir.Value
) -> ir.Value:
    """``[B, kv_num_heads, G * S, T]``, G queries' heads for each of the keys'; zeros where nothing is seen."""
    scaled = body.add("Mul", "query_scaled", [queries, body.attribute("score_scale")])
    grouped = body.add("Reshape", "groups", [scaled, _shape(body, "groups", 0, sizes.kv_heads, -1, sizes.head)])
    turned = body.add("Transpose", "keys_turned", [keys], [ir.AttrInt64s("perm", [0, 1, 3, 2])])
    products = body.add("MatMul", "scores_grouped", [grouped, turned])
    raw = body.add("Reshape", "scores_raw", [products, _shape(body, "scores", 0, sizes.heads, -1, sizes.slots)])
    cap = body.attribute("softcap")
    zero = body.constant(np.zeros((), np.float32), "unbounded")

    def bounded(branch: FunctionBody) -> ir.Value:
        return branch.add("Mul", "scores", [branch.add("Tanh", "tanh", [branch.add("Div", "parts", [raw, cap])]), cap])

    capped = body.add("Greater", "is_capped", [cap, zero])
    scores = body.choose("scores", capped, bounded, lambda branch: branch.add("Identity", "same", [raw]))
    masked = body.add("Add", "scores_masked", [scores, added])
    lowest = body.constant(np.array(_LOWEST, np.float32), "lowest")
    seen = body.add("Where", "scores_seen", [visible, masked, lowest])
    parts = body.add("Softmax", "parts", [seen], [ir.AttrInt64("axis", -1)])
    weights = body.add("Where", "weights", [visible, parts, zero])
    return body.add(
        "Reshape", "weights_grouped", [weights, _shape(body, "weights", 0, sizes.kv_heads, -1, sizes.slots)]
    )


def _checked(
    body: FunctionBody, sizes: _Sizes, heads: ir.Value, query: ir.Value, visible: ir.Value, lost: ir.Value
) -> ir.Value:
    """NaN where a query that is not finite sees a slot, or any query one whose row is not; the rest as it is."""
    zero = body.constant(np.zeros((), np.float32), "sound")
    rows = body.cast(lost, ir.DataType.FLOAT, "lost_rows_single")
    flags = [
        body.add("ReduceMax", f"lost_{at}", [part], [ir.AttrInt64("keepdims", 0)])
        for at, part in enumerate((rows, query))
    ]

    def spread(branch: FunctionBody) -> ir.Value:
        shape = _shape(branch, "all", sizes.batch, sizes.heads, sizes.tokens, sizes.slots)
        seen = branch.cast(branch.add("Expand", "visible", [visible, shape]), ir.DataType.FLOAT, "seen")
        groups = _shape(branch, "groups", 0, sizes.kv_heads, -1, sizes.slots)
        count = branch.add("MatMul", "count", [branch.add("Reshape", "grouped", [seen, groups]), rows])
        by_head = branch.add("Reshape", "by_head", [count, _shape(branch, "by_head", 0, sizes.heads, -1, 1)])
        any_seen = branch.add("ReduceMax", "any", [seen, branch.constant(np.array([-1]), "axis")])
        own = branch.add("Mul", "own", [any_seen, query])
        bad = branch.add("Greater", "bad", [branch.add("Add", "both", [by_head, own]), zero])
        return branch.add("Where", "marked", [bad, branch.constant(np.array(np.nan, np.float32), "nan"), heads])

    found = body.add("Greater", "is_lost", [body.add("Add", "lost_any", flags), zero])
    return body.choose("checked", found, spread, lambda branch: branch.add("Identity", "same", [heads]))
