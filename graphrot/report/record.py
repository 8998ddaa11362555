"""The graphrot.json of a written model: what its numbers were taken from, and measurements that are put into it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from graphrot.calibration.fingerprint import Overlap, overlap
from graphrot.errors import EnvironmentProblem, InputRefused
from graphrot.model.ours import read_manifest
from graphrot.model.save import MANIFEST
from graphrot.report.parts import EvaluationPart
from graphrot.work.files import write_atomic

_SAME = ("text", "sha256", "window", "windows", "reference", "limit")
"""What makes two measurements of the same tasks the same one; the later one stays."""


def manifest_of(model: Path) -> Path | None:
    """The manifest of a model that convert wrote: of a folder, of its ``model.onnx``, or of ``X.onnx``; None: none."""
    folder = model if model.is_dir() else model.parent
    names = ([] if model.is_dir() else [f"{model.stem}.{MANIFEST}"]) + [MANIFEST]
    if not model.is_dir() and model.name != "model.onnx":
        names.remove(MANIFEST)
    return next((folder / name for name in names if read_manifest(folder / name) is not None), None)


def seen_before(manifest: Path, tokens: np.ndarray) -> tuple[str, Overlap] | None:
    """What the model was calibrated or learned on, if it shares a passage with ``tokens``; None: nothing does.

    Args:
        manifest: of the model.
        tokens: ``[T] int64``, those that are evaluated.

    Raises:
        InputRefused: a fingerprint in the manifest is none.
    """
    for use, part in _calibrations(manifest):
        try:
            found = overlap(tokens, str(part.get("fingerprint", "")))
        except ValueError as error:
            raise InputRefused(
                "graphrot.json holds a fingerprint that is none",
                where=f"{manifest}, {use}",
                why=str(error),
                do="convert the model again",
            ) from error
        if found is not None:
            return f"{use} on {part.get('name')}", found
    return None


def _calibrations(manifest: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    content = read_manifest(manifest) or {}
    learning = content.get("learning")
    parts = {
        "calibrated": content.get("calibration"),
        "learned": learning.get("calibration") if isinstance(learning, dict) else None,
    }
    yield from ((use, part) for use, part in parts.items() if isinstance(part, dict))


def record(manifest: Path, evaluation: EvaluationPart) -> None:
    """Put a measurement into a manifest, in the place of an earlier one of the same.

    Args:
        manifest: a file that :func:`manifest_of` found.
        evaluation: what was measured.

    Raises:
        InputRefused: its evaluations are not what graphrot writes.
        EnvironmentProblem: it cannot be written.
    """
    content = dict(read_manifest(manifest) or {})
    try:
        earlier = [EvaluationPart.model_validate(entry) for entry in content.get("evaluations", [])]
    except (ValidationError, TypeError) as error:
        raise InputRefused(
            "The evaluations in graphrot.json do not parse",
            where=str(manifest),
            why=" ".join(str(error).split())[:400],
            do="record with the version of graphrot that wrote them",
        ) from error
    kept = [entry for entry in earlier if _key(entry) != _key(evaluation)]
    content["evaluations"] = [entry.model_dump() for entry in (*kept, evaluation)]
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    try:
        write_atomic(manifest, text.encode())
    except OSError as error:
        raise EnvironmentProblem(
            "The measurement could not be recorded",
            where=str(manifest),
            why=error.strerror or str(error),
            do="check permissions and space",
        ) from error


def _key(evaluation: EvaluationPart) -> tuple[object, ...]:
    return (*(getattr(evaluation, name) for name in _SAME), *sorted(evaluation.tasks))
