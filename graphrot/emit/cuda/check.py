"""Every node of a file for CUDA has a CUDA kernel: checked against the list, before the file is written.

Three kinds of nodes need none. What is made of constants alone is computed when the model is loaded. What is made of
shapes and small constants is arithmetic of sizes, which ONNX Runtime leaves on the CPU by its own rule, where shapes
are; by the same rule a lookup in a table is not, and nothing in 16 bits. The bodies of graphrot's functions run only
without graphrot's library.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from graphrot.emit.cuda.kernels import KernelList, cuda_kernels
from graphrot.errors import InputRefused
from graphrot.graph import inner_nodes
from graphrot.model.floats import is_standard, value_types
from graphrot.ops.hadamard import DOMAIN

LARGEST_BLOCK = 128
"""Weights in a block of MatMulNBits, at most, for its CUDA kernel."""

_SMALL = 100
"""Numbers in a constant, at most, beside which ONNX Runtime leaves arithmetic of sizes on the CPU."""
_HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_SHOWN = 4
"""Nodes that are named in a refusal."""
_SIZES = frozenset({"Shape", "Size"})
_EIGHT = frozenset({ir.DataType.INT8, ir.DataType.UINT8})


def check_cuda(model: ir.Model) -> int:
    """Refuse a model in which a node would run on the CPU, beside arithmetic of sizes.

    Args:
        model: finished, sorted; every value's type follows from its operators.

    Returns:
        How many nodes of such arithmetic there are.

    Raises:
        InputRefused: a node has no CUDA kernel for its types, or one that does not take its attributes.
    """
    kernels = cuda_kernels()
    sizes, missing = without_kernel(model, kernels)
    if not missing:
        return sizes
    more = f", and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    raise InputRefused(
        "The model has nodes without a CUDA kernel",
        where="; ".join(missing[:_SHOWN]) + more,
        why=f"in ONNX Runtime's CUDA provider ({kernels.version}) they would run on the CPU, and what they read and "
        "make would be copied in every run",
        do="use --provider cpu, or give a model without these operators",
    )


def without_kernel(model: ir.Model, kernels: KernelList) -> tuple[int, list[str]]:
    """How many nodes are arithmetic of sizes, and, in words, those that have no CUDA kernel and should."""
    opset = model.opset_imports.get("", 1)
    types = value_types(model)
    fixed = {value for value in model.graph.initializers.values() if not value.is_graph_input()}
    small = {value for value in fixed if _is_small(value)}
    sizes: set[ir.Value] = set()
    count = 0
    missing: list[str] = []
    for node in model.graph:
        given = [value for value in node.inputs if value is not None]
        inner = list(inner_nodes(node))
        if all(value in fixed for value in given) and not inner and _is_folded(node):
            fixed.update(node.outputs)
            small.update(node.outputs)
            continue
        if node.op_type in _SIZES and is_standard(node):
            sizes.update(node.outputs)
        elif _is_arithmetic(node, given, sizes, small) and not inner:
            sizes.update(node.outputs)
            count += 1
            continue
        reason = _missing(node, opset, types, kernels)
        reason = reason or next(filter(None, (_missing(each, opset, types, kernels) for each in inner)), None)
        if reason is not None:
            missing.append(reason)
    return count, missing


def _is_arithmetic(node: ir.Node, given: list[ir.Value], sizes: set[ir.Value], small: set[ir.Value]) -> bool:
    """Whether a node computes with sizes: at least one of them, and small constants."""
    others = [value for value in given if value not in sizes]
    return is_standard(node) and len(others) < len(given) and all(value in small for value in others)


def _is_small(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is None or (tensor.size <= _SMALL and tensor.dtype not in _HALVES)


def _is_folded(node: ir.Node) -> bool:
    """Whether the runtime computes a node of constants when it loads the model: not what decodes weights."""
    decodes = node.op_type in ("DequantizeLinear", "QuantizeLinear")
    return is_standard(node) and not decodes and "Random" not in node.op_type


def _missing(node: ir.Node, opset: int, types: dict[ir.Value, ir.DataType | None], kernels: KernelList) -> str | None:
    """Why a node would not run on CUDA, with its name; None where it does."""
    inputs = [None if value is None else types.get(value, value.dtype) for value in node.inputs]
    outputs = [types.get(value, value.dtype) if value.name else None for value in node.outputs]
    why = "" if kernels.serves(node, opset, inputs, outputs) else _types(inputs)
    if not why:
        why = _obstacle(node, inputs) or ""
    return f"{node.op_type} that makes {node.outputs[0].name!r} ({why})" if why else None


def _types(inputs: Iterable[ir.DataType | None]) -> str:
    found = dict.fromkeys("?" if dtype is None else dtype.name.lower() for dtype in inputs)
    return ", ".join(found) or "no inputs"


def _obstacle(node: ir.Node, inputs: list[ir.DataType | None]) -> str | None:
    """What a kernel that there is refuses when it runs."""
    attributes = node.attributes
    blocks = attributes["block_size"].as_int() if "block_size" in attributes and node.domain != DOMAIN else 0
    if node.op_type == "MatMulNBits" and blocks > LARGEST_BLOCK:
        return f"its blocks are of {blocks} weights, and the kernel takes at most {LARGEST_BLOCK}"
    if is_standard(node) and node.op_type == "DequantizeLinear" and blocks and inputs[0] in _EIGHT:
        return "the kernel takes no blocks of 8-bit numbers"
    if is_standard(node) and node.op_type == "QuantizeLinear" and blocks and not _makes_four(node):
        return "the kernel takes no blocks of 8-bit numbers"
    if node.op_type == "GroupQueryAttention" and len(node.inputs) > 10 and node.inputs[10] is not None:
        return "the kernel takes no attention_bias"
    return None


def _makes_four(node: ir.Node) -> bool:
    named = node.attributes.get("output_dtype")
    return named is not None and named.as_int() in (int(ir.DataType.INT4), int(ir.DataType.UINT4))
