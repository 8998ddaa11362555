"""The same bytes on one thread and on two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import graphrot
from graphrot.quant.grid import WeightGrid
from graphrot.quant.linears import quantize_linears
from graphrot.threads import steady_blas
from tests.quant import conftest as decoder


def _blas_threads() -> set[int]:
    return {entry["num_threads"] for entry in threadpool_info() if entry["user_api"] == "blas"}


def _hessian(width: int = 600) -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal((2 * width, width))
    return noise.T @ noise


def test_blas_gives_the_same_bits_on_any_number_of_threads() -> None:
    factors = []
    for threads in (1, 2, 4):
        with threadpool_limits(limits=threads, user_api="blas"):
            with steady_blas():
                factors.append(np.linalg.cholesky(_hessian()))
            assert _blas_threads() == {threads}
    assert all(np.array_equal(factors[0], other) for other in factors)


def test_gptq_on_one_and_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide enough for BLAS to cut its work, and for ONNX Runtime, too."""
    for name, size in {"DIM": 288, "HEADS": 4, "HEAD": 72, "FFN": 400, "LAYERS": 1}.items():
        monkeypatch.setattr(decoder, name, size)
    toy = decoder.build()
    results = []
    for threads in (1, 2):
        with threadpool_limits(limits=threads, user_api="blas"), steady_blas():
            results.append(
                quantize_linears(
                    toy.model,
                    toy.linears,
                    grid=WeightGrid(4),
                    solver="gptq",
                    activation_bits=8,
                    feeds=toy.feeds,
                    threads=threads,
                )
            )
    one, two = results
    assert one.keys() == two.keys() and len(one) == 7
    for node, tensor in one.items():
        assert tensor.error == two[node].error
        assert np.array_equal(tensor.codes, two[node].codes) and np.array_equal(tensor.scales, two[node].scales)


def test_a_conversion_is_steady_throughout(source: Path, text: Path, tmp_path: Path) -> None:
    seen: list[set[int]] = []
    with threadpool_limits(limits=2, user_api="blas"):
        graphrot.convert(
            source,
            output=tmp_path / "out",
            calibration=text,
            certificate=None,
            progress=lambda *_: seen.append(_blas_threads()),
        )
        assert _blas_threads() == {2}
    assert len(seen) > 20 and all(threads == {1} for threads in seen)
