"""``graphrot.json``: what was done to a model, and what was measured. One file, one shape."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx_ir as ir
from pydantic import Field

from graphrot.analysis.types import AttentionSites, Facts
from graphrot.evaluate.certificate import Certificate, weight_bytes
from graphrot.evaluate.outliers import Outlier
from graphrot.half import HalfError, HalfTypes
from graphrot.model.in_place import written_in_place
from graphrot.model.load import Source
from graphrot.plan.serialize import plan_hash
from graphrot.plan.types import MeanFold, Rotation, RotationPlan
from graphrot.quantize import Quantized
from graphrot.recipe import Recipe
from graphrot.report.parts import (
    CachePart,
    CalibrationPart,
    CertificatePart,
    ChoicePart,
    EvaluationPart,
    HalfPart,
    LearningPart,
    MeanPart,
    OutlierPart,
    Part,
    PlanPart,
    QuantizedPart,
    RefusedPart,
    RotationPart,
    SizesPart,
    SourcePart,
)


class Manifest(Part):
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
    tokenizer_files: dict[str, str] = Field(default_factory=dict)
    other_files: dict[str, str] = Field(default_factory=dict)
    calibration: CalibrationPart | None = None
    learning: LearningPart | None = None
    choices: list[ChoicePart] = Field(default_factory=list)
    outliers: list[OutlierPart] = Field(default_factory=list)
    evaluations: list[EvaluationPart] = Field(default_factory=list)

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


def outlier_parts(outliers: Sequence[Outlier]) -> list[OutlierPart]:
    """What was measured, as it is written."""
    return [OutlierPart(**asdict(outlier)) for outlier in outliers]


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
    fields = ("construction", "dim", "block", "seed", "mean_preserving", "file", "key", "sha256", "note")
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
