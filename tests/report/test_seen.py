"""Activations of written models, rotated back by their plans, are the source's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphrot
from graphrot.evaluate.outliers import Seen
from graphrot.plan.serialize import load_plan
from graphrot.progress import silent
from graphrot.report.seen import seen_from_source, seen_in_written, seen_unrotated
from tests.exported import tiny_onnx

TOKENS = np.random.default_rng(3).integers(3, 60, 32)


def _convert(name: str, folder: Path, **options: Any) -> Path:
    graphrot.convert(tiny_onnx(name), output=folder / "out", **options)
    return folder / "out"


def _written(out: Path, folder: Path) -> list[Seen]:
    (folder / "written").mkdir()
    return list(seen_in_written(out / "model.onnx", load_plan(out / "plan.json"), TOKENS, folder=folder / "written"))


def _exact(name: str, out: Path, folder: Path) -> list[Seen]:
    (folder / "exact").mkdir()
    plan = load_plan(out / "plan.json")
    made = seen_from_source(str(tiny_onnx(name)), plan, {"kv": None}, TOKENS, folder=folder / "exact", progress=silent)
    return list(made)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"recipe": "rotate-only"}),
        ("llama", {"recipe": "rotate-only", "only": ("R1", "R2", "R4", "O")}),
    ],
)
def test_a_float_model_has_the_same_tensors(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    out = _convert(name, tmp_path, **options)
    exact: dict[tuple[str, str], list[Seen]] = {}
    for tensor in _exact(name, out, tmp_path):
        exact.setdefault((tensor.kind, tensor.space), []).append(tensor)
    found = _written(out, tmp_path)
    assert {tensor.kind for tensor in found} == {kind for kind, _ in exact}
    for tensor in found:
        twins = [twin for twin in exact[tensor.kind, tensor.space] if twin.after.shape == tensor.after.shape]
        scale = np.abs(tensor.after).max()
        assert any(np.abs(twin.after - tensor.after).max() < 2e-5 * scale for twin in twins), tensor.tensor
        if tensor.kind != "R1":  # which leaves the gains of norms out
            scale = np.abs(tensor.before).max()
            assert any(np.abs(twin.before - tensor.before).max() < 2e-5 * scale for twin in twins), tensor.tensor


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"recipe": "w4a8", "solver": "rtn", "weights": "int8", "kv": "int8"}),
        ("gpt2", {"recipe": "w4a8", "solver": "rtn", "weights": "int8"}),
        ("llama", {"recipe": "w4a8", "solver": "rtn", "weights": "int8", "target": "portable"}),
        ("llama", {"recipe": "rotate-only", "dtype": "float16"}),
    ],
)
def test_a_rounded_model_has_nearly_the_same_tensors(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Transforms inside of operators, biases taken up, blocks of QDQ, half types: each is seen in its own form."""
    out = _convert(name, tmp_path, **options)
    exact = _exact(name, out, tmp_path)
    found = _written(out, tmp_path)
    counts = [sum(tensor.kind == kind for tensor in found) for kind in ("R1", "R2", "R4")]
    assert counts == [sum(tensor.kind == kind for tensor in exact) for kind in ("R1", "R2", "R4")]
    for tensor in found:
        twins = [twin for twin in exact if (twin.kind, twin.space) == (tensor.kind, tensor.space)]
        norms = [
            np.linalg.norm(twin.after - tensor.after) / np.linalg.norm(twin.after)
            for twin in twins
            if twin.after.shape == tensor.after.shape
        ]
        assert min(norms) < 0.12, (tensor.tensor, norms)
        if tensor.kind == "R4":
            norms = [np.linalg.norm(twin.before - tensor.before) / np.linalg.norm(twin.before) for twin in twins]
            assert min(norms) < 0.12, (tensor.tensor, norms)


def test_an_unrotated_model_shows_what_its_linears_read(tmp_path: Path) -> None:
    out = _convert("llama", tmp_path, recipe="w4a8", solver="rtn", rotations=None)
    quantized = json.loads((out / "graphrot.json").read_text(encoding="utf-8"))["quantized"]
    (tmp_path / "scratch").mkdir()
    found = list(seen_unrotated(out / "model.onnx", quantized, TOKENS, folder=tmp_path / "scratch"))
    assert len(found) >= 4 * 2
    for tensor in found:
        assert np.array_equal(tensor.before, tensor.after)
        assert tensor.kind == f"{tensor.before.shape[1]} channels"
