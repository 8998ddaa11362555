"""The numpy reference of rounded activations, against the operators it stands for."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphrot.quant.activations import EPSILON, fake_quantize_blocks, fake_quantize_tokens, quantize_tokens


def tokens(seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_t(3, (2, 5, 96)).astype(np.float32)
    x[0, 0] = 0
    x[0, 1, 3] = 1000
    return x


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_equal_those_of_quantizelinear(bits: int) -> None:
    dtype = {4: TensorProto.INT4, 8: TensorProto.INT8}[bits]
    x = tokens()
    codes, scales = quantize_tokens(x, bits)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], axis=-1, block_size=96, output_dtype=dtype),
        helper.make_node("DequantizeLinear", ["q", "one"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * 3) for n in "xs"],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 3)],
        [numpy_helper.from_array(np.ones((), np.float32), "one")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"x": x, "s": scales})[0], codes)


@pytest.mark.parametrize(("bits", "qmax"), [(4, 7), (8, 127)])
def test_a_token_has_one_scale_made_from_its_largest_magnitude(bits: int, qmax: int) -> None:
    x = tokens()
    codes, scales = quantize_tokens(x, bits)
    np.testing.assert_allclose(scales[..., 0], np.maximum(np.abs(x).max(-1), EPSILON) / qmax, rtol=1e-6)
    assert np.abs(codes).max() == qmax
    restored = fake_quantize_tokens(x, bits)
    np.testing.assert_array_equal(restored, codes * scales)
    assert np.all(np.abs(restored - x) <= scales * 0.5001)
    assert np.all(restored[0, 0] == 0)


def test_halves_go_to_even() -> None:
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5]], np.float32)
    np.testing.assert_array_equal(quantize_tokens(x, 8)[0], [[127, 0, 2, 2, 0, -2]])


def test_tokens_do_not_see_each_other_and_the_input_stays() -> None:
    x = tokens()
    kept = x.copy()
    whole = fake_quantize_tokens(x, 4)
    np.testing.assert_array_equal(whole[1, 2], fake_quantize_tokens(x[1, 2], 4))
    np.testing.assert_array_equal(x, kept)


def test_half_precision_comes_back_as_half_precision() -> None:
    x = tokens().astype(np.float16)
    assert fake_quantize_tokens(x, 8).dtype == np.float16
    assert np.float16(EPSILON / 127) > 0


def test_blocks_have_their_own_scales() -> None:
    x = tokens()
    blocked, whole = fake_quantize_blocks(x, 32), fake_quantize_tokens(x, 8)
    np.testing.assert_array_equal(blocked[..., :32], fake_quantize_tokens(x[..., :32], 8))
    np.testing.assert_array_equal(fake_quantize_blocks(x, 64)[..., 64:], fake_quantize_tokens(x[..., 64:], 8))
    assert np.linalg.norm(blocked - x) < 0.8 * np.linalg.norm(whole - x)
