"""What is rewritten for CUDA makes the same numbers, by operators that have kernels there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.emit.cuda.check import without_kernel
from graphrot.emit.cuda.kernels import cuda_kernels
from graphrot.emit.cuda.lower import lower_for_cuda
from graphrot.quant.grid import WeightGrid
from tests.emit.lowered import Setting, Target, lower
from tests.half.graphs import run
from tests.passes_quant.graphs import Example


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


TABLES = [
    WeightGrid(8, None),
    WeightGrid(8, None, symmetric=False),
    WeightGrid(4, None),
    WeightGrid(4, 32, symmetric=False),
]


@pytest.mark.parametrize("target", ["ort", "portable"])
@pytest.mark.parametrize("table", TABLES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_lookups_in_integer_tables(table: WeightGrid, tied: bool, target: Target, tmp_path: Path) -> None:
    done = lower(Example(), Setting(table=table, tied=tied), target, tmp_path)
    for node in done.model.graph:
        if node.op_type == "MatMulNBits":  # as the rule for float16 may make it
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 5))
    before = run(done.model, tmp_path / "before", {"ids": tokens})
    assert lower_for_cuda(done.model) > 0
    after = run(done.model, tmp_path / "after", {"ids": tokens})
    assert [words for words in without_kernel(done.model, cuda_kernels())[1] if "head" not in words] == []
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_inputs_that_are_rounded_per_token(bits: Literal[8, 4], tmp_path: Path) -> None:
    """The same whole numbers by a Div and a Round as by QuantizeLinear with blocks, bit for bit."""
    done = lower(Example(), Setting(weights=WeightGrid(4, 32), activations=bits), "portable", tmp_path)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 5))
    before = run(done.model, tmp_path / "before", {"ids": tokens})
    assert lower_for_cuda(done.model) > 0
    assert not any(node.op_type == "QuantizeLinear" for node in done.model.graph)
    for one, other in zip(before, run(done.model, tmp_path / "after", {"ids": tokens}), strict=True):
        np.testing.assert_array_equal(one, other)
