"""Rotated, 4-bit ONNX transformers.

The functions here are the public interface. Importing the package loads neither ONNX Runtime nor torch;
each function loads what it needs when it is called.
"""

from __future__ import annotations

from graphrot.api import (
    bench,
    convert,
    evaluate,
    export_graphsurgeon,
    generate,
    inspect,
    learn,
    library_path,
    register,
    report,
    verify,
)
from graphrot.evaluate.kvcache import KVCache
from graphrot.ops.foreign import custom_ops

__all__ = [
    "KVCache",
    "bench",
    "convert",
    "custom_ops",
    "evaluate",
    "export_graphsurgeon",
    "generate",
    "inspect",
    "learn",
    "library_path",
    "register",
    "report",
    "verify",
]


def __getattr__(name: str) -> str:
    """``graphrot.__version__``, looked up when it is asked for."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("graphrot")
        except PackageNotFoundError:  # used from a checkout that is not installed
            return "unknown"
    raise AttributeError(f"module 'graphrot' has no attribute {name!r}")
