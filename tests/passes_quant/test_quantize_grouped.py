"""ONNX Runtime's own attention over a quantized cache: where it can stand, and that it answers like the float model."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphrot.analysis.types import AttentionSites
from graphrot.passes.quantize_grouped import QuantizeGrouped, obstacle
from graphrot.quant.cache import cache_scales
from tests.passes_quant.attended import Written, answers, decoder, session, sites_of, text
from tests.passes_quant.graphs import PLAN

IDS = text(3, 9)
LEFT = (np.arange(9) >= np.array([[0], [2], [3]])).astype(np.int64)


@functools.cache
def _sites(written: Written) -> AttentionSites:
    return sites_of(decoder(written))


def _apart(written: Written, bits: Any, per: Any, *, factor: float = 1.0) -> float:
    """The largest difference of logits over the largest logit: a prompt, then token by token."""
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
    wanted = answers(session(decoder(written)), IDS, LEFT, [6, 1, 1, 1])[LEFT.astype(bool)]
    found_logits = answers(session(model), IDS, LEFT, [6, 1, 1, 1])[LEFT.astype(bool)]
    return float(np.abs(found_logits - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("written", [Written(), Written(window=4), Written(form="attention")])
def test_answers_like_the_float_model(written: Written, per: str) -> None:
    assert _apart(written, 8, per) < 0.05


def test_four_bits_and_wrong_scales_are_further_off() -> None:
    assert 0.01 < _apart(Written(), 4, "channel") < 0.4
    assert _apart(Written(), 8, "channel", factor=0.1) > 0.1


def test_what_the_operator_cannot_do() -> None:
    assert obstacle(_sites(Written()).sites[0], 4) is None
    sloped = _sites(Written(mask="slopes")).sites[0]
    assert "hides tokens to come" in str(obstacle(sloped, 8))
    assert "takes" in str(obstacle(replace(sloped, causal=True), 8))
    assert "multiple of 8 channels" in str(obstacle(replace(_sites(Written()).sites[0], head_size=20), 4))
    assert obstacle(replace(_sites(Written()).sites[0], head_size=20), 8) is None
