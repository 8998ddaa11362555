"""The two errors of every quantized tensor: what they mean, and that they are the same measure in two bases.

Both are recomputed in float64 from the written file, its own calibration inputs, and matrices built from the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphrot
from graphrot.analysis.types import LinearRef, decode_runs
from graphrot.converted import Converted
from graphrot.folded import Rotate, Scale
from graphrot.graph import node_of, read_constant, value_map
from graphrot.plan.types import MatrixRef
from graphrot.quant.clip import quantize_clip
from graphrot.quant.gptq import gptq_many
from graphrot.quant.grid import WeightGrid
from graphrot.quant.hessian import SecondMoment
from graphrot.quant.rtn import quantize_rtn
from graphrot.quant.unrotated import SourceWeight, gptq_errors, source_moment
from graphrot.quantize import CALIBRATION_TOKENS, calibration_feeds
from graphrot.report.parts import QuantizedPart
from graphrot.rotation.orthogonal import build_matrix
from graphrot.texts import Texts
from tests.exported import with_tokenizer

GRID = WeightGrid(4)


@dataclass(frozen=True)
class Case:
    """A converted model, its source, and its files."""

    source: ir.Model
    done: Converted
    file: Path
    text: Path
    window: int


def _planted(path: Path) -> None:
    """A few input channels of each down projection get weights, and the up projection columns, out of proportion."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("down_proj.weight") or list(tensor.dims) in ([112, 48], [48, 112]):
            array = np.array(onnx.numpy_helper.to_array(tensor))
            axis = array.shape.index(112)
            np.moveaxis(array, axis, 0)[[5, 70]] *= 25
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, path)


def _case(name: str, folder: Path, *, planted: bool = False, **options: Any) -> Case:
    with_tokenizer(name, folder)
    source = folder / "model.onnx"
    if planted:
        _planted(source)
    text = folder / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 12, encoding="utf-8")
    settings = {"recipe": "w4a8", "target": "portable", "certificate": None} | options
    file = folder / "out.onnx"
    calibration = text if settings.get("solver", "gptq") == "gptq" else None
    done = graphrot.convert(source, output=file, calibration=calibration, **settings)
    window = 64 if name == "gpt2" else 512
    return Case(ir.load(source), done, file, text, window)


def _seen(case: Case, names: list[str]) -> dict[str, list[np.ndarray]]:
    """Tensors of the written model on the calibration windows, nothing fused."""
    proto = onnx.load(case.file)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    graphrot.register(options)
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    texts = Texts(case.file.parent, case.text)
    feeds = calibration_feeds(ir.load(case.file), texts.tokens(CALIBRATION_TOKENS), window=case.window)
    runs = [session.run(names, feed) for feed in feeds]
    return {name: [run[k] for run in runs] for k, name in enumerate(names)}


@dataclass(frozen=True)
class Linear:
    """One entry of the manifest, in float64: rotated inputs ``[.., K]``, rounded and exact weight ``[K, N]``."""

    entry: QuantizedPart
    node: str
    inputs: np.ndarray
    stored: np.ndarray
    exact: np.ndarray


def _linears(case: Case) -> list[Linear]:
    """Every 4-bit linear; a Gemm of the source is a MatMul in the file."""
    written = {node.output[0]: node for node in onnx.load(case.file).graph.node}
    entries = [q for q in case.done.report.quantized if "proj" in q.node or "attn" in q.node or "mlp" in q.node]
    nodes = [written[entry.node] for entry in entries]
    seen = _seen(case, list(dict.fromkeys(name for node in nodes for name in node.input)))
    plan = case.file.with_name("out.plan.json")
    rotated = graphrot.convert(plan.with_name("model.onnx"), recipe="rotate-only", plan=plan, certificate=None)
    values, found = value_map(rotated.model), []
    for entry, node in zip(entries, nodes, strict=True):
        name = entry.node if entry.node in values else entry.node.removesuffix(".matmul")
        exact = _matrix(values, name)
        inputs = np.concatenate([x.reshape(-1, exact.shape[0]) for x in seen[node.input[0]]]).astype(np.float64)
        found.append(Linear(entry, name, inputs, seen[node.input[1]][0].astype(np.float64), exact))
    return found


def _matrix(values: dict[str, ir.Value], name: str) -> np.ndarray:
    node = node_of(values, name)
    weight = read_constant(node.inputs[1]).astype(np.float64)
    return weight.T if "transB" in node.attributes and node.attributes["transB"].as_int() else weight


def _ratio(inputs: np.ndarray, exact: np.ndarray, stored: np.ndarray) -> float:
    return float(np.linalg.norm(inputs @ (exact - stored)) / np.linalg.norm(inputs @ exact))


def _source_inputs(case: Case, linear: Linear) -> np.ndarray:
    """The inputs in the source's basis, by dense matrices: ``x = x' Q.T ... diag(gain) + shift``."""
    values, plan = value_map(case.source), case.done.plan
    inputs = linear.inputs
    for rotation in sorted(plan.rotations, key=lambda r: r.placement == "online", reverse=True):
        matrix = build_matrix(rotation.matrix).dense()
        for use in rotation.space.consumers:
            if use.node == linear.node:
                inputs = inputs.copy()
                for group in use.groups:
                    inputs[:, decode_runs(group)] = inputs[:, decode_runs(group)] @ matrix.T
    for fold in plan.gain_folds:
        for consumer in fold.consumers:
            if consumer.use.node == linear.node:
                index = decode_runs(consumer.index)
                inputs = inputs * read_constant(values[fold.gain]).reshape(-1)[index]
                inputs = inputs + (0 if fold.shift is None else read_constant(values[fold.shift]).reshape(-1)[index])
    return inputs


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"group": 32, "certificate": "full"}),
        ("qwen2", {"only": "R1,R2,R4,O", "symmetric": False}),
    ],
)
def test_both_errors_of_gptq_from_the_written_file(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """RMSNorm and LayerNorm with shifts, MatMul and Gemm, groups, zero points, a transform across heads."""
    case = _case(name, tmp_path, **options)
    grid = WeightGrid(4, options.get("group"), symmetric=options.get("symmetric", True))
    source = value_map(case.source)
    linears, ratios = _linears(case), []
    assert len(linears) >= 8
    for linear in linears:
        assert linear.entry.error == pytest.approx(_ratio(linear.inputs, linear.exact, linear.stored), rel=5e-3)
        inputs, weight = _source_inputs(case, linear), _matrix(source, linear.node)
        lost = inputs @ weight - _outputs(case, linear, inputs, weight)
        if _onto_stream(case, linear):
            lost -= lost.mean(axis=1, keepdims=True)  # a LayerNorm's mean may have been folded there
        assert np.abs(lost).max() <= 1e-5 * np.abs(inputs @ weight).max()
        (alone,) = gptq_many([weight.T], inputs.T @ inputs, grid)
        expected = _ratio(inputs, weight, alone.dequantize().T.astype(np.float64))
        assert linear.entry.error_without_rotation is not None
        ratios.append(linear.entry.error_without_rotation / expected)
        assert linear.entry.error != linear.entry.error_without_rotation
    # Roundings that fall otherwise lead the solver another way: by chance, and never far.
    assert np.abs(np.array(ratios) - 1).max() < 0.06
    assert np.median(np.abs(np.array(ratios) - 1)) < 0.02


def _onto_stream(case: Case, linear: Linear) -> bool:
    return any(
        u.node == linear.node for r in case.done.plan.rotations if r.space.kind == "R1" for u in r.space.producers
    )


def _outputs(case: Case, linear: Linear, inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What the rotated weight makes of the rotated inputs, its outputs turned back, plus what the shift adds."""
    outputs = linear.inputs @ linear.exact
    for rotation in reversed(case.done.plan.rotations):
        for use in rotation.space.producers:
            if use.node == linear.node and use.role == "weight":
                matrix = build_matrix(rotation.matrix).dense()
                for group in use.groups:
                    outputs[:, decode_runs(group)] = outputs[:, decode_runs(group)] @ matrix.T
    offset: np.ndarray = (inputs @ weight - outputs)[:1]
    folded = [c.use.node for f in case.done.plan.gain_folds if f.shift is not None for c in f.consumers]
    return outputs + (offset if linear.node in folded else 0)


def test_planted_outliers_need_rotation(tmp_path: Path) -> None:
    case = _case("llama", tmp_path, planted=True, group="channel")
    down = [q for q in case.done.report.quantized if "down_proj" in q.tensor or "down_proj" in q.node]
    assert len(down) == 2
    for entry in down:
        assert entry.error_without_rotation is not None
        assert entry.error < 0.7 * entry.error_without_rotation


def test_weights_tables_and_heads_without_calibration(tmp_path: Path) -> None:
    """Ratios of norms of the weights, of the rotated tensor and of the source's; a shared table has one entry."""
    case = _case("llama_tied", tmp_path, solver="rtn", embedding="int4", head="int4")
    source = value_map(case.source)
    for entry in case.done.report.quantized:
        weight = np.asarray(read_constant(source[entry.tensor]), dtype=np.float32)
        body = "proj" in entry.node
        rows = weight.T if body or weight.shape[0] == 48 else weight  # a table is [V, D], a head may be [D, V]
        tensor = quantize_rtn(rows, GRID) if body else quantize_clip(rows, GRID)
        assert entry.error_without_rotation == pytest.approx(tensor.error, rel=1e-6)
        assert entry.error > 0 and entry.error != entry.error_without_rotation
    for linear in _linears(case):
        ratio = float(np.linalg.norm(linear.exact - linear.stored) / np.linalg.norm(linear.exact))
        assert linear.entry.error == pytest.approx(ratio, rel=1e-4)


def test_nothing_is_compared_where_nothing_is_rotated(tmp_path: Path) -> None:
    case = _case("llama", tmp_path, rotations=None)
    assert len(case.done.report.quantized) > 10
    assert all(q.error > 0 and q.error_without_rotation is None for q in case.done.report.quantized)


def test_a_linear_that_no_rotation_touches_has_one_error_twice(tmp_path: Path) -> None:
    case = _case("llama", tmp_path, only="R4")
    same = {q.tensor: q.error == q.error_without_rotation for q in case.done.report.quantized}
    assert len(same) > 10
    assert {tensor for tensor, equal in same.items() if not equal} == {t for t in same if "down_proj" in t}


def _edits(size: int, rng: np.random.Generator) -> tuple[Scale, Rotate, Rotate]:
    gain = rng.standard_normal(size)
    gain[[0, 3]] = 0, 1e-30
    blocks = tuple(((start, 1, 4),) for start in range(0, size, 4))
    return (
        Scale(0, tuple(gain.tolist())),
        Rotate(0, blocks, MatrixRef("hadamard", 4, seed=3)),
        Rotate(0, (((0, 1, size),),), MatrixRef("hadamard", size, seed=None)),
    )


def test_the_moment_of_the_source_without_a_division() -> None:
    """Gains of nearly nothing, two rotations one behind the other (Paley's matrix is not symmetric), and a shift."""
    rng, size = np.random.default_rng(0), 24
    edits, shift = _edits(size, rng), rng.standard_normal(size)
    basis = np.eye(size)
    for edit in edits:
        basis = edit.apply(basis)
    inputs = rng.standard_normal((50, size)).astype(np.float32)
    moment = SecondMoment(size)
    moment.add(inputs)
    wanted = inputs.astype(np.float64) @ basis + shift
    weight = SourceWeight(np.zeros((1, size)), edits)
    found = source_moment(moment, weight, shift)
    assert np.abs(found - wanted.T @ wanted).max() < 1e-5 * np.abs(found).max()
    swapped = source_moment(moment, SourceWeight(np.zeros((1, size)), edits[::-1]), shift)
    assert np.abs(swapped - wanted.T @ wanted).max() > 1e-2 * np.abs(found).max()
    exact = SecondMoment(size)
    exact.matrix, exact.total, exact.tokens = inputs.T.astype(np.float64) @ inputs, inputs.sum(0, dtype=np.float64), 50
    found = source_moment(exact, weight, None)
    wanted -= shift
    assert np.abs(found - wanted.T @ wanted).max() < 1e-12 * np.abs(found).max()


def test_an_untouched_weight_is_not_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((8, 16)).astype(np.float32)
    value = ir.Value(name="w", const_value=ir.tensor(weight, name="w"))
    linear = LinearRef("y", "Gemm", "w", 1, "x", 16, 8, "NK")
    moment = SecondMoment(16)
    moment.add(rng.standard_normal((40, 16)))
    tensors = gptq_many([weight], moment.matrix, GRID)
    monkeypatch.setattr("graphrot.quant.unrotated.gptq_many", None)
    assert gptq_errors([linear], {"w": value}, moment, tensors, GRID, {}) == [tensors[0].error]
