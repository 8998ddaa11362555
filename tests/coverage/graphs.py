"""Where the graphs of the table come from: torch's exporters, or nodes put together by hand. Each once per run."""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import torch

from graphrot.model.trace import quiet
from tests.coverage import handmade
from tests.coverage.zoo import program

Road = Literal["torchscript", "dynamo", "by hand"]


@dataclass(frozen=True)
class Graph:
    """A model and an array for each of its inputs, in their order."""

    model: ir.Model
    inputs: tuple[np.ndarray, ...]


@functools.cache
def graph(name: str, road: Road, opset: int) -> Graph:
    """The graph of one row. Do not change it."""
    if road == "by hand":
        return Graph(*handmade.build(name, opset))
    source = program(name, layers=1 if road == "dynamo" else None)  # its time goes with the number of layers
    with torch.no_grad(), quiet():
        model = _scripted(source, opset) if road == "torchscript" else _exported(source, opset)
    return Graph(model, tuple(x.numpy() for x in source.inputs))


def _scripted(source: Any, opset: int) -> ir.Model:
    names = [f"in{k}" for k in range(len(source.inputs))]
    buffer = io.BytesIO()
    torch.onnx.export(
        source.module,
        source.inputs,
        buffer,
        opset_version=opset,
        input_names=names,
        output_names=["out"],
        dynamic_axes=dict(zip(names, source.axes, strict=True)),
        dynamo=False,
    )
    return ir.from_proto(onnx.load_model_from_string(buffer.getvalue()))


def _exported(source: Any, opset: int) -> ir.Model:
    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple(dict.fromkeys(axes, dynamic) for axes in source.axes)
    exported = torch.onnx.export(
        source.module, source.inputs, dynamo=True, opset_version=opset, dynamic_shapes=(shapes,), verbose=False
    )
    assert exported is not None
    return ir.from_proto(ir.to_proto(exported.model))
