"""What the analysis finds. Frozen facts that name tensors and never hold nodes.

A node is named by its **first output** (unique in a valid graph, while node names may be empty or
repeated). Channel positions along an axis are written as *runs* ``(start, step, count)``, so that a
space of thousands of channels stays short in JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Runs = tuple[tuple[int, int, int], ...]
SpaceKind = Literal["R1", "R2", "R3", "R4", "O", "other"]
Placement = Literal["merged", "online"]


def encode_runs(positions: Sequence[int]) -> Runs:
    """Write positions as arithmetic runs, greedily from the left.

    Args:
        positions: channel positions in basis order.

    Returns:
        Runs ``(start, step, count)`` that :func:`decode_runs` expands to ``positions``.
    """
    runs: list[tuple[int, int, int]] = []
    i, n = 0, len(positions)
    while i < n:
        if i + 1 == n:
            runs.append((int(positions[i]), 1, 1))
            break
        step = int(positions[i + 1]) - int(positions[i])
        j = i + 1
        while j + 1 < n and int(positions[j + 1]) - int(positions[j]) == step:
            j += 1
        runs.append((int(positions[i]), step, j - i + 1))
        i = j + 1
    return tuple(runs)


def decode_runs(runs: Runs) -> list[int]:
    """Expand runs to the list of positions, in order."""
    return [start + step * k for start, step, count in runs for k in range(count)]


@dataclass(frozen=True)
class WeightUse:
    """One constant operand that takes part in a space.

    ``groups`` holds, per block of channels (head copy, ...), the positions along ``axis`` of the
    operand that form the block, ordered by basis coordinate. For a producer the operand changes as
    ``W[..., g] <- W[..., g] @ Q``; for a consumer as ``W[g, ...] <- Q.T @ W[g, ...]``.
    """

    node: str
    """First output of the node that takes the operand."""
    op: str
    """Op type of that node (for people)."""
    input: int
    """Index of the operand among the node's inputs."""
    tensor: str
    """Name of the operand's value as the node takes it (initializer or constant chain)."""
    axis: int
    """Axis of the operand on which the channels lie (non-negative)."""
    groups: tuple[Runs, ...]
    role: Literal["weight", "bias", "table"] = "weight"
    """``table``: rows are picked by a Gather (embedding, positions)."""


@dataclass(frozen=True)
class OnlineUse:
    """A run-time tensor after which an online transform must stand.

    ``groups`` are positions along the **last** axis; every index of the other axes has the same groups.
    """

    tensor: str
    op: str
    groups: tuple[Runs, ...]
    width: int
    """Length of the last axis."""


@dataclass(frozen=True)
class OnlineExit:
    """A place where rotated channels are read in their own basis: the inverse transform must stand in front of it.

    ``node`` is the first output of a norm (the transform stands between the norm and its gain) or of another node that
    reads ``tensor``; an empty string where the graph output ``tensor`` itself is the reader. ``groups`` are positions
    along the **last** axis.
    """

    node: str
    op: str
    tensor: str
    groups: tuple[Runs, ...]
    width: int
    """Length of the last axis."""


@dataclass(frozen=True)
class MeanNorm:
    """A norm that takes the mean of each row away before it divides.

    ``op``: LayerNormalization. ``skip``: SkipLayerNormalization. ``chain``: a Sub of a ReduceMean, in front of a
    decomposed norm or of anything else; ``node`` is the Sub.
    """

    node: str
    op: str
    form: Literal["op", "skip", "chain"]


@dataclass(frozen=True)
class MeanReader:
    """A node that reads the channels of a space before their mean was taken away, and why that matters to it."""

    node: str
    op: str
    reason: str


@dataclass(frozen=True)
class RotationSpace:
    """A set of channels that one orthogonal matrix may act on.

    ``dim`` is the size of the matrix. All weights, online tensors and caches named here must change
    together; leaving one out changes the model.
    """

    id: str
    """Unique and stable: kind and a counter in graph order, such as ``R2.7``."""
    kind: SpaceKind
    placement: Placement
    dim: int
    producers: tuple[WeightUse, ...] = ()
    consumers: tuple[WeightUse, ...] = ()
    online: tuple[OnlineUse, ...] = ()
    contractions: tuple[str, ...] = ()
    """First outputs of nodes that contract two rotated tensors (q.k), where the rotation cancels."""
    cache_inputs: tuple[str, ...] = ()
    cache_outputs: tuple[str, ...] = ()
    mean_preserving: bool = False
    """As the graph is, the matrix must map the all-ones vector to itself (a LayerNorm reads the space)."""
    norms: tuple[MeanNorm, ...] = ()
    """The norms that take the mean of these channels away."""
    mean_reader: MeanReader | None = None
    """What else the mean reaches; without it, the mean can be taken out of the producers."""
    exits: tuple[OnlineExit, ...] = ()
    optional: bool = False
    """Online transforms would have to stand within the layers: their number grows with depth."""

    @property
    def mean_folds(self) -> bool:
        """The mean can go: with centred producers and RMS norms in place of ``norms`` every matrix is allowed."""
        return self.mean_preserving and self.mean_reader is None and bool(self.norms)


def places(space: RotationSpace) -> tuple[str, ...]:
    """Names of the nodes (or ends of the graph) where online transforms of a space stand."""
    return (*(use.tensor for use in space.online), *(end.node or end.tensor for end in space.exits))


@dataclass(frozen=True)
class GainConsumer:
    """A constant matmul that takes up a folded gain: ``W[p] *= gain[index(p)]`` along ``axis``."""

    use: WeightUse
    index: Runs
    """For every position along ``use.axis``, the flat index into the gain."""


@dataclass(frozen=True)
class GainFold:
    """A per-channel gain (and shift) that moves forward into the matmuls that read it.

    ``form`` says what the node is: ``norm`` (RMSNormalization, LayerNormalization, Simplified... and
    Skip... variants: the gain is an input of the norm) or ``mul`` (a separate Mul by a constant).
    For ``norm`` the pass sets the gain to ones (and the shift to zeros); for ``mul`` it bypasses the
    Mul. A shift ``beta`` goes into the consumers' bias as ``beta @ W`` with the *old* W.
    """

    node: str
    op: str
    form: Literal["norm", "mul"]
    gain: str
    """Value name of the gain operand."""
    gain_input: int
    consumers: tuple[GainConsumer, ...]
    shift: str | None = None
    """Value name of beta: an input of the norm, or the constant operand of an Add after the Mul."""
    shift_node: str | None = None
    """First output of the node that takes beta (the norm itself, or the Add)."""
    shift_input: int | None = None


@dataclass(frozen=True)
class LinearRef:
    """One ``[K, N]`` view of a matmul by a constant weight."""

    node: str
    op: str
    weight: str
    weight_input: int
    input: str
    """Name of the activation tensor that is multiplied."""
    in_features: int
    out_features: int
    layout: Literal["KN", "NK"]
    bias: str | None = None
    is_head: bool = False
    """Its output is (up to casts, biases, slices and scalar ops) a graph output: the LM head."""


@dataclass(frozen=True)
class EmbeddingRef:
    """A lookup of rows of a constant table by token ids, ``[V, D]``."""

    node: str
    table: str
    table_input: int
    rows: int
    dim: int


@dataclass(frozen=True)
class TiedHead:
    """A head whose weight is the embedding table (same tensor, or equal values in either layout)."""

    embedding: EmbeddingRef
    head: LinearRef


@dataclass(frozen=True)
class Refusal:
    """A place where a rotation was looked for and is not possible, with the node that says no."""

    kind: SpaceKind | Literal["KV"]
    """``KV``: a cache that cannot be quantized."""
    node: str
    op: str
    reason: str
    change: str = ""
    """What would change it."""


@dataclass(frozen=True)
class CachePair:
    """A cache input and the output that carries it on, ``[B, H, T, D]``; ``[2, B, H, T, D]`` for keys and values."""

    past: str
    present: str
    heads: int
    """``H``, also where the graph leaves it open."""
    width: int
    """``D``, likewise."""


@dataclass(frozen=True)
class OperandRef:
    """An input of a node, and the form of what it reads.

    ``rows``: ``[B, S, H * D]``. ``heads``: ``[B, H, S, D]``. ``stacked``: ``[B * H, S, D]``.
    """

    node: str
    """First output of the node."""
    input: int
    form: Literal["rows", "heads", "stacked"] = "rows"


@dataclass(frozen=True)
class MaskTerm:
    """One tensor that says what a query may see, or how much: it broadcasts to ``[B, H, S, T]``.

    ``bias``: it is added to the scores, times ``factor``. ``keep``: scores where it is false become ``number``.
    ``hide``: scores where it is true become ``number``. ``padding``: integers ``[B, T]``, likewise where they are 0.
    """

    place: OperandRef
    kind: Literal["bias", "keep", "hide", "padding"] = "bias"
    factor: float = 1.0
    number: float = 0.0


@dataclass(frozen=True)
class AttentionSite:
    """A place where queries meet a cache of keys and values, read off what it computes.

    ``softmax(softcap(score_scale * q . k) + mask) . v`` over past and new tokens, for each head; a group of query
    heads shares a head of keys and values.
    """

    node: str
    """First output of the node that makes the weighted values."""
    op: str
    query: OperandRef
    key: OperandRef
    """New keys."""
    value: OperandRef
    """New values."""
    past_key: str
    past_value: str
    present_key: str
    present_value: str
    heads: int
    kv_heads: int
    head_size: int
    score_scale: float
    softcap: float = 0.0
    """0: none."""
    window: int = -1
    """Slots that a query sees at most, its own included; -1: all."""
    causal: bool = True
    output: Literal["rows", "heads", "stacked"] = "rows"
    """Form of what the node makes."""
    seqlens: str = ""
    """Tensor with the slots that a row of the batch has in use, minus one; empty: every row has all of them."""
    total: str = ""
    """Tensor with the slots in use; empty: past and new tokens."""
    pads: bool = False
    """Slots where the input attention_mask is 0 are hidden."""
    mask: tuple[MaskTerm, ...] = ()
    """What is hidden beyond ``causal``, ``window`` and ``pads``."""


@dataclass(frozen=True)
class ShapeRead:
    """A node that reads the shape of a cache, or of what is made of one on the way to the scores.

    ``sizes`` are what it finds there: multiples of the batch ``B``, the new tokens ``S``, those before ``P``, both
    together ``T``, or of 1.
    """

    node: str
    sizes: tuple[tuple[Literal["B", "S", "P", "T", "1"], int], ...]


@dataclass(frozen=True)
class AttentionSites:
    """The attention of a graph, in graph order, and what is refused."""

    sites: tuple[AttentionSite, ...] = ()
    refused: tuple[Refusal, ...] = ()
    shapes: tuple[ShapeRead, ...] = ()
    """Shapes that are read of caches, and have to be computed in another way."""
    counts: bool = False
    """The input attention_mask ``[B, T]`` is as long as past and new tokens together."""
    shares: bool = False
    """Nothing but these sites looks at a past, and lengths come from attention_mask: past and present may be one
    buffer of fixed capacity."""


@dataclass(frozen=True)
class Facts:
    """All that the analysis says about one graph."""

    nodes: int
    opset: int
    spaces: tuple[RotationSpace, ...]
    gains: tuple[GainFold, ...]
    linears: tuple[LinearRef, ...]
    embeddings: tuple[EmbeddingRef, ...]
    tied: TiedHead | None
    caches: tuple[CachePair, ...]
    refused: tuple[Refusal, ...]
    seconds: float = field(default=0.0, compare=False)
