"""What a model file says of itself, read before it is loaded."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping

import onnx

_FLOATS = {
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
}
"""From the coarsest to the finest."""


def read_header(proto: onnx.ModelProto) -> tuple[dict[str, str], frozenset[str], str]:
    """The model's metadata, the domains of its operators, and its coarsest float type.

    Read from the protobuf itself, whose memory goes back at once; graph objects would stay in the heap.
    """
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    ends = (value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output))
    found = {*ends, *(tensor.data_type for tensor in proto.graph.initializer if len(tensor.dims) > 1)}
    coarsest = next((name for number, name in _FLOATS.items() if number in found), "float32")
    domains = frozenset(entry.domain for entry in proto.opset_import)
    del proto
    return metadata, domains, coarsest


def target_of(metadata: Mapping[str, str]) -> str | None:
    """The target that graphrot wrote a model for, out of the recipe in its metadata."""
    return _of_recipe(metadata, "target")


def provider_of(metadata: Mapping[str, str]) -> str | None:
    """The provider that graphrot wrote a model for."""
    return _of_recipe(metadata, "provider")


def _of_recipe(metadata: Mapping[str, str], name: str) -> str | None:
    try:
        recipe = json.loads(metadata.get("graphrot.recipe", "null"))
    except json.JSONDecodeError:
        return None
    value = recipe.get(name) if isinstance(recipe, dict) else None
    return value if isinstance(value, str) else None


def give_back() -> None:
    """Return freed memory to the system, where the C library keeps it unless told (2 MB after 1,000 nodes)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
