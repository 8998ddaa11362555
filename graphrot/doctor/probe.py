"""The part of the doctor's look that can crash: imports ONNX Runtime and runs tiny models. Prints one line of JSON.

Run as ``python -m graphrot.doctor.probe``; imports stand inside functions, so that a broken package is an answer.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    import onnxruntime

SIZE = 96
"""Channels of the tiny model: a Hadamard matrix of order 12 next to Sylvester's of order 8."""
_OPS = ("HadamardTransform", "RotatedMatMul", "RotatedAttention")
_TYPES = {"float": 1, "float16": 10, "bfloat16": 16}


def look() -> dict[str, Any]:
    """Fields of :class:`graphrot.doctor.facts.Facts`."""
    found = _runtime() | _library()
    if "runtime" not in found:
        return found
    if "library" in found:
        found["registers"] = _failure(_registers)
        if found["registers"] is None:
            found["kernels"] = [_run(op, name, library=True) for op in _OPS for name in _TYPES]
    found["functions"] = [_run(op, "float", library=False) for op in _OPS]
    return found


def _failure(action: Callable[[], object]) -> str | None:
    """Why the action fails, in one line; None: it does not."""
    try:
        action()
    except Exception as error:
        return _words(error)
    return None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def _runtime() -> dict[str, Any]:
    try:
        import onnxruntime
        from onnxruntime.capi import build_and_package_info as built

        providers = list(onnxruntime.get_available_providers())
    except Exception as error:  # whatever a broken or foreign file raises
        return {"runtime_failure": _words(error)}
    onnxruntime.set_default_logger_severity(4)
    cuda = str(getattr(built, "cuda_version", "") or "")
    return {
        "runtime": str(onnxruntime.__version__),
        "runtime_package": str(getattr(built, "package_name", "")),
        "cuda_build": cuda,
        "providers": providers,
        "cuda_missing": missing_libraries(cuda.partition(".")[0], sys.path) if cuda else [],
    }


def missing_libraries(major: str, folders: list[str]) -> list[str]:
    """Libraries of CUDA ``major`` and cuDNN that neither the loader nor NVIDIA's wheels in ``folders`` have."""
    if sys.platform == "win32":
        names = [f"cublasLt64_{major}.dll", f"cublas64_{major}.dll", f"cudart64_{major}.dll", "cudnn64_9.dll"]
    else:
        fft = 12 if int(major) >= 13 else 11
        names = [f"lib{name}.so.{major}" for name in ("cublasLt", "cublas", "cudart")]
        names += [f"libcufft.so.{fft}", "libcurand.so.10", "libcudnn.so.9"]
    return [name for name in names if not _loads(name) and not _in_wheels(name, folders)]


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _in_wheels(name: str, folders: list[str]) -> bool:
    """Where ``onnxruntime.preload_dlls()`` looks."""
    return any(next(Path(folder).glob(f"nvidia/*/*/{name}"), None) for folder in folders if folder)


def _library() -> dict[str, Any]:
    try:
        from graphrot.ops.library import describe, library_path

        return {"library": str(library_path()), "described": describe()}
    except Exception as error:
        what = getattr(error, "what", None)
        why = getattr(error, "why", None)
        return {"library_failure": f"{what} ({why})" if what and why else _words(error)}


def _registers() -> None:
    import onnxruntime

    from graphrot.ops.library import library_path

    onnxruntime.SessionOptions().register_custom_ops_library(str(library_path()))


def _run(op: str, name: str, *, library: bool) -> dict[str, Any]:
    """One node on a few tokens, against the reference in float64."""
    try:
        return {"op": op, "type": name, "error": _error(op, name, library=library)}
    except Exception as error:
        return {"op": op, "type": name, "failure": _words(error)}


def _error(op: str, name: str, *, library: bool) -> float:
    import numpy as np
    import onnx_ir as ir
    import onnxruntime

    from graphrot.ops.library import register

    dtype = ir.DataType(_TYPES[name])
    x = ir.Value(name="x", shape=ir.Shape([1, 3, SIZE]), type=ir.TensorType(dtype))
    model, reference = {"HadamardTransform": _hadamard, "RotatedMatMul": _matmul, "RotatedAttention": _attention}[op](x)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if library:
        register(options)
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = np.random.default_rng(0).standard_normal((1, 3, SIZE)).astype(dtype.numpy())
    exact = reference(values.astype(np.float64))
    result = _answer(session, values, exact.shape)
    return float(np.abs(result.astype(np.float64) - exact).max())


def _model(x: ir.Value, node: ir.Node, initializers: list[ir.Value]) -> ir.Model:
    import onnx_ir as ir

    graph = ir.Graph(
        [x], node.outputs[:1], nodes=[node], initializers=initializers, opset_imports={"": 21}, name="doctor"
    )
    return ir.Model(graph, ir_version=10)


def _hadamard(x: ir.Value) -> tuple[ir.Model, Callable[[np.ndarray], np.ndarray]]:
    from graphrot.ops.hadamard import ensure_function, hadamard_node
    from graphrot.ops.reference import evaluate_hadamard
    from graphrot.rotation.orthogonal import choose_matrix

    node = hadamard_node(x, choose_matrix(SIZE, rotations="hadamard", seed=None), "y")
    model = _model(x, node, [])
    ensure_function(model)
    return model, lambda values: evaluate_hadamard(node, values)


def _matmul(x: ir.Value) -> tuple[ir.Model, Callable[[np.ndarray], np.ndarray]]:
    import numpy as np

    from graphrot.ops.hadamard import transform_attributes
    from graphrot.ops.reference import evaluate_rotated_matmul
    from graphrot.ops.rotated_matmul import PackedWeight, ensure_rotated_matmul, rotated_matmul_node
    from graphrot.rotation.orthogonal import choose_matrix

    block, columns = 32, 8
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (columns, SIZE // block, block // 2)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.02, columns).astype(np.float32)
    stored = _constants(codes=codes, scales=scales)
    weight = PackedWeight(stored[0], stored[1], None, SIZE, columns, 4, 0, block)
    matrix = choose_matrix(SIZE, rotations="hadamard", seed=None)
    node = rotated_matmul_node(x, weight, "y", rotation=transform_attributes(matrix))
    model = _model(x, node, stored)
    ensure_rotated_matmul(model)
    return model, lambda values: evaluate_rotated_matmul(node, values, codes, scales)


def _attention(x: ir.Value) -> tuple[ir.Model, Callable[[np.ndarray], np.ndarray]]:
    """The new tokens' queries, keys and values are the same; two older tokens lie in the cache."""
    import numpy as np

    from graphrot.ops.attention_reference import evaluate_rotated_attention, store_rows
    from graphrot.ops.hadamard import transform_attributes
    from graphrot.ops.rotated_attention import AttentionForm, ensure_rotated_attention, rotated_attention_node
    from graphrot.rotation.orthogonal import choose_matrix

    heads, old, new = 4, 2, 3
    form = AttentionForm(heads, heads, SIZE // heads, 4, (SIZE // heads) ** -0.5)
    keys, values = (
        store_rows(np.random.default_rng(at).standard_normal((1, heads, old, SIZE // heads)), 4) for at in (1, 2)
    )
    lengths, total = np.array([old + new - 1], np.int32), np.array(old + new, np.int32)
    stored = _constants(keys=keys, values=values, lengths=lengths, total=total)
    rotation = transform_attributes(choose_matrix(form.head_size, rotations="hadamard", seed=None))
    node = rotated_attention_node(
        x,
        x,
        x,
        stored[0],
        stored[1],
        stored[2],
        stored[3],
        ("y", "present_key", "present_value"),
        form,
        rotation=rotation,
    )
    model = _model(x, node, stored)
    ensure_rotated_attention(model)
    return model, lambda rows: evaluate_rotated_attention(node, rows, rows, rows, keys, values, lengths, old + new)[0]


def _constants(**arrays: np.ndarray) -> list[ir.Value]:
    import onnx_ir as ir

    made = []
    for name, array in arrays.items():
        tensor = ir.tensor(array, name=name)
        kind = ir.TensorType(tensor.dtype)
        made.append(ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=kind))
    return made


def _answer(session: onnxruntime.InferenceSession, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    import ml_dtypes
    import numpy as np
    import onnxruntime

    if values.dtype != ml_dtypes.bfloat16:
        return np.asarray(session.run(None, {"x": values})[0])
    binding = session.io_binding()  # numpy arrays of bfloat16 go in and out as raw bits
    result = np.empty(shape, np.uint16)
    for bind, label, array in (
        (binding.bind_ortvalue_input, "x", values.view(np.uint16)),
        (binding.bind_ortvalue_output, "y", result),
    ):
        bind(label, onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _TYPES["bfloat16"]))
    session.run_with_iobinding(binding)
    return result.view(ml_dtypes.bfloat16)


if __name__ == "__main__":
    print(json.dumps(look()))
