"""``graphrot.json``: what was done to a model, and what was measured. One file, one shape."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from graphrot.plan.types import RotationPlan


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourcePart(_Part):
    kind: str
    name: str
    sha256: str


class RotationPart(_Part):
    """One rotation that was applied; producers and consumers are the tensors that were changed.

    An online rotation has no producers: it names the run-time tensors that the transform follows.
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


class PlanPart(_Part):
    rotations: list[RotationPart]
    refused: list[RefusedPart]


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


class SizesPart(_Part):
    """File sizes in bytes, and the bits per weight of the quantized linears, scales included."""

    source_bytes: int
    model_bytes: int
    bits_per_weight: float


class QuantizedPart(_Part):
    """One quantized tensor; the errors are relative Frobenius errors of the weight."""

    tensor: str
    node: str
    bits: int
    group: int | str
    error: float
    error_without_rotation: float | None


class CachePart(_Part):
    """What the key/value cache holds: bits of an element, layout, rotated or not, kind of scales."""

    bits: int
    layout: str
    rotated: bool
    scales: str | None


class Manifest(_Part):
    """The content of ``graphrot.json``."""

    graphrot_version: str
    source: SourcePart
    recipe: dict[str, Any]
    plan: PlanPart
    certificate: CertificatePart | None
    sizes: SizesPart
    quantized: list[QuantizedPart]
    cache: CachePart
    seconds: dict[str, float]
    versions: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest file; raises pydantic's ValidationError where it is not one."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


def plan_part(plan: RotationPlan) -> PlanPart:
    """The manifest's view of a plan: every site taken, and every one refused with its reason."""
    rotations = [
        RotationPart(
            kind=rotation.space.kind,
            space=rotation.space.id,
            placement=rotation.placement,
            dim=rotation.space.dim,
            matrix=_matrix(rotation),
            producers=[use.tensor for use in (*rotation.space.producers, *rotation.space.online)],
            consumers=[use.tensor for use in rotation.space.consumers],
        )
        for rotation in plan.rotations
    ]
    refused = [RefusedPart(kind=r.kind, node=r.node, op=r.op, reason=r.reason) for r in plan.refusals]
    return PlanPart(rotations=rotations, refused=refused)


def _matrix(rotation: Any) -> dict[str, Any]:
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
