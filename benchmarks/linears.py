"""Models of many equal linears with weights of their own: RotatedMatMul, and what ONNX Runtime has instead.

Every node has an input and an output of its own, so that nothing is shared, and the weights stream through the caches
one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphrot.ops.hadamard import transform_attributes
from graphrot.ops.rotated_matmul import PackedWeight, ensure_rotated_matmul, rotated_matmul_node
from graphrot.passes.quantize_nodes import channel_block
from graphrot.rotation.hadamard import factor_matrix, sylvester
from graphrot.rotation.orthogonal import choose_matrix, reference_split

MICROSOFT = "com.microsoft"
PEER_BLOCK = 128
"""Weights that share a scale in ONNX Runtime's own product."""


@dataclass(frozen=True)
class Linears:
    """``copies`` linears ``[K, N]`` with random weights; the same numbers for everyone who asks for them.

    With ``half`` inputs, outputs and scales are float16, and ONNX Runtime's own product rounds no activations.
    """

    in_features: int
    out_features: int
    copies: int
    half: bool = False

    def names(self) -> list[tuple[str, str]]:
        """Names of the inputs and outputs, in pairs."""
        return [(f"x{index}", f"y{index}") for index in range(self.copies)]

    def codes(self, index: int, block: int) -> np.ndarray:
        """4-bit codes in MatMulNBits storage. The last block's rest is zero, as a code of zero."""
        rng = np.random.default_rng(index)
        codes = rng.integers(0, 16, (self.out_features, self.in_features), dtype=np.uint8)
        blocks = -(-self.in_features // block)
        padded = np.full((self.out_features, blocks * block), 8, np.uint8)
        padded[:, : self.in_features] = codes
        pairs = padded.reshape(self.out_features, blocks, block // 2, 2)
        return np.ascontiguousarray(pairs[..., 0] | pairs[..., 1] << 4)

    def scales(self, index: int, blocks: int | None) -> np.ndarray:
        """Scales per block ``[N, blocks]`` that are equal in a channel, or of channels ``[N]``."""
        rng = np.random.default_rng(1000 + index)
        scales = (rng.uniform(0.5, 1.5, self.out_features) / 8 / np.sqrt(self.in_features)).astype(self._dtype.numpy())
        return scales if blocks is None else np.repeat(scales[:, None], blocks, axis=1)

    def rotated(self, group: int, *, rotate: bool = True) -> ir.Model:
        """One RotatedMatMul each; ``group`` 0: a scale per channel."""
        block = group or channel_block(self.in_features)
        blocks = -(-self.in_features // block)
        rotation = list(transform_attributes(self._matrix())) if rotate else None

        def linear(graph: _Graph, x: ir.Value, index: int, y: str) -> ir.Value:
            weight = PackedWeight(
                graph.constant(f"b{index}", self.codes(index, block)),
                graph.constant(f"s{index}", self.scales(index, blocks if group else None)),
                None, self.in_features, self.out_features, 4, group, block,
            )  # fmt: skip
            return graph.add(rotated_matmul_node(x, weight, y, rotation=rotation))

        model = self._model(linear)
        ensure_rotated_matmul(model)
        return model

    def runtimes_own(self, *, rotate: bool = True) -> ir.Model:
        """A Hadamard transform in standard operators, then MatMulNBits with 8-bit activations.

        The transform takes the two factors of least work, as two products; their other forms were not faster.
        """
        left, right = self._factors()

        def linear(graph: _Graph, x: ir.Value, index: int, y: str) -> ir.Value:
            if rotate:
                tall = graph.op("Reshape", [x, graph.shared("tall", np.array([-1, len(left), len(right)]))])
                by_right = graph.op("MatMul", [tall, graph.shared("right", right)])
                by_left = graph.op("MatMul", [graph.shared("left", left), by_right])
                x = graph.op("Reshape", [by_left, graph.shared("flat", np.array([-1, self.in_features]))])
            codes = self.codes(index, PEER_BLOCK)
            operands = [
                x,
                graph.constant(f"b{index}", codes),
                graph.constant(f"s{index}", self.scales(index, codes.shape[1])),
            ]
            sizes = {"K": self.in_features, "N": self.out_features, "bits": 4, "block_size": PEER_BLOCK}
            sizes["accuracy_level"] = 0 if self.half else 4
            attributes = [ir.AttrInt64(name, value) for name, value in sizes.items()]
            return graph.op("MatMulNBits", operands, attributes, domain=MICROSOFT, name=y)

        return self._model(linear)

    def dynamic(self, dtype: type[np.uint8] | type[np.int8]) -> ir.Model:
        """DynamicQuantizeMatMul on 8-bit weights, without any rotation."""
        middle = 128 if dtype is np.uint8 else 0

        def linear(graph: _Graph, x: ir.Value, index: int, y: str) -> ir.Value:
            rng = np.random.default_rng(index)
            weight = (rng.integers(-127, 128, (self.in_features, self.out_features)) + middle).astype(dtype)
            scale = graph.shared("scale", np.array(1e-3, np.float32))
            operands = [x, graph.constant(f"b{index}", weight), scale, graph.shared("zero", np.array(middle, dtype))]
            return graph.op("DynamicQuantizeMatMul", operands, domain=MICROSOFT, name=y)

        return self._model(linear)

    def weight_bytes(self, group: int) -> int:
        """Bytes of all packed weights and scales."""
        blocks = -(-self.in_features // group) if group else 1
        return self.copies * self.out_features * (self.in_features // 2 + 4 * blocks)

    @property
    def _dtype(self) -> ir.DataType:
        return ir.DataType.FLOAT16 if self.half else ir.DataType.FLOAT

    def _matrix(self):
        return choose_matrix(self.in_features, rotations="hadamard", seed=None)

    def _factors(self) -> tuple[np.ndarray, np.ndarray]:
        """``left`` and ``right``: y = left @ x.reshape(len(left), len(right)) @ right is the transform."""
        split = reference_split(self._matrix())
        factor = factor_matrix(split).astype(np.float32)
        levels = min(range(split.levels + 1), key=lambda n: (split.order << n) + (1 << (split.levels - n)))
        left = np.kron(factor.T, sylvester(levels)).astype(np.float32)
        return left, (sylvester(split.levels - levels) * split.size**-0.5).astype(np.float32)

    def _model(self, linear: Callable[[_Graph, ir.Value, int, str], ir.Value]) -> ir.Model:
        graph = _Graph()
        inputs, outputs = [], []
        for index, (x, y) in enumerate(self.names()):
            shape = ir.Shape(["rows", self.in_features])
            inputs.append(ir.Value(name=x, shape=shape, type=ir.TensorType(self._dtype)))
            outputs.append(linear(graph, inputs[-1], index, y))
            outputs[-1].type = ir.TensorType(self._dtype)
            outputs[-1].shape = ir.Shape(["rows", self.out_features])
        imports = {"": 21, MICROSOFT: 1}
        whole = ir.Graph(inputs, outputs, nodes=graph.nodes, initializers=graph.constants, opset_imports=imports)
        return ir.Model(whole, ir_version=10)


class _Graph:
    """Collects nodes and constants."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self._constants: dict[str, ir.Value] = {}

    @property
    def constants(self) -> list[ir.Value]:
        return list(self._constants.values())

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        self._constants[name] = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        return self._constants[name]

    def shared(self, name: str, array: np.ndarray) -> ir.Value:
        return self._constants[name] if name in self._constants else self.constant(name, array)

    def add(self, node: ir.Node) -> ir.Value:
        self.nodes.append(node)
        return node.outputs[0]

    def op(
        self,
        op_type: str,
        operands: Sequence[ir.Value],
        attributes: Sequence[ir.Attr] = (),
        *,
        domain: str = "",
        name: str | None = None,
    ) -> ir.Value:
        output = ir.Value(name=name or f"{op_type}_{len(self.nodes)}")
        return self.add(ir.Node(domain, op_type, operands, attributes, outputs=[output], name=output.name))
