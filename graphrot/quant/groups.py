"""Solved groups of linears in files, so that an interrupted run of GPTQ goes on where it stopped.

One group is two files: ``0007.bin``, the arrays one after the other, and ``0007.json``, written last, which says
what they are, and what the hash of all this is. ``job.json`` says what all of them were solved for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from graphrot.quant.grid import Grids, QuantizedTensor, grid_of
from graphrot.quant.segments import LinearGroup
from graphrot.work.files import write_atomic
from graphrot.work.folder import remove_tree

_JOB = "job.json"


class SolvedGroups:
    """A folder of solved groups, in the order in which they are solved.

    Args:
        folder: owned by the caller; made if it is not there. Groups that were solved for another job go.
        job: everything that the codes depend on, as plain JSON: source, recipe, text, versions.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        plain = json.loads(json.dumps(job))
        self.known = 0
        """How many groups :meth:`load` found."""
        before = _read(folder / _JOB)
        found = any(file.name != _JOB for file in folder.glob("*.json"))
        self.changed: tuple[str, ...] = ()
        """What is different in the job that left groups here: they were not used."""
        if before != plain:
            if found:
                names = sorted({*plain, *(before or {})})
                self.changed = tuple(n for n in names if before is None or before.get(n) != plain.get(n))
            for file in folder.iterdir():
                remove_tree(file)
            write_atomic(folder / _JOB, json.dumps(plain, indent=1).encode())

    def load(self, groups: Sequence[LinearGroup], grids: Grids) -> list[tuple[QuantizedTensor, ...]]:
        """The groups that are solved already: the first ones, as far as they are whole.

        Args:
            groups: all groups of the job, in order.
            grids: the grid of their weights, or of each by its node.
        """
        found: list[tuple[QuantizedTensor, ...]] = []
        for position, group in enumerate(groups):
            tensors = self._load(position, group, grids)
            if tensors is None:
                break
            found.append(tensors)
        self.known = len(found)
        return found

    def keep(self, position: int, group: LinearGroup, tensors: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
        """Store a solved group; returns the same tensors with their codes memory-mapped, read-only."""
        binary = self._path(position, "bin")
        digest = hashlib.sha256()
        entries: list[dict[str, Any]] = []
        offset = 0
        for path in (binary, self._path(position, "json")):
            if path.is_dir() or path.is_symlink():
                remove_tree(path)
        with binary.open("wb") as stream:
            for linear, tensor in zip(group.linears, tensors, strict=True):
                errors = {"error": tensor.error, "error_without_rotation": tensor.error_without_rotation}
                entries.append({"node": linear.node, "shape": tensor.codes.shape, "at": offset, **errors})
                for array in (tensor.codes, tensor.scales, tensor.zeros):
                    data = b"" if array is None else np.ascontiguousarray(array).tobytes()
                    stream.write(data)
                    digest.update(data)
                    offset += len(data)
        digest.update(_plain(entries))
        content = {"tensors": entries, "sha256": digest.hexdigest()}
        write_atomic(self._path(position, "json"), json.dumps(content).encode())
        return [self._mapped(tensor, binary, entry["at"]) for tensor, entry in zip(tensors, entries, strict=True)]

    def _path(self, position: int, kind: str) -> Path:
        return self._folder / f"{position:04}.{kind}"

    @staticmethod
    def _mapped(tensor: QuantizedTensor, binary: Path, offset: int) -> QuantizedTensor:
        codes = tensor.codes
        if codes.size == 0:
            return tensor
        return replace(tensor, codes=np.memmap(binary, codes.dtype, mode="r", offset=offset, shape=codes.shape))

    def _load(self, position: int, group: LinearGroup, grids: Grids) -> tuple[QuantizedTensor, ...] | None:
        content = _read(self._path(position, "json"))
        binary = self._path(position, "bin")
        if content is None or not binary.is_file() or content.keys() != {"tensors", "sha256"}:
            return None
        data = binary.read_bytes()
        digest = hashlib.sha256(data)
        digest.update(_plain(content["tensors"]))
        if digest.hexdigest() != content["sha256"]:
            return None
        shapes = [(linear.node, [linear.out_features, linear.in_features]) for linear in group.linears]
        if [(entry["node"], entry["shape"]) for entry in content["tensors"]] != shapes:
            return None
        if any("error_without_rotation" not in entry for entry in content["tensors"]):
            return None
        tensors = []
        for entry in content["tensors"]:
            n, k = entry["shape"]
            grid = grid_of(grids, entry["node"])
            groups = grid.groups(k)
            start = entry["at"] + n * k
            codes = np.frombuffer(data, grid.code_dtype, n * k, entry["at"]).reshape(n, k)
            scales = np.frombuffer(data, np.float32, n * groups, start).reshape(n, groups).copy()
            zeros = None
            if not grid.symmetric:
                zeros = np.frombuffer(data, np.uint8, n * groups, start + 4 * n * groups).reshape(n, groups).copy()
            tensor = QuantizedTensor(codes, scales, zeros, grid, entry["error"], entry["error_without_rotation"])
            tensors.append(self._mapped(tensor, binary, entry["at"]))
        return tuple(tensors)


def _plain(entries: Any) -> bytes:
    """Entries of a record as they are hashed: the same before they are written and after they are read."""
    return json.dumps(entries, sort_keys=True).encode()


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
