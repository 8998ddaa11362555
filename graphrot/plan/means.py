"""What a LayerNorm means for the plan: its mean goes into the producers, or the matrix keeps the all-ones vector.

With ``P = I - 1 1^T / n``, a LayerNorm of x is an RMS norm of ``x P``. So every producer ``W`` becomes ``W P``, and
any orthogonal matrix may act (SliceGPT, section 3.2, arXiv:2401.15024). Where the mean is read elsewhere too, merged
rotations take a matrix that keeps the all-ones vector, and online ones, for which no fast one does, are refused.

A table that a head shares cannot be centred, since the head reads its rows with their mean. Its rows lose their mean
after the lookup then: two vectors instead of a second table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphrot.analysis.reasons import change_of
from graphrot.analysis.types import OnlineUse, Refusal, RotationSpace, TiedHead, WeightUse, places
from graphrot.plan.types import CentredLookup, CentredTensor, MeanFold, Rotation

_SIMPLE_BIAS = 3
"""Where SkipSimplifiedLayerNormalization has the bias that SkipLayerNormalization has behind its shift."""


def mean_refusal(space: RotationSpace) -> Refusal | None:
    """Why an online space cannot be rotated for the sake of its mean, if so."""
    if space.placement != "online" or not space.mean_preserving or space.mean_folds:
        return None
    if space.mean_reader is None:
        op = space.online[0].op if space.online else space.exits[0].op
        node, reason = places(space)[0], "the mean of its rows is read"
    else:
        node, op, reason = space.mean_reader.node, space.mean_reader.op, space.mean_reader.reason
    return Refusal(
        kind=space.kind,
        node=node,
        op=op,
        reason=f"{reason}, which the next LayerNorm takes away: no fast transform keeps it for one of them alone",
        change=change_of(reason),
    )


def mean_note(space: RotationSpace) -> str:
    """Why the matrix of a space keeps the all-ones vector, for the report; empty where it need not."""
    if not space.mean_preserving or space.mean_folds or space.mean_reader is None:
        return ""
    reader = space.mean_reader
    return f"the mean is kept: {reader.op} {reader.node}: {reader.reason}"


def fold_means(
    rotations: Sequence[Rotation], tie: TiedHead | None
) -> tuple[tuple[Rotation, ...], tuple[MeanFold, ...]]:
    """The mean folds of some rotations, and the rotations as they are once these folds are made.

    Args:
        rotations: what the plan takes.
        tie: the table that embedding and head go on sharing, if they do.
    """
    folds: list[MeanFold] = []
    result: list[Rotation] = []
    for rotation in rotations:
        space = rotation.space
        if not space.mean_folds:
            result.append(rotation)
            continue
        shared = [use for use in space.producers if tie is not None and is_shared(tie, use)]
        lookup = _lookup(shared[0]) if shared else None
        fold = MeanFold(
            space=space.id,
            producers=tuple(use for use in space.producers if use not in shared),
            norms=space.norms,
            online=tuple(CentredTensor(use.tensor, f"{use.tensor}__centred") for use in space.online),
            lookup=lookup,
        )
        folds.append(fold)
        result.append(replace(rotation, space=_after(space, lookup)))
    return tuple(result), tuple(folds)


def is_shared(tie: TiedHead, use: WeightUse) -> bool:
    """Whether an operand is the embedding's side of a tied table."""
    return use.node == tie.embedding.node and use.input == tie.embedding.table_input


def _lookup(use: WeightUse) -> CentredLookup:
    return CentredLookup(
        tensor=use.node,
        groups=use.groups,
        width=sum(count for group in use.groups for _, _, count in group),
        number=f"{use.node}__mean",
        part=f"{use.node}__mean_part",
        centred=f"{use.node}__centred",
    )


def _after(space: RotationSpace, lookup: CentredLookup | None) -> RotationSpace:
    """The space with its transforms behind the centred tensors, and the vectors of a lookup among its operands."""
    online: tuple[OnlineUse, ...] = tuple(replace(use, tensor=f"{use.tensor}__centred") for use in space.online)
    skips = {norm.node for norm in space.norms if norm.form == "skip"}
    producers = tuple(replace(use, input=_SIMPLE_BIAS) if use.node in skips else use for use in space.producers)
    space = replace(space, online=online, producers=producers)
    if lookup is None:
        return space
    vectors = [
        WeightUse(name, "MatMul", 1, f"{name}_vector", axis, lookup.groups)
        for name, axis in ((lookup.number, 0), (lookup.part, 1))
    ]
    return replace(
        space,
        consumers=(*space.consumers, vectors[0]),
        producers=(*space.producers, vectors[1]),
    )
