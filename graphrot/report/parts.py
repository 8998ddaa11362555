"""The parts of ``graphrot.json``, each a frozen model with a fixed shape."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourcePart(Part):
    kind: str
    name: str
    sha256: str


class RotationPart(Part):
    """One rotation that was applied; producers and consumers are the tensors that were changed.

    An online rotation also names the run-time tensors that its transforms follow.
    """

    kind: str
    space: str
    placement: str
    dim: int
    matrix: dict[str, Any]
    producers: list[str]
    consumers: list[str]


class RefusedPart(Part):
    kind: str
    node: str
    op: str
    reason: str


class MeanPart(Part):
    """A space whose LayerNorms became RMS norms: the tensors that were centred for it, and the norms by their output.

    ``online`` are run-time tensors that are centred while the model runs.
    """

    space: str
    producers: list[str]
    online: list[str]
    norms: list[str]


class PlanPart(Part):
    rotations: list[RotationPart]
    refused: list[RefusedPart]
    means: list[MeanPart] = []


class CertificatePart(Part):
    """The measured difference between the source and the rotated, not yet quantized model.

    ``relative`` and ``tolerance`` are fractions of the largest source logit; ``control_relative`` is the
    same measure with one inverse left out, and must be over the tolerance (None: nothing was rotated).
    """

    mode: str
    max_abs: float
    relative: float
    top1: float
    tolerance: float
    dtype: str
    tokens: int
    control_relative: float | None


class HalfPart(Part):
    """What a float16 or bfloat16 model's logits are off by, as fractions of the source's largest logit in float32.

    ``relative`` is the written model, quantization included; ``plain_relative`` the source cast alike,
    neither rotated nor quantized (None: it does not fit into the type).
    """

    dtype: str
    relative: float
    plain_relative: float | None
    top1: float
    tokens: int


class SizesPart(Part):
    """File sizes in bytes, and the bits per weight of the quantized linears, scales included."""

    source_bytes: int
    model_bytes: int
    bits_per_weight: float


class QuantizedPart(Part):
    """One quantized tensor.

    ``error`` is a ratio of norms. For linears solved by gptq it is that of their outputs on the calibration text,
    ``|X W' - X W| / |X W|``, X as the quantized model makes them; for all others (rtn, clip, tables, heads) that of
    the weights, ``|W' - W| / |W|``. ``error_without_rotation`` is the same measure of the source's tensor, after the
    same solver on the same grid, with the same X in the source's basis; None where nothing was rotated.
    """

    tensor: str
    node: str
    bits: int
    group: int | str
    error: float
    error_without_rotation: float | None


class CachePart(Part):
    """What the key/value cache holds.

    ``layout``: ``float`` ``[batch, heads, tokens, width]`` of ``bits``; ``rows``, uint8, a scale and a minimum behind
    the codes of each token and head; ``gqa``, as ONNX Runtime's GroupQueryAttention packs it; ``none`` without a cache.
    ``scales``: what shares a scale, ``token``, ``tensor`` or ``channel``. ``shared_buffers``: one buffer of fixed
    capacity may be both past and present.
    """

    bits: int
    layout: str
    rotated: bool
    scales: str | None
    shared_buffers: bool = False


class CalibrationPart(Part):
    """Where the text came from that numbers were taken from.

    ``kind``: ``default`` (Python's help topics), ``text``, ``tokens``, ``dataset`` or ``self`` (the model's own
    samples). ``sha256`` is that of the tokens (int64, little endian) that were read; ``fingerprint`` holds 64-bit
    hashes of their runs (base64), by which an evaluation finds out that its text overlaps.
    """

    kind: str
    name: str
    tokens: int
    sha256: str
    fingerprint: str = ""


class LearningPart(Part):
    """How learned rotations came about, from the metadata of their file.

    ``curve`` and ``heldout`` are pairs of step and loss; ``distance`` is ``|R - R0|`` (Frobenius) by space.
    """

    file: str
    sha256: str
    loss: str
    steps: int
    seed: int
    curve: list[tuple[int, float]]
    heldout: list[tuple[int, float]]
    distance: dict[str, float]
    orthogonality: float
    calibration: CalibrationPart | None = None


class ChoicePart(Part):
    """What a measurement decided for one rotation site or one weight.

    ``candidates`` maps every candidate to its measured figure, of which less is better; ``gain`` is what the choice
    gained over the first candidate, as a fraction of that one's figure.
    """

    kind: Literal["rotation", "weight", "recipe"]
    name: str
    chosen: str
    candidates: dict[str, float]
    measure: str
    gain: float
    why: str


class OutlierPart(Part):
    """Largest over median magnitude of a tensor on the calibration text, in the source's basis and in the new one."""

    space: str
    kind: str
    tensor: str
    before: float
    after: float


class EvaluationPart(Part):
    """One measurement of the finished model, kept by ``graphrot eval --record``.

    ``kl`` (nats a token) and ``top1`` (a fraction) compare with ``reference``. ``tasks`` maps a task's metrics to
    figures, on ``limit`` items of each (None: all). ``sha256`` is that of the text file; ``overlaps``: the model had
    seen parts of it when it was calibrated.
    """

    text: str | None = None
    sha256: str | None = None
    window: int | None = None
    windows: int | None = None
    tokens: int | None = None
    perplexity: float | None = None
    reference: str | None = None
    reference_perplexity: float | None = None
    kl: float | None = None
    top1: float | None = None
    tasks: dict[str, dict[str, float]] = {}
    limit: int | None = None
    overlaps: bool = False
