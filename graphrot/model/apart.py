"""Take fused operators apart where a weight stands inside of them, or a transform would have to."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphrot.graph import is_constant, read_constant
from graphrot.model.fused_attention import unfuse_attention, unpack_attention
from graphrot.model.fused_embedding import unfuse_embeddings
from graphrot.model.fused_products import unfuse_biases, unfuse_products
from graphrot.model.rewrite import Rewriter, integer
from graphrot.model.rotary import unfuse_rotary


def take_apart(model: ir.Model, *, rotary: bool) -> bool:
    """Rewrite fused operators of the main graph by plain ones that compute the same, and drop what nothing reads.

    Args:
        model: changed in place; its inputs and outputs stay.
        rotary: also take rotary positions out of attention nodes.

    Returns:
        Whether anything was changed.
    """
    done = [unfuse_attention(model), unfuse_embeddings(model), unfuse_products(model), drop_idle_lookups(model)]
    if rotary:
        done.append(bool(unfuse_rotary(model)))
    done.append(RemoveUnusedNodesPass()(model).modified)
    return any(done)


def for_the_cpu(model: ir.Model) -> bool:
    """Rewrite operators that ONNX Runtime has no CPU kernel for, where others that it has compute the same.

    Args:
        model: changed in place; its inputs and outputs stay.

    Returns:
        Whether anything was changed.
    """
    return any([unpack_attention(model), unfuse_biases(model)])


def drop_idle_lookups(model: ir.Model) -> bool:
    """Compute the shape of a lookup from that of its indices, where nothing else of the lookup is read.

    ONNX Runtime's optimizer leaves such lookups behind, and the table with them.
    """
    found = [node for node in model.graph if _is_idle(node)]
    rewriter = Rewriter(model, "lookup")
    for node in found:
        table = node.inputs[0]
        assert table is not None
        width = rewriter.constant((int(read_constant(table).shape[1]),))
        lengths = rewriter.op(node, "Shape", [node.inputs[1]], "indices_shape")
        whole = rewriter.op(node, "Concat", [lengths, width], "shape", {"axis": 0})
        for reader in [use.node for use in node.outputs[0].uses()]:
            rewriter.replace(reader, {0: rewriter.op(reader, "Identity", [whole], "known_shape")})
    return bool(found)


def _is_idle(node: ir.Node) -> bool:
    """A lookup of rows of a constant table, of which only the whole shape is read."""
    if node.op_type != "Gather" or node.domain not in ("", "ai.onnx") or integer(node, "axis"):
        return False
    table, output = node.inputs[0], node.outputs[0]
    if table is None or not is_constant(table) or len(read_constant(table).shape) != 2 or output.is_graph_output():
        return False
    readers = [use.node for use in output.uses()]
    return bool(readers) and all(_reads_shape(reader) for reader in readers)


def _reads_shape(node: ir.Node) -> bool:
    whole = not integer(node, "start") and "end" not in node.attributes
    return node.op_type == "Shape" and node.domain in ("", "ai.onnx") and whole
