"""LayerNorm models: the mean goes into the producers, the norms become RMS norms, and any matrix is allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.analysis import means
from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import RotationSpace
from graphrot.emit.norms import fuse_residual_norms
from graphrot.errors import InputRefused
from graphrot.evaluate.double import to_double
from graphrot.folded import Center
from graphrot.graph import is_constant, node_of, read_constant, value_map
from graphrot.passes import ROTATION_PASSES, FoldMeans
from graphrot.passes.quantize_nodes import NodeWriter
from graphrot.plan.build import build_plan
from graphrot.plan.serialize import plan_from_json, plan_to_json
from graphrot.plan.types import RotationPlan
from graphrot.report.inspection import inspection
from graphrot.report.manifest import plan_part
from tests.analysis import graphs
from tests.analysis.fused import fused_decoder
from tests.analysis.graphs import HIDDEN, decoder
from tests.means.graphs import applied, error, ops, raw_branch, raw_transform, request, tied_decoder, transform

EXACT = 1e-12


def planned(model: ir.Model, **options: object) -> RotationPlan:
    return build_plan(analyze(model), request(**options), source_hash="0")


def r1(plan: RotationPlan) -> RotationSpace:
    (found,) = [r for r in plan.rotations if r.space.kind == "R1"]
    assert found.matrix.construction == "hadamard" and found.matrix.seed is not None
    assert not found.matrix.mean_preserving
    return found.space


@pytest.mark.parametrize("norm", [graphs.layer_norm, graphs.layer_op])
@pytest.mark.parametrize("options", [{}, {"rope": False, "bias": True, "cache": False}])
def test_the_matrix_is_a_plain_hadamard(norm: Callable[..., str], options: dict[str, bool]) -> None:
    model, _ = decoder(norm, **options)
    plan = planned(model)
    (fold,) = plan.mean_folds
    assert fold.space == r1(plan).id and len(fold.norms) == 3 and not fold.online and fold.lookup is None
    assert fold.producers == r1(plan).producers
    assert error(model, plan) <= EXACT
    rotated = applied(model, plan)
    assert {"LayerNormalization", "Sub"}.isdisjoint(ops(rotated))
    assert fuse_residual_norms(rotated, NodeWriter(rotated)) == 2


def test_what_is_made_has_no_mean() -> None:
    """In the basis before the rotation: all producers, and the biases that took up a shift."""
    model, _ = decoder(graphs.layer_op, bias=True)
    plan = planned(model)
    rotated = model.clone()
    for kind in ROTATION_PASSES[: ROTATION_PASSES.index(FoldMeans) + 1]:
        kind(plan)(rotated)
    values = value_map(rotated)
    (fold,) = plan.mean_folds
    assert {use.role for use in fold.producers} == {"table", "weight", "bias"}
    for use in fold.producers:
        operand = node_of(values, use.node).inputs[use.input]
        assert operand is not None and is_constant(operand)
        numbers = read_constant(operand)
        assert np.abs(numbers.mean(axis=use.axis)).max() < 1e-7 < np.abs(numbers).max()


@pytest.mark.parametrize("dropped", range(4))
def test_a_producer_that_is_left_out_shows(dropped: int) -> None:
    model, _ = decoder(graphs.layer_op, bias=True)
    plan = planned(model)
    (fold,) = plan.mean_folds
    assert len(fold.producers) == 4
    fewer = replace(fold, producers=fold.producers[:dropped] + fold.producers[dropped + 1 :])
    assert error(model, replace(plan, mean_folds=(fewer,))) > 1e-4


def test_a_norm_that_is_left_out_shows() -> None:
    model, _ = decoder(graphs.layer_op)
    plan = planned(model)
    (fold,) = plan.mean_folds
    assert error(model, replace(plan, mean_folds=(replace(fold, norms=fold.norms[1:]),))) > 1e-4


@pytest.mark.parametrize("attention", ["standard", "multi"])
def test_contributed_skip_norms(attention: str) -> None:
    model = fused_decoder(attention, layer=True)
    plan = planned(model)
    r1(plan)
    assert [norm.form for norm in plan.mean_folds[0].norms] == ["op", "skip", "skip"]
    rotated = applied(model, plan)
    assert ops(rotated).count("SkipSimplifiedLayerNormalization") == 2
    assert {"LayerNormalization", "SkipLayerNormalization"}.isdisjoint(ops(rotated))
    assert error(model, plan, double=False) <= 2e-5


def test_norms_of_parallel_branches_become_one() -> None:
    b = graphs.Builder(seed=2, opset=21)
    ids = b.input("ids", ["batch", "sequence"], graphs.INT64)
    x = b.op("Gather", b.constant(b.rng.standard_normal((graphs.VOCAB, HIDDEN))), ids)
    for _ in range(2):
        parts = [b.linear(b.op("Tanh", b.linear(graphs.layer_op(b, x), HIDDEN, 8)), 8, HIDDEN) for _ in range(2)]
        x = b.op("Add", b.op("Add", x, parts[0]), parts[1])
    b.result(b.linear(graphs.layer_op(b, x), HIDDEN, graphs.VOCAB), "logits")
    b.output("logits", ["batch", "sequence", graphs.VOCAB])
    model = b.model()
    plan = planned(model)
    assert len(plan.mean_folds[0].norms) == 5
    assert error(model, plan) <= EXACT
    rotated = applied(model, plan)
    assert ops(rotated).count("Sqrt") == 3
    assert fuse_residual_norms(rotated, NodeWriter(rotated)) == 2


def test_a_stream_that_is_read_raw_keeps_its_mean() -> None:
    model, _ = decoder(graphs.layer_op, residual=raw_branch)
    plan = planned(model)
    (found,) = [r for r in plan.rotations if r.space.kind == "R1"]
    reader = found.space.mean_reader
    assert found.matrix.mean_preserving and not plan.mean_folds
    assert reader is not None and reader.op == "MatMul" and reader.node in found.matrix.note
    assert "LayerNormalization" in ops(applied(model, plan))
    assert error(model, plan) <= EXACT


def test_a_raw_reader_that_is_overlooked_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(means, "_READS", means._PASSES)
    model, _ = decoder(graphs.layer_op, residual=raw_branch)
    plan = planned(model)
    assert plan.mean_folds and error(model, plan) > 1e-4


@pytest.mark.parametrize(
    "hook",
    [
        lambda b, x: b.op("Add", x, b.constant(0.7)),
        lambda b, x: b.op("Add", x, b.op("ReduceMean", x, b.ints(-1))),
        lambda b, x: b.op("Mul", x, b.op("Sigmoid", b.op("ReduceMean", x, b.ints(-1)))),
        lambda b, x: b.op("Div", x, b.op("ReduceL2", x, b.ints(-1))),
        lambda b, x: b.op("LayerNormalization", x, b.constant(np.ones(HIDDEN)), b.vector(HIDDEN), axis=-1),
    ],
)
def test_other_readers_of_the_mean(hook: graphs.Hook) -> None:
    model, _ = decoder(graphs.layer_op, residual=hook)
    plan = planned(model)
    (found,) = [r for r in plan.rotations if r.space.kind == "R1"]
    assert found.matrix.mean_preserving and found.matrix.note and not plan.mean_folds
    assert error(model, plan) <= EXACT


def test_a_norm_without_mean_behind_one_with_it() -> None:
    """A LayerNorm without gain, whose rows have no mean, may be read by anything."""
    ones = np.ones(HIDDEN)
    model, _ = decoder(
        graphs.rms_norm, residual=lambda b, x: b.op("LayerNormalization", x, b.constant(3 * ones), axis=-1)
    )
    plan = planned(model)
    (found,) = [r for r in plan.rotations if r.space.kind == "R1"]
    reader = found.space.mean_reader
    assert reader is not None and "ReduceMean" not in reader.op and found.matrix.mean_preserving
    assert error(model, plan) <= EXACT


@pytest.mark.parametrize("read", [False, True])
def test_other_outputs_of_a_layernorm(read: bool) -> None:
    """Its mean and deviation stand in the way only if something takes them."""

    def three(b: graphs.Builder, x: str, size: int = HIDDEN) -> str:
        y = b.op("LayerNormalization", x, b.vector(size, around=1), b.vector(size), outputs=3, axis=-1)
        return b.op("Add", y, b.nodes[-1].output[1]) if read else y

    model, _ = decoder(three)
    plan = planned(model)
    assert bool(plan.mean_folds) != read
    if read:  # the mean is a float32 tensor, whatever the input is
        assert error(model, plan, double=False) <= 2e-5
    else:
        assert error(model, plan) <= EXACT


def test_an_activation_that_a_layernorm_reads_is_rotated() -> None:
    model, _ = decoder(graphs.layer_op, final=transform)
    plan = planned(model)
    spaces = [r.space for r in plan.rotations if r.space.kind == "R4"]
    assert [space.dim for space in spaces] == [graphs.FFN, HIDDEN] and not plan.refusals
    fold = next(fold for fold in plan.mean_folds if fold.space == spaces[1].id)
    assert len(fold.online) == len(fold.norms) == 1
    assert spaces[1].online[0].tensor == fold.online[0].centred
    rotated = applied(model, plan)
    made = value_map(rotated)[fold.online[0].centred]
    assert [use.node.op_type for use in made.uses()] == ["HadamardTransform"]
    assert error(model, plan) <= EXACT


def test_an_activation_that_is_read_raw_too_is_refused_by_node() -> None:
    model, _ = decoder(graphs.layer_op, final=raw_transform)
    facts = analyze(model)
    plan = build_plan(facts, request(), source_hash="0")
    (refusal,) = plan.refusals
    reader = node_of(value_map(model), refusal.node)
    assert (refusal.kind, refusal.op, reader.op_type) == ("R4", "MatMul", "MatMul")
    assert refusal.node in {use.node for space in facts.spaces for use in space.consumers}
    assert "LayerNorm" in refusal.reason and "LayerNorm" in refusal.change
    assert error(model, plan) <= EXACT


def test_a_stream_that_begins_behind_a_norm_is_centred_there() -> None:
    model, _ = decoder(graphs.layer_op, embedded=graphs.layer_op)
    plan = planned(model)
    (found,) = [r for r in plan.rotations if r.space.kind == "R1"]
    (fold,) = plan.mean_folds
    assert found.placement == "online" and not found.matrix.mean_preserving
    assert len(fold.online) == 1 and len(fold.norms) == 3
    assert error(model, plan) <= EXACT


def test_a_stream_that_goes_out_keeps_its_mean() -> None:
    def states(b: graphs.Builder, x: str) -> str:
        b.output(b.op("Identity", x), ["batch", "sequence", HIDDEN])
        return x

    model, _ = decoder(graphs.layer_op, residual=states)
    plan = planned(model)
    assert not plan.mean_folds and "R1" not in {r.space.kind for r in plan.rotations}
    (refusal,) = plan.refusals
    assert (refusal.kind, refusal.op, refusal.node) == ("R1", "graph output", model.graph.outputs[0].name)
    assert error(model, plan) <= EXACT


def test_inspect_tells_what_becomes_of_the_mean() -> None:
    def told(model: ir.Model) -> tuple[dict[str, str], list[str]]:
        found = inspection(analyze(model))
        return {site.kind: site.mean for site in found.sites if site.mean}, [r.kind for r in found.refused]

    assert told(decoder(graphs.layer_op, final=transform)[0]) == ({"R1": "folded", "R4": "folded"}, [])
    assert told(decoder(graphs.layer_op, final=raw_transform)[0]) == ({"R1": "folded"}, ["R4"])
    kept, refused = told(decoder(graphs.layer_op, residual=raw_branch)[0])
    assert list(kept) == ["R1"] and kept["R1"].startswith("the mean is kept: MatMul ") and not refused
    assert told(decoder()[0]) == ({}, [])


def test_the_plan_is_kept_and_told() -> None:
    model, _ = decoder(graphs.layer_op, final=transform)
    plan = planned(model)
    assert plan_from_json(plan_to_json(plan)) == plan
    part = plan_part(plan)
    assert [mean.space for mean in part.means] == [fold.space for fold in plan.mean_folds]
    assert part.means[1].online == [plan.mean_folds[1].online[0].tensor] and len(part.means[0].norms) == 3
    older = plan_to_json(planned(decoder()[0]))
    assert '"mean_folds":[]' in older
    assert plan_from_json(older.replace(',"mean_folds":[]', "")).mean_folds == ()


def test_it_runs_once() -> None:
    model = to_double(decoder(graphs.layer_op, final=transform)[0])
    plan = planned(model)
    for kind in ROTATION_PASSES[: ROTATION_PASSES.index(FoldMeans)]:
        kind(plan)(model)
    step = FoldMeans(plan)
    assert step(model).modified
    before = ops(model)
    assert not step(model).modified and ops(model) == before
    assert [reason for _, reason in step.report.skipped] == ["centred already"] * 2


def test_a_name_that_is_taken_is_refused() -> None:
    model, _ = decoder(graphs.layer_op, final=transform)
    plan = planned(model)
    taken = plan.mean_folds[1].online[0].centred
    model.graph.node(0).outputs[0].name = taken
    with pytest.raises(InputRefused, match="of a name that the plan gives"):
        applied(model, replace(plan, mean_folds=plan.mean_folds[1:], gain_folds=(), rotations=()))


def test_centring() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((5, 12))
    groups = (((0, 2, 4),), ((1, 2, 4),))
    centred = Center(1, groups).apply(weight)
    for positions in ([0, 2, 4, 6], [1, 3, 5, 7]):
        part = weight[:, positions]
        np.testing.assert_allclose(centred[:, positions], part - part.mean(axis=1, keepdims=True), atol=1e-15)
    np.testing.assert_array_equal(centred[:, 8:], weight[:, 8:])
    np.testing.assert_allclose(Center(0, groups).apply(weight.T), centred.T, atol=1e-15)
    assert Center(1, groups).key != Center(0, groups).key


# A table that a head shares


def shared(model: ir.Model, plan: RotationPlan) -> bool:
    assert plan.tie is not None
    values = value_map(model)
    table = node_of(values, plan.tie.embedding.node).inputs[plan.tie.embedding.table_input]
    flip = node_of(values, plan.tie.head.node).inputs[plan.tie.head.weight_input]
    maker = None if flip is None else flip.producer()
    return maker is not None and maker.op_type == "Transpose" and maker.inputs[0] is table


def test_a_tied_table_stays_one() -> None:
    """Its rows lose their mean behind the lookup, since the head reads them with it."""
    model = tied_decoder()
    plan = planned(model)
    (fold,) = plan.mean_folds
    assert plan.tie is not None and fold.lookup is not None
    assert fold.lookup.tensor == plan.tie.embedding.node
    assert plan.tie.embedding.node not in {use.node for use in fold.producers}
    r1(plan)
    assert error(model, plan) <= EXACT
    assert shared(applied(model, plan), plan)
    without = replace(plan, mean_folds=(replace(fold, lookup=None),))
    with pytest.raises(InputRefused):
        error(model, without)


def test_an_untied_table_is_centred() -> None:
    model = tied_decoder()
    plan = planned(model, bits=(8, None))
    (fold,) = plan.mean_folds
    assert plan.untie and fold.lookup is None and "table" in {use.role for use in fold.producers}
    assert error(model, plan) <= EXACT


@pytest.mark.parametrize("kinds", [("R1", "R4"), ("R4",), ("R1",)])
def test_a_tied_head_behind_a_transform_layer(kinds: tuple[str, ...]) -> None:
    """Embedding and head are in two spaces: the small matrix in front of the head leads from one to the other."""
    model = tied_decoder(transform)
    plan = planned(model, kinds=kinds)
    assert plan.tie is not None and {r.space.kind for r in plan.rotations} == set(kinds)
    assert len(plan.mean_folds) == len(kinds)
    assert error(model, plan) <= EXACT
    assert shared(applied(model, plan), plan)
