"""Raise the standard opset, operator by operator, where that keeps the meaning.

Between opset 13 and 21 most operators only gained types or optional attributes. Those that did not
are rewritten here (reductions, Split) or refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx.defs
import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.folded import used_names
from graphrot.graph import unique_name
from graphrot.ops.hadamard import OLDEST_OPSET
from graphrot.passes.base import GraphPass
from graphrot.plan.types import RotationPlan

_OLDEST = 13
_NEWEST = 21

_WIDER: dict[int, frozenset[str]] = {
    14: frozenset("Add CumSum Div GRU Identity LSTM Mul RNN Relu Reshape Sub".split()),
    15: frozenset("Pow Shape".split()),
    16: frozenset(
        "GreaterOrEqual Identity If LeakyRelu LessOrEqual Loop PRelu Scan ScatterElements ScatterND Where".split()
    ),
    17: frozenset({"LayerNormalization"}),
    18: frozenset("LpPool OptionalGetElement OptionalHasElement Pad Resize ScatterElements ScatterND".split()),
    19: frozenset(
        "AveragePool Cast CastLike Constant DequantizeLinear Equal Identity If Loop Pad QuantizeLinear Reshape Resize "
        "Scan Shape Size".split()
    ),
    20: frozenset("ConstantOfShape IsInf IsNaN ReduceMax ReduceMin".split()),
    21: frozenset(
        "Cast CastLike Constant ConstantOfShape DequantizeLinear Flatten Identity If Loop Pad QLinearMatMul "
        "QuantizeLinear Reshape Scan Shape Size Squeeze Transpose Unsqueeze".split()
    ),
}
"""Per opset, the operators that it only extends: types, or attributes whose default is the old meaning.

LayerNormalization was ONNX Runtime's own, with the same meaning, before opset 17.
"""

_REDUCTIONS = frozenset(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare".split()
)
"""From opset 18 on they take their axes as an input instead of an attribute."""


class RaiseOpset(GraphPass):
    """Bring the standard opset import, that of local functions too, to at least 21, or another.

    Args:
        plan: the plan (kept for the record).
        opset: the least opset.

    Raises:
        InputRefused: the opset is below 13, or an operator is redefined on the way and not covered.
    """

    def __init__(self, plan: RotationPlan, opset: int = _NEWEST) -> None:
        super().__init__(plan)
        self._opset = opset

    def apply(self, model: ir.Model, done: set[str]) -> None:
        self.report.changed += raise_opset(model, self._opset)
        done.add("opset")


def needed_opset(plan: RotationPlan, *, quantizes: bool) -> list[RaiseOpset]:
    """What brings a model to the opset that the file will need: 21 where numbers are rounded, that of the
    transform's function where one is put in, else its own."""
    if quantizes:
        return [RaiseOpset(plan)]
    online = any(rotation.placement == "online" for rotation in plan.rotations)
    return [RaiseOpset(plan, OLDEST_OPSET)] if online else []


def raise_opset(model: ir.Model, opset: int = _NEWEST) -> list[str]:
    """Raise the opset in place; nothing happens to models that have it already.

    Args:
        model: the model.
        opset: the opset to reach, 13 to 21.

    Returns:
        First outputs of the nodes that had to be rewritten.

    Raises:
        InputRefused: see :class:`RaiseOpset`; the model is unchanged then.
    """
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    older = [h for h in holders if h.opset_imports.get("", opset) < opset]
    for holder in older:
        _check(holder, opset)
    rewritten: list[str] = []
    names = used_names(model)
    for holder in older:
        now = holder.opset_imports[""]
        for node in list(_standard_nodes(holder)):
            if now < 18 <= opset and _rewrite(node, names):
                rewritten.append(node.outputs[0].name or "")
            node.version = None
        holder.opset_imports[""] = opset
    if older:
        model.ir_version = max(model.ir_version, 10 if opset >= 21 else 8)
    return rewritten


def _standard_nodes(holder: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    return (node for node in holder.all_nodes() if node.domain in ("", "ai.onnx"))


def _check(holder: ir.Graph | ir.Function, opset: int) -> None:
    now = holder.opset_imports[""]
    refused: dict[str, str] = {}
    for node in _standard_nodes(holder):
        versions = _versions(node.op_type)
        for step in (v for v in versions if now < v <= opset):
            rewritable = step == 18 and (node.op_type == "Split" or _has_plain_axes(node))
            if node.op_type not in _WIDER.get(step, ()) and not rewritable:
                refused.setdefault(node.op_type, node.outputs[0].name or "")
    if now >= _OLDEST and not refused:
        return
    where = ", ".join(f"{op} (makes {name!r})" for op, name in sorted(refused.items())) or f"opset {now}"
    raise InputRefused(
        f"The model cannot be moved from opset {now} to {opset}",
        where=where,
        why="operators are redefined on the way" if refused else f"before opset {_OLDEST} too many operators differ",
        do=f"export the model again with opset {opset} or later",
    )


def _has_plain_axes(node: ir.Node) -> bool:
    return node.op_type in _REDUCTIONS and not ("axes" in node.attributes and node.attributes["axes"].is_ref())


def _versions(op_type: str) -> list[int]:
    """The opsets that define or redefine an operator."""
    found: list[int] = []
    version = _NEWEST
    while version > 0:
        try:
            since = onnx.defs.get_schema(op_type, version, "").since_version
        except onnx.defs.SchemaError:
            break
        found.append(since)
        version = since - 1
    return found


def _rewrite(node: ir.Node, names: set[str]) -> bool:
    """Give a reduction or Split of before opset 18 today's form."""
    if node.op_type == "Split" and len(node.inputs) < 2 and "num_outputs" not in node.attributes:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
        return True
    if node.op_type not in _REDUCTIONS or "axes" not in node.attributes:
        return False
    axes = np.asarray(node.attributes.pop("axes").as_ints(), dtype=np.int64)
    constant = ir.node("Constant", [], {"value": ir.tensor(axes)})
    constant.outputs[0].name = unique_name(names, f"{node.outputs[0].name}.axes")
    assert node.graph is not None
    node.graph.insert_before(node, constant)
    node.resize_inputs(2)
    node.replace_input_with(1, constant.outputs[0])
    return True
