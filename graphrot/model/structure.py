"""The structure of a graph, checked on its protobuf: what is read must have been made before, once.

The graph classes of other packages repair or lose some of these faults silently, and runtimes name them
in their own words, or not at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.defs

from graphrot.errors import InputRefused
from graphrot.model.extents import DEEPEST, check_extents
from graphrot.ops.foreign import has_custom_ops

OLDEST_OPSET = 7
"""ONNX Runtime runs no older models."""

KNOWN_DOMAINS = frozenset(
    {
        *("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview", "ai.onnx.preview.training"),
        *("com.microsoft", "com.microsoft.experimental", "com.microsoft.nchwc", "com.ms.internal.nhwc"),
        *("org.pytorch.aten", "graphrot"),
    }
)
"""Domains whose operators ONNX Runtime, or this package, defines."""

RUNTIME_OPS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
"""Operators that ONNX Runtime has in the standard domain at every opset: before the standard, or without it."""

_UPGRADE = "pip install -U onnx onnxruntime, or export the model at an older opset"


def check_structure(proto: onnx.ModelProto, where: str) -> None:
    """Refuse a model whose graph cannot be followed.

    Args:
        proto: the model; its weights are not looked at.
        where: the file's name, for messages.

    Raises:
        InputRefused: no operators, an opset or IR version out of range, a name made twice or never, nodes in
            a circle or out of order, functions that call themselves, sparse initializers, sizes without bounds,
            an operator that nobody defines.
    """
    if (text := _not_text(proto)) is not None:
        raise _refuse(f"a text in it is not UTF-8: {text!r}", where)
    if not proto.graph.node or not proto.opset_import:
        raise _refuse("it holds no graph with operators", where, do="export it again, or check the download")
    _check_versions(proto, where)
    functions = {(f.domain, f.name): f for f in proto.functions}
    if _repeated([(f.domain, f.name, f.overload) for f in proto.functions]) is not None:
        raise _refuse("two of its functions have the same name", where)
    _check_calls(functions, where)
    for function in proto.functions:
        inside = f"{where}: function {function.name!r}"
        scope = _Scope(function.node, inside, functions)
        scope.check(function.input, (), function.output, frozenset())
    graph = proto.graph
    _check_declared(graph, where)
    check_extents(proto, functions, where)
    _Scope(graph.node, where, functions).check(
        [value.name for value in graph.input], _initializers(graph), [value.name for value in graph.output], frozenset()
    )


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs among a node's attributes."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def read_names(graph: onnx.GraphProto) -> frozenset[str]:
    """Names that the nodes of a graph read, by their inputs and by their subgraphs."""
    return frozenset(name for node in graph.node for name in _reads(node))


def hide_runtime_ops(proto: onnx.ModelProto) -> None:
    """Move operators that ONNX Runtime alone has in the standard domain to its own one, in place.

    The checker, which knows the standard only, leaves nodes of other domains alone.

    Args:
        proto: a copy that is only looked at.
    """
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    _hide(proto.graph.node, opsets.get("", opsets.get("ai.onnx", 1)))
    for function in proto.functions:
        inside = {entry.domain: entry.version for entry in function.opset_import}
        if _hide(function.node, inside.get("", 1)) and "com.microsoft" not in inside:
            function.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    if "com.microsoft" not in opsets:
        proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))


def _hide(nodes: Iterable[onnx.NodeProto], opset: int) -> bool:
    found = False
    for node in nodes:
        if node.domain in ("", "ai.onnx") and node.op_type in RUNTIME_OPS and not _in_standard(node.op_type, opset):
            node.domain = "com.microsoft"
            found = True
        for graph in subgraphs(node):
            found |= _hide(graph.node, opset)
    return found


def _in_standard(op_type: str, opset: int) -> bool:
    try:
        onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    return True


def node_label(node: onnx.NodeProto, place: int | None = None) -> str:
    """A node for people: its operator, and its name or what it makes."""
    name = node.name or next((output for output in node.output if output), "")
    return f"{node.op_type} {name!r}" if name or place is None else f"{node.op_type}, node {place}"


def _check_versions(proto: onnx.ModelProto, where: str) -> None:
    opsets: dict[str, int] = {}
    for entry in (*proto.opset_import, *(entry for function in proto.functions for entry in function.opset_import)):
        if entry.version < 1:
            raise _refuse(f"it imports version {entry.version} of the domain {entry.domain or 'ai.onnx'!r}", where)
    for entry in proto.opset_import:
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        if opsets.setdefault(domain, entry.version) != entry.version:
            raise _refuse(f"it imports two opsets of the domain {domain or 'ai.onnx'!r}", where)
    opset, newest = opsets.get(""), onnx.defs.onnx_opset_version()
    if opset is not None and opset > newest:
        raise InputRefused(
            f"The model's opset {opset} is not supported",
            where=where,
            why=f"the installed onnx {onnx.__version__} knows opsets up to {newest}",
            do=_UPGRADE,
        )
    if opset is not None and opset < OLDEST_OPSET:
        raise InputRefused(
            f"The model's opset {opset} is not supported",
            where=where,
            why=f"ONNX Runtime runs models of opset {OLDEST_OPSET} and later",
            do="export the model again with opset 21 or later",
        )
    if proto.ir_version > onnx.IR_VERSION:
        raise InputRefused(
            f"The model's IR version {proto.ir_version} is not supported",
            where=where,
            why=f"the installed onnx {onnx.__version__} knows versions up to {onnx.IR_VERSION}",
            do=_UPGRADE,
        )


def _check_declared(graph: onnx.GraphProto, where: str) -> None:
    for tensor in graph.sparse_initializer:
        raise InputRefused(
            "The model holds a sparse initializer",
            where=f"{where}: tensor {tensor.values.name!r}",
            why="sparse weights are neither rotated nor kept",
            do="export the model with dense weights",
        )
    known = set(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED}
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type not in known:
            kind = value.type.tensor_type.elem_type
            raise _refuse(f"it declares the tensor {value.name!r} with data type {kind}, which is none", where)


def _initializers(graph: onnx.GraphProto) -> list[str]:
    dense = [tensor.name for tensor in graph.initializer]
    return dense + [tensor.values.name for tensor in graph.sparse_initializer]


@dataclass
class _Scope:
    """One list of nodes: a graph's or a function's."""

    nodes: Sequence[onnx.NodeProto]
    where: str
    functions: dict[tuple[str, str], onnx.FunctionProto]

    def check(
        self, inputs: Iterable[str], initializers: Iterable[str], outputs: Iterable[str], outer: frozenset[str]
    ) -> None:
        """Walk through the nodes in their order; ``outer`` are names of the graphs around this one."""
        given = list(inputs)
        stored = list(initializers)
        for kind, names in (("inputs", given), ("initializers", stored)):
            if (twice := _repeated(names)) is not None:
                raise self._refuse(f"two of its {kind} are called {twice!r}")
        makers: dict[str, int] = {}
        fixed = {*given, *stored}
        for place, node in enumerate(self.nodes):
            self._check_operator(node, place)
            for output in node.output:
                if not output:
                    continue
                if output in makers or output in fixed:
                    other = node_label(self.nodes[makers[output]]) if output in makers else "an input or initializer"
                    raise self._refuse(
                        f"two parts of it make the tensor {output!r}: {node_label(node, place)} and {other}",
                        do="give every tensor a name of its own",
                    )
                makers[output] = place
        self._check_reads(makers, outer | fixed)
        everything = outer | fixed | makers.keys()
        for output in outputs:
            if output not in everything:
                raise self._refuse(
                    f"its output {output!r} is made by no node", do="export it again, or take the output out"
                )

    def _check_reads(self, makers: dict[str, int], known: frozenset[str]) -> None:
        late: tuple[int, str] | None = None
        for place, node in enumerate(self.nodes):
            for name in _reads(node):
                if name in known:
                    continue
                if name not in makers:
                    raise self._refuse(
                        f"{node_label(node, place)} reads {name!r}, which nothing makes",
                        do="export it again; a weight or a node is missing",
                    )
                if makers[name] >= place and late is None:
                    late = (place, name)
        if late is not None:
            if circle := self._circle(makers):
                path = " -> ".join(node_label(self.nodes[place], place) for place in circle)
                raise self._refuse(f"its nodes form a cycle: {path}", do="take the edge that leads back out")
            place, name = late
            raise self._refuse(
                f"its nodes are not sorted: {node_label(self.nodes[place], place)} reads {name!r} before it is made",
                do="sort them: graphsurgeon's graph.toposort(), or onnx_ir's model.graph.sort()",
            )
        self._check_subgraphs(known)

    def _check_subgraphs(self, known: frozenset[str]) -> None:
        before = set(known)
        for place, node in enumerate(self.nodes):
            for graph in subgraphs(node):
                inside = f"{self.where}: {node_label(node, place)}"
                _check_declared(graph, inside)
                _Scope(graph.node, inside, self.functions).check(
                    [value.name for value in graph.input],
                    _initializers(graph),
                    [value.name for value in graph.output],
                    frozenset(before),
                )
            before.update(node.output)

    def _check_operator(self, node: onnx.NodeProto, place: int) -> None:
        if node.domain in KNOWN_DOMAINS or (node.domain, node.op_type) in self.functions or has_custom_ops():
            return
        raise InputRefused(
            f"The model uses an operator that nothing here defines: {node.domain}::{node.op_type}",
            where=f"{self.where}: {node_label(node, place)}",
            why="it needs the library of somebody else's operators, and the model carries no function for it",
            do="give that library: --custom-ops FILE, or graphrot.custom_ops(FILE) in Python; or export the model with "
            "standard operators",
        )

    def _circle(self, makers: dict[str, int]) -> list[int]:
        """Nodes along one cycle, the first again at the end; empty if there is none."""
        readers = [[makers[name] for name in _reads(node) if name in makers] for node in self.nodes]
        state = [0] * len(readers)
        for start in range(len(readers)):
            path: list[int] = []
            stack = [(start, iter(readers[start]))] if state[start] == 0 else []
            state[start] = state[start] or 1
            path.append(start)
            while stack:
                place, sources = stack[-1]
                source = next(sources, None)
                if source is None:
                    state[place] = 2
                    stack.pop()
                    path.pop()
                elif state[source] == 1:
                    circle = path[path.index(source) :]
                    return [*reversed(circle), circle[-1]]
                elif state[source] == 0:
                    state[source] = 1
                    stack.append((source, iter(readers[source])))
                    path.append(source)
        return []

    def _refuse(self, why: str, do: str = "export it again, or check the download") -> InputRefused:
        return _refuse(why, self.where, do=do)


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads, by its inputs and by its subgraphs; those that a subgraph makes left out."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        own = {value.name for value in graph.input} | set(_initializers(graph))
        own |= {output for part in graph.node for output in part.output}
        for part in graph.node:
            yield from (name for name in _reads(part) if name not in own)
        yield from (value.name for value in graph.output if value.name not in own)


def _check_calls(functions: dict[tuple[str, str], onnx.FunctionProto], where: str) -> None:
    """Refuse functions that call themselves, straight or by others: a runtime would unfold them for ever."""
    done: set[tuple[str, str]] = set()

    def visit(name: tuple[str, str], above: tuple[tuple[str, str], ...]) -> None:
        if len(above) > DEEPEST:
            raise _refuse(f"more than {DEEPEST} of its functions call each other in a row", where)
        if name in above:
            raise _refuse(f"its function {name[1]!r} calls itself", where)
        if name in done or name not in functions:
            return
        for called in dict.fromkeys(_calls(functions[name].node)):
            visit(called, (*above, name))
        done.add(name)

    for name in functions:
        visit(name, ())


def _calls(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        yield node.domain, node.op_type
        for graph in subgraphs(node):
            yield from _calls(graph.node)


def _not_text(message: Any) -> bytes | None:
    """A string in the protobuf message that is none: the parser gives it as bytes."""
    for field, content in message.ListFields():
        values = content if isinstance(content, Sequence) and not isinstance(content, str | bytes) else [content]
        if field.type == field.TYPE_STRING:
            for value in values:
                if isinstance(value, bytes):
                    return value[:80]
        elif field.type == field.TYPE_MESSAGE:
            for value in values:
                if (text := _not_text(value)) is not None:
                    return text
    return None


def _repeated(names: Sequence[Hashable]) -> Hashable | None:
    """The first that stands in the list twice."""
    seen: set[Hashable] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _refuse(why: str, where: str, *, do: str = "export it again, or check the download") -> InputRefused:
    return InputRefused("The file is not a usable ONNX model", where=where, why=why, do=do)
