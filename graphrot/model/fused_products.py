"""Take matmuls by constant weights out of the operators that ONNX Runtime fused them into.

The weight stays the tensor that it was: where it has to be transposed or scaled, a Transpose or a Mul of constants
stands in front of the matmul, and passes read through them.
"""

from __future__ import annotations

import onnx_ir as ir

from graphrot.graph import is_constant, read_constant
from graphrot.model.rewrite import MICROSOFT, Rewriter, integer, kept, operand

_ACTIVATIONS = {
    "Relu": (),
    "Tanh": (),
    "Sigmoid": (),
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
}
"""Activations of FusedGemm, and their numbers that stand in ``activation_alpha`` and ``activation_beta``."""


def unfuse_products(model: ir.Model) -> bool:
    """Rewrite FusedMatMul and FusedGemm by constant weights as MatMul, Gemm and what was fused to them.

    Left alone are products of two run-time tensors, and transposed activations.

    Args:
        model: changed in place; its inputs and outputs stay.

    Returns:
        Whether there was one.
    """
    found = [node for node in model.graph if _is_product(node)]
    rewriter = _Unfuser(model, "product")
    for node in found:
        rewriter.rewrite(node)
    return bool(found)


def unfuse_biases(model: ir.Model) -> bool:
    """Rewrite GemmFastGelu, BiasAdd and BiasSplitGelu, which have no kernel on the CPU, by operators that have.

    Args:
        model: changed in place; its inputs and outputs stay.

    Returns:
        Whether there was one.
    """
    found = [
        node
        for node in model.graph
        if node.domain == MICROSOFT
        and (
            node.op_type in ("GemmFastGelu", "BiasAdd")
            or (node.op_type == "BiasSplitGelu" and is_constant(operand(node, 1)))
        )
    ]
    rewriter = _Unfuser(model, "bias")
    for node in found:
        rewriter.rewrite(node)
    return bool(found)


def _is_product(node: ir.Node) -> bool:
    if node.domain != MICROSOFT or node.op_type not in ("FusedMatMul", "FusedGemm"):
        return False
    weight, data = operand(node, 1), operand(node, 0)
    if weight is None or not is_constant(weight) or data is None or is_constant(data):
        return False
    if any(integer(node, name) for name in ("transA", "transBatchA", "transBatchB")):
        return False
    if node.op_type == "FusedGemm":
        activation = node.attributes["activation"].as_string() if "activation" in node.attributes else ""
        numbers = _ACTIVATIONS.get(activation)
        return numbers is not None and all(f"activation_{name}" in node.attributes for name in numbers)
    return len(read_constant(weight).shape) >= 2


class _Unfuser(Rewriter):
    def rewrite(self, node: ir.Node) -> None:
        made = {
            "FusedMatMul": self._matmul,
            "FusedGemm": self._gemm,
            "GemmFastGelu": self._gelu,
            "BiasAdd": self._add,
            "BiasSplitGelu": self._gated,
        }[node.op_type](node)
        self.replace(node, {0: made})

    def _matmul(self, node: ir.Node) -> ir.Value:
        weight = node.inputs[1]
        assert weight is not None
        numbers = read_constant(weight)
        alone = len(weight.uses()) == 1
        if integer(node, "transB"):
            order = [*range(numbers.ndim - 2), numbers.ndim - 1, numbers.ndim - 2]
            weight = self.op(node, "Transpose", [weight], "weight", {"perm": order})
        alpha = node.attributes["alpha"].as_float() if "alpha" in node.attributes else 1.0
        if alpha == 1:
            return self.op(node, "MatMul", [node.inputs[0], weight], "product")
        factor = self.number(alpha, f"{node.outputs[0].name}.alpha", ir.DataType.from_numpy(numbers.dtype))
        if alone:
            scaled = self.op(node, "Mul", [weight, factor], "scaled_weight")
            return self.op(node, "MatMul", [node.inputs[0], scaled], "product")
        product = self.op(node, "MatMul", [node.inputs[0], weight], "product")
        return self.op(node, "Mul", [product, factor], "scaled")

    def _gemm(self, node: ir.Node) -> ir.Value:
        rules = kept(node, "alpha", "beta", "transB")
        product = self.op(node, "Gemm", list(node.inputs), "product", rules)
        activation = node.attributes["activation"].as_string()
        numbers = {name: node.attributes[f"activation_{name}"].as_float() for name in _ACTIVATIONS[activation]}
        return self.op(node, activation, [product], "activated", numbers)

    def _gelu(self, node: ir.Node) -> ir.Value:
        product = self.op(node, "MatMul", list(node.inputs[:2]), "product")
        return self.op(node, "FastGelu", [product, operand(node, 2)], "activated", domain=MICROSOFT)

    def _add(self, node: ir.Node) -> ir.Value:
        biased = self.op(node, "Add", list(node.inputs[:2]), "biased")
        return self.op(node, "Add", [biased, node.inputs[2]], "added")

    def _gated(self, node: ir.Node) -> ir.Value:
        bias = node.inputs[1]
        assert bias is not None
        biased = self.op(node, "Add", [node.inputs[0], bias], "biased")
        half = _size(bias) // 2
        value, gate = self.split(node, biased, (half, half), ("value", "gate"), 2)
        return self.op(node, "Mul", [value, self.op(node, "Gelu", [gate], "gelu", domain=MICROSOFT)], "gated")


def _size(bias: ir.Value) -> int:
    return int(read_constant(bias).shape[0])
