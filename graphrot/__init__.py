"""Rotated, 4-bit ONNX transformers.

The functions here are the public interface. Importing the package loads neither ONNX Runtime nor torch;
each function loads what it needs when it is called.
"""

from __future__ import annotations

from graphrot.api import convert, evaluate, generate, inspect, library_path, register, verify

__all__ = ["convert", "evaluate", "generate", "inspect", "library_path", "register", "verify"]
