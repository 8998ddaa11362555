"""Static scales of a cache: what they are taken from, and that they are the best ones."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from graphrot.analysis.types import AttentionSite, OperandRef
from graphrot.errors import InputRefused, UsageError
from graphrot.quant.cache import SHRINKS, SiteScales, cache_scales

HEADS, WIDTH, WORDS, DIM = 2, 8, 30, 8
QMAX = {4: 7, 8: 127}

_LAYER = """
   query{n} = MatMul(x{n}, wq{n})
   key{n} = MatMul(x{n}, wk{n})
   value{n} = MatMul(x{n}, wv{n})
   attended{n}, present_{n}_key, present_{n}_value = com.microsoft.GroupQueryAttention
       <num_heads = 4, kv_num_heads = 2>(query{n}, key{n}, value{n}, past_{n}_key, past_{n}_value, used, total)
   back{n} = MatMul(attended{n}, wo{n})
   x{m} = Add(x{n}, back{n})
"""


def decoder() -> onnx.ModelProto:
    """Two layers of attention; one channel of the keys is far larger than the others."""
    caches = [f"{{0}}_{layer}_{part}" for layer in (0, 1) for part in ("key", "value")]
    ends = [", ".join(f"float[1, 2, t, 8] {name.format(end)}" for name in caches) for end in ("past", "present")]
    text = f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    g (int64[1, s] ids, {ends[0]}) => (float[1, s, 8] x2, {ends[1]}) {{
      x0 = Gather(table, ids)
      size = Shape(ids)
      last = Slice(size, one, two)
      total = Cast<to = 6>(last)
      used = Sub(total, one32)
      {_LAYER.format(n=0, m=1)} {_LAYER.format(n=1, m=2)}
    }}"""
    made = parser.parse_model(text)
    rng = np.random.default_rng(0)
    shapes = {"q": (DIM, 32), "k": (DIM, 16), "v": (DIM, 16), "o": (32, DIM)}
    weights: dict[str, np.ndarray] = {
        f"w{kind}{layer}": rng.standard_normal(shape) for layer in (0, 1) for kind, shape in shapes.items()
    }
    weights["table"] = rng.standard_normal((WORDS, DIM))
    for layer in (0, 1):
        weights[f"wk{layer}"][:, 5] *= 40
    arrays = {name: array.astype(np.float32) for name, array in weights.items()}
    arrays |= {"one": np.array([1]), "two": np.array([2]), "one32": np.array([1], np.int32)}
    made.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return made


def feeds(*sizes: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    empty = np.zeros((1, HEADS, 0, WIDTH), np.float32)
    pasts = {f"past_{layer}_{part}": empty for layer in (0, 1) for part in ("key", "value")}
    return [{"ids": rng.integers(0, WORDS, (1, size)), **pasts} for size in sizes]


def sites() -> list[AttentionSite]:
    return [
        AttentionSite(
            node=f"attended{layer}",
            op="GroupQueryAttention",
            query=OperandRef(f"attended{layer}", 0),
            key=OperandRef(f"attended{layer}", 1),
            value=OperandRef(f"attended{layer}", 2),
            past_key=f"past_{layer}_key",
            past_value=f"past_{layer}_value",
            present_key=f"present_{layer}_key",
            present_value=f"present_{layer}_value",
            heads=4,
            kv_heads=HEADS,
            head_size=WIDTH,
            score_scale=0.5,
        )
        for layer in (0, 1)
    ]


def caches(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What runs of the whole model leave, ``[HEADS, tokens, WIDTH]``."""
    session = onnxruntime.InferenceSession(decoder().SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()][1:]
    runs = [session.run(names, batch) for batch in batches]
    return {name: np.concatenate([run[at][0] for run in runs], axis=1) for at, name in enumerate(names)}


def calibrated(batches: list[dict[str, np.ndarray]], **options: Any) -> dict[str, SiteScales]:
    return cache_scales(ir.from_proto(decoder()), sites(), batches, threads=1, **options)


def stored(x: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    return np.clip(np.rint(x / scale), -QMAX[bits] - 1, QMAX[bits]) * scale


@pytest.mark.parametrize("bits", [4, 8])
def test_ranges_reach_what_the_model_puts_into_its_cache(bits: Literal[4, 8]) -> None:
    batches = feeds(9, 5)
    seen = caches(batches)
    by_channel = calibrated(batches, bits=bits, per="channel", method="minmax")
    by_tensor = calibrated(batches, bits=bits, per="tensor", method="minmax")
    assert list(by_channel) == list(by_tensor) == ["attended0", "attended1"]
    for layer in (0, 1):
        for part in ("key", "value"):
            largest = np.abs(seen[f"present_{layer}_{part}"]).max(axis=1)
            site, whole = by_channel[f"attended{layer}"], by_tensor[f"attended{layer}"]
            assert getattr(site, part).dtype == np.float32
            np.testing.assert_allclose(getattr(site, part), largest / QMAX[bits], rtol=1e-5)
            np.testing.assert_allclose(getattr(whole, part), [largest.max() / QMAX[bits]], rtol=1e-5)


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("bits", [4, 8])
def test_no_other_tried_scale_has_a_smaller_error(bits: Literal[4, 8], per: Literal["tensor", "channel"]) -> None:
    batches = feeds(40, 40)
    seen = caches(batches)
    axes = (0, 1, 2) if per == "tensor" else (1,)
    best = calibrated(batches, bits=bits, per=per, method="mse")
    ranges = calibrated(batches, bits=bits, per=per, method="minmax")
    for layer in (0, 1):
        for part in ("key", "value"):
            x = seen[f"present_{layer}_{part}"].astype(np.float64)
            site, whole = best[f"attended{layer}"], ranges[f"attended{layer}"]
            first = getattr(whole, part)

            def error(scale: np.ndarray, x: np.ndarray = x) -> np.ndarray:
                """Squared errors where ``scale`` is used; its shape is ``[1]`` or ``[HEADS, WIDTH]``."""
                shaped = scale if per == "tensor" else scale[:, None]
                return np.square(x - stored(x, shaped, bits)).sum(axis=axes)

            chosen = error(getattr(site, part))
            for shrink in SHRINKS:
                assert (chosen <= error(first * np.float32(shrink)) * (1 + 1e-3)).all()
            relative = np.sqrt(chosen.sum() / np.square(x).sum())
            np.testing.assert_allclose(getattr(site, f"{part}_error"), relative, rtol=1e-3)
            assert getattr(site, f"{part}_error") <= getattr(whole, f"{part}_error")
        if bits == 4:
            assert best[f"attended{layer}"].key_error < 0.2


def test_a_large_channel_costs_the_others_their_digits_unless_it_has_its_own_scale() -> None:
    batches = feeds(40)
    whole, apart = (calibrated(batches, bits=4, per=per, method="minmax")["attended0"] for per in ("tensor", "channel"))
    x = caches(batches)["present_0_key"]
    small = np.delete(x.swapaxes(0, 1).reshape(len(x[0]), -1), 5, axis=1)
    assert (stored(small, whole.key, 4) == 0).mean() > 0.9
    scales = np.delete(apart.key.reshape(-1), 5)
    assert np.linalg.norm(stored(small, scales, 4) - small) < 0.2 * np.linalg.norm(small)


def test_the_model_is_only_read_and_runs_again_alike() -> None:
    model, batches = ir.from_proto(decoder()), feeds(6)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    steps: list[tuple[int, int]] = []
    first, second = (
        cache_scales(
            model, sites(), batches, bits=4, threads=1, progress=lambda step, done, of: steps.append((done, of))
        )
        for _ in range(2)
    )
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    assert len(batches[0]) == 5
    assert steps[:4] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for node in first:
        np.testing.assert_array_equal(first[node].key, second[node].key)
        np.testing.assert_array_equal(first[node].value, second[node].value)


def test_without_tokens_and_with_keys_that_are_not_finite() -> None:
    with pytest.raises(UsageError, match="at least one batch"):
        calibrated([], bits=4)
    broken = decoder()
    weight = next(each for each in broken.graph.initializer if each.name == "wk1")
    array = onnx.numpy_helper.to_array(weight).copy()
    array[0, 0] = np.inf
    weight.CopyFrom(onnx.numpy_helper.from_array(array, "wk1"))
    with pytest.raises(InputRefused, match="not finite") as caught:
        cache_scales(ir.from_proto(broken), sites(), feeds(5), bits=8, threads=1)
    assert caught.value.where == "output 'present_1_key'"
