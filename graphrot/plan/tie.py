"""What a shared embedding table means for the plan.

With ``E`` shared, the head cannot take up the final norm's gain. A small matrix in front of the head
does: ``x @ diag(gamma) @ E.T``. Under R1 the table becomes ``E @ Q`` for both users, and the small
matrix ``Q.T @ diag(gamma) @ Q``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphrot.analysis.types import GainConsumer, GainFold, TiedHead, WeightUse
from graphrot.plan.means import is_shared
from graphrot.plan.types import Rotation


def matrix_name(tie: TiedHead) -> str:
    """Name of the small matrix' product: the first output of the MatMul in front of the head."""
    return f"{tie.head.node}__tied_input"


def touches_head(tie: TiedHead, gains: Sequence[GainFold], rotations: Sequence[Rotation]) -> bool:
    """Whether a fold or a rotation of the plan changes what the head must read, or the table."""
    head = tie.head.node
    return (
        any(u.node == head for r in rotations for u in r.space.consumers)
        or any(is_shared(tie, u) for r in rotations for u in r.space.producers)
        or any(c.use.node == head for g in gains for c in g.consumers)
    )


def redirect(
    tie: TiedHead, gains: Sequence[GainFold], rotations: Sequence[Rotation]
) -> tuple[tuple[GainFold, ...], tuple[Rotation, ...]]:
    """Send the head's gain to the small matrix, and rotate the matrix on both sides.

    The head's operand becomes the transposed rotated table: it rotates with the embedding, whose space need not be
    the one that the head reads (where a transform layer stands between the two).
    """
    return tuple(_gain(tie, fold) for fold in gains), tuple(_rotation(tie, rotation) for rotation in rotations)


def _matrix_use(tie: TiedHead, use: WeightUse, axis: int) -> WeightUse:
    name = matrix_name(tie)
    return replace(use, node=name, op="MatMul", input=1, tensor=f"{name}_matrix", axis=axis, role="weight")


def _gain(tie: TiedHead, fold: GainFold) -> GainFold:
    consumers = tuple(
        GainConsumer(_matrix_use(tie, c.use, 0), c.index) if c.use.node == tie.head.node else c for c in fold.consumers
    )
    return replace(fold, consumers=consumers)


def _rotation(tie: TiedHead, rotation: Rotation) -> Rotation:
    space = rotation.space
    own = [use for use in space.consumers if use.node == tie.head.node]
    tables = [use for use in space.producers if is_shared(tie, use)]
    others = [use for use in space.consumers if use.node != tie.head.node]
    heads = (own or [_head_use(tie, table) for table in tables]) if tables else []
    consumers = (*others, *heads, *(_matrix_use(tie, use, 0) for use in own))
    producers = (*space.producers, *(_matrix_use(tie, use, 1) for use in tables))
    return replace(rotation, space=replace(space, consumers=consumers, producers=producers))


def _head_use(tie: TiedHead, table: WeightUse) -> WeightUse:
    """The head's operand, as one that rotates with the table."""
    head = tie.head
    axis = 0 if head.layout == "KN" else 1
    return WeightUse(head.node, head.op, head.weight_input, head.weight, axis, table.groups)
