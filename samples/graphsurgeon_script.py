"""A deployment script in onnx-graphsurgeon with one line more: the graph is rotated and quantized on its way.

    python samples/graphsurgeon_script.py MODEL.onnx OUT.onnx

The script's own edit: the model returns logits of the last position only, as a serving loop wants them.
MODEL.onnx is a decoder with its tokenizer beside it (calibration text has to become tokens).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs

import graphrot
from graphrot.errors import GraphrotError


def last_logits_only(graph: gs.Graph) -> None:
    """Replace the output ``logits [B, S, V]`` by its last row, ``[B, 1, V]``, under the same name."""
    logits = next(output for output in graph.outputs if output.name == "logits")
    last = gs.Variable("logits", dtype=logits.dtype, shape=[logits.shape[0], 1, logits.shape[2]])
    logits.name = "all_logits"
    bounds = [gs.Constant(f"last_{name}", np.array([value])) for name, value in BOUNDS.items()]
    graph.nodes.append(gs.Node("Slice", "last_logits", inputs=[logits, *bounds], outputs=[last]))
    graph.outputs = [last if output is logits else output for output in graph.outputs]


BOUNDS = {"start": -1, "end": np.iinfo(np.int64).max, "axis": 1}


def main(model: Path, output: Path) -> None:
    """Import, rotate and quantize, edit, export."""
    graph = gs.import_onnx(onnx.load(model))
    graph = graphrot.convert(graph, recipe="w4a8", tokenizer=model.parent).to_graphsurgeon()
    last_logits_only(graph)
    graph.cleanup().toposort()
    onnx.save(graphrot.export_graphsurgeon(graph), output, save_as_external_data=True, location=f"{output.name}.data")
    print(f"{output}: {len(graph.nodes)} nodes, outputs {', '.join(value.name for value in graph.outputs[:3])}, ...")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except (GraphrotError, FileNotFoundError) as error:
        sys.exit(str(error))
