"""Which kernels ONNX Runtime's CUDA provider has, by operator, version and types.

``kernels.json`` is what :mod:`graphrot.emit.cuda.read` found in the library of an installed ``onnxruntime-gpu``, and
nothing is written into it by hand. Graphrot's own operators have CUDA kernels in graphrot's library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import onnx_ir as ir

from graphrot.model.floats import is_standard, schema_of
from graphrot.ops.hadamard import DOMAIN

LIST = Path(__file__).with_name("kernels.json")

OURS = frozenset({"HadamardTransform", "RotatedAttention", "RotatedMatMul"})
OUR_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

_SIGNATURES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "com.microsoft::GroupQueryAttention": (
        ("T", "T", "T", "T_CACHE", "T_CACHE", "M", "M", "T", "T", "", "T", "T", "T_KV_SCALE", "T_KV_SCALE"),
        ("T", "T_CACHE", "T_CACHE", "T"),
    ),
    "com.microsoft::MatMulNBits": (("T1", "T2", "T1", "T3", "T4", "T1"), ("T1",)),
    "com.microsoft::RotaryEmbedding": (("T", "M", "T", "T"), ("T",)),
    "com.microsoft::SkipLayerNormalization": (("T",) * 5, ("T", "U", "U", "T")),
    "com.microsoft::SkipSimplifiedLayerNormalization": (("T",) * 4, ("T", "U", "U", "T")),
    "SimplifiedLayerNormalization": (("T", "V"), ("V", "U")),
}
"""Names of the types of inputs and outputs, for operators that the package ``onnx`` does not define."""


@dataclass(frozen=True)
class Kernel:
    """A registered kernel.

    Attributes:
        start: first version of the operator.
        end: last one; None: no later version changes the operator.
        types: allowed types, by the name of the type, or of an input, in the operator's definition.
    """

    start: int
    end: int | None
    types: Mapping[str, frozenset[str]]

    def takes(self, since: int, bound: Sequence[tuple[frozenset[str], str | None]]) -> bool:
        """Whether the runtime chooses it for an operator defined in version ``since``, with these types by name."""
        if self.start != since and (self.end is None or not self.start < since <= self.end):
            return False
        return all(dtype is None or dtype in self.types.get(name, (dtype,)) for names, dtype in bound for name in names)


@dataclass(frozen=True)
class KernelList:
    """What was read from one release of ``onnxruntime-gpu``."""

    version: str
    kernels: Mapping[str, tuple[Kernel, ...]]

    def serves(
        self,
        node: ir.Node,
        opset: int,
        inputs: Sequence[ir.DataType | None],
        outputs: Sequence[ir.DataType | None],
    ) -> bool:
        """Whether a node has a CUDA kernel.

        Args:
            node: of the standard domain, of ``com.microsoft``, or graphrot's own.
            opset: of the standard domain.
            inputs: types; None: not known, or left out.
            outputs: the same.
        """
        if node.domain == DOMAIN:
            return node.op_type in OURS and inputs[0] in (None, *OUR_TYPES)
        schema = schema_of(node, opset)
        bound = [(names, _name(dtype)) for names, dtype in _bound(node, opset, inputs, outputs)]
        found = self.kernels.get(key_of(node), ())
        return any(kernel.takes(1 if schema is None else schema.since_version, bound) for kernel in found)


def key_of(node: ir.Node) -> str:
    """The name of a node's operator in the list."""
    return node.op_type if is_standard(node) else f"{node.domain}::{node.op_type}"


@cache
def cuda_kernels() -> KernelList:
    """The committed list."""
    content = json.loads(LIST.read_text(encoding="utf-8"))
    kernels = {
        name: tuple(
            Kernel(start, end, {key: frozenset(types) for key, types in constraints.items()})
            for start, end, constraints in entries
        )
        for name, entries in content["kernels"].items()
    }
    return KernelList(content["onnxruntime_gpu"], kernels)


def _bound(
    node: ir.Node, opset: int, inputs: Sequence[ir.DataType | None], outputs: Sequence[ir.DataType | None]
) -> Iterator[tuple[frozenset[str], ir.DataType | None]]:
    """The names that a constraint may have, and the type, of every input and output."""
    schema = schema_of(node, opset)
    for types, formals, names in (
        (inputs, () if schema is None else schema.inputs, _SIGNATURES.get(key_of(node), ((), ()))[0]),
        (outputs, () if schema is None else schema.outputs, _SIGNATURES.get(key_of(node), ((), ()))[1]),
    ):
        for index, dtype in enumerate(types):
            if formals:
                formal = formals[min(index, len(formals) - 1)]
                yield frozenset({formal.type_str, formal.name}), dtype
            elif names:
                yield frozenset({names[index]} if index < len(names) else ()), dtype
            else:
                yield frozenset({"T"} if index == 0 else ()), dtype


def _name(dtype: ir.DataType | None) -> str | None:
    return None if dtype is None else dtype.name.lower()
