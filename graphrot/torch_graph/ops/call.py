"""One node at run time: its operands as tensors, its attributes as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from graphrot.errors import InputRefused

MICROSOFT = "com.microsoft"
GRAPHROT = "graphrot"

_DTYPES = {
    ir.DataType.BOOL: torch.bool,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
}
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

Result = torch.Tensor | Sequence[torch.Tensor | None]
Op = Callable[["Call"], Result]


@dataclass(frozen=True)
class Signature:
    """What of a node stays the same in each run.

    Args:
        node: the node.
        attributes: as Python numbers, lists, strings, arrays.
        opset: of the node's domain.
        wanted: which outputs are read.
    """

    node: ir.Node
    attributes: dict[str, Any]
    opset: int
    wanted: tuple[bool, ...]

    @property
    def where(self) -> str:
        """For messages."""
        return f"the {self.node.op_type} that makes {self.node.outputs[0].name!r}"


def signature(node: ir.Node, opset: int) -> Signature:
    """Read a node once."""
    attributes: dict[str, Any] = {}
    for name, attribute in node.attributes.items():
        if attribute.type == ir.AttributeType.TENSOR:
            attributes[name] = attribute.as_tensor().numpy()
        elif attribute.type == ir.AttributeType.STRING:
            attributes[name] = attribute.as_string()
        else:
            attributes[name] = attribute.value
    wanted = tuple(bool(value.uses()) or value.is_graph_output() for value in node.outputs)
    return Signature(node, attributes, opset, wanted)


@dataclass(frozen=True)
class Call:
    """A node and its operands.

    Args:
        about: the node.
        inputs: tensors; None for operands that are left out.
        dtype: the float type of the run: every float type of the graph is this one.
    """

    about: Signature
    inputs: Sequence[torch.Tensor | None]
    dtype: torch.dtype

    def has(self, position: int) -> bool:
        """Whether an operand is there."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def maybe(self, position: int) -> torch.Tensor | None:
        """An operand, or None."""
        return self.inputs[position] if position < len(self.inputs) else None

    def tensor(self, position: int) -> torch.Tensor:
        """An operand.

        Raises:
            InputRefused: it is left out.
        """
        value = self.maybe(position)
        if value is None:
            raise InputRefused("An operator lacks an input", where=f"input {position} of {self.about.where}")
        return value

    def tensors(self) -> list[torch.Tensor]:
        """All operands that are there."""
        return [value for value in self.inputs if value is not None]

    def numbers(self, position: int, name: str = "") -> list[int] | None:
        """Whole numbers from an operand or, in older opsets, from an attribute; None without."""
        value = self.maybe(position)
        if value is not None:
            return [int(number) for number in value.reshape(-1).tolist()]
        found = self.about.attributes.get(name)
        return None if found is None else [int(number) for number in found]

    def integer(self, name: str, default: int = 0) -> int:
        """An attribute."""
        return int(self.about.attributes.get(name, default))

    def floating(self, name: str, default: float = 0.0) -> float:
        """An attribute."""
        return float(self.about.attributes.get(name, default))

    def text(self, name: str, default: str = "") -> str:
        """An attribute."""
        return str(self.about.attributes.get(name, default))

    def axis(self, default: int) -> int:
        """The attribute ``axis``."""
        return self.integer("axis", default)

    def array(self, name: str) -> np.ndarray | None:
        """A tensor attribute."""
        found: np.ndarray | None = self.about.attributes.get(name)
        return found

    def type_of(self, number: int) -> torch.dtype:
        """The torch type of an ONNX type: every float type is the run's."""
        kind = ir.DataType(number)
        if kind in _FLOATS:
            return self.dtype
        found = _DTYPES.get(kind)
        if found is None:
            raise InputRefused(f"The type {kind.name} has no place in a differentiable graph", where=self.about.where)
        return found

    def refuse(self, why: str) -> InputRefused:
        """The refusal of this node; raise it."""
        return InputRefused(
            f"{self.about.node.op_type} is not differentiated in this form", where=self.about.where, why=why
        )
