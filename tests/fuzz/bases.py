"""Small decoders to break: one exported, two built by hand; with and without external data."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from tests.analysis.graphs import decoder, layer_op, rms_norm

BASES = ("exported", "embedded", "layernorm")

_NAMES = {
    "ids": "input_ids",
    "positions": "position_ids",
    "past_k": "past_key_values.0.key",
    "past_v": "past_key_values.0.value",
    "present_k": "present.0.key",
    "present_v": "present.0.value",
}


def write_base(name: str, path: Path) -> None:
    """Write one of :data:`BASES`: a decoder of one layer."""
    if name == "exported":
        from graphrot.model.export import export_decoder
        from tests.tiny import tiny_llama

        export_decoder(tiny_llama(tied=True, layers=1), path)
        return
    model, _ = decoder(rms_norm if name == "embedded" else layer_op, bias=name == "layernorm")
    for graph_value in (*model.graph.inputs, *model.graph.outputs):
        graph_value.name = _NAMES.get(graph_value.name or "", graph_value.name)
    proto = ir.to_proto(model)
    if name == "embedded":
        onnx.save(proto, path)
    else:
        onnx.save(proto, path, save_as_external_data=True, location=path.name + ".data", size_threshold=1024)
