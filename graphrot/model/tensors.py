"""The weights of a model: that their bytes are there, where they may be, and as many as their shapes say.

Nothing is read but sizes. :mod:`graphrot.model.finite` looks at the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.model.structure import subgraphs

_FIELDS = {
    "float_data": (onnx.TensorProto.FLOAT, onnx.TensorProto.COMPLEX64),
    "double_data": (onnx.TensorProto.DOUBLE, onnx.TensorProto.COMPLEX128),
    "int64_data": (onnx.TensorProto.INT64,),
    "uint64_data": (onnx.TensorProto.UINT32, onnx.TensorProto.UINT64),
    "string_data": (onnx.TensorProto.STRING,),
}
"""Where numbers lie that are not raw; every other type lies in int32_data."""
_COMPLEX = (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
_LIGHT = 1024
"""Elements of tensors that shape inference may read."""
_LONGEST_NAME = 255
_REPAIR = "export the model again, or check the download"


def check_tensors(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse tensors whose numbers are not all there.

    Args:
        proto: the model, external data not loaded.
        path: its .onnx file; external data lies in its folder or below it.

    Raises:
        InputRefused: a type or shape that is none, more or fewer numbers than the shape says, or external data
            that is missing, too short, or outside the model's folder.
    """
    needed: dict[str, int] = {}
    for tensor in all_tensors(proto):
        bits = _check_type(tensor, path)
        count = math.prod(tensor.dims)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            location, end = _external(tensor, path, (count * bits + 7) // 8)
            needed[location] = max(needed.get(location, 0), end)
        else:
            _check_count(tensor, path, count, bits)
    for location, size in needed.items():
        _check_file(location, size, path)


def all_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of the model: initializers and attributes, in subgraphs and functions too."""
    yield from _of_graph(proto.graph)
    for function in proto.functions:
        for node in function.node:
            yield from _of_node(node)


def without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for checkers and shape inference: what is large or external becomes an input of the graph.

    Nothing of the weights is copied. In subgraphs, which cannot have inputs of their own, only the name stays.
    """
    light = onnx.ModelProto(ir_version=proto.ir_version)
    light.opset_import.extend(proto.opset_import)
    light.functions.extend(proto.functions)
    graph = light.graph
    graph.name = proto.graph.name
    for field in ("node", "input", "output", "sparse_initializer"):
        getattr(graph, field).extend(getattr(proto.graph, field))
    given = {value.name for value in graph.input}
    for tensor in proto.graph.initializer:
        if not _is_heavy(tensor):
            graph.initializer.append(tensor)
        elif tensor.name not in given:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    for node in graph.node:
        for inner in subgraphs(node):
            _lighten(inner)
    return light


def _lighten(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        if _is_heavy(tensor):
            name, kind = tensor.name, tensor.data_type
            tensor.Clear()
            tensor.name, tensor.data_type = name, kind
            tensor.dims.append(0)
    for node in graph.node:
        for inner in subgraphs(node):
            _lighten(inner)


def _is_heavy(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL or math.prod(tensor.dims) > _LIGHT


def data_files(path: Path) -> list[Path]:
    """The external data files that the model at ``path`` names, sorted; none where it does not parse."""
    try:
        proto = onnx.load(path, load_external_data=False)
    except Exception:  # the parser raises whatever it meets; loading the model says what is wrong
        return []
    entries = (entry for tensor in all_tensors(proto) for entry in tensor.external_data)
    return sorted({path.parent / entry.value for entry in entries if entry.key == "location" and entry.value})


def place_of(location: str, path: Path) -> Path | None:
    """The file that external data of the model at ``path`` really lies in; None where that is not allowed.

    It may lie in the model's folder or below it. Where the folder holds links, as the cache of Hugging Face
    does, it may also lie beside the file that the model's own link leads to.
    """
    folder = path.absolute().parent
    if Path(location).is_absolute() or ".." in Path(location).parts:
        return None
    try:
        file = (folder / location).resolve()
    except (OSError, RuntimeError):  # a circle of links
        return None
    if any(file.is_relative_to(allowed) for allowed in (folder.resolve(), path.resolve().parent)):
        return file
    return None


def follow_links(model: ir.Model, path: Path) -> None:
    """Let external tensors read the files that links lead to; to be called after :func:`check_tensors`."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = _followed(tensor, path)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    tensor = attribute.as_tensor()
                    if isinstance(tensor, ir.ExternalTensor):
                        node.attributes[name] = ir.AttrTensor(name, _followed(tensor, path))


def _followed(tensor: ir.ExternalTensor, path: Path) -> ir.ExternalTensor:
    file = place_of(str(tensor.location), path)
    folder = path.absolute().parent.resolve()
    if file is None or file.is_relative_to(folder):
        return tensor
    return ir.ExternalTensor(
        file.name,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name or "",
        base_dir=file.parent,
    )


def _of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    for node in graph.node:
        yield from _of_node(node)


def _of_node(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            continue
        if attribute.type == onnx.AttributeProto.TENSOR:
            yield attribute.t
        elif attribute.type == onnx.AttributeProto.TENSORS:
            yield from attribute.tensors
        elif attribute.type in (onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.SPARSE_TENSORS):
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (part for part in (sparse.values, sparse.indices) if part.data_type)
    for graph in subgraphs(node):
        yield from _of_graph(graph)


def _check_type(tensor: onnx.TensorProto, path: Path) -> int:
    """Bits of one number."""
    if any(dim < 0 for dim in tensor.dims):
        raise _unusable(tensor, path, f"its shape is {list(tensor.dims)}")
    if tensor.data_type == onnx.TensorProto.STRING:
        return 0
    try:
        return int(ir.DataType(tensor.data_type).bitwidth)
    except (ValueError, TypeError) as error:
        raise _unusable(tensor, path, f"its data type is {tensor.data_type}, which is none") from error


def _check_count(tensor: onnx.TensorProto, path: Path, count: int, bits: int) -> None:
    kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
    if tensor.HasField("raw_data"):
        there, wanted, unit = len(tensor.raw_data), (count * bits + 7) // 8, "bytes"
    else:
        field = next((name for name, kinds in _FIELDS.items() if tensor.data_type in kinds), "int32_data")
        per = max(1, 8 // bits) if 0 < bits < 8 else 1
        wanted = 2 * count if tensor.data_type in _COMPLEX else -(-count // per)
        there, unit = len(getattr(tensor, field)), "numbers"
    if there != wanted:
        raise _unusable(
            tensor, path, f"as {kind} of shape {list(tensor.dims)} it takes {wanted} {unit}, and it has {there}"
        )


def _external(tensor: onnx.TensorProto, path: Path, size: int) -> tuple[str, int]:
    """Name of the tensor's file, and where in it the tensor ends."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    longest = max((len(part.encode()) for part in Path(location).parts), default=0)
    if not location.isprintable() or not 0 < longest <= _LONGEST_NAME:
        shown = location if len(location) < 50 else location[:50] + "..."
        raise _unusable(tensor, path, f"it lies in external data, and no file can be called {shown!r}")
    numbers: dict[str, int] = {}
    for key in ("offset", "length"):
        text = entries.get(key, "0")
        if not (text.isascii() and text.isdecimal()):
            raise _unusable(tensor, path, f"the {key} of its external data is {text!r}")
        numbers[key] = int(text)
    if (numbers["length"] and numbers["length"] != size) or tensor.data_type == onnx.TensorProto.STRING:
        kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        shape = list(tensor.dims)
        why = f"as {kind} of shape {shape} it takes {size} bytes, and {numbers['length']} are set aside for it"
        raise _unusable(tensor, path, why)
    return location, numbers["offset"] + size


def _check_file(location: str, size: int, path: Path) -> None:
    file = place_of(location, path)
    if file is None:
        linked = (path.absolute().parent / location).is_symlink()
        raise InputRefused(
            "The model's external data lies outside its folder",
            where=f"{path}: {location!r}",
            why="a model file must not point at arbitrary files",
            do="put the data itself beside the model" + (", not a link" if linked else " and name it so"),
        )
    if not file.is_file():
        raise _missing(location, path)
    if file.samefile(path):
        raise InputRefused(
            "The model's external data is the model file itself",
            where=f"{path}: {location!r}",
            why="the bytes of a graph are no weights",
            do="export the model again, or check the download",
        )
    there = file.stat().st_size
    if there < size:
        raise InputRefused(
            "The model's external data is too short",
            where=str(path.absolute().parent / location),
            why=f"{path.name} reads up to byte {size}, the file has {there}",
            do="copy or download the file again",
        )


def _missing(location: str, path: Path) -> InputRefused:
    beside = path.with_name(path.name + ".data")
    other = beside if beside.is_file() and beside.name != location else None
    return InputRefused(
        "The model's external data is missing",
        where=str(path.absolute().parent / location),
        why=f"{path.name} keeps its weights in it" if other is None else f"{path.name} asks for it by this name",
        do="put the file beside the model; a model that was renamed still asks for the old name"
        if other is None
        else f"{other.name} looks like it: give both files their old names, {Path(location).stem} and {location}",
    )


def _unusable(tensor: onnx.TensorProto, path: Path, why: str) -> InputRefused:
    return InputRefused(
        "A tensor of the model is not usable", where=f"{path}: tensor {tensor.name!r}", why=why, do=_REPAIR
    )
