"""A tiny graph with every kind of linear the quantizing passes take, and its float64 reference.

``ids -> table -> a, g (share an input, K = 48) -> a * g -> Gemm d (transB, bias, alpha, beta, K = 100)
-> tied or own head``. No two sizes are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from graphrot.analysis.types import EmbeddingRef, LinearRef
from graphrot.plan.types import RotationPlan
from graphrot.quant.grid import QuantizedTensor, WeightGrid
from graphrot.quant.rtn import quantize_rtn

PLAN = RotationPlan("", {}, (), (), ())
ALPHA, BETA = 0.5, 2.0
EXACT = ("session.qdq_matmulnbits_accuracy_level", "0")

Rounding = Callable[[str, np.ndarray], np.ndarray]


def unrounded(_node: str, x: np.ndarray) -> np.ndarray:
    return x


@dataclass
class Example:
    """The graph, its references and its weights; sizes may be overridden."""

    vocab: int = 50
    dim: int = 48
    ffn: int = 100
    dtype: type = np.float32
    seed: int = 0
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        shapes = {
            "table": (self.vocab, self.dim),
            "w_a": (self.dim, self.ffn),
            "w_g": (self.dim, self.ffn),
            "w_d": (self.dim, self.ffn),
            "bias": (self.dim,),
        }
        for name, shape in shapes.items():
            self.weights[name] = rng.standard_normal(shape).astype(self.dtype)

    @property
    def linears(self) -> list[LinearRef]:
        return [
            LinearRef("a", "MatMul", "w_a", 1, "x", self.dim, self.ffn, "KN"),
            LinearRef("g", "MatMul", "w_g", 1, "x", self.dim, self.ffn, "KN"),
            LinearRef("d", "Gemm", "w_d", 1, "flat", self.ffn, self.dim, "NK", "bias"),
        ]

    @property
    def embedding(self) -> EmbeddingRef:
        return EmbeddingRef("x", "table", 0, self.vocab, self.dim)

    @property
    def head(self) -> LinearRef:
        return LinearRef("logits", "MatMul", "head", 1, "hidden", self.dim, self.vocab, "KN", is_head=True)

    def model(self, *, opset: int = 21) -> ir.Model:
        """A fresh model; the head reads the transposed table."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        node = helper.make_node
        nodes = [
            node("Gather", ["table", "ids"], ["x"]),
            node("MatMul", ["x", "w_a"], ["a"]),
            node("MatMul", ["x", "w_g"], ["g"]),
            node("Mul", ["a", "g"], ["product"]),
            node("Reshape", ["product", "flat_shape"], ["flat"]),
            node("Gemm", ["flat", "w_d", "bias"], ["d"], transB=1, alpha=ALPHA, beta=BETA),
            node("Shape", ["x"], ["x_shape"]),
            node("Reshape", ["d", "x_shape"], ["hidden"]),
            node("Transpose", ["table"], ["head"], perm=[1, 0]),
            node("MatMul", ["hidden", "head"], ["logits"]),
        ]
        constants = [numpy_helper.from_array(array, name) for name, array in self.weights.items()]
        constants.append(numpy_helper.from_array(np.array([-1, self.ffn], np.int64), "flat_shape"))
        graph = helper.make_graph(
            nodes,
            "example",
            [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "tokens"])],
            [helper.make_tensor_value_info("logits", kind, ["batch", "tokens", self.vocab])],
            constants,
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        onnx.checker.check_model(proto, full_check=True)
        return ir.from_proto(proto)

    def quantized(self, grid: WeightGrid) -> dict[str, QuantizedTensor]:
        """The three linears, rounded to nearest."""
        found = {}
        for linear in self.linears:
            weight = self.weights[linear.weight]
            found[linear.node] = quantize_rtn(weight if linear.layout == "NK" else weight.T, grid)
        return found

    def reference(
        self,
        ids: np.ndarray,
        tensors: Mapping[str, QuantizedTensor] | None = None,
        *,
        table: QuantizedTensor | None = None,
        head: QuantizedTensor | None = None,
        rounding: Rounding = unrounded,
    ) -> np.ndarray:
        """The graph in float64 with decoded weights; ``rounding`` acts on each linear's input."""

        def weight(node: str, name: str, transposed: bool) -> np.ndarray:
            if tensors is not None and node in tensors:
                return tensors[node].dequantize().astype(np.float64).T
            content = self.weights[name].astype(np.float64)
            return content.T if transposed else content

        float_table = self.weights["table"].astype(np.float64)
        rows = float_table if table is None else table.dequantize().astype(np.float64)
        top = float_table if head is None else head.dequantize().astype(np.float64)
        x = rows[ids]
        product = (rounding("a", x) @ weight("a", "w_a", False)) * (rounding("g", x) @ weight("g", "w_g", False))
        flat = product.reshape(-1, self.ffn)
        d = ALPHA * (rounding("d", flat) @ weight("d", "w_d", True)) + BETA * self.weights["bias"].astype(np.float64)
        hidden = d.reshape(x.shape)
        return rounding("logits", hidden) @ top.T


def ids(example: Example, *shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, example.vocab, shape or (2, 5))


def check(model: ir.Model) -> onnx.ModelProto:
    """The model as one proto that passed the full checker; its weights are loaded."""
    proto = ir.to_proto(ir.external_data.load_to_model(model))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run_ort(
    proto: onnx.ModelProto, tokens: np.ndarray, *, level: int = 99, exact: bool = True, output: str | None = None
) -> np.ndarray:
    """One run on one thread at an optimization level (0, 1, 2, 99)."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel(level)
    if exact:
        options.add_session_config_entry(*EXACT)
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None if output is None else [output], {"ids": tokens})[0]
    return result


def describe(model: ir.Model, *outputs: str) -> list[str]:
    """The nodes that make ``outputs``, one line each: ``output = Op<attribute=value>(inputs)``."""
    lines = []
    for node in model.graph:
        if node.outputs[0].name not in outputs:
            continue
        attributes = ", ".join(f"{a.name}={a.value}" for a in sorted(node.attributes.values(), key=lambda a: a.name))
        operands = ", ".join("" if value is None else str(value.name) for value in node.inputs)
        lines.append(f"{node.outputs[0].name} = {node.op_type}{f'<{attributes}>' if attributes else ''}({operands})")
    return lines


def difference(result: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference over the largest reference."""
    return float(np.abs(result.astype(np.float64) - reference).max() / np.abs(reference).max())
