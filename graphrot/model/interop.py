"""Models as Python objects: ``onnx.ModelProto``, ``onnx_ir.Model`` and ``onnx_graphsurgeon.Graph``, in and out.

An object that is given is read and never changed. onnx-graphsurgeon itself loses a model's metadata and
writes 4-bit arrays wrongly; :func:`to_graphsurgeon` and :func:`export_graphsurgeon` keep both.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx
import onnx_ir as ir

from graphrot.errors import EnvironmentProblem, InputRefused, UsageError
from graphrot.model.save import save_model

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

ModelObject: TypeAlias = "onnx.ModelProto | ir.Model | gs.Graph"
"""A model in memory."""

METADATA = "metadata_props"
"""Attribute of a graphsurgeon graph that :func:`to_graphsurgeon` sets: the model's metadata, a dictionary."""


def is_object(source: object) -> bool:
    """Whether ``source`` is a model in memory (:data:`ModelObject`)."""
    return isinstance(source, onnx.ModelProto | ir.Model) or is_graphsurgeon(source)


def is_graphsurgeon(source: object) -> bool:
    """Whether ``source`` is an onnx-graphsurgeon graph; does not import that package."""
    return type(source).__module__.partition(".")[0] == "onnx_graphsurgeon" and hasattr(source, "import_domains")


def describe(source: object) -> str:
    """An object's type and name, for messages and manifests."""
    graph = source if is_graphsurgeon(source) else getattr(source, "graph", None)
    name = getattr(graph, "name", None)
    kind = f"{type(source).__module__.partition('.')[0].removesuffix('_pb2')}.{type(source).__name__}"
    kind = "onnx.ModelProto" if isinstance(source, onnx.ModelProto) else kind
    return f"{kind} {name!r}" if name else kind


def to_ir(source: ModelObject) -> ir.Model:
    """The model as an ``onnx_ir.Model`` of its own. Weights are shared with ``source``, not copied.

    Args:
        source: a model in memory. External data of a ``ModelProto`` or a graphsurgeon graph is looked for
            in the current folder, for nothing in them says where it lies.

    Raises:
        InputRefused: the object is no valid model, or its external data cannot be read.
        UsageError: it is none of the three types.
    """
    try:
        if isinstance(source, ir.Model):
            model = source.clone()
        elif isinstance(source, onnx.ModelProto):
            model = ir.from_proto(source)
        elif is_graphsurgeon(source):
            from graphrot.model.surgeon import import_graph

            model = import_graph(source)
        else:
            raise UsageError(
                "The source is not understood",
                where=f"a {type(source).__name__}",
                do="give a path, an onnx.ModelProto, an onnx_ir.Model or an onnx_graphsurgeon.Graph",
            )
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise InputRefused(
            "The object is not a usable model",
            where=describe(source),
            why=f"{type(error).__name__}: {str(error).strip()[:400]}",
        ) from error
    _check_readable(model, describe(source))
    return model


def write_object(source: ModelObject, path: Path) -> None:
    """Write a model in memory to ``path`` and ``path.data``; the folder exists.

    Raises:
        InputRefused, UsageError: as for :func:`to_ir`.
    """
    model = to_ir(source)
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            if value.const_value is None:
                raise InputRefused("A weight has no numbers", where=f"{describe(source)}: tensor {name!r}")
    try:
        save_model(model, path)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputRefused(
            "The object is not a usable model",
            where=describe(source),
            why=f"it cannot be written: {type(error).__name__}: {str(error).strip()[:400]}",
        ) from error


@contextlib.contextmanager
def as_file(source: str | Path | ModelObject) -> Iterator[Path]:
    """A path for ``source``: its own, or a temporary file's that holds a model in memory.

    Raises:
        InputRefused, UsageError: as for :func:`to_ir`.
    """
    if isinstance(source, str | Path):
        yield Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="graphrot-object-") as folder:
        path = Path(folder) / "model.onnx"
        write_object(source, path)
        with naming(source, path):
            yield path


@contextlib.contextmanager
def naming(source: ModelObject, path: Path) -> Iterator[None]:
    """Let errors name the object instead of the file that it was written to."""
    try:
        yield
    except InputRefused as error:
        error.where = (error.where or str(path)).replace(str(path), describe(source))
        raise


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The model as one protobuf with all weights inside.

    Over 2 GiB the protobuf exists in memory but cannot be serialized in one piece: ``onnx.save`` writes it
    with ``save_as_external_data=True``.
    """
    proto = ir.to_proto(model)
    tensors = {name: value.const_value for graph in model.graphs() for name, value in graph.initializers.items()}
    for tensor in _tensors(proto.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            content = tensors[tensor.name]
            assert content is not None
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = content.tobytes()
    return proto


def to_graphsurgeon(model: ir.Model | onnx.ModelProto) -> gs.Graph:
    """The model as an onnx-graphsurgeon graph that ``gs.export_onnx`` turns into the same model.

    Weights stay in the form that graphsurgeon exports unread; 4-bit ones whose ``values`` were looked at
    export rightly by :func:`export_graphsurgeon` alone. Metadata is put into ``graph.metadata_props``.
    Overloads of functions, which graphsurgeon does not know, become functions of other names.

    Raises:
        EnvironmentProblem: onnx-graphsurgeon is not installed.
    """
    if importlib.util.find_spec("onnx_graphsurgeon") is None:
        raise EnvironmentProblem(
            "A package is not installed: onnx_graphsurgeon",
            why="the model was asked for as its graph",
            do="pip install onnx-graphsurgeon",
        )
    import onnx_graphsurgeon

    proto = model if isinstance(model, onnx.ModelProto) else to_proto(model)
    if any(function.overload for function in proto.functions):
        proto = _without_overloads(proto)
    graph = onnx_graphsurgeon.import_onnx(proto)
    setattr(graph, METADATA, {entry.key: entry.value for entry in proto.metadata_props})
    return graph


def from_graphsurgeon(graph: gs.Graph) -> ir.Model:
    """An onnx-graphsurgeon graph as an ``onnx_ir.Model``; see :func:`to_ir` for weights and errors."""
    return to_ir(graph)


def export_graphsurgeon(graph: gs.Graph) -> onnx.ModelProto:
    """``gs.export_onnx`` without its losses: metadata, functions and 4-bit arrays are written as they are.

    Args:
        graph: with ``metadata_props`` (a dictionary) if it is to have metadata. It is not changed.

    Raises:
        InputRefused: the graph is no valid model.
    """
    return to_proto(to_ir(graph))


def _check_readable(model: ir.Model, what: str) -> None:
    """Refuse weights whose files are not where the object says."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                continue
            file = Path(tensor.path)
            end = (tensor.offset or 0) + (tensor.length or 0)
            if not file.is_file() or file.stat().st_size < end:
                raise InputRefused(
                    "The object's weights lie in a file that cannot be read",
                    where=f"{what}: tensor {value.name!r} in {file}",
                    why=f"it ends before byte {end}" if file.is_file() else "there is no such file",
                    do="load the model with its weights (onnx.load(path), onnx_ir.load(path)), or give the path",
                )


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") or attribute.graphs else ():
                yield from _tensors(inner)


def _without_overloads(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every overload of a function is a function with a name of its own."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    names = {(f.domain, f.name) for f in copy.functions if not f.overload}
    renamed: dict[tuple[str, str, str], str] = {}
    for function in copy.functions:
        if function.overload:
            name = f"{function.name}_{function.overload}"
            while (function.domain, name) in names:
                name += "_"
            names.add((function.domain, name))
            renamed[function.domain, function.name, function.overload] = name
            function.name, function.overload = name, ""
    for node in (*_nodes(copy.graph.node), *(n for f in copy.functions for n in _nodes(f.node))):
        if plain := renamed.get((node.domain, node.op_type, node.overload)):
            node.op_type, node.overload = plain, ""
    return copy


def _nodes(nodes: Any) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner.node)
