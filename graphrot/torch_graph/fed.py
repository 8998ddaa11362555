"""The part of a graph that depends on the feeds alone, in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

from graphrot.errors import InputRefused, UsageError
from graphrot.quant.session import create_session, first_line
from graphrot.torch_graph.program import Program, operands


class FedPart:
    """Runs the fed nodes of a program.

    Args:
        model: the whole model.
        program: of it.
    """

    def __init__(self, model: ir.Model, program: Program) -> None:
        inputs = set(model.graph.inputs)
        self._plain = [value for value in program.fetched if value in inputs]
        self._made = [value for value in program.fetched if value not in inputs]
        self._session = None
        self._read: list[str] = []
        if not self._made:
            return
        graph = onnx.GraphProto(name="fed")
        read: dict[ir.Value, None] = {}
        for node in program.fed:
            graph.node.append(ir.serde.serialize_node(node))
            read.update(dict.fromkeys(value for value in operands(node) if value.producer() is None))
        for value in read:
            if value in inputs:
                graph.input.append(ir.serde.serialize_value(value))
                self._read.append(value.name or "")
            elif value.const_value is not None:
                tensor = ir.tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=value.name)
                graph.initializer.append(ir.serde.serialize_tensor(tensor))
        for value in self._made:
            graph.output.append(onnx.ValueInfoProto(name=value.name))
        proto = onnx.ModelProto(ir_version=model.ir_version, graph=graph)
        proto.opset_import.extend(helper.make_opsetid(d, v) for d, v in model.opset_imports.items())
        proto.functions.extend(ir.serde.serialize_function(function) for function in model.functions.values())
        self._session = create_session(proto, None)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[ir.Value, np.ndarray]:
        """The fetched values.

        Raises:
            UsageError: an input is not fed.
            InputRefused: ONNX Runtime does not run the part on these feeds.
        """
        missing = [name for name in (*self._read, *(v.name or "" for v in self._plain)) if name not in feeds]
        if missing:
            raise UsageError(f"The graph's input {missing[0]!r} is not fed", do="feed every input that is read")
        found = {value: feeds[value.name or ""] for value in self._plain}
        if self._session is None:
            return found
        try:
            arrays = self._session.run([v.name for v in self._made], {name: feeds[name] for name in self._read})
        except Exception as error:  # onnxruntime raises bare subclasses of its own
            raise InputRefused(
                "A part of the model does not run on the calibration text",
                where="the nodes that depend on no weight",
                why=first_line(error),
                do="check that the model runs in ONNX Runtime, and that the text fits its vocabulary and length",
            ) from error
        return found | dict(zip(self._made, arrays, strict=True))
