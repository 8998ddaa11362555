"""``graphrot::RotatedAttention``: attention over a cache of 4- or 8-bit rows, a scale and a minimum in every row.

Domain ``graphrot``, version 1. Inputs (T: float, float16 or bfloat16):

* ``query`` T ``[B, S, num_heads * D]``, ``key`` and ``value`` T ``[B, S, kv_num_heads * D]``: the new tokens;
* ``past_key``, ``past_value``: uint8 ``[B, kv_num_heads, P, R]``, rows as below;
* ``seqlens_k``: int32 ``[B]`` or ``[B, 1]``; slots of a row of the batch in use after this call, minus one;
* ``total_sequence_length``: int32 ``[]`` or ``[1]``;
* ``mask`` (optional): float, broadcasts to ``[B, num_heads, S, M]``; M is at least the slots in use.

Outputs: ``output`` T ``[B, S, num_heads * D]``; ``present_key`` and ``present_value`` uint8
``[B, kv_num_heads, T, R]`` with ``T = max(P, total_sequence_length)``.

A row of ``R = D * bits / 8 + 4`` bytes stores a head's key or value of one token, z in float32 (keys after the
rotation, where there is one)::

    step = float16((max z - min z) / levels)     levels 15 or 255; float16 half to even, at most 65504
    base = float16(min z)
    code = clip(round half even((z - base) / step), 0, levels), 0 where step is 0

and stands for ``base + step * code``. The codes come first: for 8 bits one after the other, for 4 bits
``code[i] | code[i + D/2] << 4`` in byte i. Then step and base, little endian. A row that is not finite has a base of
NaN and zeros.

With ``L = seqlens_k + 1`` the new tokens go to the slots from ``start = max(0, L - S)`` on; the other slots are those
of past, and zeros beyond it. Query i sees slot j if ``j < start + S``, ``j <= start + i`` where ``causal``,
``j > start + i - local_window_size`` where that is not negative, and ``mask > -1e30``. Over what it sees::

    s = score_scale * q . k        q rotated like the keys; k as stored, also that of the new tokens
    s = softcap * tanh(s / softcap) where softcap is not 0
    output = softmax(s + mask) . v

and zeros where it sees nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from graphrot.errors import UsageError
from graphrot.ops.attention_body import attention_nodes
from graphrot.ops.body import FunctionBody
from graphrot.ops.hadamard import ATTRIBUTES as TRANSFORM_ATTRIBUTES
from graphrot.ops.hadamard import DOMAIN, add_function, declared_function, transform_attributes
from graphrot.plan.types import MatrixRef

OP_TYPE = "RotatedAttention"

ATTRIBUTES = {
    "num_heads": ir.AttributeType.INT,
    "kv_num_heads": ir.AttributeType.INT,
    "head_size": ir.AttributeType.INT,
    "bits": ir.AttributeType.INT,
    "row_bytes": ir.AttributeType.INT,
    "score_scale": ir.AttributeType.FLOAT,
    "softcap": ir.AttributeType.FLOAT,
    "local_window_size": ir.AttributeType.INT,
    "causal": ir.AttributeType.INT,
    "rotate": ir.AttributeType.INT,
    **TRANSFORM_ATTRIBUTES,
}
"""All attributes of the node.

``bits``: 4 or 8. ``row_bytes``: R. ``softcap``: 0 for none. ``local_window_size``: slots that a query sees at most,
its own included; -1 for no window. ``causal`` and ``rotate``: 0 or 1; then the attributes of HadamardTransform follow
(``size`` divides ``head_size``), without a rotation those of size 1.
"""

OLDEST_OPSET = 21
"""The oldest that the function is tested with; it takes operators up to version 18."""


@dataclass(frozen=True)
class AttentionForm:
    """What an attention node computes.

    Args:
        num_heads: heads of queries, a multiple of ``kv_num_heads``.
        kv_num_heads: heads of keys and values.
        head_size: D, even.
        bits: of a stored code, 4 or 8.
        score_scale: factor on the products of queries and keys.
        softcap: bound of the scores, by a tanh; 0: none.
        window: slots that a query sees at most, its own included; -1: no window.
        causal: a query sees no later slot than its own.

    Raises:
        UsageError: the operator has no such form.
    """

    num_heads: int
    kv_num_heads: int
    head_size: int
    bits: Literal[4, 8]
    score_scale: float
    softcap: float = 0.0
    window: int = -1
    causal: bool = True

    def __post_init__(self) -> None:
        if self.kv_num_heads < 1 or self.num_heads < 1 or self.num_heads % self.kv_num_heads:
            raise UsageError(f"{OP_TYPE} cannot share {self.kv_num_heads} heads of keys among {self.num_heads} heads")
        if self.head_size < 2 or self.head_size % 2:
            raise UsageError(f"{OP_TYPE} has no heads of {self.head_size} channels", why="their number must be even")
        if self.bits not in (4, 8):
            raise UsageError(f"{OP_TYPE} has no caches of {self.bits} bits", do="choose 4 or 8")
        if self.softcap < 0:
            raise UsageError(f"{OP_TYPE} cannot bound scores by {self.softcap}", do="choose 0 for no bound")
        if self.window < -1:
            raise UsageError(f"{OP_TYPE} has no window of {self.window} slots", do="choose -1 for no window")

    @property
    def row_bytes(self) -> int:
        """R."""
        return row_bytes(self.head_size, self.bits)


def row_bytes(head_size: int, bits: int) -> int:
    """Bytes of the stored key or value of one token and head: codes, step and minimum."""
    return head_size * bits // 8 + 4


def rotated_attention_node(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    past_key: ir.Value,
    past_value: ir.Value,
    seqlens_k: ir.Value,
    total: ir.Value,
    names: Sequence[str],
    form: AttentionForm,
    *,
    mask: ir.Value | None = None,
    rotation: Iterable[ir.Attr] | None = None,
) -> ir.Node:
    """The node that stores the new keys and values and attends to all that is stored.

    Args:
        query: T ``[B, S, num_heads * D]``; type and shape pass on to the output.
        key: T ``[B, S, kv_num_heads * D]``.
        value: T ``[B, S, kv_num_heads * D]``.
        past_key: uint8 ``[B, kv_num_heads, P, R]``.
        past_value: likewise.
        seqlens_k: int32 ``[B]`` or ``[B, 1]``.
        total: ``total_sequence_length``, int32 ``[]`` or ``[1]``.
        names: of the outputs ``output``, ``present_key`` and ``present_value``; free names.
        form: what is computed.
        mask: float32, broadcasts to ``[B, num_heads, S, M]``.
        rotation: attributes of the HadamardTransform that queries and keys go through, from ``transform_attributes``
            or from a node that this one takes in; None: no rotation.

    Returns:
        A node that is in no graph yet, named like its first output.

    Raises:
        UsageError: the rotation's blocks do not divide a head.
    """
    transform = list(transform_attributes(MatrixRef("hadamard", 1)) if rotation is None else rotation)
    size = next(attribute.as_int() for attribute in transform if attribute.name == "size")
    if form.head_size % size:
        raise UsageError(
            f"{OP_TYPE} cannot rotate heads of {form.head_size} channels in blocks of {size}",
            where=f"output {names[0]!r}",
        )
    attributes = [
        ir.AttrInt64("num_heads", form.num_heads),
        ir.AttrInt64("kv_num_heads", form.kv_num_heads),
        ir.AttrInt64("head_size", form.head_size),
        ir.AttrInt64("bits", form.bits),
        ir.AttrInt64("row_bytes", form.row_bytes),
        ir.AttrFloat32("score_scale", form.score_scale),
        ir.AttrFloat32("softcap", form.softcap),
        ir.AttrInt64("local_window_size", form.window),
        ir.AttrInt64("causal", int(form.causal)),
        ir.AttrInt64("rotate", int(rotation is not None)),
        *transform,
    ]
    inputs = [query, key, value, past_key, past_value, seqlens_k, total]
    if mask is not None:  # ONNX Runtime 1.20 crashes on an empty name at the end
        inputs.append(mask)
    outputs = [ir.Value(name=names[0], shape=query.shape, type=query.type)]
    for name, past in zip(names[1:], (past_key, past_value), strict=True):
        batch = None if past.shape is None else past.shape[0]
        shape = ir.Shape([batch, form.kv_num_heads, None, form.row_bytes])
        outputs.append(ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.UINT8)))
    return ir.Node(DOMAIN, OP_TYPE, inputs, attributes, outputs=outputs, name=names[0])


def ensure_rotated_attention(model: ir.Model) -> None:
    """Give the model the function and the import of the domain, unless it has them, and an IR version with functions.

    Raises:
        InputRefused: the model's standard opset is too old for the function.
    """
    add_function(model, OP_TYPE, rotated_attention_function, OLDEST_OPSET)


def rotated_attention_function(opset: int = 21) -> ir.Function:
    """The model-local function ``graphrot::RotatedAttention`` in standard operators.

    Args:
        opset: version of the standard operators, that of the model (21 or later).
    """
    names = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "mask")
    inputs = [ir.Value(name=name) for name in names]
    body = FunctionBody(ATTRIBUTES)
    outputs = attention_nodes(body, inputs)
    return declared_function(OP_TYPE, inputs, outputs, body, ATTRIBUTES, {"": opset})
