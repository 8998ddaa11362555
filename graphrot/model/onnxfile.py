"""Open an ``.onnx`` file with its external data, memory-mapped, and refuse what cannot be used."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.model.filetype import refuse_other_files
from graphrot.model.structure import check_structure, hide_runtime_ops
from graphrot.model.tensors import check_tensors, follow_links, without_weights

OWN_MARK = "graphrot.version"
"""Key in metadata_props of every model that graphrot has written."""


_QUANTIZED_OPS = frozenset(
    {
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"),
        *("QLinearMatMul", "QLinearConv", "MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "GatherBlockQuantized"),
        *("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulInteger16", "QGemm", "QAttention", "QMoE"),
        *("QEmbedLayerNormalization", "DequantizeBFP", "QuantizeBFP", "DynamicQuantizeLSTM", "QOrderedMatMul"),
        "RotatedMatMul",
        *("QOrderedAttention", "QOrderedLayerNormalization", "QuantizeWithOrder", "DequantizeWithOrder"),
    }
)
"""Operators that only quantized models have."""

_LAYOUTS = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})
_COPIES = frozenset({"MemcpyFromHost", "MemcpyToHost"})


def open_onnx(path: Path) -> ir.Model:
    """Read and check an ONNX file. Weights in external data stay on disk and are mapped on use.

    Args:
        path: the .onnx file; its external data lies in the same folder or below it (see
            :func:`graphrot.model.tensors.place_of` for links).

    Raises:
        InputRefused: not there, not ONNX, not valid, saved by ONNX Runtime for one kind of hardware, or its external
            data is missing, too short or outside the model's folder.
    """
    proto = read_proto(path, anywhere=True)
    _run_checker(proto, path)
    return _mapped(proto, path)


def reopen_onnx(path: Path) -> ir.Model:
    """Read a file that :func:`open_onnx` has checked once more, as another object."""
    return _mapped(_parse(path), path)


def _mapped(proto: onnx.ModelProto, path: Path) -> ir.Model:
    try:
        model = ir.serde.deserialize_model(proto)
    except Exception as error:  # it raises whatever it meets
        raise _corrupt(path, f"it does not load: {type(error).__name__}: {str(error).strip()[:400]}") from error
    _set_folder(model, path)
    return model


def read_proto(path: Path, *, anywhere: bool = False) -> onnx.ModelProto:
    """Read the protobuf without its external data, and check that graph and weights are whole.

    Args:
        path: the .onnx file.
        anywhere: refuse operators that ONNX Runtime makes for one kind of hardware.

    Raises:
        InputRefused: see :func:`open_onnx`.
    """
    refuse_other_files(path)
    proto = _parse(path)
    if anywhere:
        _refuse_hardware(proto, path)
    check_structure(proto, str(path))
    check_tensors(proto, path)
    return proto


def refuse_quantized(model: ir.Model, path: Path) -> None:
    """Refuse a model whose activations are rounded already, or whose weights are in a way that is not read.

    To be called after :func:`graphrot.model.dequantize.dequantize`, which takes out what is understood.

    Raises:
        InputRefused: it holds an operator that only quantized models have.
    """
    holders: tuple[ir.Graph | ir.Function, ...] = (model.graph, *model.functions.values())
    found = [node for holder in holders for node in holder.all_nodes() if node.op_type in _QUANTIZED_OPS]
    if found:
        kinds = ", ".join(sorted({node.op_type for node in found}))
        name = found[0].name or next((o.name for o in found[0].outputs if o.name), "")
        raise InputRefused(
            "The model is already quantized",
            where=f"{path}: {len(found)} nodes ({kinds}), the first is {name!r}",
            why="rounded activations do not rotate, and of quantized weights only those of MatMulNBits (2, 4 or 8 "
            "bits, without g_idx), GatherBlockQuantized and DequantizeLinear are read back",
            do="give the float model that it was made from",
        )


def refuse_own(model: ir.Model, path: Path) -> None:
    """Refuse a model that graphrot wrote: rotating twice is not what its plan says.

    Raises:
        InputRefused: the model carries :data:`OWN_MARK`.
    """
    if OWN_MARK in model.metadata_props:
        raise InputRefused(
            "The model was already converted by graphrot",
            where=str(path),
            why=f"its metadata says {OWN_MARK} = {model.metadata_props[OWN_MARK]}",
            do="convert the source that it was made from",
        )


def external_files(model: ir.Model) -> list[Path]:
    """The external data files of a model opened from a file, sorted."""
    return sorted({Path(tensor.path) for tensor in _external_tensors(model)})


def _external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    return [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]


def _refuse_hardware(proto: onnx.ModelProto, path: Path) -> None:
    """A graph that ONNX Runtime saved after its last optimizations holds weights in the order of one processor."""
    found = [node for node in proto.graph.node if node.domain in _LAYOUTS or node.op_type in _COPIES]
    if not found:
        return
    kinds = ", ".join(sorted({f"{node.domain}::{node.op_type}".removeprefix("::") for node in found}))
    name = found[0].name or next(iter(found[0].output), "")
    raise InputRefused(
        "ONNX Runtime saved the model for one kind of hardware",
        where=f"{path}: {len(found)} nodes ({kinds}), the first is {name!r}",
        why="their weights lie in the order of that processor, or they copy between the devices of one session",
        do="give the model that was optimized, or save it at the level ORT_ENABLE_EXTENDED on a CPU",
    )


def _corrupt(path: Path, why: str) -> InputRefused:
    return InputRefused(
        "The file is not a usable ONNX model", where=str(path), why=why, do="export it again, or check the download"
    )


def _parse(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except OSError:
        raise
    except Exception as error:  # the parser raises whatever it meets in a broken file
        raise _corrupt(path, f"it does not parse: {type(error).__name__}: {str(error).strip()[:400]}") from error


def _run_checker(proto: onnx.ModelProto, path: Path) -> None:
    try:
        light = without_weights(proto)
        hide_runtime_ops(light)
        onnx.checker.check_model(light)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise _corrupt(path, f"the ONNX checker says: {str(error).strip()[:400]}") from error


def _set_folder(model: ir.Model, path: Path) -> None:
    for tensor in _external_tensors(model):
        tensor.base_dir = path.parent
    follow_links(model, path)
