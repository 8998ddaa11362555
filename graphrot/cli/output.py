"""What commands print: one JSON object, or text for people. Progress and logs go to stderr."""

from __future__ import annotations

import json
import math
from typing import Any

import typer


def print_json(content: dict[str, Any]) -> None:
    """Print one JSON object on stdout; numbers that JSON does not know become null."""
    typer.echo(json.dumps(_finite(content), indent=2, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
