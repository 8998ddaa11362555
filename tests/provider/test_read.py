"""Reading the registered kernels: the memory of a process, what is merged, and the committed list against a release.

The last of these runs where ``onnxruntime-gpu`` and a C compiler are installed.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from graphrot.emit.cuda.kernels import LIST
from graphrot.emit.cuda.read import Definition, Memory, merged, to_text

_FOUND = importlib.util.find_spec("onnxruntime")
_PROVIDER = Path(_FOUND.origin or "" if _FOUND else "").parent / "capi" / "libonnxruntime_providers_cuda.so"


def test_memory_is_read_or_refused() -> None:
    array = np.frombuffer(b"MatMul\0 and so on, for more than sixteen bytes\0", np.uint8).copy()
    memory = Memory()
    assert memory.read(array.ctypes.data, 6) == b"MatMul"
    assert memory.text(array.ctypes.data) == "MatMul"
    words = np.array([array.ctypes.data, 6], np.uint64)
    assert memory.string(words.ctypes.data) == "MatMul" and memory.word(words.ctypes.data + 8) == 6
    with pytest.raises(ValueError, match="no memory at 0x8"):
        memory.read(8, 8)
    words[1] = 1 << 40
    with pytest.raises(ValueError, match="no string"):
        memory.string(words.ctypes.data)
    assert memory.regions and all(start < end for start, end in memory.regions)


def test_kernels_that_differ_in_one_name_are_one() -> None:
    """In two names they are not: not every pair of types is registered."""
    found = [
        Definition("Add", 7, 12, {"T": ("float",)}),
        Definition("Add", 7, 12, {"T": ("float16",)}),
        Definition("Add", 13, None, {"T": ("float",)}),
        Definition("Cast", 6, None, {"T1": ("float",), "T2": ("float", "int8")}),
        Definition("Cast", 6, None, {"T1": ("int8",), "T2": ("float",)}),
        Definition("Relu", 6, None, {}),
        Definition("Relu", 6, None, {}),
    ]
    assert merged(found) == {
        "Add": [[7, 12, {"T": ["float", "float16"]}], [13, None, {"T": ["float"]}]],
        "Cast": [
            [6, None, {"T1": ["float"], "T2": ["float", "int8"]}],
            [6, None, {"T1": ["int8"], "T2": ["float"]}],
        ],
        "Relu": [[6, None, {}]],
    }


def test_the_committed_list_is_written_by_the_reader() -> None:
    text = LIST.read_text(encoding="utf-8")
    assert to_text(json.loads(text)) == text


if _PROVIDER.is_file():

    def test_the_list_is_what_the_installed_release_registers() -> None:
        from graphrot.emit.cuda.read import read_kernels

        content, found = json.loads(LIST.read_text(encoding="utf-8")), read_kernels()
        if content["onnxruntime_gpu"] == found["onnxruntime_gpu"]:
            assert found == content
