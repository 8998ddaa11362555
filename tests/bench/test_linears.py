"""The models of ``benchmarks/matmul.py`` compute the same linears; a ratio of different things would say nothing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphrot.rotation.orthogonal import build_matrix, choose_matrix

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
K, N, COPIES, ROWS = 352, 40, 3, 5  # 44 * 8, whose factor is not symmetric; no multiple of 128


@pytest.fixture(scope="module")
def linears() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(FOLDER), *sys.path])
        return importlib.import_module("linears")


def _run(model: ir.Model, x: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    ready = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(ready.run(None, x))


@pytest.mark.parametrize("group", [0, 32, 128, None])
def test_all_compute_the_linear_that_is_meant(linears: ModuleType, group: int | None) -> None:
    """None: ONNX Runtime's own operators. The weights of a copy are its own."""
    case = linears.Linears(K, N, COPIES)
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal((ROWS, K)).astype(np.float32) for name, _ in case.names()}
    results = _run(case.runtimes_own() if group is None else case.rotated(group), x)
    matrix = build_matrix(choose_matrix(K, rotations="hadamard", seed=None)).rotate(np.eye(K), axis=1)
    assert len(results) == COPIES
    for index, (result, rows) in enumerate(zip(results, x.values(), strict=True)):
        packed = case.codes(index, 32)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(N, K).astype(np.float64) - 8
        expected = rows @ matrix @ (codes * case.scales(index, None)[:, None]).T
        error = np.abs(result - expected).max() / np.abs(expected).max()
        assert error < 0.02
        assert error > 1e-6  # the rows are rounded: else it is no product of integers that is measured


@pytest.mark.parametrize("rotated", [True, False])
def test_linears_of_halves(linears: ModuleType, rotated: bool) -> None:
    """Ours rounds its rows, and ONNX Runtime's own does not."""
    case = linears.Linears(K, N, 2, half=True)
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal((ROWS, K)).astype(np.float16) for name, _ in case.names()}
    results = _run(case.rotated(0) if rotated else case.runtimes_own(rotate=False), x)
    matrix = build_matrix(choose_matrix(K, rotations="hadamard", seed=None)).rotate(np.eye(K), axis=1)
    for index, (result, rows) in enumerate(zip(results, x.values(), strict=True)):
        packed = case.codes(index, 32)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(N, K).astype(np.float64) - 8
        weight = (codes * case.scales(index, None)[:, None]).T
        expected = (rows @ matrix if rotated else rows) @ weight
        error = np.abs(result - expected).max() / np.abs(expected).max()
        assert result.dtype == np.float16
        assert error < (0.02 if rotated else 0.002)


def test_weights_of_eight_bits(linears: ModuleType) -> None:
    case = linears.Linears(K, N, 2)
    x = {name: np.random.default_rng(0).standard_normal((ROWS, K)).astype(np.float32) for name, _ in case.names()}
    unsigned, signed = _run(case.dynamic(np.uint8), x), _run(case.dynamic(np.int8), x)
    assert not np.array_equal(unsigned[0], unsigned[1])
    for one, other in zip(unsigned, signed, strict=True):
        assert np.allclose(one, other, atol=1e-4)


def test_bytes_of_a_model(linears: ModuleType) -> None:
    assert linears.Linears(256, 10, 3).weight_bytes(0) == 3 * 10 * (128 + 4)
    assert linears.Linears(256, 10, 3).weight_bytes(64) == 3 * 10 * (128 + 4 * 4)
