"""Ways to break a model's files. Each takes a random generator and changes one thing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import TensorProto, helper

Edit = Callable[[onnx.ModelProto, random.Random], None]


def mutate(folder: Path, kind: str, seed: int) -> None:
    """Break ``folder/model.onnx`` (or its data) by one or two mutations of :data:`KINDS`."""
    rng = random.Random(f"{kind} {seed}")
    path = folder / "model.onnx"
    data = path.with_name("model.onnx.data")
    for _ in range(rng.choice((1, 1, 1, 2))):
        if kind == "bytes":
            _flip(path, rng)
        elif kind == "data":
            _flip(data if data.exists() else path, rng)
        elif kind == "tails":
            _cut(rng.choice([file for file in (path, data) if file.exists()]), rng)
        else:
            proto = onnx.load(path, load_external_data=False)
            rng.choice(_EDITS[kind])(proto, rng)
            path.write_bytes(proto.SerializeToString())


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        place = rng.randrange(len(content))
        content[place] = rng.choice((rng.randrange(256), content[place] ^ (1 << rng.randrange(8)), 0, 255))
    path.write_bytes(content)


def _cut(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    size = max(1, len(content))
    keep = rng.choice((0, 1, size // 2, size - 1, rng.randrange(size)))
    path.write_bytes(content[:keep] + rng.choice((b"", b"", bytes(size - keep), rng.randbytes(32))))


def _initializer(proto: onnx.ModelProto, rng: random.Random) -> TensorProto:
    return rng.choice(list(proto.graph.initializer))


def _node(proto: onnx.ModelProto, rng: random.Random) -> onnx.NodeProto:
    return rng.choice(list(proto.graph.node))


def _value_infos(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    return [*proto.graph.input, *proto.graph.output, *proto.graph.value_info]


def _tensor_type(proto: onnx.ModelProto, rng: random.Random) -> None:
    _initializer(proto, rng).data_type = rng.choice((*range(24), 99))


def _same_width_type(proto: onnx.ModelProto, rng: random.Random) -> None:
    tensor = _initializer(proto, rng)
    twins = {
        TensorProto.FLOAT: (TensorProto.INT32, TensorProto.UINT32),
        TensorProto.INT64: (TensorProto.DOUBLE, TensorProto.UINT64),
    }
    tensor.data_type = rng.choice(twins.get(tensor.data_type, (TensorProto.UINT8,)))


def _value_type(proto: onnx.ModelProto, rng: random.Random) -> None:
    rng.choice(_value_infos(proto)).type.tensor_type.elem_type = rng.choice((*range(24), 99))


def _cast_type(proto: onnx.ModelProto, rng: random.Random) -> None:
    casts = [node for node in proto.graph.node if node.op_type == "Cast"]
    if casts:
        rng.choice(casts).attribute[0].i = rng.choice((*range(24), 99))
    else:
        _value_type(proto, rng)


def _drop_initializer(proto: onnx.ModelProto, rng: random.Random) -> None:
    proto.graph.initializer.remove(_initializer(proto, rng))


def _rename_initializer(proto: onnx.ModelProto, rng: random.Random) -> None:
    other = _initializer(proto, rng).name
    _initializer(proto, rng).name = rng.choice(("", "new", other, proto.graph.input[0].name))


def _double_initializer(proto: onnx.ModelProto, rng: random.Random) -> None:
    proto.graph.initializer.append(_initializer(proto, rng))


def _exchange_numbers(proto: onnx.ModelProto, rng: random.Random) -> None:
    one, two = _initializer(proto, rng), _initializer(proto, rng)
    one.name, two.name = two.name, one.name


def _dims(proto: onnx.ModelProto, rng: random.Random) -> None:
    tensor = _initializer(proto, rng)
    if tensor.dims:
        place = rng.randrange(len(tensor.dims))
        size = tensor.dims[place]
        tensor.dims[place] = rng.choice((0, -1, 1, size + 1, size * 2, max(0, size - 1), 2**40, 2**62))
    else:
        tensor.dims.append(rng.choice((0, 1, 2)))


def _reshaped(proto: onnx.ModelProto, rng: random.Random) -> None:
    """The same number of elements in another shape."""
    tensor = _initializer(proto, rng)
    count = 1
    for dim in tensor.dims:
        count *= dim
    shape = rng.choice(([count], [1, count], list(reversed(tensor.dims)), [count, 1], [1, *tensor.dims]))
    del tensor.dims[:]
    tensor.dims.extend(shape)


def _value_dims(proto: onnx.ModelProto, rng: random.Random) -> None:
    dims = rng.choice(_value_infos(proto)).type.tensor_type.shape.dim
    if not dims or rng.random() < 0.2:
        dims.add().dim_value = rng.choice((0, 1, 3))
    elif rng.random() < 0.3:
        dims.remove(dims[rng.randrange(len(dims))])
    elif rng.random() < 0.5:
        dims[rng.randrange(len(dims))].dim_value = rng.choice((0, 1, 2, 7, -1, 2**40))
    else:
        dims[rng.randrange(len(dims))].dim_param = rng.choice(("", "batch", "past + sequence", "a*b", "x/", "(", "7"))


def _location(proto: onnx.ModelProto, rng: random.Random) -> None:
    tensor = _initializer(proto, rng)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    key = rng.choice(("location", "offset", "length"))
    values = {
        "location": ("", ".", "..", "../model.onnx.data", "/etc/hostname", "model.onnx", "absent", "a\0b", "x" * 300),
        "offset": ("-1", "4", "1e3", "", "99999999999999999999", "64"),
        "length": ("0", "-4", "4", "x", "99999999999999999999"),
    }
    entries[key] = rng.choice(values[key])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    for name, value in entries.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = name, value


def _drop_node(proto: onnx.ModelProto, rng: random.Random) -> None:
    proto.graph.node.remove(_node(proto, rng))


def _double_node(proto: onnx.ModelProto, rng: random.Random) -> None:
    proto.graph.node.append(_node(proto, rng))


def _bypass_node(proto: onnx.ModelProto, rng: random.Random) -> None:
    """Leave a node out; its readers read its first input."""
    node = _node(proto, rng)
    if node.input and node.output:
        for other in proto.graph.node:
            for place, name in enumerate(other.input):
                if name == node.output[0]:
                    other.input[place] = node.input[0]
        proto.graph.node.remove(node)


def _swap_nodes(proto: onnx.ModelProto, rng: random.Random) -> None:
    one, two = rng.randrange(len(proto.graph.node)), rng.randrange(len(proto.graph.node))
    nodes = list(proto.graph.node)
    nodes[one], nodes[two] = nodes[two], nodes[one]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(copies)


def _swap_inputs(proto: onnx.ModelProto, rng: random.Random) -> None:
    nodes = [node for node in proto.graph.node if len(node.input) > 1]
    node = rng.choice(nodes)
    one, two = rng.sample(range(len(node.input)), 2)
    node.input[one], node.input[two] = node.input[two], node.input[one]


def _rewire(proto: onnx.ModelProto, rng: random.Random) -> None:
    """Read another tensor; mostly one that was made before."""
    place = rng.randrange(len(proto.graph.node))
    node = proto.graph.node[place]
    if not node.input:
        return
    until = len(proto.graph.node) if rng.random() < 0.2 else place
    names = [name for other in proto.graph.node[:until] for name in other.output]
    names += [tensor.name for tensor in proto.graph.initializer] + [value.name for value in proto.graph.input] + [""]
    node.input[rng.randrange(len(node.input))] = rng.choice(names)


def _drop_input(proto: onnx.ModelProto, rng: random.Random) -> None:
    node = _node(proto, rng)
    if node.input:
        node.input.pop()


def _more_outputs(proto: onnx.ModelProto, rng: random.Random) -> None:
    node = _node(proto, rng)
    if rng.random() < 0.5:
        node.output.append(rng.choice(("", "one more")))
    else:
        node.output[0] = rng.choice(("", "renamed"))


def _operator(proto: onnx.ModelProto, rng: random.Random) -> None:
    node = _node(proto, rng)
    others = ("Add", "Mul", "MatMul", "Identity", "Softmax", "Transpose", "Reshape", "Gather", "Nonsense", "", "Loop")
    node.op_type = rng.choice((*others, _node(proto, rng).op_type))
    if rng.random() < 0.1:
        node.domain = rng.choice(("com.microsoft", "graphrot", "example.org"))


def _attribute(proto: onnx.ModelProto, rng: random.Random) -> None:
    found = [attribute for node in proto.graph.node for attribute in node.attribute]
    attribute = rng.choice(found)
    draw = rng.random()
    if draw < 0.2:
        node = next(node for node in proto.graph.node if attribute in node.attribute)
        node.attribute.remove(attribute)
    elif draw < 0.3:
        attribute.type = rng.randrange(15)
    elif draw < 0.4:
        attribute.name = rng.choice(("axis", "perm", "to", "value", "keepdims", "nonsense", ""))
    elif attribute.type == onnx.AttributeProto.INTS and attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice((-9, -1, 0, 1, 2, 3, 7, 2**40))
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e30))
    else:
        attribute.i = rng.choice((-9, -2, -1, 0, 1, 2, 3, 7, 2**40))


def _opset(proto: onnx.ModelProto, rng: random.Random) -> None:
    if not proto.opset_import or rng.random() < 0.2:
        del proto.opset_import[:]
    elif rng.random() < 0.2:
        proto.opset_import.append(helper.make_opsetid(rng.choice(("", "ai.onnx", "example.org")), 11))
    else:
        rng.choice(list(proto.opset_import)).version = rng.choice((*range(-1, 30), 99, 2**31))
    if rng.random() < 0.2:
        proto.ir_version = rng.choice((0, 1, 3, 4, 9, 13, 15, 99))


def _interface(proto: onnx.ModelProto, rng: random.Random) -> None:
    values = rng.choice((proto.graph.input, proto.graph.output))
    value = rng.choice(list(values))
    draw = rng.random()
    if draw < 0.3:
        values.remove(value)
    elif draw < 0.5:
        values.append(value)
    elif draw < 0.7:
        value.name = rng.choice(("", "other", proto.graph.node[0].output[0], proto.graph.initializer[0].name))
    elif draw < 0.8:
        value.ClearField("type")
    else:
        value.type.tensor_type.ClearField("shape")


def _metadata(proto: onnx.ModelProto, rng: random.Random) -> None:
    entry = proto.metadata_props.add()
    entry.key, entry.value = rng.choice((("graphrot.version", "0"), ("graphrot.recipe", "{"), ("", ""), ("a", "b")))


_EDITS: dict[str, tuple[Edit, ...]] = {
    "types": (_tensor_type, _same_width_type, _value_type, _cast_type),
    "initializers": (_drop_initializer, _rename_initializer, _double_initializer, _exchange_numbers),
    "shapes": (_dims, _reshaped, _value_dims),
    "external": (_location,),
    "nodes": (_drop_node, _double_node, _bypass_node, _swap_nodes, _operator),
    "wires": (_swap_inputs, _rewire, _drop_input, _more_outputs),
    "attributes": (_attribute,),
    "header": (_opset, _interface, _metadata),
}

KINDS = ("bytes", "data", "tails", *_EDITS)
"""Kinds of mutations."""
