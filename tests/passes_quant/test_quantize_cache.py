"""Attention over a quantized cache answers like the float model, however it was written; or it is refused."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphrot.analysis.cached.cut import Cut
from graphrot.analysis.probe_sizes import Run
from graphrot.analysis.types import AttentionSites
from graphrot.passes.quantize_cache import QuantizeCache
from tests.passes_quant.attended import Written, answers, decoder, session, sites_of, text
from tests.passes_quant.graphs import PLAN

CLOSE = 0.02
"""Of the largest logit. Rows of 8 bits are off by 1/510 of their range, some 1 % of a number; 0.1 to 0.8 is what a
wrong mask or scale gives here."""

CASES = {
    "masks that are added": Written(),
    "two layers": Written(layers=2),
    "masks that choose": Written(mask="chosen"),
    "a table of masks": Written(mask="table"),
    "a window": Written(window=4),
    "a window that chooses": Written(mask="chosen", window=3),
    "bounded scores": Written(softcap=0.7),
    "scores scaled behind the product": Written(late_scale=True),
    "scale, bound and window": Written(late_scale=True, softcap=0.9, window=5),
    "batch and heads in one axis": Written(form="stacked"),
    "as many heads everywhere": Written(groups=4),
    "slopes": Written(mask="slopes"),
    "padding told from tokens": Written(mask="tokens"),
    "Attention": Written(form="attention"),
    "Attention, bounded": Written(form="attention", softcap=0.7, window=4),
    "Attention, chosen": Written(form="attention", mask="chosen"),
    "MultiHeadAttention": Written(form="multi_head", groups=4),
}

IDS = text(3, 9)
WHOLE = np.ones_like(IDS)
LEFT = (np.arange(9) >= np.array([[0], [2], [3]])).astype(np.int64)
RIGHT = np.where(np.arange(9) < 6, np.arange(9) < np.array([[6], [4], [3]]), 1).astype(np.int64)
"""Prompts of 6, 4 and 3 tokens, padded behind; then three more for each."""


def _stored(model: ir.Model, bits: Any = 8, sites: AttentionSites | None = None, **changes: Any) -> ir.Model:
    """The model with its cache quantized; ``changes`` make every site say something wrong."""
    found = sites_of(model) if sites is None else sites
    assert not found.refused
    if changes:
        found = replace(found, sites=tuple(replace(site, **changes) for site in found.sites))
    QuantizeCache(PLAN, found, bits=bits)(model)
    model.graph.sort()
    onnx.checker.check_model(ir.to_proto(model))
    return model


@functools.cache
def _sites(written: Written) -> AttentionSites:
    return sites_of(decoder(written))


def _apart(written: Written, *paddings: np.ndarray, bits: Any = 8, **changes: Any) -> float:
    """The largest difference of logits at tokens that are no padding, over the largest logit; six tokens first, then
    one, then two."""
    floats, stored = session(decoder(written)), session(_stored(decoder(written), bits, _sites(written), **changes))
    worst = 0.0
    for padding in paddings:
        wanted, found = (answers(runs, IDS, padding, [6, 1, 2])[padding.astype(bool)] for runs in (floats, stored))
        worst = max(worst, float(np.abs(found - wanted).max() / np.abs(wanted).max()))
    return worst


@pytest.mark.parametrize("name", CASES)
def test_answers_like_the_float_model(name: str) -> None:
    assert _apart(CASES[name], WHOLE, LEFT, RIGHT) < CLOSE


def test_four_bits_are_further_off_and_still_the_model() -> None:
    assert CLOSE < _apart(Written(), LEFT, bits=4) < 0.3


@pytest.mark.parametrize(
    ("written", "changes"),
    [
        (Written(), {"score_scale": 0.6}),
        (Written(), {"causal": False}),
        (Written(), {"pads": False}),
        (Written(), {"window": 2}),
        (Written(window=4), {"window": -1}),
        (Written(softcap=0.7), {"softcap": 0.0}),
        (Written(mask="slopes"), {"mask": ()}),
    ],
)
def test_a_site_that_says_something_else_is_noticed(written: Written, changes: dict[str, Any]) -> None:
    assert _apart(written, LEFT, **changes) > 3 * CLOSE


@pytest.mark.parametrize(
    ("name", "causal", "window", "pads", "terms"),
    [
        ("masks that are added", True, -1, True, 0),
        ("masks that choose", True, -1, True, 0),
        ("a table of masks", True, -1, True, 0),
        ("a window", True, 4, True, 0),
        ("a window that chooses", True, 3, True, 0),
        ("slopes", False, -1, False, 1),
        ("padding told from tokens", False, -1, False, 1),
        ("Attention, bounded", True, 4, True, 0),
    ],
)
def test_masks_become_rules_where_they_are(name: str, causal: bool, window: int, pads: bool, terms: int) -> None:
    for site in _sites(CASES[name]).sites:
        assert (site.causal, site.window, site.pads, len(site.mask)) == (causal, window, pads, terms)


@pytest.mark.parametrize("form", ["plain", "attention"])
def test_lengths_come_from_the_mask_so_that_one_buffer_may_be_past_and_present(form: str) -> None:
    sites = _sites(Written(form=form))
    assert sites.shares
    model = _stored(decoder(Written(form=form)), sites=sites)
    for value in model.graph.inputs:
        if str(value.name).startswith("past"):
            assert [use.node.op_type for use in value.uses()] == ["RotatedAttention"]


def test_one_buffer_of_fixed_capacity_answers_alike() -> None:
    runs = session(_stored(decoder(Written(window=4)), sites=_sites(Written(window=4))))
    wanted = answers(runs, IDS, LEFT, [6, 3])
    names = [value.name for value in runs.get_inputs() if value.name.startswith("past")]
    room = {name: np.zeros((3, 2, 20, 12), np.uint8) for name in names}
    feeds = {"input_ids": IDS[:, :6], "attention_mask": LEFT[:, :6], "position_ids": np.maximum(LEFT.cumsum(1) - 1, 0)}
    first = runs.run(None, {**feeds, "position_ids": feeds["position_ids"][:, :6], **room})
    caches = dict(zip(names, first[1:], strict=True))
    assert all(cache.shape == (3, 2, 20, 12) for cache in caches.values())
    rest = {"input_ids": IDS[:, 6:], "attention_mask": LEFT, "position_ids": feeds["position_ids"][:, 6:]}
    second = runs.run(None, {**rest, **caches})
    found = np.concatenate([first[0], second[0]], axis=1)
    np.testing.assert_allclose(found[LEFT.astype(bool)], wanted[LEFT.astype(bool)], rtol=1e-5, atol=1e-5)


def test_a_second_run_changes_nothing() -> None:
    model, found = decoder(Written()), _sites(Written())
    once = QuantizeCache(PLAN, found, bits=8)
    assert once(model).modified
    before = ir.to_proto(model).SerializeToString()
    again = QuantizeCache(PLAN, found, bits=8)
    assert not again(model).modified and len(again.report.skipped) == 1
    assert ir.to_proto(model).SerializeToString() == before


@pytest.mark.parametrize("mask", ["prefix", "blocks", "ahead", "one_wide"])
def test_a_rule_that_holds_for_few_tokens_or_heads_is_none(mask: str) -> None:
    (site,) = _sites(Written(mask=mask)).sites
    assert (site.causal, site.window, site.pads, len(site.mask)) == (False, -1, False, 1)


def test_a_mask_cut_from_a_square_of_all_tokens_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = []
    run = Cut.run

    def watched(self: Cut, sizes: Run, feeds: Mapping[ir.Value, np.ndarray]) -> list[np.ndarray]:
        longest.append(sizes.past)
        return run(self, sizes, feeds)

    monkeypatch.setattr(Cut, "run", watched)
    (site,) = sites_of(decoder(Written(mask="square"))).sites
    assert (site.causal, site.pads) == (True, True)
    assert max(longest) < 10_000
    longest.clear()
    assert len(sites_of(decoder(Written())).sites) == 1 and max(longest) > 100_000


def test_each_place_is_checked_not_only_the_first_of_its_form() -> None:
    proto = ir.to_proto(decoder(Written(layers=2)))
    second = [node for node in proto.graph.node if node.op_type == "Softmax"][1]
    second.attribute[0].i = 2
    found = sites_of(ir.from_proto(proto))
    assert [site.past_key for site in found.sites] == ["past.0.key"]
    assert "something else than softmax" in found.refused[0].reason


def _scores_of(proto: onnx.ModelProto) -> tuple[int, onnx.NodeProto]:
    """The node that multiplies queries and keys, and its place."""
    softmax = next(node for node in proto.graph.node if node.op_type == "Softmax")
    made = {name: node for node in proto.graph.node for name in node.output}
    node = softmax
    while node.op_type != "MatMul":
        node = made[node.input[0]]
    return list(proto.graph.node).index(node), node


def test_a_factor_that_is_one_for_short_texts_only_stays() -> None:
    proto = ir.to_proto(decoder(Written()))
    place, product = _scores_of(proto)
    table = np.maximum(np.log(np.arange(1, 257)) / np.log(16), 1).astype(np.float32).reshape(1, 1, 256, 1)
    proto.graph.initializer.extend(
        [onnx.numpy_helper.from_array(table, "table"), onnx.numpy_helper.from_array(np.array([2]), "axis")]
    )
    nodes = [
        onnx.helper.make_node("Shape", ["past.0.key"], ["before"], start=2, end=3),
        onnx.helper.make_node("Shape", ["input_ids"], ["new"], start=1, end=2),
        onnx.helper.make_node("Add", ["before", "new"], ["all"]),
        onnx.helper.make_node("Slice", ["table", "before", "all", "axis"], ["factors"]),
        onnx.helper.make_node("Mul", [product.input[0], "factors"], ["scaled"]),
    ]
    for node in reversed(nodes):
        proto.graph.node.insert(place, node)
    product.input[0] = "scaled"
    (site,) = sites_of(ir.from_proto(proto)).sites
    assert site.score_scale == 1.0  # queries are read behind all factors, that of 0.3 too


def test_scores_that_another_node_reads_are_refused() -> None:
    proto = ir.to_proto(decoder(Written()))
    place, product = _scores_of(proto)
    proto.graph.node.insert(place + 1, onnx.helper.make_node("ReduceMax", [product.output[0]], ["peak"], keepdims=0))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("peak", onnx.TensorProto.FLOAT, []))
    found = sites_of(ir.from_proto(proto))
    assert not found.sites
    assert "its scores or weights are also read by ReduceMax" in found.refused[0].reason


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (Written(mask="sunk"), "it adds a sink to the softmax"),
    ],
)
def test_what_cannot_be_said_is_refused(written: Written, words: str) -> None:
    found = _sites(written)
    assert not found.sites
    assert all(words in refusal.reason and refusal.kind == "KV" for refusal in found.refused)
    assert len(found.refused) == 1


def test_names_mean_nothing() -> None:
    model = decoder(Written(window=4))
    outer = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    rng = np.random.default_rng(0)
    inner = [value for node in model.graph for value in node.outputs if value.name not in outer]
    for value, number in zip(inner, rng.permutation(len(inner)), strict=True):
        value.name = f"x{number}"
    runs = session(_stored(model))
    wanted = answers(session(decoder(Written(window=4))), IDS, LEFT, [6, 3])
    found = answers(runs, IDS, LEFT, [6, 3])
    assert np.abs(found - wanted)[LEFT.astype(bool)].max() < CLOSE * np.abs(wanted).max()
