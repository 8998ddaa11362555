"""Weights in torch are what their edits make of them in float64, and so are the shorter ways to their products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
import torch

from graphrot.analysis.types import Runs, encode_runs
from graphrot.folded import Center, Edit, FoldedTensor, Rotate, Scale, Shift
from graphrot.plan.types import MatrixRef
from graphrot.rotation.orthogonal import build_matrix
from graphrot.torch_graph.weights import Matrices, TorchWeight

K, N = 24, 16
BIG = MatrixRef("random", 24, seed=1)
SMALL = MatrixRef("random", 8, seed=2)


def groups(*starts: int, step: int = 1, size: int = 8) -> tuple[Runs, ...]:
    return tuple(encode_runs([start + step * k for k in range(size)]) for start in starts)


WHOLE = groups(0, size=24)
EDITS: dict[str, tuple[Edit, ...]] = {
    "rows": (Rotate(0, WHOLE, BIG),),
    "rows back": (Rotate(0, WHOLE, BIG, inverse=True),),
    "heads": (Rotate(1, groups(0, 8), SMALL),),
    "some of the columns": (Rotate(1, groups(4), SMALL),),
    "woven": (Rotate(1, groups(0, 1, step=2), SMALL),),
    "some of the rows": (Rotate(0, groups(16, 3), SMALL, inverse=True),),
    "both": (Rotate(0, WHOLE, BIG), Rotate(1, groups(0, 8), SMALL)),
    "gain first": (Scale(0, tuple(np.linspace(0.5, 2, K))), Rotate(0, WHOLE, BIG)),
    "gain behind": (Rotate(0, WHOLE, BIG), Scale(0, tuple(np.linspace(0.5, 2, K)))),
    "gain across": (Rotate(0, WHOLE, BIG), Scale(1, tuple(np.linspace(0.5, 2, N)))),
    "mean first": (Center(1, groups(0, 8)), Rotate(1, groups(0, 8), SMALL)),
    "mean behind": (Rotate(1, groups(0, 8), SMALL), Center(1, groups(0, 8))),
    "shifts": (Shift(1, tuple(np.linspace(-1, 1, N))), Rotate(1, groups(0, 8), SMALL), Shift(1, (0.5,) * N)),
    "twice": (Rotate(1, groups(0, 8), SMALL), Rotate(1, groups(0, 1, step=2), SMALL)),
}


def opened(edits: tuple[Edit, ...], fixed: bool) -> tuple[tuple[Edit, ...], dict[str, torch.Tensor]]:
    """The edits with their matrices given by key; ``fixed``: the last rotation keeps its own."""
    matrices: dict[str, torch.Tensor] = {}
    made: list[Edit] = []
    last = max(place for place, edit in enumerate(edits) if isinstance(edit, Rotate))
    for place, edit in enumerate(edits):
        if isinstance(edit, Rotate) and not (fixed and place == last):
            key = f"space {edit.matrix.dim}"
            matrices[key] = torch.from_numpy(build_matrix(edit.matrix).dense())
            edit = replace(edit, matrix=MatrixRef("file", edit.matrix.dim, file="", key=key))
        made.append(edit)
    return tuple(made), matrices


def weight(edits: tuple[Edit, ...]) -> tuple[FoldedTensor, ir.Value]:
    base = ir.tensor(np.random.default_rng(5).standard_normal((K, N)))
    folded = FoldedTensor(base, edits, "w")
    return folded, ir.Value(name="w", const_value=folded)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", EDITS)
def test_a_weight_is_what_its_edits_make(name: str, fixed: bool) -> None:
    exact = weight(EDITS[name])[0].exact()
    edits, given = opened(EDITS[name], fixed)
    made = TorchWeight(weight(edits)[1], torch.float64)
    matrices = Matrices(given, torch.float64)
    assert np.abs(made.numbers(matrices).numpy() - exact).max() < 1e-13
    x = torch.randn(2, 3, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    product = made.times(x, matrices)
    if product is not None:
        assert torch.allclose(product, x @ torch.from_numpy(exact), rtol=0, atol=1e-12)
    index = torch.tensor([[3, 0], [K - 1, 3]])
    picked = made.rows(index, matrices)
    assert (picked is None) == any(edit.axis == 0 for edit in made.tail)
    if picked is not None:
        assert np.abs(picked.numpy() - exact[index.numpy()]).max() < 1e-13


def test_products_take_the_shorter_way_where_it_is_one() -> None:
    edits, given = opened(EDITS["rows"], fixed=False)
    made = TorchWeight(weight(edits)[1], torch.float64)
    matrices = Matrices(given, torch.float64)
    assert made.times(torch.zeros(N - 1, K, dtype=torch.float64), matrices) is not None
    assert made.times(torch.zeros(N, K, dtype=torch.float64), matrices) is None


def test_only_what_waits_for_a_matrix_is_made_in_each_run() -> None:
    across, _ = opened(EDITS["gain across"], fixed=False)
    behind, _ = opened(EDITS["gain behind"], fixed=False)
    assert [len(TorchWeight(weight(edits)[1], torch.float64).tail) for edits in (across, behind)] == [1, 2]


def test_plain_weights_leave_learnable_rotations_out_and_keep_the_others() -> None:
    edits, _ = opened((Rotate(1, groups(0, 8), SMALL), Rotate(0, WHOLE, BIG)), fixed=True)
    made = TorchWeight(weight(edits)[1], torch.float64).numbers(Matrices({}, torch.float64, plain=True))
    expected = weight((Rotate(0, WHOLE, BIG),))[0].exact()
    assert np.abs(made.numpy() - expected).max() < 1e-13
