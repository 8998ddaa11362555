"""Models for CUDA are refused where a node would run on the CPU, in words that name it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.emit.cuda.check import check_cuda, without_kernel
from graphrot.emit.cuda.kernels import cuda_kernels
from graphrot.errors import InputRefused
from tests.half.graphs import graph


def refused(model: ir.Model) -> str:
    with pytest.raises(InputRefused) as found:
        check_cuda(model)
    assert found.value.exit_code == 3
    return str(found.value)


def test_a_node_without_a_kernel_is_named() -> None:
    text = refused(graph("(float16[n] x) => (float16[n] z) { y = Relu(x) z = Mish(y) }"))
    assert "Mish that makes 'z' (float16)" in text and "Relu" not in text
    assert cuda_kernels().version in text and "--provider cpu" in text
    many = " ".join(f"y{k} = BitwiseNot(x)" for k in range(6))
    text = refused(graph("(uint8[n] x) => (uint8[n] y0) { " + many + " }"))
    assert text.count("BitwiseNot that makes") == 4 and "and 2 more" in text


def test_types_decide() -> None:
    assert check_cuda(graph("(float[n] x) => (float[n] y) { y = Erf(x) }")) == 0
    assert check_cuda(graph("(float16[n] x) => (float16[n] y) { y = Cast<to=10>(x) }")) == 0
    assert "(double, " not in refused(graph("(string[n] x) => (string[n] y) { y = Identity(x) }"))


def test_sizes_are_left_to_the_cpu() -> None:
    """Arithmetic of shapes needs no kernel, whatever it is; with data in it, it does."""
    text = "(float16[n, m] x) => (float16[k] y) { s = Shape(x) t = ReduceProd<keepdims=1>(s) y = Reshape(x, t) }"
    assert check_cuda(graph(text)) == 1
    mixed = "(float16[n] x, int64[k] i) => (int64[k] y) { s = Shape(x) y = BitwiseXor(s, i) }"
    assert "BitwiseXor that makes 'y' (int64)" in refused(graph(mixed))


def test_weights_that_no_kernel_decodes_are_no_arithmetic_of_sizes() -> None:
    text = (
        "(float16[n, 8] x) => (float16[n, 4] y) { d = DequantizeLinear<axis=0, block_size=8>(w, s) y = MatMul(x, d) }"
    )
    model = graph(text, w=np.ones((8, 4), np.int8), s=np.ones((1, 4), np.float16))
    assert "DequantizeLinear that makes 'd' (the kernel takes no blocks of 8-bit numbers)" in refused(model)


@pytest.mark.parametrize(("count", "dtype"), [(101, np.float32), (100, np.float16)])
def test_a_lookup_by_sizes_is_no_arithmetic_of_sizes(count: int, dtype: type) -> None:
    """ONNX Runtime leaves it on the GPU where the table is large, or in 16 bits; so what follows needs a kernel."""
    text = "(float16[n, m] x) => (float[2] z) { s = Shape(x) y = Gather(w, s) f = Cast<to=1>(y) z = Mish(f) }"
    assert "Mish that makes 'z' (float)" in refused(graph(text, w=np.ones(count, dtype)))
    assert check_cuda(graph(text, w=np.ones(100, np.float32))) == 3


def test_constants_are_computed_when_a_model_is_loaded() -> None:
    text = "(uint8[2] x) => (uint8[2] y) { c = BitwiseNot(w) y = Add(x, c) }"
    model = graph(text, w=np.array([1, 2], np.uint8))
    sizes, missing = without_kernel(model, cuda_kernels())
    assert sizes == 0 and all("BitwiseNot" not in words for words in missing)


def test_subgraphs_are_looked_into() -> None:
    text = """(bool b, float16[n] x) => (float16[n] y) {
        y = If (b) <then_branch = t () => (float16[n] p) { p = Relu(x) },
                    else_branch = e () => (float16[n] q) { q = Mish(x) }>
    }"""
    assert "Mish that makes 'q'" in refused(graph(text))


BLOCKS = "(int8[n, 8] x, float[n, 1] s) => (float[n, 8] y) { y = DequantizeLinear<axis=1, block_size=8>(x, s) }"
ROUNDS = """(float[n, 8] x, float[n, 1] s) => (int8[n, 8] y)
    { y = QuantizeLinear<axis=1, block_size=8, output_dtype=3>(x, s) }"""
PACKED = """(float16[n, 256] x, uint8[16, 1, 128] b, float16[16, 1] s) => (float16[n, 16] y)
    { y = com.microsoft.MatMulNBits<K=256, N=16, bits=4, block_size=256>(x, b, s) }"""
BIASED = """(float16[b, s, 64] q, float16[b, s, 64] k, float16[b, h, p, 16] c, int32[b] l, int32 t,
    float16[b, h, s, t2] m) => (float16[b, s, 64] y, float16[b, h, t3, 16] d, float16[b, h, t3, 16] e)
    { y, d, e = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=4>(q, k, k, c, c, l, t, "", "", "", m) }"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BLOCKS, "the kernel takes no blocks of 8-bit numbers"),
        (ROUNDS, "the kernel takes no blocks of 8-bit numbers"),
        (PACKED, "its blocks are of 256 weights"),
        (BIASED, "the kernel takes no attention_bias"),
    ],
)
def test_what_kernels_refuse_when_they_run(text: str, words: str) -> None:
    assert words in refused(graph(text))
