"""Take EmbedLayerNormalization apart: lookups of words, positions and kinds of text, their sum, and a LayerNorm."""

from __future__ import annotations

import onnx_ir as ir

from graphrot.model.rewrite import MICROSOFT, Rewriter, is_read, kept, operand

_IDS, _KINDS, _WORDS_TABLE, _POSITIONS_TABLE, _KINDS_TABLE, _GAIN, _SHIFT, _MASK, _POSITIONS = range(9)
_EPSILON = 1e-12
"""What the operator takes where it does not say (onnxruntime, contrib_ops, embed_layer_norm_base)."""


def unfuse_embeddings(model: ir.Model) -> bool:
    """Rewrite every EmbedLayerNormalization of the main graph.

    Args:
        model: changed in place; its inputs and outputs stay, and the tables are those that were there.

    Returns:
        Whether there was one.
    """
    found = [
        node
        for node in model.graph
        if node.op_type == "EmbedLayerNormalization"
        and node.domain == MICROSOFT
        and (operand(node, _KINDS) is None) == (operand(node, _KINDS_TABLE) is None)
    ]
    rewriter = _Unfuser(model, "embedding")
    for node in found:
        rewriter.rewrite(node)
    return bool(found)


class _Unfuser(Rewriter):
    def rewrite(self, node: ir.Node) -> None:
        ids = node.inputs[_IDS]
        words = self.op(node, "Gather", [node.inputs[_WORDS_TABLE], ids], "words", {"axis": 0})
        places = operand(node, _POSITIONS) or self._places(node)
        positions = self.op(node, "Gather", [node.inputs[_POSITIONS_TABLE], places], "positions", {"axis": 0})
        total = self.op(node, "Add", [words, positions], "embedded")
        if operand(node, _KINDS) is not None:
            kinds = self.op(node, "Gather", [node.inputs[_KINDS_TABLE], node.inputs[_KINDS]], "kinds", {"axis": 0})
            total = self.op(node, "Add", [total, kinds], "embedded_kinds")
        rules = {"axis": -1, "epsilon": _EPSILON, **kept(node, "epsilon")}
        norm = [total, operand(node, _GAIN), operand(node, _SHIFT)]
        outputs = {0: self.op(node, "LayerNormalization", norm, "normalized", rules)}
        if is_read(node, 1):
            outputs[1] = self._lengths(node)
        if is_read(node, 2):
            outputs[2] = total
        self.replace(node, outputs)

    def _places(self, node: ir.Node) -> ir.Value:
        """0, 1, 2, ... for the tokens of a row."""
        shape = self.op(node, "Shape", [node.inputs[_IDS]], "ids_shape")
        count = self.op(node, "Gather", [shape, self.constant(1)], "tokens", {"axis": 0})
        return self.op(node, "Range", [self.constant(0), count, self.constant(1)], "places")

    def _lengths(self, node: ir.Node) -> ir.Value:
        """``mask_index``: how many elements of each row of the mask are 1; 0 without a mask. int32."""
        mask = operand(node, _MASK)
        kind = {"to": int(ir.DataType.INT32)}
        if mask is None:
            none = self.op(node, "Mul", [node.inputs[_IDS], self._zero(node)], "no_mask")
            return self.along(node, "ReduceSum", none, 1, "lengths", keepdims=0)
        one = self.op(node, "Cast", [self.constant(1)], "one", kind)
        ones = self.op(node, "Cast", [self.op(node, "Equal", [mask, one], "is_one")], "ones", kind)
        return self.along(node, "ReduceSum", ones, 1, "lengths", keepdims=0)

    def _zero(self, node: ir.Node) -> ir.Value:
        return self.op(node, "Cast", [self.constant(0)], "zero", {"to": int(ir.DataType.INT32)})
