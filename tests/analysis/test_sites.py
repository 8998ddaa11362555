"""The sites of tiny decoders: found, exact in float64, and each part of them needed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import Facts, RotationSpace
from tests.analysis import graphs
from tests.analysis.fused import fused_decoder
from tests.analysis.graphs import decoder, feeds_for
from tests.analysis.rotated import relative_error
from tests.exported import tiny_onnx
from tests.tiny import TINY_NAMES

EXACT = 1e-12
"""Relative error of a float64 copy."""
SINGLE = 1e-5
"""Relative error of a float32 copy, for operators without float64 kernels."""
WRONG = 1e-3
"""What a mistake makes at least."""

Site = tuple[str, str, int]


@functools.cache
def loaded(name: str) -> ir.Model:
    return ir.load(tiny_onnx(name))


@functools.cache
def facts_of(name: str) -> Facts:
    return analyze(loaded(name))


def sites(facts: Facts) -> Counter[Site]:
    return Counter((s.kind, s.placement, s.dim) for s in facts.spaces)


def per_layer(layers: int, hidden: int, head: int, ffn: int, heads: int, r3: str = "online") -> dict[Site, int]:
    return {
        ("R1", "merged", hidden): 1,
        ("R2", "merged", head): layers,
        ("R3", r3, head): layers,
        ("R4", "online", ffn): layers,
        ("O", "online", heads * head): layers,
    }


TINY_SITES = {
    "llama": per_layer(2, 48, 16, 112, 3),
    "llama_tied": per_layer(2, 48, 16, 112, 3),
    "qwen2": per_layer(2, 80, 16, 96, 5),
    "qwen3": per_layer(3, 48, 16, 80, 6),
    "phi3": per_layer(2, 64, 16, 96, 4),
    "gpt2": per_layer(2, 80, 16, 320, 5, r3="merged"),
}


@pytest.mark.parametrize("name", TINY_NAMES)
def test_tiny_decoders_have_all_four_rotations(name: str) -> None:
    facts = facts_of(name)
    assert sites(facts) == TINY_SITES[name]
    assert facts.refused == ()
    assert all(s.mean_preserving == (name == "gpt2" and s.kind == "R1") for s in facts.spaces)
    layers = max(TINY_SITES[name].values())
    assert len(facts.gains) == 2 * layers + 1
    assert [s.id for s in facts.spaces if s.kind == "R4"] == [f"R4.{n}" for n in range(layers)]


@pytest.mark.parametrize("name", TINY_NAMES)
def test_facts_are_exact(name: str) -> None:
    """All rotations at once, with random dense matrices and a rotated past."""
    model = loaded(name)
    assert relative_error(model, facts_of(name), feeds_for(model)) <= EXACT


@pytest.mark.parametrize("kind", ["R1", "R2", "R3", "R4"])
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_each_kind_is_exact_alone(name: str, kind: str) -> None:
    model, facts = loaded(name), facts_of(name)
    spaces = tuple(s for s in facts.spaces if s.kind == kind)
    assert relative_error(model, facts, feeds_for(model), spaces=spaces) <= EXACT


def _without_producer(space: RotationSpace) -> RotationSpace:
    return replace(space, producers=space.producers[1:])


def _without_consumer(space: RotationSpace) -> RotationSpace:
    return replace(space, consumers=space.consumers[1:])


def _without_bias(space: RotationSpace) -> RotationSpace:
    return replace(space, producers=tuple(p for p in space.producers if p.role != "bias"))


def _without_online(space: RotationSpace) -> RotationSpace:
    return replace(space, online=space.online[1:])


def _without_a_head(space: RotationSpace) -> RotationSpace:
    first, *rest = space.consumers
    return replace(space, consumers=(replace(first, groups=first.groups[1:]), *rest))


@pytest.mark.parametrize(
    ("name", "kind", "cut"),
    [
        ("qwen2", "R1", _without_producer),
        ("qwen2", "R1", _without_consumer),
        ("qwen2", "R2", _without_bias),
        ("qwen2", "R2", _without_a_head),
        ("qwen2", "R3", _without_online),
        ("qwen2", "R4", _without_online),
        ("qwen2", "R4", _without_consumer),
        ("gpt2", "R1", _without_bias),
        ("gpt2", "R3", _without_bias),
    ],
)
def test_every_part_counts(name: str, kind: str, cut: Callable[[RotationSpace], RotationSpace]) -> None:
    model, facts = loaded(name), facts_of(name)
    spaces = [s for s in facts.spaces if s.kind == kind]
    changed = (cut(spaces[0]), *spaces[1:])
    assert changed[0] != spaces[0]
    assert relative_error(model, facts, feeds_for(model), spaces=changed) > WRONG


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_gain_counts(name: str) -> None:
    model, facts = loaded(name), facts_of(name)
    fold = facts.gains[1]
    lost = replace(facts, gains=(facts.gains[0], replace(fold, consumers=fold.consumers[1:]), *facts.gains[2:]))
    assert relative_error(model, lost, feeds_for(model), spaces=()) > WRONG


def test_a_past_in_the_old_basis_is_wrong() -> None:
    model, facts = loaded("llama"), facts_of("llama")
    forgotten = tuple(replace(s, cache_inputs=()) if s.kind == "R3" else s for s in facts.spaces)
    assert relative_error(model, facts, feeds_for(model), spaces=forgotten) > WRONG


def test_caches_are_paired_by_what_they_hold() -> None:
    facts = facts_of("qwen2")
    assert [(p.past.replace("past_key_values", "present"), p.present) for p in facts.caches] == [
        (p.present, p.present) for p in facts.caches
    ]
    assert len(facts.caches) == 4
    kinds = {name: s.kind for s in facts.spaces for name in s.cache_inputs}
    assert all(kinds[p.past] == ("R3" if p.past.endswith("key") else "R2") for p in facts.caches)


@pytest.mark.parametrize(
    "norm", [graphs.rms_norm, graphs.rms_op, graphs.layer_norm, graphs.layer_op, graphs.simplified]
)
@pytest.mark.parametrize("options", [{}, {"cache": False}, {"rope": False, "bias": True}])
def test_norms_of_all_forms(norm: Callable[..., str], options: dict[str, bool]) -> None:
    model, _ = decoder(norm, **options)
    facts = analyze(model)
    r3 = "online" if options.get("rope", True) else "merged"
    assert sites(facts) == per_layer(1, graphs.HIDDEN, graphs.WIDTH, graphs.FFN, graphs.HEADS, r3)
    assert len(facts.gains) == 3
    assert facts.refused == ()
    centred = norm in (graphs.layer_norm, graphs.layer_op)
    assert facts.spaces[0].mean_preserving == centred
    assert all((g.shift is not None) == centred for g in facts.gains)
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(
    ("attention", "rotary"),
    [
        ("standard", "none"), ("standard", "node"), ("grouped", "none"), ("grouped", "node"),
        ("packed", "none"), ("multi", "none"), ("multi", "node"),
    ],
)  # fmt: skip
def test_fused_operators(attention: str, rotary: str, layer: bool) -> None:
    model = fused_decoder(attention, rotary=rotary, layer=layer)
    facts = analyze(model)
    assert sites(facts) == per_layer(1, 40, 16, 20, 4, "merged" if rotary == "none" else "online")
    assert facts.refused == ()
    assert relative_error(model, facts, feeds_for(model, batch=1), double=False) <= SINGLE


@pytest.mark.parametrize("attention", ["grouped", "packed"])
def test_rotary_inside_attention_leaves_no_place_for_r3(attention: str) -> None:
    model = fused_decoder(attention, rotary="inside")
    facts = analyze(model)
    assert Counter(s.kind for s in facts.spaces) == {"R1": 1, "R2": 1, "R4": 1, "O": 1}
    (refusal,) = facts.refused
    assert (refusal.kind, refusal.op) == ("R3", "GroupQueryAttention")
    assert "do_rotary" in refusal.reason and refusal.change
    assert relative_error(model, facts, feeds_for(model, batch=1), double=False) <= SINGLE


def test_groups_list_heads() -> None:
    facts = facts_of("llama")
    r2 = next(s for s in facts.spaces if s.kind == "R2")
    assert [u.groups for u in r2.producers] == [(((0, 1, 16),),)]
    assert [u.groups for u in r2.consumers] == [(((0, 1, 16),), ((16, 1, 16),), ((32, 1, 16),))]
    fused = next(s for s in facts_of("phi3").spaces if s.kind == "R2")
    assert [u.groups for u in fused.producers] == [(((96, 1, 16),), ((112, 1, 16),))]
    gpt2 = next(s for s in facts_of("gpt2").spaces if s.kind == "R3")
    assert [len(u.groups) for u in gpt2.producers] == [10, 10]
    assert {u.role for u in gpt2.producers} == {"weight", "bias"}


def test_tables_are_producers() -> None:
    r1 = next(s for s in facts_of("gpt2").spaces if s.kind == "R1")
    tables = [u for u in r1.producers if u.role == "table"]
    assert len(tables) == 2
    assert {u.axis for u in tables} == {1}


def _static(model: ir.Model, sizes: dict[str, int]) -> ir.Model:
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape(d if isinstance(d, int) else sizes[str(d.value)] for d in value.shape)
    return model


def test_fixed_sizes_share_one_matrix_over_all_positions() -> None:
    model = _static(decoder(cache=False)[0], {"batch": 1, "sequence": 5})
    facts = analyze(model)
    assert sites(facts) == per_layer(1, graphs.HIDDEN, graphs.WIDTH, graphs.FFN, graphs.HEADS)
    assert relative_error(model, facts, feeds_for(model, batch=1)) <= EXACT


def test_one_number_added_to_all_channels_keeps_the_mean() -> None:
    model, _ = decoder(residual=lambda b, x: b.op("Add", x, b.constant(0.7)))
    facts = analyze(model)
    assert facts.spaces[0].kind == "R1" and facts.spaces[0].mean_preserving
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def test_constants_that_are_inputs_too_are_refused_by_node() -> None:
    """Old files list every initializer among the inputs: then a caller may replace it."""
    model, _ = decoder()
    for value in list(model.graph.initializers.values()):
        if value.const_value is not None and len(value.const_value.shape) == 2:
            model.graph.inputs.append(value)
    facts = analyze(model)
    assert not [s for s in facts.spaces if s.consumers]


def test_the_model_is_left_alone() -> None:
    model, _ = decoder()
    before = ir.to_proto(model).SerializeToString()
    analyze(model)
    assert ir.to_proto(model).SerializeToString() == before


def test_analysis_repeats() -> None:
    model = ir.load(tiny_onnx("phi3"))
    assert analyze(model) == analyze(model)


def test_random_matrices_keep_ones_where_they_must() -> None:
    from tests.analysis.rotated import random_orthogonal

    matrix = random_orthogonal(12, np.random.default_rng(0), mean_preserving=True)
    assert np.abs(matrix @ matrix.T - np.eye(12)).max() < 1e-14
    assert np.abs(matrix.sum(axis=1) - 1).max() < 1e-14
