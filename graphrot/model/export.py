"""Export a torch decoder to one ONNX file with KV cache inputs and outputs, and check it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import onnx
import onnx_ir as ir
import torch

from graphrot.errors import InputRefused
from graphrot.model import trace
from graphrot.model.crosscheck import TOLERANCE, Mismatch, compare
from graphrot.model.tidy import tidy
from graphrot.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IR_VERSION = 10
"""Goes with opset 21, and is the newest that ONNX Runtime 1.20 reads."""

Road = Literal["torchscript", "dynamo"]
ROADS: tuple[Road, ...] = ("torchscript", "dynamo")


@dataclass(frozen=True)
class Exported:
    """How an export went: the road that was taken and its difference from torch."""

    road: Road
    mismatch: Mismatch


def export_decoder(
    model: PreTrainedModel,
    path: Path,
    *,
    opset: int = 21,
    progress: Progress = silent,
    roads: tuple[Road, ...] = ROADS,
) -> Exported:
    """Write ``path`` and ``path.data``: ``input_ids, attention_mask, position_ids, past_key_values.%d.key/value``
    to ``logits, present.%d.key/value``.

    Batch, sequence and past are dynamic. Linears are stored ``[K, N]``; a table shared by embedding and
    head is stored once. The file is compared with the torch model on random tokens (prefill, a chunk after
    a past, one token, padding, batch 1 and 2); an exporter whose file differs is not used.

    Args:
        model: a decoder in float32, in eval mode.
        path: the .onnx file to write; weights go to the same name with ``.data`` appended.
        opset: the standard opset of the file, at least 21 (the first with 4-bit types in Q/DQ).
        progress: told of each step.
        roads: the exporters to try, in order.

    Raises:
        InputRefused: no exporter gives a graph that agrees with torch.
    """
    if any(p.dtype != torch.float32 for p in model.parameters()):
        raise InputRefused(
            "Only float32 models are exported", where=type(model).__name__, do="load the model with dtype=torch.float32"
        )
    model.train(False)
    signature = trace.read_signature(model)
    steps = 3 * len(roads)
    failures: list[str] = []
    for tried, road in enumerate(roads):
        progress(f"exporting ({road})", 3 * tried, steps)
        try:
            traced = _trace(model, signature, road, opset)
            tidy(traced, opset=opset, inputs=signature.inputs(), outputs=signature.outputs())
            traced.ir_version = _IR_VERSION
            progress("writing the exported weights", 3 * tried + 1, steps)
            _write(traced, path)
            del traced
            progress("comparing the export with torch", 3 * tried + 2, steps)
            mismatch = compare(path, model, signature)
        except Exception as error:  # exporters and checkers raise whatever they meet
            failures.append(f"{road}: {type(error).__name__}: {str(error).strip()[:400]}")
            _remove(path)
            continue
        if mismatch.acceptable:
            progress("exported", steps, steps)
            return Exported(road, mismatch)
        failures.append(f"{road}: {mismatch}, accepted is {TOLERANCE:g}")
        _remove(path)
    raise InputRefused(
        "No exporter gave an ONNX graph that agrees with the torch model",
        where=type(model).__name__,
        why="; ".join(failures),
        do="export the model to ONNX by other tools and give the .onnx file",
    )


def _trace(model: PreTrainedModel, signature: trace.Signature, road: Road, opset: int) -> ir.Model:
    if road == "torchscript":
        return trace.torchscript(model, signature)
    return trace.dynamo(model, signature, opset=opset)


def _write(model: ir.Model, path: Path) -> None:
    _remove(path)
    ir.save(model, path, external_data=_data_path(path).name, alignment=4096, align_threshold=0)
    onnx.checker.check_model(os.fspath(path), full_check=True)


def _data_path(path: Path) -> Path:
    return path.with_name(path.name + ".data")


def _remove(path: Path) -> None:
    for file in (path, _data_path(path)):
        file.unlink(missing_ok=True)
