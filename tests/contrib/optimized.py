"""What ONNX Runtime's own optimizer makes of exported models, each made once per test run."""

from __future__ import annotations

import atexit
import functools
import logging
import shutil
import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.transformers import optimizer

from tests.coverage.graphs import graph
from tests.exported import tiny_onnx

HEADS = {"t5": 3, "llama": 3, "cached llama": 3}
HIDDEN = {"phi2": 80, "cached gpt2": 80, "llama": 48, "cached llama": 48}
_FOLDER = Path(tempfile.mkdtemp(prefix="graphrot-optimized-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)


@functools.cache
def exported(name: str) -> Path:
    """A model of the table of coverage, without caches; or of ``tests/exported.py``: ``cached NAME``."""
    if name.startswith("cached "):
        return tiny_onnx(name.removeprefix("cached "))
    path = _FOLDER / f"{name}.onnx"
    onnx.save(ir.to_proto(graph(name, "torchscript", 17).model), path)
    return path


@functools.cache
def optimized(name: str, kind: str, *, level: int = 0, half: bool = False) -> Path:
    """``optimize_model`` of a model.

    Args:
        name: see :func:`exported`.
        kind: ``model_type``.
        level: ``opt_level``: which optimizations of the runtime itself go first.
        half: converted to float16, inputs and outputs too.
    """
    logging.disable(logging.WARNING)
    sizes = {"num_heads": HEADS.get(name, 5), "hidden_size": HIDDEN.get(name, 60)}
    made = optimizer.optimize_model(str(exported(name)), model_type=kind, opt_level=level, **sizes)
    if half:
        made.convert_float_to_float16(keep_io_types=False)
    logging.disable(logging.NOTSET)
    path = _FOLDER / f"{name}-{kind}-{level}-{half}.onnx".replace(" ", "_")
    made.save_model_to_file(str(path))
    return path


@functools.cache
def saved(name: str) -> Path:
    """The graph that a session of the runtime saves, with all optimizations that no hardware of its own needs."""
    path = _FOLDER / f"{name}-saved.onnx"
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    ort.InferenceSession(str(exported(name)), options, providers=["CPUExecutionProvider"])
    return path
