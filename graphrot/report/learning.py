"""What ``graphrot.json`` says of learned rotations, from the metadata of their file."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from graphrot.errors import InputRefused
from graphrot.plan.types import RotationPlan
from graphrot.report.parts import LearningPart
from graphrot.rotation.file import RotationFile, read_rotations

_FIELDS = frozenset(LearningPart.model_fields) - {"file", "sha256"}


def rotation_file(plan: RotationPlan) -> RotationFile | None:
    """The file that a plan takes its learned matrices from; None: it has none.

    Raises:
        InputRefused: the file cannot be read, or has changed since the plan was made.
    """
    named = next((r.matrix for r in plan.rotations if r.matrix.construction == "file" and r.matrix.file), None)
    if named is None or named.file is None:
        return None
    file = read_rotations(named.file)
    if named.sha256 is not None and file.sha256 != named.sha256:
        raise InputRefused(
            "The file with the rotations has changed since the plan was made",
            where=named.file,
            why=f"its sha256 is {file.sha256[:12]} and was {named.sha256[:12]}",
            do="put the old file back, or make a new plan",
        )
    return file


def learning_part(file: RotationFile | None) -> LearningPart | None:
    """How the matrices of a file were learned; None where it does not say, or there is none."""
    if file is None or "loss" not in file.provenance:
        return None
    said = {name: value for name, value in file.provenance.items() if name in _FIELDS}
    try:
        return LearningPart(file=Path(file.path).name, sha256=file.sha256, **said)
    except (ValidationError, TypeError) as error:
        raise InputRefused(
            "The metadata of the file with the rotations are not of this version",
            where=file.path,
            why=str(error).splitlines()[0],
            do="write it again with graphrot learn",
        ) from error


def source_note(file: RotationFile | None, sha256: str) -> tuple[str, ...]:
    """A note where rotations were learned on another source: they are exact all the same, but may serve less."""
    learned_on = None if file is None else file.provenance.get("source")
    if file is None or learned_on in (None, sha256):
        return ()
    return (f"the rotations in {Path(file.path).name} were learned on another source ({str(learned_on)[:12]})",)
