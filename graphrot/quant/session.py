"""Builds and runs one segment of a model in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

from graphrot.errors import InputRefused
from graphrot.graph import read_constant
from graphrot.ops.foreign import register_custom_ops
from graphrot.ops.hadamard import DOMAIN
from graphrot.ops.library import is_available, register
from graphrot.ops.runtime import runtime
from graphrot.quant.segments import Segment

if TYPE_CHECKING:
    import onnxruntime

_EMBED = 1 << 16
"""Initializers up to this many bytes are written into the segment; larger ones are fed, without a copy."""


def weight_name(node: str) -> str:
    """The segment input that stands for the weight of the linear with this first output."""
    return f"{node}//weight"


def quantized_name(tensor: str) -> str:
    """The segment input that stands for a tensor after its rounding."""
    return f"{tensor}//quantized"


class SegmentSession:
    """One segment, ready to run on any number of batches.

    Args:
        model: the whole model (opset imports, functions, initializers).
        segment: what to run.
        weights: replaced operands: node (first output) -> ``(input index, array)``.
        renamed: node (first output) -> tensor that it reads in rounded form (:func:`quantized_name`).
        example: one batch of carried tensors, for their dtypes and ranks.
        threads: threads of ONNX Runtime; None: its own choice.
    """

    def __init__(
        self,
        model: ir.Model,
        segment: Segment,
        *,
        weights: Mapping[str, tuple[int, np.ndarray]],
        renamed: Mapping[str, str],
        example: Mapping[str, np.ndarray],
        threads: int | None,
    ) -> None:
        self.outputs = list(segment.outputs)
        self._fed = {weight_name(node): array for node, (_, array) in weights.items()}
        graph = onnx.GraphProto(name="segment")
        for node in segment.nodes:
            graph.node.append(_rewire(node, weights, renamed))
        for name in segment.initializers:
            value = model.graph.initializers[name]
            content = value.const_value
            assert content is not None
            if content.nbytes <= _EMBED or content.dtype.bitwidth < 8:
                copied = ir.tensor(content.numpy(), dtype=content.dtype, name=name)
                graph.initializer.append(ir.serde.serialize_tensor(copied))
            else:
                self._fed[name] = read_constant(value)
        names = dict.fromkeys((*segment.inputs, *(quantized_name(name) for name in renamed.values())))
        self.inputs = [name for name in names if name in example]
        for name in self.inputs:
            graph.input.append(_value_info(name, example[name], static=False))
        for name, array in self._fed.items():
            graph.input.append(_value_info(name, array, static=True))
        for name in self.outputs:
            graph.output.append(onnx.ValueInfoProto(name=name))
        proto = onnx.ModelProto(ir_version=model.ir_version, graph=graph)
        proto.opset_import.extend(helper.make_opsetid(d, v) for d, v in model.opset_imports.items())
        proto.functions.extend(ir.serde.serialize_function(function) for function in model.functions.values())
        self._session = create_session(proto, threads)
        self._where = segment.group.input

    def run(self, carried: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one batch; returns the segment's outputs by name."""
        feed = {name: carried[name] for name in self.inputs} | self._fed
        try:
            results = self._session.run(self.outputs, feed)
        except Exception as error:  # onnxruntime raises bare subclasses of its own
            raise InputRefused(
                "A part of the model does not run on the calibration text",
                where=f"the nodes before tensor {self._where!r}",
                why=first_line(error),
                do="check that the model runs in ONNX Runtime, and that the text fits its vocabulary and length",
            ) from error
        return dict(zip(self.outputs, results, strict=True))


def _rewire(node: ir.Node, weights: Mapping[str, tuple[int, np.ndarray]], renamed: Mapping[str, str]) -> onnx.NodeProto:
    proto = ir.serde.serialize_node(node)
    key = node.outputs[0].name or ""
    if key in renamed:
        for position, name in enumerate(proto.input):
            if name == renamed[key]:
                proto.input[position] = quantized_name(name)
    if key in weights:
        proto.input[weights[key][0]] = weight_name(key)
    return proto


def _value_info(name: str, array: np.ndarray, *, static: bool) -> onnx.ValueInfoProto:
    dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
    shape = array.shape if static else tuple(f"{name}.{axis}" for axis in range(array.ndim))
    return helper.make_tensor_value_info(name, dtype, shape)


def create_session(proto: onnx.ModelProto, threads: int | None) -> onnxruntime.InferenceSession:
    """A session on a part of a model, with the custom operators at hand.

    Args:
        proto: the part.
        threads: threads of ONNX Runtime; None: its own choice.

    Raises:
        InputRefused: ONNX Runtime does not take it.
    """
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    register_custom_ops(options)
    if any(entry.domain == DOMAIN for entry in proto.opset_import) and is_available():
        register(options)
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(
            proto.SerializeToString(), sess_options=options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime raises bare subclasses of its own
        raise InputRefused(
            "ONNX Runtime does not take a part of the model",
            where=f"the nodes before tensor {proto.graph.output[-1].name!r}",
            why=first_line(error),
        ) from error


def first_line(error: Exception) -> str:
    """What ONNX Runtime says, without its trace."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
