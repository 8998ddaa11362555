"""Files of learned rotations: one safetensors file, a float64 matrix ``[dim, dim]`` for each space, and where they
came from.

The metadata hold one JSON object under ``graphrot``: how the matrices were learned, on which source (its sha256), for
which recipe, and by which version. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from graphrot.errors import InputRefused
from graphrot.rotation.hadamard import Float64Array
from graphrot.work.files import write_atomic

METADATA = "graphrot"
"""Key of the metadata under which the JSON object stands."""

TOLERANCE = 1e-6
"""How far ``Q.T Q`` may be from the identity, in its largest element."""

_DO = "write it again with graphrot learn"


@dataclass(frozen=True)
class RotationFile:
    """What a file of rotations says of itself; the matrices are read when they are needed.

    Args:
        path: as it was given.
        sha256: of the file's bytes.
        sizes: space id -> ``dim``.
        provenance: the JSON object of the metadata; empty for a file that was not written by graphrot.
    """

    path: str
    sha256: str
    sizes: Mapping[str, int]
    provenance: Mapping[str, Any]


def write_rotations(path: Path, matrices: Mapping[str, Float64Array], provenance: Mapping[str, Any]) -> str:
    """Write the file, whole or not at all.

    Args:
        path: of the file; replaced if it exists.
        matrices: by space id, ``[dim, dim] float64``.
        provenance: plain JSON.

    Returns:
        The sha256 of the file.

    Raises:
        InputRefused: a matrix is not orthogonal.
    """
    from safetensors.numpy import save

    plain = {key: np.ascontiguousarray(matrix, dtype=np.float64) for key, matrix in sorted(matrices.items())}
    for key, matrix in plain.items():
        check_orthogonal(matrix, where=f"{path} key {key!r}")
    content = save(plain, metadata={METADATA: json.dumps(dict(provenance), sort_keys=True)})
    write_atomic(path, content)
    return hashlib.sha256(content).hexdigest()


def read_rotations(path: str | Path) -> RotationFile:
    """Read what a file says, and check every matrix in it.

    Raises:
        InputRefused: the file is not there, cannot be read, or holds something that is no orthogonal matrix.
    """
    where = str(path)
    content = _bytes(where)
    tensors, metadata = _tensors(content, where)
    if not tensors:
        raise InputRefused("The file holds no rotations", where=where, do=_DO)
    for key, matrix in tensors.items():
        check_orthogonal(matrix, where=f"{where} key {key!r}")
    try:
        provenance = json.loads(metadata.get(METADATA, "{}"))
    except ValueError as error:
        raise InputRefused(
            "The metadata of the file with the rotations cannot be read", where=where, why=str(error), do=_DO
        ) from error
    if not isinstance(provenance, dict):
        raise InputRefused("The metadata of the file with the rotations are no JSON object", where=where, do=_DO)
    sizes = {key: len(matrix) for key, matrix in tensors.items()}
    return RotationFile(where, hashlib.sha256(content).hexdigest(), sizes, provenance)


def check_orthogonal(matrix: np.ndarray, *, where: str) -> None:
    """Refuse a matrix that is not square, not finite, or not orthogonal.

    Raises:
        InputRefused: it is one of these.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise InputRefused(f"A rotation has shape {list(matrix.shape)}, which is not square", where=where, do=_DO)
    if not np.isfinite(matrix).all():
        raise InputRefused("A rotation has numbers that are not finite", where=where, do=_DO)
    exact = matrix.astype(np.float64)
    error = float(np.abs(exact.T @ exact - np.eye(len(exact))).max(initial=0.0))
    if error > TOLERANCE:
        raise InputRefused(
            "The matrix is not orthogonal",
            where=where,
            why=f"Q.T Q is off from the identity by {error:.1e}, allowed {TOLERANCE:.0e}",
            do=_DO,
        )


def matrix_of(path: str, key: str, sha256: str | None) -> Float64Array:
    """One matrix, moved to the nearest orthogonal one in float64; do not change it.

    Args:
        path: of the file.
        key: space id.
        sha256: that the file must have; None: any.

    Raises:
        InputRefused: the file is not there, is another one, lacks the key, or holds no orthogonal matrix there.
    """
    return _matrix(path, key, None) if sha256 is None else _known(path, key, sha256)


def _matrix(path: str, key: str, sha256: str | None) -> Float64Array:
    content = _bytes(path)
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise InputRefused(
            "The file with the rotations has changed since the plan was made",
            where=path,
            why=f"its sha256 is {found[:12]} and was {sha256[:12]}",
            do="put the old file back, or make a new plan",
        )
    tensors, _ = _tensors(content, path)
    where = f"{path} key {key!r}"
    if key not in tensors:
        raise InputRefused("The file with the rotations lacks a matrix", where=where)
    check_orthogonal(tensors[key], where=where)
    left, _, right = np.linalg.svd(tensors[key].astype(np.float64))
    return np.asarray(left @ right, np.float64)


_known = lru_cache(maxsize=8)(_matrix)
"""One matrix is applied to many weights; the hash says that it is the same one."""


def _bytes(path: str) -> bytes:
    if not Path(path).is_file():
        raise InputRefused("The file with the rotations does not exist", where=path, do="check the path")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputRefused("The file with the rotations cannot be read", where=path, why=str(error)) from error


def _tensors(content: bytes, where: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the metadata of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputRefused("The file with the rotations cannot be read", where=where, why=str(error), do=_DO) from error
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    return tensors, metadata
