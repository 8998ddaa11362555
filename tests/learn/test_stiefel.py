"""Descent over orthogonal matrices against problems whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphrot.errors import CheckFailed
from graphrot.learn import stiefel
from graphrot.learn.stiefel import CayleySgd, orthogonality


def orthogonal(size: int, seed: int) -> torch.Tensor:
    matrix = np.random.default_rng(seed).standard_normal((size, size))
    return torch.from_numpy(np.linalg.qr(matrix)[0])


def test_it_finds_the_nearest_orthogonal_matrix() -> None:
    """Maximizing tr(R.T A) has the polar factor of A as its answer."""
    goal = torch.from_numpy(np.random.default_rng(0).standard_normal((12, 12)))
    left, _, right = torch.linalg.svd(goal)
    best = left @ right
    start = orthogonal(12, 1)
    if torch.linalg.det(start) * torch.linalg.det(best) < 0:  # the two kinds of orthogonal matrices do not connect
        start[:, 0] *= -1
    descent = CayleySgd({"R": start})
    for step in range(600):
        descent.step({"R": -goal}, 0.05 * (1 - step / 600))
    assert float((descent.matrices["R"] - best).abs().max()) < 1e-2
    assert float((start - best).abs().max()) > 0.3


def test_the_first_step_goes_down_the_riemannian_gradient() -> None:
    start, gradient = orthogonal(9, 2), orthogonal(9, 3)
    descent = CayleySgd({"R": start})
    descent.step({"R": gradient}, 1e-4)
    moved = descent.matrices["R"] - start
    tangent = (gradient - start @ gradient.T @ start) / 2
    cosine = -(moved * tangent).sum() / moved.norm() / tangent.norm()
    assert float(cosine) == pytest.approx(1, abs=1e-6)
    assert float(moved.norm()) == pytest.approx(1e-4 * 3, rel=1e-3)


@pytest.mark.parametrize("size", [1, 2, 16, 80])
def test_matrices_stay_orthogonal_whatever_the_steps(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    descent = CayleySgd({"R": orthogonal(size, 4)})
    for _ in range(50):
        noise = torch.randn((size, size), generator=generator, dtype=torch.float64) * 10**3
        descent.step({"R": noise}, 1.0)
    assert descent.error < 1e-12


def test_steps_do_not_depend_on_the_scale_of_the_loss() -> None:
    one, other = CayleySgd({"R": orthogonal(8, 5)}), CayleySgd({"R": orthogonal(8, 5)})
    for seed in range(5):
        gradient = orthogonal(8, seed)
        one.step({"R": gradient}, 0.1)
        other.step({"R": gradient * 1e-6}, 0.1)
    assert float((one.matrices["R"] - other.matrices["R"]).abs().max()) < 1e-12


def test_a_gradient_of_zero_changes_nothing() -> None:
    start = orthogonal(6, 6)
    descent = CayleySgd({"R": start})
    descent.step({"R": torch.zeros(6, 6)}, 0.1)
    assert torch.equal(descent.matrices["R"], start)


def test_what_is_not_orthogonal_or_not_finite_is_refused() -> None:
    with pytest.raises(CheckFailed, match="not orthogonal"):
        CayleySgd({"R": orthogonal(6, 7) * (1 + 1e-6)})
    descent = CayleySgd({"R": orthogonal(6, 7)})
    with pytest.raises(CheckFailed, match="gradient of the loss is not finite"):
        descent.step({"R": torch.full((6, 6), torch.nan)}, 0.1)


def test_a_step_that_loses_orthogonality_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is what stands between a wrong step and a wrong model."""
    monkeypatch.setattr(stiefel, "_skew", lambda product: product)
    descent = CayleySgd({"R": orthogonal(6, 8)})
    with pytest.raises(CheckFailed, match=r"rotation R, after 1 steps: off by"):
        descent.step({"R": orthogonal(6, 9)}, 0.1)


def test_the_measure_of_orthogonality() -> None:
    assert orthogonality(orthogonal(10, 10)) < 1e-13
    assert orthogonality(orthogonal(10, 10) * 1.5) == pytest.approx(1.25)
