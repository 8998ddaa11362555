"""Read the kernels of ONNX Runtime's CUDA provider out of an installed ``onnxruntime-gpu``, and write ``kernels.json``.

``python -m graphrot.emit.cuda.read [FILE]``, on Linux, with a C compiler. Neither a GPU nor CUDA is needed: when the
provider's library is loaded, it registers its kernels before it looks for a device, and libraries of empty functions
stand in for those of CUDA (:mod:`graphrot.emit.cuda.stand_in`).

The kernels are found in the memory of the process that has loaded the library: every entry of the registry has a key
``operator domain CUDAExecutionProvider``, and behind it a pointer to the definition of the kernel, which begins with
the operator's name, versions, domain and provider; a map of the types that it takes follows, which are told by their
run-time type information. What does not look like that is an error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphrot.emit.cuda.kernels import LIST
from graphrot.emit.cuda.stand_in import write_stand_ins
from graphrot.errors import EnvironmentProblem

_PROVIDER = b"CUDAExecutionProvider"
_KEY = re.compile(rb"\w+ [\w.]* CUDAExecutionProvider\0")
_TENSOR = re.compile(r"N11onnxruntime10TensorTypeI(.*)EE")
_STANDARD = "ai.onnx"
_INSIDE = "--inside"
_OPEN_END = 2**31 - 1
"""The last version of a kernel without one."""
_WORD = 8
_STRING = 32
"""Bytes of a string of libstdc++: pointer, length, and room for short ones."""
_LONGEST = 200
_MAP = _STRING + _WORD + _STRING + _STRING
"""Where a definition holds its types: a hash map of libstdc++, from a name to a vector of pointers to types."""
_TYPES = {
    **dict(zip("fdb", "float double bool".split(), strict=True)),
    **dict(zip("ahstijlm", "int8 uint8 int16 uint16 int32 uint32 int64 uint64".split(), strict=True)),
    "NS_9MLFloat16E": "float16",
    "NS_8BFloat16E": "bfloat16",
    "NS_12Float8E4M3FNE": "float8e4m3fn",
    "NS_14Float8E4M3FNUZE": "float8e4m3fnuz",
    "NS_10Float8E5M2E": "float8e5m2",
    "NS_14Float8E5M2FNUZE": "float8e5m2fnuz",
    "NS_10Float8E8M0E": "float8e8m0",
    "NS_12Float4E2M1x2E": "float4e2m1",
    "NS_10Int2x4BaseILb1EEE": "int2",
    "NS_10Int2x4BaseILb0EEE": "uint2",
    "NS_10Int4x2BaseILb1EEE": "int4",
    "NS_10Int4x2BaseILb0EEE": "uint4",
}
"""Element types, by their mangled names."""
_STRANGE = frozenset({"NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"})
"""Element types that no decoder computes with."""


class Memory:
    """The memory of this process, read without a chance of a crash."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/mem", os.O_RDONLY)
        self.regions = tuple(_writable())

    def read(self, address: int, count: int) -> bytes:
        """Bytes at an address.

        Raises:
            ValueError: there is no such memory.
        """
        try:
            data = os.pread(self._file, count, address)
        except (OSError, OverflowError):
            data = b""
        if len(data) != count:
            raise ValueError(f"no memory at {address:#x}")
        return data

    def word(self, address: int) -> int:
        """The pointer or number at an address."""
        return int(struct.unpack("<Q", self.read(address, _WORD))[0])

    def string(self, address: int) -> str:
        """The string of libstdc++ at an address."""
        start, length = struct.unpack("<QQ", self.read(address, 2 * _WORD))
        if length > _LONGEST:
            raise ValueError(f"no string at {address:#x}")
        return self.read(start, length).decode("ascii")

    def text(self, address: int) -> str:
        """The text at an address, up to its zero."""
        data = self.read(address, 16)
        while b"\0" not in data and len(data) < _LONGEST:
            data += self.read(address + len(data), 16)
        return data.partition(b"\0")[0].decode("ascii")


def _writable() -> Iterator[tuple[int, int]]:
    """Where objects can be: memory that no file is behind."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines():
        parts = line.split(maxsplit=5)
        if parts[1].startswith("rw") and (len(parts) < 6 or parts[5] == "[heap]"):
            start, end = (int(part, 16) for part in parts[0].split("-"))
            yield start, end


@dataclass(frozen=True)
class Definition:
    """A registered kernel: operator, with its domain in front unless that is the standard one; versions; types."""

    name: str
    start: int
    end: int | None
    types: dict[str, tuple[str, ...]]


def read_registry(memory: Memory) -> list[Definition]:
    """Every CUDA kernel that is registered in this process.

    Raises:
        ValueError: a definition does not look like one.
    """
    keys: dict[int, str] = {}
    blocks = [(start, memory.read(start, end - start)) for start, end in memory.regions]
    for start, data in blocks:
        for found in _KEY.finditer(data):
            keys[start + found.start()] = found[0][:-1].decode("ascii")
    wanted = np.array(sorted(keys), dtype=np.uint64)
    definitions: dict[int, Definition] = {}
    for start, data in blocks:
        words = np.frombuffer(data, dtype="<u8", count=len(data) // _WORD)
        for index in np.flatnonzero(np.isin(words, wanted)):
            place, key = start + _WORD * int(index), keys[int(words[index])]
            if memory.word(place + _WORD) == len(key):
                address = memory.word(place + _STRING)
                definition = _definition(memory, address, key)
                if definition is not None:
                    definitions[address] = definition
    return sorted(definitions.values(), key=lambda d: (d.name, d.start, d.end or 0, sorted(d.types.items())))


def _definition(memory: Memory, address: int, key: str) -> Definition | None:
    """The definition at an address; None where the key is that of something else."""
    op, domain, _ = key.split(" ")
    try:
        if memory.string(address) != op or memory.string(address + _STRING + _WORD + _STRING) != _PROVIDER.decode():
            return None
    except (ValueError, UnicodeDecodeError):
        return None
    start, end = struct.unpack("<ii", memory.read(address + _STRING, _WORD))
    types = {}
    node, count = (memory.word(address + _MAP + offset) for offset in (2 * _WORD, 3 * _WORD))
    for _ in range(count):
        name = memory.string(node + _WORD)
        first, last = (memory.word(node + _WORD + _STRING + offset) for offset in (0, _WORD))
        found = (_type(memory, memory.word(each)) for each in range(first, last, _WORD))
        types[name] = tuple(sorted({dtype for dtype in found if dtype is not None}))
        node = memory.word(node)
    if node or not 0 < start <= end:
        raise ValueError(f"{key}: the definition at {address:#x} is not understood")
    name = op if domain == _STANDARD else f"{domain}::{op}"
    return Definition(name, start, None if end == _OPEN_END else end, types)


def _type(memory: Memory, address: int) -> str | None:
    """The element type of a tensor type; None for sequences and the like.

    Raises:
        ValueError: it is a tensor of a type that is not known here.
    """
    information = memory.word(memory.word(address) - _WORD)
    name = memory.text(memory.word(information + _WORD))
    found = _TENSOR.fullmatch(name)
    if found is None:
        return None
    if found[1] not in _TYPES and found[1] not in _STRANGE:
        raise ValueError(f"a tensor of an unknown type: {name}")
    return _TYPES.get(found[1])


def merged(definitions: list[Definition]) -> dict[str, list[list[Any]]]:
    """What ``kernels.json`` holds: kernels of one operator and version that differ in the types of one name are one."""
    found: dict[str, list[list[Any]]] = {}
    for each in definitions:
        entries = found.setdefault(each.name, [])
        types = {name: list(kinds) for name, kinds in sorted(each.types.items())}
        for entry in entries:
            if entry[:2] != [each.start, each.end] or entry[2].keys() != types.keys():
                continue
            other = [name for name in types if entry[2][name] != types[name]]
            if len(other) <= 1:
                for name in other:
                    entry[2][name] = sorted({*entry[2][name], *types[name]})
                break
        else:
            entries.append([each.start, each.end, types])
    return found


def load_provider() -> tuple[str, str]:
    """Load the CUDA provider of the installed runtime in this process; its version, and that of its CUDA."""
    import onnx
    import onnxruntime
    from onnxruntime.capi import build_and_package_info as built

    text = '<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[1] y) { y = Abs(x) }'
    model = onnx.parser.parse_model(text)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with contextlib.suppress(Exception):  # there is no device; its kernels are registered before that is found out
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[_PROVIDER.decode()])
    return str(onnxruntime.__version__), str(built.cuda_version)


def read_kernels() -> dict[str, Any]:
    """The content of ``kernels.json`` for the installed ``onnxruntime-gpu``.

    Raises:
        EnvironmentProblem: there is none, or its provider cannot be loaded.
    """
    found = importlib.util.find_spec("onnxruntime")
    folder = Path(found.origin or "").parent / "capi" if found is not None else Path()
    provider = folder / "libonnxruntime_providers_cuda.so"
    if not provider.is_file():
        raise EnvironmentProblem(
            "There is no CUDA provider to read", where=str(provider), do="pip install onnxruntime-gpu"
        )
    with tempfile.TemporaryDirectory(prefix="graphrot-cuda-") as scratch:
        write_stand_ins(provider, Path(scratch))
        environment = {**os.environ, "LD_LIBRARY_PATH": scratch, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", __spec__.name, _INSIDE]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise EnvironmentProblem(
            "The CUDA provider's kernels cannot be read", where=str(provider), why=done.stderr.strip()[-400:]
        )
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content


def to_text(content: dict[str, Any]) -> str:
    """``kernels.json``, a line for each operator."""
    head = ", ".join(f"{json.dumps(key)}: {json.dumps(content[key])}" for key in ("onnxruntime_gpu", "cuda"))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(content["kernels"].items()))
    return f'{{{head}, "kernels": {{\n{lines}\n}}}}\n'


def main(arguments: list[str]) -> None:
    """Write the list, or print it from inside of the process that has loaded the provider."""
    if arguments == [_INSIDE]:
        version, cuda = load_provider()
        kernels = merged(read_registry(Memory()))
        print(json.dumps({"onnxruntime_gpu": version, "cuda": cuda, "kernels": kernels}))
        return
    target = Path(arguments[0]) if arguments else LIST
    content = read_kernels()
    target.write_text(to_text(content), encoding="utf-8")
    print(f"{target}: {len(content['kernels'])} operators of onnxruntime-gpu {content['onnxruntime_gpu']}")


if __name__ == "__main__":
    main(sys.argv[1:])
