"""The supported ranges of other packages; ``pyproject.toml`` says the same."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Versions from ``low`` on and, where ``below`` is given, below that."""

    low: str
    below: str | None = None

    def holds(self, version: str) -> bool:
        """True when the version lies inside."""
        number = numbers(version)
        return number >= numbers(self.low) and (self.below is None or number < numbers(self.below))

    def __str__(self) -> str:
        return f">={self.low}" + (f",<{self.below}" if self.below else "")


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: ``2.13.0+cpu`` is (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


PYTHON = Range("3.11")
CORE = {
    "ml-dtypes": Range("0.5"),
    "jinja2": Range("3.1"),
    "numpy": Range("2.0"),
    "onnx": Range("1.19"),
    "onnx-ir": Range("1.0"),
    "pydantic": Range("2.7"),
    "pyyaml": Range("6.0"),
    "rich": Range("13.7"),
    "safetensors": Range("0.5"),
    "threadpoolctl": Range("3.5"),
    "tokenizers": Range("0.20"),
    "typer": Range("0.15"),
}
"""What every install needs."""
RUNTIME = Range("1.20")
NEWEST_RUNTIME = "1.32"
"""The newest ONNX Runtime that the tests have run on."""
EIGHT_BIT_RUNTIME = Range("1.22")
"""MatMulNBits and GatherBlockQuantized take 8-bit weights from here on."""
EXTRAS = {
    "hf": {
        "accelerate": Range("1.0"),
        "gguf": Range("0.17"),
        "onnxscript": Range("0.5"),
        "torch": Range("2.9", "2.14"),
        "transformers": Range("5.0", "6"),
    },
    "genai": {"onnxruntime-genai": Range("0.14")},
}
"""Optional packages by the extra that brings them."""
RUNTIME_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-qnn")
"""Distributions that all fill the folder ``onnxruntime``."""
OTHERS = ("onnx-graphsurgeon", "huggingface-hub")
"""Shown with their versions, and required by nothing."""
CAPABILITY = Range("8.0")
"""Of a GPU, for graphrot's CUDA kernels: Ampere and later."""
BELOW_FOR_CUDA = {"12": "1.27"}
"""CUDA of the driver -> the first onnxruntime-gpu on the index that asks for a newer one."""
