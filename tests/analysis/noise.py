"""How far outputs are apart, and how far rounding alone would move them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def distance(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> float:
    """The largest difference of any output, relative to its largest number (or one)."""
    worst = 0.0
    for name, goal in expected.items():
        if goal.size and np.isfinite(goal).all():
            worst = max(worst, float(np.abs(found[name] - goal).max() / max(1.0, np.abs(goal).max())))
    return worst


def disturbed(model: ir.Model, amount: float) -> ir.Model:
    """The model with every constant off by about ``amount``, as a part."""
    copy, rng = model.clone(), np.random.default_rng(0)
    for value in copy.graph.initializers.values():
        content = value.const_value
        if content is not None and content.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            numbers = content.numpy()
            noise = 1 + amount * rng.standard_normal(numbers.shape)
            value.const_value = ir.tensor((numbers * noise).astype(numbers.dtype), name=value.name)
    return copy
