"""Small helpers over ``onnx_ir`` that every layer shares: names, constants, new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphrot.errors import InputRefused

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})

_ARITHMETIC: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
}
_FOLDED_OPS = frozenset(
    {
        *("Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Concat", "Slice", "Neg"),
        *_ARITHMETIC,
    }
)


def iter_values(model: ir.Model) -> Iterator[ir.Value]:
    """Every named value of the main graph: inputs, initializers, node outputs."""
    yield from model.graph.inputs
    for value in model.graph.initializers.values():
        if not value.is_graph_input():
            yield value
    for node in model.graph:
        for output in node.outputs:
            if output.name:
                yield output


RENAMED = "graphrot.renamed"
"""``model.meta`` key: names of the source -> names now, where a pass had to move a graph output's name."""


def value_map(model: ir.Model) -> dict[str, ir.Value]:
    """Name -> value for the main graph; a name that a pass moved still finds the source's value."""
    values = {value.name: value for value in iter_values(model) if value.name}
    renamed: dict[str, str] = model.meta.get(RENAMED, {})
    return values | {old: values[new] for old, new in renamed.items() if new in values}


def node_of(values: Mapping[str, ir.Value], first_output: str) -> ir.Node:
    """The node whose first output has this name.

    Raises:
        InputRefused: no such node; the plan was made for another model.
    """
    value = values.get(first_output)
    node = value.producer() if value is not None else None
    if node is None:
        raise InputRefused(
            "The plan names a node that this model does not have",
            where=f"output {first_output!r}",
            do="make the plan again from this model, or give the model the plan was made for",
        )
    return node


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs among a node's attributes; attributes that refer to a function's are none."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def inner_nodes(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes of a node's subgraphs, and of theirs."""
    for graph in subgraphs(node):
        for inner in graph:
            yield inner
            yield from inner_nodes(inner)


def is_constant(value: ir.Value | None, *, depth: int = 8) -> bool:
    """True for an initializer, a Constant, or movement and casts of those (up to ``depth`` nodes)."""
    if value is None:
        return False
    if value.is_initializer():
        return not value.is_graph_input()
    node = value.producer()
    if node is None:
        return value.const_value is not None and not value.is_graph_input()
    if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
        return True
    if depth == 0 or node.op_type not in _FOLDED_OPS or node.domain not in ("", "ai.onnx"):
        return False
    return all(i is None or is_constant(i, depth=depth - 1) for i in node.inputs)


def read_constant(value: ir.Value) -> np.ndarray:
    """The numbers of a constant value (see :func:`is_constant`), memory-mapped where they are stored so.

    Returns:
        A read-only array of the value's own dtype and shape.

    Raises:
        InputRefused: the value is not constant.
    """
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    if node is None or not is_constant(value):
        raise InputRefused(
            "A weight was expected to be constant and is computed at run time", where=f"tensor {value.name!r}"
        )
    if node.op_type == "Constant":
        attribute = next(iter(node.attributes.values()))
        content = attribute.value
        if isinstance(content, ir.TensorProtocol):
            return content.numpy()
        dtype = np.int64 if attribute.type in (ir.AttributeType.INT, ir.AttributeType.INTS) else np.float32
        return np.asarray(content, dtype=dtype)
    inputs = [None if i is None else read_constant(i) for i in node.inputs]
    first = inputs[0]
    assert first is not None
    op = node.op_type
    if op == "Identity":
        return first
    if op == "Cast":
        return first.astype(ir.DataType(node.attributes["to"].as_int()).numpy())
    if op == "Transpose":
        perm = node.attributes.get("perm")
        return np.transpose(first, None if perm is None else list(perm.as_ints()))
    if op == "Reshape":
        assert inputs[1] is not None
        target = [first.shape[k] if d == 0 else int(d) for k, d in enumerate(inputs[1].tolist())]
        return first.reshape(target)
    if op == "Flatten":
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
        return first.reshape(int(np.prod(first.shape[:axis], dtype=np.int64)), -1)
    if op in ("Squeeze", "Unsqueeze"):
        axes = tuple(int(a) for a in np.atleast_1d(inputs[1])) if len(inputs) > 1 and inputs[1] is not None else None
        if axes is None and "axes" in node.attributes:
            axes = tuple(node.attributes["axes"].as_ints())
        return np.squeeze(first, axes) if op == "Squeeze" else np.expand_dims(first, axes or ())
    if op == "Concat":
        return np.concatenate([i for i in inputs if i is not None], node.attributes["axis"].as_int())
    if op == "Slice":
        return sliced(node, first)
    if op == "Neg":
        return np.asarray(np.negative(first))
    second = inputs[1]
    assert second is not None
    if op == "Div" and np.issubdtype(first.dtype, np.integer):
        return np.asarray((first - np.fmod(first, second)) // second)
    return np.asarray(_ARITHMETIC[op](first, second))


def sliced(node: ir.Node, array: np.ndarray) -> np.ndarray:
    """What a Slice with constant bounds takes of ``array``."""
    parts: list[list[int] | None] = []
    for position, name in enumerate(("starts", "ends", "axes", "steps"), start=1):
        operand = node.inputs[position] if position < len(node.inputs) else None
        if operand is not None:
            parts.append([int(n) for n in read_constant(operand).reshape(-1)])
        else:
            parts.append(list(node.attributes[name].as_ints()) if name in node.attributes else None)
    starts, ends = parts[0] or [], parts[1] or []
    axes = parts[2] or list(range(len(starts)))
    steps = parts[3] or [1] * len(starts)
    index = [slice(None)] * array.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        to_start = step < 0 and end < -array.shape[axis]
        index[axis % array.ndim] = slice(start, None if to_start else end, step)
    return array[tuple(index)]


def plain_shape(tensor: ir.TensorProtocol) -> ir.Shape:
    """The shape of a tensor that holds numbers: integers only."""
    return ir.Shape([int(dim) for dim in tensor.shape.numpy()])


def unique_name(model_names: set[str], base: str) -> str:
    """A name that is not taken yet; it is added to ``model_names``."""
    name, k = base, 0
    while name in model_names:
        k += 1
        name = f"{base}_{k}"
    model_names.add(name)
    return name


def add_initializer(model: ir.Model, name: str, tensor: ir.TensorProtocol | np.ndarray) -> ir.Value:
    """Register a new initializer under ``name`` (which must be free) and return its value."""
    content: ir.TensorProtocol = (
        ir.tensor(np.asarray(tensor, order="C"), name=name) if isinstance(tensor, np.ndarray) else tensor
    )
    value = ir.Value(name=name, const_value=content, shape=plain_shape(content), type=ir.TensorType(content.dtype))
    model.graph.initializers[name] = value
    return value


def drop_unused_initializers(model: ir.Model) -> int:
    """Remove initializers that nothing reads any more; returns how many."""
    unused = [
        name
        for name, value in model.graph.initializers.items()
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input()
    ]
    for name in unused:
        del model.graph.initializers[name]
    return len(unused)


def drop_dead_constant(model: ir.Model, value: ir.Value) -> None:
    """Remove a constant that nothing reads any more: its initializer, or the nodes that make it."""
    if value.uses() or value.is_graph_output() or value.is_graph_input():
        return
    node = value.producer()
    if node is None:
        if value.is_initializer() and value.name:
            del model.graph.initializers[value.name]
        return
    if any(output.uses() for output in node.outputs) or not is_constant(value):
        return
    operands = [operand for operand in node.inputs if operand is not None]
    model.graph.remove(node, safe=True)
    for operand in dict.fromkeys(operands):
        drop_dead_constant(model, operand)


class WeightStore:
    """Scratch file for new weights, so that they are memory-mapped instead of held in RAM.

    Each :meth:`put` appends one tensor and returns an ``ir.ExternalTensor`` on it. The file lives in
    a folder that the caller owns and removes.
    """

    def __init__(self, folder: Path, name: str = "weights.bin") -> None:
        self._folder = folder
        self._name = name
        self._offset = 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")

    def put(self, name: str, array: np.ndarray, dtype: ir.DataType | None = None) -> ir.ExternalTensor:
        """Append ``array``; packed dtypes (INT4, UINT4) are stored two to a byte, low nibble first."""
        tensor = ir.tensor(np.asarray(array, order="C"), dtype=dtype, name=name)
        data = tensor.tobytes()
        pad = -self._offset % 64
        with (self._folder / self._name).open("ab") as file:
            file.write(b"\0" * pad)
            file.write(data)
        start = self._offset + pad
        self._offset = start + len(data)
        return ir.ExternalTensor(
            self._name, start, len(data), tensor.dtype, shape=plain_shape(tensor), name=name, base_dir=self._folder
        )
