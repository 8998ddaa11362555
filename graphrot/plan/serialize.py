"""Plans as JSON, both ways."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from graphrot.errors import UsageError
from graphrot.plan.types import RotationPlan

_ADAPTER = TypeAdapter(RotationPlan)


def plan_to_json(plan: RotationPlan) -> str:
    """The plan as one JSON document; :func:`plan_from_json` gives an equal plan back."""
    return _ADAPTER.dump_json(plan).decode()


def plan_from_json(text: str, *, where: str = "plan") -> RotationPlan:
    """Read a plan.

    Raises:
        UsageError: the text is not a plan of this version.
    """
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            "The file is not a rotation plan of this version",
            where=f"{where}: {'.'.join(str(part) for part in first['loc'])}",
            why=first["msg"],
            do="write the plan again with this version of graphrot",
        ) from error


def load_plan(path: Path) -> RotationPlan:
    """Read a plan file.

    Raises:
        UsageError: the file cannot be read, or is not a plan.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = str(error)
        raise UsageError("The plan file cannot be read", where=str(path), why=why, do="check the path") from error
    return plan_from_json(text, where=str(path))


def plan_hash(plan: RotationPlan) -> str:
    """A sha256 of the plan's JSON, in hexadecimal."""
    return hashlib.sha256(plan_to_json(plan).encode()).hexdigest()
