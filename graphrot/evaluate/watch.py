"""Look at tensors inside of a decoder: a copy of its graph with more outputs, over the same weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from graphrot.evaluate.session import DecoderSession, open_decoder
from graphrot.model.onnxfile import external_files

BUDGET = 256 * 2**20
"""Bytes of watched tensors that are in memory at once; the model runs again for more."""


class Watched:
    """A decoder whose inner tensors can be read.

    Args:
        model: an .onnx file; it is only read.
        widths: tensors of the main graph, by name, with the length of their last axis.
        folder: takes the copy of the graph and, unless it is the model's own, one of its data files.
        library: see :class:`graphrot.evaluate.session.DecoderSession`.

    Raises:
        InputRefused: the model is no decoder, or ONNX Runtime does not take it.
    """

    def __init__(self, model: Path, widths: Mapping[str, int], folder: Path, *, library: bool | None = None) -> None:
        self._widths = dict(widths)
        proto = onnx.load(model, load_external_data=False)
        _add_outputs(proto, [*widths])
        if folder.absolute() != model.absolute().parent:
            for file in external_files(ir.load(model)):
                shutil.copyfile(file, folder / file.name)
        path = folder / f"{model.stem}-watched.onnx"
        path.write_bytes(proto.SerializeToString())
        self.decoder: DecoderSession = open_decoder(path, library=library)

    def run(self, tokens: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Run ``tokens [S]`` as one row.

        Yields:
            Each tensor's name and its numbers ``[S, W]`` (leading axes together) in float32.
        """
        rows = np.tile(tokens, (self.decoder.batch or 1, 1))
        for names in self._parts(rows.size):
            found = self.decoder.watch(rows, names)
            for name in names:
                array = found.pop(name)
                yield name, array[:1].reshape(-1, array.shape[-1]).astype(np.float32)

    def _parts(self, tokens: int) -> Iterator[list[str]]:
        part: list[str] = []
        size = 0
        for name, width in self._widths.items():
            bytes_here = 4 * tokens * width
            if part and size + bytes_here > BUDGET:
                yield part
                part, size = [], 0
            part.append(name)
            size += bytes_here
        if part:
            yield part


def _add_outputs(proto: onnx.ModelProto, names: Sequence[str]) -> None:
    """Make tensors outputs; a single output that is not called ``logits`` gets that name by an Identity."""
    outputs = {value.name for value in proto.graph.output}
    if "logits" not in outputs and len(rest := [name for name in outputs if not name.startswith("present")]) == 1:
        proto.graph.node.append(onnx.helper.make_node("Identity", rest, ["logits"]))
        proto.graph.output.append(onnx.ValueInfoProto(name="logits"))
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
