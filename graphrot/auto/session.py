"""A model in memory, in a session of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.model.save import save_model
from graphrot.ops.foreign import register_custom_ops
from graphrot.ops.hadamard import DOMAIN
from graphrot.ops.library import is_available, register
from graphrot.ops.runtime import runtime

if TYPE_CHECKING:
    import onnxruntime


def model_session(model: ir.Model, folder: Path) -> onnxruntime.InferenceSession:
    """Open a model on the CPU.

    Args:
        model: nodes in topological order.
        folder: takes the file that the session maps its weights from; owned by the caller, made if it is not there.

    Raises:
        InputRefused: ONNX Runtime does not take it.
    """
    package = runtime()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "measured.onnx"
    save_model(model, path)
    options = package.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    register_custom_ops(options)
    if DOMAIN in model.opset_imports and is_available():
        register(options)
    try:
        return package.InferenceSession(str(path), sess_options=options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises bare subclasses of its own
        raise InputRefused(
            "ONNX Runtime does not take the model to be measured", why=str(error).strip()[:300]
        ) from error
