"""ONNX Runtime's own attention over a quantized cache: where it can stand, and that it answers like the float model."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphrot.analysis.types import AttentionSites
from graphrot.passes.quantize_grouped import QuantizeGrouped, obstacle
from graphrot.quant.cache import cache_scales
from tests.passes_quant.attended import Written, answers, decoder, session, sites_of, text
from tests.passes_quant.graphs import PLAN

IDS = text(3, 9)
_TYPES = {4: np.uint8, 8: np.int8}
LEFT = (np.arange(9) >= np.array([[0], [2], [3]])).astype(np.int64)


@functools.cache
def _sites(written: Written) -> AttentionSites:
    return sites_of(decoder(written))


def _stored(written: Written, bits: Any, per: Any, *, factor: float = 1.0) -> ir.Model:
    model, found = decoder(written), _sites(written)
    feeds = {
        "input_ids": text(1, 40),
        "attention_mask": np.ones((1, 40), np.int64),
        "position_ids": np.arange(40)[None] % 9,
        **{n: np.zeros((1, 2, 0, 8), np.float32) for s in found.sites for n in (s.past_key, s.past_value)},
    }
    scales = cache_scales(model, found.sites, [feeds], bits=bits, per=per, method="minmax")
    pairs = {node: (factor * found.key, factor * found.value) for node, found in scales.items()}
    QuantizeGrouped(PLAN, found, bits=bits, per=per, scales=pairs)(model)
    model.graph.sort()
    return model


def _apart(written: Written, bits: Any, per: Any, *, factor: float = 1.0) -> float:
    """The largest difference of logits over the largest logit: a prompt, then token by token."""
    wanted = answers(session(decoder(written)), IDS, LEFT, [6, 1, 1, 1])[LEFT.astype(bool)]
    found = answers(session(_stored(written, bits, per, factor=factor)), IDS, LEFT, [6, 1, 1, 1])[LEFT.astype(bool)]
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("written", [Written(), Written(window=4), Written(form="attention")])
def test_answers_like_the_float_model(written: Written, per: str) -> None:
    assert _apart(written, 8, per) < 0.05


def test_four_bits_and_wrong_scales_are_further_off() -> None:
    assert 0.01 < _apart(Written(), 4, "channel") < 0.4
    assert _apart(Written(), 8, "channel", factor=0.1) > 0.1


@pytest.mark.parametrize("bits", [4, 8])
def test_one_buffer_of_fixed_capacity_answers_alike(bits: Any) -> None:
    """Past and present in the same memory: other numbers than those of the tokens before would be read otherwise."""
    runs = session(_stored(Written(window=4), bits, "channel"))
    wanted = answers(runs, IDS, LEFT, [6, 1, 1, 1])
    packed = bits == 4
    room = {
        value.name: ort.OrtValue.ortvalue_from_numpy(np.full((3, 2, 20, 4 if packed else 8), 85, _TYPES[bits]))
        for value in runs.get_inputs()
        if value.name.startswith("past")
    }
    positions, found, start = np.maximum(LEFT.cumsum(1) - 1, 0), [], 0
    for end in (6, 7, 8, 9):
        binding = runs.io_binding()
        feeds = {"input_ids": IDS[:, start:end], "attention_mask": LEFT[:, :end]}
        for name, array in {**feeds, "position_ids": positions[:, start:end]}.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        binding.bind_output("logits")
        for name, buffer in room.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(name.replace("past", "present"), buffer)
        runs.run_with_iobinding(binding)
        found.append(binding.get_outputs()[0].numpy())
        start = end
    tokens = LEFT.astype(bool)
    np.testing.assert_allclose(np.concatenate(found, axis=1)[tokens], wanted[tokens], rtol=1e-5, atol=1e-5)


def test_what_the_operator_cannot_do() -> None:
    assert obstacle(_sites(Written()).sites[0], 4) is None
    sloped = _sites(Written(mask="slopes")).sites[0]
    assert "hides tokens to come" in str(obstacle(sloped, 8))
    assert "takes" in str(obstacle(replace(sloped, causal=True), 8))
    assert "multiple of 8 channels" in str(obstacle(replace(_sites(Written()).sites[0], head_size=20), 4))
    assert obstacle(replace(_sites(Written()).sites[0], head_size=20), 8) is None
