"""Weights that a model holds in few bits become float weights when it is read.

Understood are packed matmuls (MatMulNBits), packed tables (GatherBlockQuantized) and DequantizeLinear of
constants. What is rounded at run time, or stored in other ways, stays as it is and is refused by
:func:`graphrot.model.onnxfile.refuse_quantized`. The float weights are computed one at a time, when they
are written to a scratch file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphrot.graph import add_initializer, drop_unused_initializers, is_constant, iter_values, unique_name
from graphrot.model.packed import Blocks, gathered_blocks, linear_blocks, matmul_blocks
from graphrot.model.save import save_model
from graphrot.model.widen import FloatTypes, float_types, widen

_FLOAT = ir.DataType.FLOAT


@dataclass
class Losses:
    """What is known about the rounding that a model went through before.

    Args:
        floats: the float types that the model had, and the bytes of its weights.
        tensors: how many weights there are of each form: bits, and weights that share a scale (None: all of a row).
        level: the matmuls' accuracy level, if it makes them round their inputs to 8 bits.
    """

    floats: FloatTypes
    tensors: Counter[tuple[int, int | None]] = field(default_factory=Counter)
    level: int = 0
    squares: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Per weight, sums over its numbers: of their squares, and of the mean squared error of rounding to nearest."""

    def notes(self) -> tuple[str, ...]:
        """What a user has to know."""
        forms = ", ".join(
            f"{count} of {bits} bits with one scale for {'a whole row' if group is None else f'{group} weights'}"
            for (bits, group), count in sorted(self.tensors.items(), key=lambda item: (item[0][0], item[0][1] or 0))
        )
        total = sum(square for square, _ in self.squares.values())
        error = math.sqrt(sum(lost for _, lost in self.squares.values()) / total) if total > 0 else 0.0
        estimate = f" (about {error:.1%} of the weights, judged by its steps, root mean square)" if error else ""
        lost = (
            f"the source was quantized already: {forms}. What that rounding lost{estimate} cannot be had back, and the "
            "result gets no more accurate than the source; the float model that it was made from gives a better one"
        )
        notes = [lost]
        if self.level == 4:
            notes.append(
                "the source's matmuls round their inputs to 8 bits as they run (accuracy_level 4): "
                "the certificate compares with its weights on float inputs"
            )
        return tuple(notes)


def write_float(model: ir.Model, folder: Path) -> tuple[ir.Model, Path]:
    """Write what :func:`dequantize` left to a file, in float32, weight by weight, and map it from there.

    Args:
        model: not to be used any more.
        folder: takes the file and its data; must stay while the result is used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if float_types(model) is not None:
        return widen(model, folder)
    path = folder / "dequantized.onnx"
    save_model(model, path)
    return ir.load(path), path


def dequantize(model: ir.Model) -> Losses | None:
    """Replace packed weights of the main graph by float32 ones that are computed when they are read.

    In a half model the other tensors stay half, so that it has to be widened afterwards.

    Args:
        model: changed in place; inputs, outputs and names of tensors stay.

    Returns:
        What was found, None if there was nothing.
    """
    floats = float_types(model) or FloatTypes()
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    worker = _Dequantizer(model, Losses(replace(floats, weight_bytes=size)))
    for node in list(model.graph):
        worker.visit(node)
    if not worker.losses.tensors and not worker.others:
        return None
    _drop_unread(model)
    drop_unused_initializers(model)
    return worker.losses


class _Dequantizer:
    def __init__(self, model: ir.Model, losses: Losses) -> None:
        self.model = model
        self.names = {value.name for value in iter_values(model) if value.name}
        self.losses = losses
        self.others = 0
        self.made: dict[tuple[object, ...], ir.Value] = {}

    def visit(self, node: ir.Node) -> None:
        if node.op_type == "MatMulNBits" and node.domain == "com.microsoft":
            self._matmul(node)
        elif node.op_type == "GatherBlockQuantized" and node.domain == "com.microsoft":
            self._lookup(node)
        elif node.op_type == "DequantizeLinear" and node.domain in ("", "ai.onnx", "com.microsoft"):
            self._constant(node)

    def _matmul(self, node: ir.Node) -> None:
        blocks = matmul_blocks(node)
        if blocks is None:
            return
        if "accuracy_level" in node.attributes:
            self.losses.level = max(self.losses.level, node.attributes["accuracy_level"].as_int())
        weight = self._weight(blocks, transposed=True)
        bias = node.inputs[5] if len(node.inputs) > 5 else None
        product = ir.node("MatMul", [node.inputs[0], weight], name=node.name)
        last = product if bias is None else ir.node("Add", [product.outputs[0], bias], name=f"{node.name}.bias")
        if last is not product:
            product.outputs[0].name = unique_name(self.names, f"{node.outputs[0].name}.product")
        self._replace(node, [product] if last is product else [product, last])

    def _lookup(self, node: ir.Node) -> None:
        blocks = gathered_blocks(node)
        if blocks is None:
            return
        table = self._weight(blocks, transposed=False)
        axis = node.attributes["gather_axis"].as_int() if "gather_axis" in node.attributes else 0
        self._replace(node, [ir.node("Gather", [table, node.inputs[1]], {"axis": axis}, name=node.name)])

    def _constant(self, node: ir.Node) -> None:
        if not all(operand is None or is_constant(operand) for operand in node.inputs):
            return
        blocks = linear_blocks(node)
        if blocks is None or node.outputs[0].is_graph_output():
            return
        weight = self._weight(blocks, transposed=False)
        node.outputs[0].replace_all_uses_with(weight)
        self.model.graph.remove(node, safe=True)

    def _weight(self, blocks: Blocks, *, transposed: bool) -> ir.Value:
        """The float weight; the same operands read alike give the same one."""
        key = (blocks.key, transposed)
        if key not in self.made:
            name = unique_name(self.names, f"{blocks.codes.value.name}.dequantized")
            shape = tuple(reversed(blocks.shape)) if transposed else blocks.shape
            self.made[key] = add_initializer(
                self.model, name, _lazy(name, shape, self._reader(name, blocks, transposed))
            )
            if len(blocks.shape) > 1:
                self.losses.tensors[blocks.bits, blocks.group] += 1
            else:
                self.others += 1
        return self.made[key]

    def _reader(self, name: str, blocks: Blocks, transposed: bool) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            numbers, lost = blocks.numbers()
            if numbers.ndim > 1:
                flat = numbers.reshape(-1)
                self.losses.squares[name] = (float(np.dot(flat, flat)), lost)
            return np.ascontiguousarray(numbers.T) if transposed else numbers

        return read

    def _replace(self, node: ir.Node, nodes: list[ir.Node]) -> None:
        old, new = node.outputs[0], nodes[-1].outputs[0]
        name = old.name
        new.type, new.shape = old.type, old.shape
        self.model.graph.insert_before(node, nodes)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        self.model.graph.remove(node, safe=True)
        new.name = name


def _lazy(name: str, shape: tuple[int, ...], read: Callable[[], np.ndarray]) -> ir.LazyTensor:
    return ir.LazyTensor(lambda: ir.tensor(read(), name=name), dtype=_FLOAT, shape=ir.Shape(shape), name=name)


def _drop_unread(model: ir.Model) -> None:
    """Remove nodes that only led packed weights on, such as a Reshape of them."""
    for node in reversed(list(model.graph)):
        unread = all(not output.uses() and not output.is_graph_output() for output in node.outputs)
        if unread and all(operand is None or is_constant(operand) for operand in node.inputs):
            model.graph.remove(node, safe=True)
