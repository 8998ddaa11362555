"""``graphrot.json``: what was done to a model, and what was measured. One file, one shape."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict

from graphrot.analysis.types import AttentionSites, Facts
from graphrot.evaluate.certificate import Certificate, weight_bytes
from graphrot.half import HalfError, HalfTypes
from graphrot.model.in_place import written_in_place
from graphrot.model.load import Source
from graphrot.plan.serialize import plan_hash
from graphrot.plan.types import MeanFold, Rotation, RotationPlan
from graphrot.quantize import Quantized
from graphrot.recipe import Recipe


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourcePart(_Part):
    kind: str
    name: str
    sha256: str


class RotationPart(_Part):
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


class RefusedPart(_Part):
    kind: str
    node: str
    op: str
    reason: str


class MeanPart(_Part):
    """A space whose LayerNorms became RMS norms: the tensors that were centred for it, and the norms by their output.

    ``online`` are run-time tensors that are centred while the model runs.
    """

    space: str
    producers: list[str]
    online: list[str]
    norms: list[str]


class PlanPart(_Part):
    rotations: list[RotationPart]
    refused: list[RefusedPart]
    means: list[MeanPart] = []


class CertificatePart(_Part):
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


class HalfPart(_Part):
    """What a float16 or bfloat16 model's logits are off by, as fractions of the source's largest logit in float32.

    ``relative`` is the written model, quantization included; ``plain_relative`` the source cast alike,
    neither rotated nor quantized (None: it does not fit into the type).
    """

    dtype: str
    relative: float
    plain_relative: float | None
    top1: float
    tokens: int


class SizesPart(_Part):
    """File sizes in bytes, and the bits per weight of the quantized linears, scales included."""

    source_bytes: int
    model_bytes: int
    bits_per_weight: float


class QuantizedPart(_Part):
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


class CachePart(_Part):
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


class Manifest(_Part):
    """The content of ``graphrot.json``.

    ``tokenizer_files`` are those that were copied into the output folder, with their sha256; ``other_files`` what else
    lies beside the model for the target genai.
    """

    graphrot_version: str
    source: SourcePart
    recipe: dict[str, Any]
    plan: PlanPart
    certificate: CertificatePart | None
    half: HalfPart | None = None
    sizes: SizesPart
    quantized: list[QuantizedPart]
    cache: CachePart
    seconds: dict[str, float]
    versions: dict[str, str]
    tokenizer_files: dict[str, str] = {}
    other_files: dict[str, str] = {}

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest file; raises pydantic's ValidationError where it is not one."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


def build_manifest(
    source: Source,
    model: ir.Model,
    recipe: Recipe,
    plan: RotationPlan,
    certificate: Certificate | None,
    quantized: Quantized,
    facts: Facts,
    sites: AttentionSites,
    seconds: Mapping[str, float],
    types: HalfTypes,
    half: HalfError | None,
) -> Manifest:
    """Put together what the steps of a conversion said of a ``model``; the written size is set when it is known."""
    source_bytes = source.floats.weight_bytes
    versions = library_versions()
    return Manifest(
        graphrot_version=versions.get("graphrot", "unknown"),
        source=SourcePart(kind=source.kind, name=source.name, sha256=source.sha256),
        recipe=recipe.model_dump(),
        plan=plan_part(plan),
        certificate=None if certificate is None else CertificatePart(**asdict(certificate)),
        half=None if half is None else HalfPart(**asdict(half)),
        sizes=SizesPart(
            source_bytes=weight_bytes(source.model) if source_bytes is None else source_bytes,
            model_bytes=0,
            bits_per_weight=_float_bits(types) if quantized.bits_per_weight is None else quantized.bits_per_weight,
        ),
        quantized=[QuantizedPart(**asdict(entry)) for entry in quantized.entries],
        cache=_cache(model, plan, facts, sites, recipe, types),
        seconds=dict(seconds),
        versions=versions,
    )


def _float_bits(types: HalfTypes) -> float:
    return 32.0 if types.half is None else 16.0


def _cache(
    model: ir.Model, plan: RotationPlan, facts: Facts, sites: AttentionSites, recipe: Recipe, types: HalfTypes
) -> CachePart:
    rotated = any(rotation.space.cache_inputs for rotation in plan.rotations)
    if not facts.caches:
        return CachePart(bits=0, layout="none", rotated=rotated, scales=None)
    if recipe.kv_bits is not None:
        stock = recipe.stock_cache
        return CachePart(
            bits=recipe.kv_bits,
            layout="gqa" if stock else "rows",
            rotated=rotated,
            scales=recipe.kv_scales if stock else "token",
            shared_buffers=sites.shares,
        )
    dtype = types.ends.get(facts.caches[0].past, ir.DataType.FLOAT)
    shared = written_in_place(model, [(pair.past, pair.present) for pair in facts.caches])
    return CachePart(bits=8 * int(dtype.itemsize), layout="float", rotated=rotated, scales=None, shared_buffers=shared)


def metadata(manifest: Manifest, plan: RotationPlan) -> dict[str, str]:
    """What the model file itself says about how it was made (``metadata_props``)."""
    online = [rotation.space.id for rotation in plan.rotations if rotation.placement == "online"]
    return {
        "graphrot.version": manifest.graphrot_version,
        "graphrot.plan": plan_hash(plan),
        "graphrot.online": ",".join(online),
        "graphrot.kv": manifest.cache.model_dump_json(),
        "graphrot.recipe": json.dumps(manifest.recipe, sort_keys=True),
    }


def plan_part(plan: RotationPlan) -> PlanPart:
    """The manifest's view of a plan: every site taken, and every one refused with its reason."""
    rotations = [
        RotationPart(
            kind=rotation.space.kind,
            space=rotation.space.id,
            placement=rotation.placement,
            dim=rotation.space.dim,
            matrix=_matrix(rotation),
            producers=[u.tensor for u in rotation.space.producers] + [u.tensor for u in rotation.space.online],
            consumers=[u.tensor for u in rotation.space.consumers],
        )
        for rotation in plan.rotations
    ]
    refused = [RefusedPart(kind=r.kind, node=r.node, op=r.op, reason=r.reason) for r in plan.refusals]
    return PlanPart(rotations=rotations, refused=refused, means=[_mean(fold) for fold in plan.mean_folds])


def _mean(fold: MeanFold) -> MeanPart:
    looked_up = [] if fold.lookup is None else [fold.lookup.tensor]
    return MeanPart(
        space=fold.space,
        producers=[use.tensor for use in fold.producers],
        online=[tensor.tensor for tensor in fold.online] + looked_up,
        norms=[norm.node for norm in fold.norms],
    )


def _matrix(rotation: Rotation) -> dict[str, Any]:
    fields = ("construction", "dim", "block", "seed", "mean_preserving", "file", "key", "note")
    values = {name: getattr(rotation.matrix, name) for name in fields}
    return {name: value for name, value in values.items() if value not in (None, "", False)}


def library_versions() -> dict[str, str]:
    """Versions of what took part, for the manifest."""
    found = {"python": platform.python_version()}
    for package in ("graphrot", "numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
