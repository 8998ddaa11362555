"""Bring a freshly exported graph into the form that everything downstream reads.

1. constants become initializers, equal ones are shared, equal computations are done once;
2. casts to the type a tensor already has go away;
3. a weight that is only ever read transposed is stored transposed (``[K, N]`` for a linear); a table that
   is looked up and also multiplied by (a tied embedding) is stored once, with a Transpose node for the head;
4. the opset import is raised, where no operator in the graph changes its meaning on the way;
5. inputs and outputs get their names, types and symbolic dimensions, nodes get unique names.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx.defs
import onnx_ir as ir
from onnx_ir.passes import common

from graphrot.errors import InputRefused

_ONLY_WIDER_TYPES = {
    21: frozenset(
        [
            *("Cast", "CastLike", "Constant", "ConstantOfShape", "DequantizeLinear", "Flatten", "Identity", "If"),
            *("Loop", "Pad", "QLinearMatMul", "QuantizeLinear", "Reshape", "Scan", "Shape", "Size", "Squeeze"),
            *("Transpose", "Unsqueeze"),
        ]
    )
}
"""Per opset, operators that it only extends: new types, or attributes whose default is the old meaning.

From the operators' change log; GroupNormalization is the one operator that opset 21 redefines.
"""


def tidy(
    model: ir.Model,
    *,
    opset: int,
    inputs: Mapping[str, tuple[str | int, ...]],
    outputs: Mapping[str, tuple[str | int, ...]],
) -> None:
    """Clean ``model`` in place (see the module's text).

    Args:
        model: a graph just exported; its weights may be lazy and are not read.
        opset: the opset to end at, not below the model's own.
        inputs: name -> shape, in graph order.
        outputs: name -> shape, in graph order.

    Raises:
        InputRefused: an operator changes its meaning between the two opsets.
    """
    _rename(model, inputs, outputs)
    for value in [out for node in model.graph for out in node.outputs]:
        if not value.is_graph_output():
            value.shape = None
    cleanup = ir.passes.Sequential(
        common.ClearMetadataAndDocStringPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True),
        common.DeduplicateInitializersPass(),
        common.IdentityEliminationPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
    )
    cleanup(model)
    raise_opset(model, opset)
    common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    drop_idle_casts(model)
    store_transposed(model)
    share_tables(model)
    common.RemoveUnusedNodesPass()(model)
    _name_nodes(model)
    model.graph.sort()


def raise_opset(model: ir.Model, opset: int) -> None:
    """Raise the standard opset import to ``opset``, operator by operator.

    Raises:
        InputRefused: an operator is redefined on the way.
    """
    now = model.opset_imports.get("", 0)
    changed: dict[str, str] = {}
    for node in model.graph.all_nodes():
        if node.domain not in ("", "ai.onnx"):
            continue
        before = onnx.defs.get_schema(node.op_type, now, "").since_version
        after = onnx.defs.get_schema(node.op_type, opset, "").since_version
        if before != after and not any(node.op_type in ops for v, ops in _ONLY_WIDER_TYPES.items() if v == after):
            changed[node.op_type] = node.name or ""
    if changed:
        raise InputRefused(
            f"The graph cannot be moved from opset {now} to {opset}",
            where=", ".join(f"{op} ({name})" for op, name in changed.items()),
            why="these operators are redefined between the two",
            do=f"export the model at opset {opset} and give the .onnx file",
        )
    model.opset_imports[""] = opset
    for node in model.graph.all_nodes():
        node.version = None


def drop_idle_casts(model: ir.Model) -> int:
    """Remove Cast nodes whose input already has the type; returns how many."""
    count = 0
    for node in list(model.graph):
        source = node.inputs[0] if node.op_type == "Cast" else None
        if source is None or node.outputs[0].is_graph_output():
            continue
        if source.dtype == ir.DataType(node.attributes["to"].as_int()):
            node.outputs[0].replace_all_uses_with(source)
            model.graph.remove(node, safe=True)
            count += 1
    return count


def store_transposed(model: ir.Model) -> int:
    """Store weights that are only read through a 2-D Transpose as ``[K, N]``; returns how many."""
    count = 0
    for weight in list(model.graph.initializers.values()):
        users = [use.node for use in weight.uses()]
        tensor = weight.const_value
        if tensor is None or len(tensor.shape) != 2 or not users or any(not _swaps(node) for node in users):
            continue
        flipped = _transposed(tensor)
        weight.const_value, weight.shape = flipped, ir.Shape(flipped.shape)
        for node in users:
            node.outputs[0].replace_all_uses_with(weight)
            model.graph.remove(node, safe=True)
        count += 1
    return count


def share_tables(model: ir.Model) -> int:
    """Replace a weight that equals a looked-up table transposed by Transpose(table); returns how many."""
    count = 0
    weights = list(model.graph.initializers.values())
    for table in weights:
        if not any(use.node.op_type == "Gather" and use.idx == 0 for use in table.uses()):
            continue
        for weight in weights:
            if weight is not table and _mirrored(table.const_value, weight.const_value):
                node = ir.node("Transpose", [table], attributes={"perm": [1, 0]}, name=f"{table.name}.transposed")
                node.outputs[0].name = f"{table.name}.transposed"
                node.outputs[0].type, node.outputs[0].shape = weight.type, weight.shape
                first = next(node for node in model.graph if any(value is weight for value in node.inputs))
                model.graph.insert_before(first, node)
                weight.replace_all_uses_with(node.outputs[0])
                del model.graph.initializers[str(weight.name)]
                count += 1
    return count


def _mirrored(table: ir.TensorProtocol | None, weight: ir.TensorProtocol | None) -> bool:
    """Whether both are matrices and ``weight`` is ``table`` transposed, value by value."""
    if table is None or weight is None or len(table.shape) != 2 or table.dtype != weight.dtype:
        return False
    if list(table.shape.numpy())[::-1] != list(weight.shape.numpy()):
        return False
    return np.array_equal(table.numpy().T, weight.numpy())


def _swaps(node: ir.Node) -> bool:
    if node.op_type != "Transpose" or node.outputs[0].is_graph_output():
        return False
    perm = node.attributes.get("perm")
    return perm is None or list(perm.as_ints()) == [1, 0]


def _transposed(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    def read() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(tensor.numpy().T), name=tensor.name)

    shape = ir.Shape(list(tensor.shape.numpy())[::-1])
    return ir.LazyTensor(read, dtype=tensor.dtype, shape=shape, name=tensor.name)


def _rename(
    model: ir.Model, inputs: Mapping[str, tuple[str | int, ...]], outputs: Mapping[str, tuple[str | int, ...]]
) -> None:
    for values, signature in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        for value, (name, shape) in zip(values, signature.items(), strict=True):
            value.name = name
            value.shape = ir.Shape(shape)
            whole = name in ("input_ids", "attention_mask", "position_ids")
            value.dtype = ir.DataType.INT64 if whole else ir.DataType.FLOAT


def _name_nodes(model: ir.Model) -> None:
    for node in model.graph:
        node.name = (node.name or node.op_type).removeprefix("/decoder")
        for output in node.outputs:
            if output.name and not output.is_graph_output():
                output.name = output.name.removeprefix("/decoder")
    common.NameFixPass()(model)
