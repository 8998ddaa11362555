"""Target portable: the canonical form, only standard operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from graphrot.emit.portable import ACCURACY_LEVEL_OPTION, emit_portable
from graphrot.errors import InputRefused
from graphrot.passes.records import QuantizedActivation
from graphrot.quant.grid import WeightGrid
from tests.emit.lowered import Setting, expected, lower
from tests.passes_quant.graphs import EXACT, Example, check, difference, ids, run_ort

SETTINGS = [
    Setting(WeightGrid(4), 8, WeightGrid(8)),
    Setting(WeightGrid(4, 32, symmetric=False), 8, WeightGrid(8), tied=False),
    Setting(WeightGrid(8), 4, WeightGrid(4)),
    Setting(WeightGrid(4), 4, WeightGrid(4, 32)),
    Setting(WeightGrid(4, 64), None, WeightGrid(8, symmetric=False)),
    Setting(activations=8),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_means_the_same_everywhere(setting: Setting, tmp_path: Path) -> None:
    """A code that falls to the other side moves a whole token, hence the median."""
    example = Example()
    model = lower(example, setting, "portable", tmp_path).model
    proto = check(model)
    assert set(model.opset_imports) == {""} and {node.domain for node in model.graph} == {""}
    tokens = ids(example, 3, 7)
    want = expected(example, setting, tokens, "portable")
    results = [ReferenceEvaluator(proto).run(None, {"ids": tokens})[0]]
    results += [run_ort(proto, tokens, level=level) for level in (0, 1, 2, 99)]
    for result in results:
        errors = np.abs(result - want).max(axis=-1) / np.abs(want).max(axis=-1)
        assert np.median(errors) < 2e-6
        assert errors.max() < 0.3
    for result in results[1:]:
        assert difference(result, results[0]) < 0.3


def test_the_option_matters(tmp_path: Path) -> None:
    """Without it, ONNX Runtime rounds what 4-bit weights read; 8-bit ones are exact with and without."""
    assert ACCURACY_LEVEL_OPTION == EXACT
    tokens = ids(Example())
    for grid, rounded in ((WeightGrid(4), True), (WeightGrid(8), False)):
        setting = Setting(grid, None, WeightGrid(8))
        lowered = lower(Example(), setting, "portable", tmp_path)
        proto = check(lowered.model)
        want = expected(Example(), setting, tokens, "portable")
        assert difference(run_ort(proto, tokens), want) < 2e-6
        assert (difference(run_ort(proto, tokens, exact=False), want) > 1e-4) == rounded
        assert any(ACCURACY_LEVEL_OPTION[0] in note for note in lowered.report.notes) == rounded


def test_powers_of_two_are_not_fused_either(tmp_path: Path) -> None:
    example = Example(dim=64, ffn=128)
    setting = Setting(WeightGrid(8))
    proto = check(lower(example, setting, "portable", tmp_path).model)
    tokens = ids(example)
    assert difference(run_ort(proto, tokens, exact=False), expected(example, setting, tokens, "portable")) < 2e-6


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (Setting(WeightGrid(4)), ["session.qdq_matmulnbits_accuracy_level"]),
        (Setting(WeightGrid(8)), []),
        (Setting(WeightGrid(8, 32)), ["session.qdq_matmulnbits_accuracy_level", "in groups"]),
        (Setting(activations=4), ["4-bit activations", "float speed"]),
        (Setting(activations=8), ["8-bit activations", "float speed"]),
    ],
    ids=str,
)
def test_notes(setting: Setting, words: list[str], tmp_path: Path) -> None:
    text = "\n".join(lower(Example(), setting, "portable", tmp_path).report.notes)
    assert all(word in text for word in words)
    assert bool(text) == bool(words)


def test_report(tmp_path: Path) -> None:
    report = lower(Example(), Setting(WeightGrid(4), 8, WeightGrid(8)), "portable", tmp_path).report
    assert report.target == "portable"
    assert [e.tensor for e in report.quantized] == ["table", "w_a", "w_g", "w_d"]
    assert report.linear_bits_per_weight == pytest.approx(4 + 32 * (100 + 100 + 48) / (3 * 4800))


def test_refuses_old_opset() -> None:
    with pytest.raises(InputRefused, match="needs opset 21"):
        emit_portable(Example().model(opset=20), activations=[QuantizedActivation("x", "y", 8, ("a",))])
