"""Which values become half, which nodes stay float32, and that the casts fit together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.emit import half_states
from graphrot.emit.half import narrow
from graphrot.errors import InputRefused
from graphrot.graph import WeightStore
from graphrot.model.floats import float_values
from graphrot.model.widen import widen
from tests.analysis.fused import Attention, Rotary, fused_decoder
from tests.half.graphs import BF16, F16, F32, HALVES, graph, made_by, narrowed, run, run_literally, types_of

RMS = """(float[t, 64] x) => (float[t, 64] y) {
    two = Constant<value_float = 2.0>()
    square = Pow(x, two)
    axes = Constant<value_ints = [-1]>()
    mean = ReduceMean(square, axes)
    least = Constant<value_float = 1e-6>()
    shifted = Add(mean, least)
    root = Sqrt(shifted)
    inverse = Reciprocal(root)
    plain = Mul(x, inverse)
    y = Mul(plain, gain)
}"""

ATTEND = """(float[b, t, 16] q, float[b, s, 16] k, float[b, s, 16] v, int64[b, s] mask) => (float[b, t, 16] y) {
    turned = Transpose<perm = [0, 2, 1]>(k)
    products = MatMul(q, turned)
    factor = Constant<value_float = 0.25>()
    scores = Mul(products, factor)
    keep = Cast<to = 1>(mask)
    one = Constant<value_float = 1.0>()
    drop = Sub(one, keep)
    lowest = Constant<value_float = -3.4028234663852886e38>()
    wide = Mul(drop, lowest)
    axes = Constant<value_ints = [1]>()
    bias = Unsqueeze(wide, axes)
    masked = Add(scores, bias)
    weights = Softmax<axis = -1>(masked)
    y = MatMul(weights, v)
}"""


def rms_feeds(rng: np.random.Generator, size: float = 1.0) -> dict[str, np.ndarray]:
    return {"x": (size * rng.standard_normal((5, 64))).astype(np.float32)}


def expected_rms(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gain


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.name)
def test_a_norm_runs_in_float32_between_half_values(half: ir.DataType, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    gain = (1 + 0.3 * rng.standard_normal(64)).astype(np.float32)
    feeds = rms_feeds(rng)
    model = narrowed(graph(RMS, gain=gain), half, tmp_path, "x", "y")
    types = types_of(model)
    assert types["x"] == types["y"] == types["gain"] == half
    assert all(types[name] == F32 for name in ("square", "mean", "shifted", "root", "inverse", "least"))
    rounded = feeds["x"].astype(half.numpy()).astype(np.float64)
    found = run(model, tmp_path / "run", feeds)[0] if half == F16 else None
    if found is not None:
        np.testing.assert_allclose(found, expected_rms(rounded, gain), rtol=3 * 2.0**-11, atol=1e-6)


def test_a_mask_of_the_lowest_float_makes_no_nan(tmp_path: Path) -> None:
    """Not even in a row that is masked as a whole, and not where every operator rounds to float16."""
    rng = np.random.default_rng(1)
    feeds = {name: rng.standard_normal((2, 6, 16)).astype(np.float16) for name in "qkv"}
    feeds["mask"] = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    model = narrowed(graph(ATTEND), F16, tmp_path, "q", "k", "v", "y")
    types = types_of(model)
    assert types["products"] == types["scores"] == F16
    assert types["bias"] == types["masked"] == types["weights"] == F32
    literal = run_literally(model, tmp_path, feeds)[0]
    assert literal.dtype == np.float16 and np.isfinite(literal).all()
    wide = {name: array.astype(np.float32) for name, array in feeds.items() if name != "mask"}
    source = run(graph(ATTEND), tmp_path / "source", {**wide, "mask": feeds["mask"]})[0]
    np.testing.assert_allclose(literal[0], source[0], atol=4e-3)
    np.testing.assert_allclose(run(model, tmp_path / "half", feeds)[0][0], source[0], atol=4e-3)


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.name)
def test_a_mask_that_a_half_operator_reads_is_limited(half: ir.DataType, tmp_path: Path) -> None:
    text = """(float[b, h, t, 16] q, float[b, h, s, 16] k, float[b, h, s, 16] v, bool[t, s] keep)
        => (float[b, h, t, 16] y) {
        zero = Constant<value_float = 0.0>()
        lowest = Constant<value_float = -3.4028234663852886e38>()
        mask = Where(keep, zero, lowest)
        y = Attention(q, k, v, mask)
    }"""
    model = narrowed(graph(text, opset=23), half, tmp_path, "q", "k", "v", "y")
    assert len(made_by(model, "Clip")) == (1 if half == F16 else 0)  # bfloat16 attention runs in float32
    rng = np.random.default_rng(2)
    feeds = {name: rng.standard_normal((1, 2, 4, 16)).astype(np.float16) for name in "qkv"}
    feeds["keep"] = np.tril(np.ones((4, 4), bool))
    if half == F16:
        assert np.isfinite(run(model, tmp_path / "run", feeds)[0]).all()
        (attention,) = made_by(model, "Attention")
        assert attention.attributes["softmax_precision"].as_int() == int(F32)


def test_tiny_and_huge_single_constants_stay_float32(tmp_path: Path) -> None:
    text = """(float[n, 4] x) => (float[n, 4] y) {
        least = Constant<value_float = 1e-12>()
        floor = Max(x, least)
        half = Constant<value_float = 0.5>()
        y = Mul(floor, half)
    }"""
    model = narrowed(graph(text), F16, tmp_path, "x", "y")
    types = types_of(model)
    assert types["least"] == types["floor"] == F32 and types["half"] == F16
    big = graph(text.replace("1e-12", "1e6").replace("Max", "Min"))
    assert types_of(narrowed(big, F16, tmp_path, "x", "y"))["least"] == F32
    assert types_of(narrowed(graph(text), BF16, tmp_path, "x", "y"))["floor"] == F32


def test_a_weight_that_is_too_large_is_refused(tmp_path: Path) -> None:
    weight = np.ones((4, 4), np.float32)
    weight[1, 2] = 70000
    text = "(float[n, 4] x) => (float[n, 4] y) { y = MatMul(x, weight) }"
    with pytest.raises(InputRefused, match="too large for float16") as refused:
        narrowed(graph(text, weight=weight), F16, tmp_path, "x", "y")
    assert "'weight'" in str(refused.value) and "bfloat16" in str(refused.value)
    narrowed(graph(text, weight=weight), BF16, tmp_path, "x", "y")


def packed(scale: float) -> ir.Model:
    text = """(float[n, 32] x) => (float[n, 8] y) {
        p = com.microsoft.MatMulNBits<K = 32, N = 8, bits = 4, block_size = 32>(x, codes, scales)
        y = Identity(p)
    }"""
    codes = np.random.default_rng(0).integers(0, 256, (8, 1, 16)).astype(np.uint8)
    return graph(text, codes=codes, scales=np.full((8, 1), scale, np.float32))


def test_scales_that_would_lose_digits_keep_their_matmul_in_float32(tmp_path: Path) -> None:
    plain, tiny = packed(0.01), packed(3e-6)
    assert narrowed(plain, F16, tmp_path, "x", "y").graph.initializers["scales"].dtype == F16
    assert narrowed(tiny, F16, tmp_path, "x", "y").graph.initializers["scales"].dtype == F32
    feeds = {"x": 30 * np.random.default_rng(1).standard_normal((3, 32)).astype(np.float16)}
    exact = run(packed(3e-6), tmp_path / "exact", feeds)[0]
    np.testing.assert_allclose(run(tiny, tmp_path / "run", feeds)[0], exact, rtol=1e-3, atol=3e-5)


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.name)
def test_a_subgraph_stays_float32(half: ir.DataType, tmp_path: Path) -> None:
    text = """(float[n, 4] x, bool c) => (float[n, 4] y) {
        h = MatMul(x, weight)
        z = If(c) <
            then_branch = t () => (float[n, 4] a) { a = Add(h, h) },
            else_branch = e () => (float[n, 4] b) { b = Neg(h) }
        >
        y = MatMul(z, weight)
    }"""
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((4, 4)).astype(np.float32)
    feeds = {"x": rng.standard_normal((3, 4)).astype(np.float32), "c": np.array(True)}
    source = run(graph(text, weight=weight), tmp_path / "source", feeds)[0]
    model = narrowed(graph(text, weight=weight), half, tmp_path)
    assert model.graph.initializers["weight"].dtype == half
    found = run(model, tmp_path / "run", feeds)[0]
    np.testing.assert_allclose(found, source, atol=20 * np.abs(source).max() * 2.0 ** -(11 if half == F16 else 8))


def test_a_subgraph_that_only_captures_is_not_constant(tmp_path: Path) -> None:
    text = """(float[n, 4] x) => (float[n, 4] y) {
        z = If(always) <then_branch = t () => (float[n, 4] a) { a = Neg(x) },
                        else_branch = e () => (float[n, 4] b) { b = Abs(x) }>
        y = MatMul(z, weight)
    }"""
    weight = np.eye(4, dtype=np.float32)
    model = narrowed(graph(text, weight=weight, always=np.array(True)), F16, tmp_path, "x", "y")
    assert types_of(model)["z"] == F32
    found = run(model, tmp_path / "run", {"x": np.full((2, 4), 0.5)})[0]
    assert found.dtype == np.float16 and (found == -0.5).all()


def test_scales_of_a_quantized_cache_stay_float32(tmp_path: Path) -> None:
    """GroupQueryAttention defines them so, whatever its other types are."""
    text = """(float[1, 1, 32] q, float[1, 1, 16] k, float[1, 1, 16] v, int8[1, 1, p, 16] pk, int8[1, 1, p, 16] pv,
               int32[1] lengths, int32 total) => (float[1, 1, 32] y, int8[1, 1, t, 16] nk, int8[1, 1, t, 16] nv) {
        y, nk, nv = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 1>
            (q, k, v, pk, pv, lengths, total, "", "", "", "", "", ks, vs)
    }"""
    one = np.ones(1, np.float32)
    model = narrowed(graph(text, ks=one, vs=one), F16, tmp_path, "q", "k", "v", "y")
    (attention,) = made_by(model, "GroupQueryAttention")
    types = [None if value is None else value.dtype for value in attention.inputs]
    assert types[:3] == [F16] * 3 and types[12:] == [F32] * 2
    assert model.graph.outputs[0].dtype == F16 and model.graph.outputs[1].dtype == ir.DataType.INT8


FUSED: list[tuple[Attention, Rotary, bool]] = [
    ("standard", "node", True), ("grouped", "inside", False), ("packed", "inside", True), ("multi", "none", False),
]  # fmt: skip


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.name)
@pytest.mark.parametrize(("attention", "rotary", "layer"), FUSED, ids=lambda value: str(value))
def test_fused_operators(attention: Attention, rotary: Rotary, layer: bool, half: ir.DataType, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    feeds: dict[str, np.ndarray] = {"ids": rng.integers(0, 37, (1, 5)), "mask": np.ones((1, 9), np.int64)}
    source = fused_decoder(attention, rotary=rotary, layer=layer)
    for value in source.graph.inputs[2:]:
        assert value.shape is not None
        feeds[str(value.name)] = rng.standard_normal((1, value.shape[1], 4, value.shape[3])).astype(np.float16)
    known = {str(value.name) for value in source.graph.inputs if value.is_graph_input()}
    feeds = {name: array for name, array in feeds.items() if name in known}
    expected = run(source, tmp_path / "source", feeds)
    caches = [str(v.name) for v in source.graph.inputs if v.dtype == F32]
    model = narrowed(fused_decoder(attention, rotary=rotary, layer=layer), half, tmp_path, *caches)
    assert {model.graph.initializers[name].dtype for name in model.graph.initializers} >= {half}
    found = run(model, tmp_path / "half", feeds)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() < 8 * np.abs(theirs).max() * 2.0 ** -(11 if half == F16 else 8)


def test_logits_that_stay_float32_are_not_rounded_on_the_way(tmp_path: Path) -> None:
    text = "(float[n, 8] x) => (float[n, 16] logits) { h = Sigmoid(x) logits = MatMul(h, head) }"
    head = np.random.default_rng(6).standard_normal((8, 16)).astype(np.float32)
    model = narrowed(graph(text, head=head), F16, tmp_path, "x")
    assert types_of(model)["logits"] == F32 and model.graph.initializers["head"].dtype == F16
    assert model.graph.outputs[0].producer().op_type == "MatMul"


def test_unknown_operators_run_in_float32(tmp_path: Path) -> None:
    text = "(float[n, 8] x) => (float[n, 8] y) { h = Sigmoid(x) y = com.microsoft.Nonsense(h) }"
    types = narrowed(graph(text), F16, tmp_path, "x", "y")
    (odd,) = made_by(types, "Nonsense")
    assert odd.inputs[0] is not None and odd.inputs[0].producer().op_type == "Cast"


def test_the_state_of_a_sum_follows_its_readers(tmp_path: Path) -> None:
    """Half plus float32: half again, unless only float32 operators read it."""
    text = """(float[n, 8] x, int64[n, 8] p) => (float[n, 8] y, float[n, 8] z) {
        q = Cast<to = 1>(p)
        sum = Add(x, q)
        y = Exp(sum)
        kept = Sub(x, q)
        z = Relu(kept)
    }"""
    states = half_states.assign(graph(text), F16, dict.fromkeys("xyz", F16))
    found = {value.name: state for value, state in states.state.items()}
    assert found["q"] == "whole" and found["sum"] == "single" and found["kept"] == "half"
    assert narrow(graph(text), F16, dict.fromkeys("xyz", F16), store=WeightStore(tmp_path)) is None


def test_bfloat16_matmuls_read_rounded_numbers(tmp_path: Path) -> None:
    """Also where the product before only moves on in float32; what is rounded already is not rounded again."""
    text = """(float[n, 4] x, float[1, 4] past) => (float[m, 4] y, float[n, 4] z) {
        h = MatMul(x, weight)
        r = Reshape(h, shape)
        y = MatMul(r, weight)
        wide = Expand(past, size)
        z = MatMul(wide, weight)
    }"""
    weight = np.random.default_rng(7).standard_normal((4, 4)).astype(np.float32)
    shapes = {"shape": np.array([-1, 4]), "size": np.array([3, 4])}
    model = narrowed(graph(text, weight=weight, **shapes), BF16, tmp_path, "x", "past")
    assert [node.op_type for node in model.graph].count("Expand") == 1
    first, second, third = (node.inputs[0] for node in made_by(model, "MatMul"))
    assert first is not None and second is not None and third is not None
    back = second.producer()
    assert back is not None and back.op_type == "Cast" and back.inputs[0] is not None
    assert types_of(model)[str(back.inputs[0].name)] == BF16
    assert third.producer().op_type == "Expand" and types_of(model)["wide"] == F32


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    def content(folder: Path) -> bytes:
        model = narrowed(fused_decoder("grouped", rotary="node"), BF16, folder, "past_k", "present_k")
        return ir.to_proto(model).SerializeToString(deterministic=True) + (folder / "weights.bin").read_bytes()

    assert content(tmp_path / "a").replace(b"/a", b"/b") == content(tmp_path / "b").replace(b"/a", b"/b")


def test_narrowing_again_finds_free_names(tmp_path: Path) -> None:
    text = "(float[n, 8] x) => (float[n, 8] y) { h = Sigmoid(x) y = Exp(h) }"
    model = narrowed(graph(text), BF16, tmp_path, "x", "y")
    names = [node.name for node in model.graph if node.name]
    assert len(set(names)) == len(names)
    node = ir.node("Neg", [model.graph.outputs[0]], name="again")
    assert node.name == "again"


FLAGS = """(float[n, 8] x) => (float[n, 8] y) {
    h = MatMul(x, weight)
    infinite = IsInf(h)
    none = IsNaN(h)
    small = Less(h, lowest)
    bad = Or(infinite, none)
    worse = Or(bad, small)
    good = Not(worse)
    best = ArgMax<axis = -1>(h)
    sizes = Shape(h)
    places = NonZero(h)
    y = Where(good, h, lowest)
}"""


def test_what_comparisons_and_counts_make_is_no_float(tmp_path: Path) -> None:
    model = graph(FLAGS, weight=np.eye(8, dtype=np.float32), lowest=np.array(-60000, np.float32))
    for node in model.graph:
        for output in node.outputs:
            output.type = output.type if output.is_graph_output() else None
    floats = {value.name for value in float_values(model)}
    assert floats == {"x", "weight", "lowest", "h", "y"}
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float16)
    narrowed(model, F16, tmp_path / "store", "x", "y")
    assert np.array_equal(run(model, tmp_path / "run", {"x": x})[0], x)


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.name)
def test_the_default_of_an_optional_input_has_its_type(half: ir.DataType, tmp_path: Path) -> None:
    kind = {F16: "float16", BF16: "bfloat16"}[half]
    text = f"({kind}[n, 8] x, {kind}[1] scale) => ({kind}[n, 8] y) {{ h = MatMul(x, weight) y = Mul(h, scale) }}"
    source = graph(text, weight=np.eye(8, dtype=half.numpy()), scale=np.array([2], half.numpy()))
    assert source.graph.initializers["scale"].is_graph_input()
    model, _ = widen(source, tmp_path / "wide")
    assert types_of(model)["scale"] == F32
    narrowed(model, half, tmp_path / "store", "x", "scale", "y")
    content = model.graph.initializers["scale"].const_value
    assert content is not None and content.dtype == half
    assert types_of(model)["scale"] == half
