"""Every refusal says which node, why, and what would change it; and where the change is made, the site is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import graphrot
from graphrot.analysis.analyze import analyze
from graphrot.analysis.reasons import CHANGES, change_of
from graphrot.analysis.types import Facts
from tests.analysis.graphs import (
    FFN,
    FLOAT,
    HIDDEN,
    INT64,
    VOCAB,
    Builder,
    decoder,
    feeds_for,
    layer_op,
    rms_norm,
)
from tests.analysis.rotated import relative_error

PACKAGE = Path(graphrot.__file__).parent
_BEGINS = re.compile(r"(its?|one of its|one number|how often|what it|no row|a constant|the channels|the cache) ")


def _reasons() -> dict[str, str]:
    """Strings of the analysis' code that read like a reason, and the file that they stand in."""
    found: dict[str, str] = {}
    for path in sorted((PACKAGE / "analysis").glob("*.py")):
        if path.name == "reasons.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {id(part.value) for part in ast.walk(tree) if isinstance(part, ast.Expr)}
        for part in ast.walk(tree):
            text = part.value if isinstance(part, ast.Constant) and id(part) not in texts else None
            if isinstance(text, str) and _BEGINS.match(text) and len(text) >= 12:
                found[text.strip()] = path.name
    return found


def test_every_reason_in_the_code_has_its_change() -> None:
    reasons = _reasons()
    assert len(reasons) > 40
    plain = change_of("Frobnicate does not commute with a rotation of its input")
    for reason, file in reasons.items():
        matches = [start for start in CHANGES if reason.startswith(start) or start.startswith(reason)]
        assert matches, f"{file}: {reason!r} has no change in reasons.py"
        assert change_of(matches[0]) != plain and len(change_of(matches[0])) > 12


def test_every_change_is_for_a_reason_in_the_code() -> None:
    reasons = _reasons()
    for start in CHANGES:
        assert any(reason.startswith(start) or start.startswith(reason) for reason in reasons), start


def _flag(b: Builder) -> str:
    """Zero, as an integer that depends on data."""
    return b.op("Mul", b.op("ReduceMax", "positions", keepdims=0), b.constant(0, np.int64))


def _longer(b: Builder, x: str) -> str:
    wide = b.op("Add", x, b.constant(b.rng.standard_normal((2, 1, 1, HIDDEN))))
    return b.op("Gather", wide, b.constant(0, np.int64), axis=0)


def _computed_constant(b: Builder, x: str) -> str:
    return b.op("Add", x, b.op("Tanh", b.vector(HIDDEN)))


def _other_type(b: Builder, x: str) -> str:
    return b.op("Cast", b.op("Cast", b.op("Mul", x, b.constant(64.0)), to=TensorProto.INT32), to=FLOAT)


def _shape_from_data(b: Builder, x: str) -> str:
    last = b.op("Reshape", b.op("Add", _flag(b), b.constant(HIDDEN, np.int64)), b.ints(1))
    return b.op("Reshape", x, b.op("Concat", b.ints(0, 0), last, axis=0))


def _bounds_from_data(b: Builder, x: str) -> str:
    start = b.op("Reshape", _flag(b), b.ints(1))
    both = b.op("Concat", x, x, axis=2)
    return b.op("Slice", both, start, b.op("Add", start, b.ints(HIDDEN)), b.ints(2))


def _repeats_from_data(b: Builder, x: str) -> str:
    once = b.op("Reshape", b.op("Add", _flag(b), b.constant(1, np.int64)), b.ints(1))
    return b.op("Tile", x, b.op("Concat", b.ints(1, 1), once, axis=0))


def _padded_channels(b: Builder, x: str) -> str:
    return b.op("Slice", b.op("Pad", x, b.ints(0, 0, 0, 0, 0, 3)), b.ints(0), b.ints(HIDDEN), b.ints(2))


def _mirrored_tokens(b: Builder, x: str) -> str:
    return b.op("Slice", b.op("Pad", x, b.ints(0, 1, 0, 0, 0, 0), mode="edge"), b.ints(1), b.ints(1 << 40), b.ints(1))


def _run_time_gain(b: Builder, x: str) -> str:
    gain = b.op("Add", b.op("Cast", _flag(b), to=FLOAT), b.vector(HIDDEN, around=1))
    return b.op("RMSNormalization", x, gain, axis=-1, epsilon=1e-3)


def _run_time_shift(b: Builder, x: str) -> str:
    shift = b.op("Add", b.op("Cast", _flag(b), to=FLOAT), b.vector(HIDDEN))
    return b.op("LayerNormalization", x, b.constant(np.ones(HIDDEN)), shift, axis=-1, epsilon=1e-3)


def _decoded_weight(b: Builder, x: str) -> str:
    weight = b.op("DequantizeLinear", b.constant(np.ones((HIDDEN, HIDDEN)), np.int8), b.constant(0.1))
    return b.op("MatMul", x, weight)


def _run_time_bias(b: Builder, x: str) -> str:
    bias = b.op("Add", b.op("Cast", _flag(b), to=FLOAT), b.vector(HIDDEN))
    flat = b.op("Gemm", b.op("Reshape", x, b.ints(-1, HIDDEN)), b.matrix(HIDDEN, HIDDEN), bias)
    return b.op("Reshape", flat, b.op("Shape", x))


def _added_activation(b: Builder, x: str) -> str:
    return b.op("Add", x, b.op("Sigmoid", b.linear(rms_norm(b, x), HIDDEN, HIDDEN)))


def _read_as_output(b: Builder, x: str) -> str:
    b.output(b.result(b.op("Identity", x), "seen"), ["batch", 4, "sequence", 6])
    return x


def _mean_read(b: Builder, x: str) -> str:
    y = b.op("LayerNormalization", x, b.constant(np.ones(HIDDEN)), outputs=2, axis=-1)
    return b.op("Add", y, b.nodes[-1].output[1])


CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "shape grows": ({"residual": _longer}, "R1", "Add", "a constant makes its rows longer"),
    "constant of a tanh": ({"residual": _computed_constant}, "R1", "Add", "it adds a constant that cannot be"),
    "integers": ({"residual": _other_type}, "R1", "Cast", "it turns the values into another type"),
    "shape from data": ({"residual": _shape_from_data}, "R1", "Reshape", "its target shape depends on data"),
    "bounds from data": ({"residual": _bounds_from_data}, "R1", "Slice", "it picks channels at run time"),
    "repeats from data": ({"residual": _repeats_from_data}, "R1", "Tile", "how often it repeats depends on data"),
    "zeros beside channels": ({"residual": _padded_channels}, "R1", "Pad", "it adds zeros beside different channels"),
    "edges repeated": ({"residual": _mirrored_tokens}, "R1", "Pad", "Pad does not commute"),
    "gain of the run": ({"residual": _run_time_gain}, "R1", "RMSNormalization", "its gain is computed at run time"),
    "shift of the run": ({"residual": _run_time_shift}, "R1", "LayerNormalization", "its shift is computed at run"),
    "mean is read": ({"residual": _mean_read}, "R1", "LayerNormalization", "its mean or deviation is read as well"),
    "packed weight": ({"residual": _decoded_weight}, "R1", "MatMul", "its weight comes out of DequantizeLinear"),
    "bias of the run": ({"residual": _run_time_bias}, "R1", "Gemm", "its bias is computed at run time"),
    "activation joins": ({"residual": _added_activation}, "R1", "Sigmoid", "what it makes is added to these channels"),
    "an output": ({"query": _read_as_output}, "R3", "Identity", "it is the graph output 'seen'"),
    "a norm behind": ({"branch": rms_norm}, "R1", "Mul", "its gain stays between two parts of the stream"),
}


_SINGLE = ("mean is read", "packed weight")
"""Operators that return float32 whatever they read."""


@pytest.mark.parametrize("case", CASES)
def test_the_reason_and_what_would_change_it(case: str) -> None:
    options, kind, op, reason = CASES[case]
    model, _ = decoder(**options)
    facts = analyze(model)
    refusal = next(r for r in facts.refused if r.kind == kind)
    assert refusal.op == op and refusal.reason.startswith(reason)
    online = "--online-r1" if any(space.optional for space in facts.spaces) else ""
    assert refusal.change.startswith(online or change_of(refusal.reason)) and len(refusal.change) > 12
    assert refusal.node in {output for node in model.graph for output in (o.name for o in node.outputs)}
    double = case not in _SINGLE
    assert relative_error(model, facts, feeds_for(model), double=double) <= (1e-12 if double else 2e-5)


def _chosen_experts(norm: Callable[..., str]) -> Facts:
    """Weights picked by each token, behind a norm."""
    b = Builder()
    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), b.input("ids", ["tokens"], INT64))
    h = norm(b, x)
    expert = b.op("ArgMax", b.linear(h, HIDDEN, 3), axis=-1, keepdims=0)
    up = b.op("Gather", b.constant(b.rng.standard_normal((3, HIDDEN, FFN)) / 5), expert, axis=0)
    down = b.op("Gather", b.constant(b.rng.standard_normal((3, FFN, HIDDEN)) / 5), expert, axis=0)
    y = b.op("MatMul", b.op("Sigmoid", b.op("MatMul", b.op("Unsqueeze", h, b.ints(1)), up)), down)
    x = b.op("Add", x, b.op("Squeeze", y, b.ints(1)))
    b.result(b.linear(rms_norm(b, x), HIDDEN, VOCAB), "logits")
    b.output("logits", ["tokens", VOCAB])
    return analyze(b.model())


def test_a_shift_in_front_of_picked_weights_is_the_reason_and_no_shift_the_change() -> None:
    facts = _chosen_experts(layer_op)
    (refusal,) = facts.refused
    assert refusal.kind == "R1" and refusal.op == "LayerNormalization"
    assert refusal.reason.startswith("its shift is read by weights without a bias")
    without = _chosen_experts(lambda b, x: b.op("RMSNormalization", x, b.vector(HIDDEN, around=1), axis=-1))
    assert not without.refused and {s.kind for s in without.spaces} == {"R1", "R4"}


def _turned(readers: int) -> Facts:
    """An activation with its channels on the second axis, moved to the last one for each of its readers."""
    b = Builder()
    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), b.input("ids", ["batch", "tokens"], INT64))
    act = b.op("Sigmoid", b.op("Transpose", b.linear(x, HIDDEN, FFN), perm=[0, 2, 1]))
    for number in range(readers):
        y = b.op("Transpose", act, perm=[0, 2, 1])
        b.output(b.result(b.linear(y, FFN, VOCAB), f"logits{number}"), ["batch", "tokens", VOCAB])
    model = b.model()
    facts = analyze(model)
    assert relative_error(model, facts, feeds_for(model)) <= 1e-12
    return facts


def test_a_site_is_refused_once() -> None:
    """No transform can stand on the second axis: the node that makes the channels says so, their readers do not say
    it again."""
    (refusal,) = [r for r in _turned(2).refused if r.kind == "R4"]
    assert refusal.op == "Sigmoid" and "last axis" in refusal.reason and "last axis" in refusal.change


def test_channels_that_come_to_the_last_axis_rotate_there() -> None:
    facts = _turned(1)
    assert not [r for r in facts.refused if r.kind == "R4"]
    (r4,) = [s for s in facts.spaces if s.kind == "R4"]
    assert [use.op for use in r4.online] == ["Transpose"]
