"""All operators that the interpreter knows."""

from __future__ import annotations

from graphrot.torch_graph.ops.attention import ATTENTION
from graphrot.torch_graph.ops.call import Op
from graphrot.torch_graph.ops.elementwise import ELEMENTWISE
from graphrot.torch_graph.ops.movement import MOVEMENT
from graphrot.torch_graph.ops.norms import NORMS
from graphrot.torch_graph.ops.products import PRODUCTS
from graphrot.torch_graph.ops.rotary import ROTARY

OPERATORS: dict[tuple[str, str], Op] = {**ELEMENTWISE, **MOVEMENT, **NORMS, **PRODUCTS, **ROTARY, **ATTENTION}
"""``(domain, op_type)`` -> what runs it; the standard domain is empty."""


def operator(domain: str, op_type: str) -> Op | None:
    """What runs an operator; None if it is not known."""
    return OPERATORS.get(("" if domain == "ai.onnx" else domain, op_type))
