"""A quantized cache for what the exporters write of known architectures: it answers like the float model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import transformers

import graphrot
from graphrot.model.export import export_decoder
from tests.coverage.zoo import program
from tests.exported import one_layer_onnx, tiny_onnx
from tests.passes_quant.attended import answers, session
from tests.tiny import VOCAB, tiny_phi3

CLOSE = 0.02
"""Of the largest logit. Rows of 8 bits are off by 1/510 of their range, some 1 % of a number; 4 bits, 17 times as
coarse, give 0.1 to 0.25 here."""
SAME = 1e-5
"""What the order of float32 sums may change. Attention reads what was stored, so that nothing else depends on steps."""

IDS = np.random.default_rng(0).integers(3, VOCAB, (2, 9))
LEFT = (np.arange(9) >= np.array([[0], [3]])).astype(np.int64)
TOKENS = LEFT.astype(bool)


@dataclass(frozen=True)
class Case:
    """A model, and what its attention has to be.

    ``windows`` of its layers (-1: none), ``softcap``, and whether it hides tokens to come ``causal`` by itself, without
    a mask that is handed over; ``rotated``: with R3.
    """

    source: Callable[[Path], Path]
    windows: tuple[int, ...] = (-1, -1)
    softcap: float = 0.0
    causal: int = 1
    rotated: bool = False


def _made(build: Callable[[], Any]) -> Callable[[Path], Path]:
    def export(folder: Path) -> Path:
        export_decoder(build(), folder / "source.onnx", roads=("torchscript",))
        return folder / "source.onnx"

    return export


def _zoo(name: str, **changes: Any) -> Callable[[Path], Path]:
    def build() -> transformers.PreTrainedModel:
        module = program(name, **changes).module
        assert isinstance(module.module, transformers.PreTrainedModel)
        return module.module

    return _made(build)


CASES = {
    "llama": Case(lambda _: tiny_onnx("llama"), rotated=True),
    "llama, dynamo": Case(lambda _: one_layer_onnx("dynamo"), (-1,)),
    "qwen3": Case(lambda _: tiny_onnx("qwen3"), (-1, -1, -1)),
    "gpt2": Case(lambda _: tiny_onnx("gpt2")),
    "phi3, a part of a head turned": Case(_made(lambda: tiny_phi3(partial_rotary_factor=0.5)), rotated=True),
    "mistral": Case(_zoo("mistral", layers=1), (4,)),
    "gemma2": Case(_zoo("gemma2"), (4, -1), 50.0),
    "falcon": Case(_zoo("falcon", layers=1), (-1,)),
    "bloom": Case(_zoo("bloom", layers=1), (-1,), causal=0),
}


def _steps(model: Path, steps: list[int]) -> np.ndarray:
    """Logits of all tokens that are no padding."""
    return answers(session(model), IDS, LEFT, steps)[TOKENS]


@pytest.mark.parametrize("name", CASES)
def test_it_answers_like_the_float_model(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    source = case.source(tmp_path)
    rotations = {"rotations": "hadamard", "only": ("R3",)} if case.rotated else {"rotations": None}
    settings = {**rotations, "kv": "int8", "certificate": None}
    stored = tmp_path / "stored.onnx"
    graphrot.convert(source, output=stored, recipe=settings)
    wanted, found = _steps(source, [6, 1, 2]), _steps(stored, [6, 1, 2])
    assert np.abs(found - wanted).max() < CLOSE * np.abs(wanted).max()
    assert np.abs(_steps(stored, [9]) - found).max() < SAME * np.abs(wanted).max()

    nodes = list(ir.load(stored).graph)
    sites = [node for node in nodes if node.op_type == "RotatedAttention"]
    numbers = [{key: a.value for key, a in node.attributes.items()} for node in sites]
    assert tuple(site["local_window_size"] for site in numbers) == case.windows
    assert {site["softcap"] for site in numbers} == {case.softcap}
    assert {site["causal"] for site in numbers} == {case.causal}
    assert {site["rotate"] for site in numbers} == {int(case.rotated)}
    assert not [node for node in nodes if node.op_type in ("Softmax", "HadamardTransform")]
