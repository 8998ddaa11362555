"""Weights beside a model: in one file or one each, in its folder or below it. They stay on disk."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

import graphrot
from graphrot.model.load import load_source
from tests.exported import tiny_onnx


def _in_one(model: onnx.ModelProto, path: Path, location: str) -> None:
    (path.parent / location).parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)


def _in_many(model: onnx.ModelProto, path: Path, folder: str) -> None:
    """One file per tensor, as torch writes models over 2 GB."""
    (path.parent / folder).mkdir(parents=True, exist_ok=True)
    for number, tensor in enumerate(model.graph.initializer):
        if not tensor.HasField("raw_data"):
            tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name))
        location = f"{folder}{tensor.name.replace('/', '_')}.{number}"
        onnx.external_data_helper.set_external_data(tensor, location)
        (path.parent / location).write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
    onnx.save(model, path)


@pytest.mark.parametrize("folder", ["", "weights/", "a/b/"])
@pytest.mark.parametrize("many", [False, True])
def test_wherever_they_lie_they_convert_and_verify(many: bool, folder: str, tmp_path: Path) -> None:
    path = tmp_path / "in" / "model.onnx"
    path.parent.mkdir()
    model = onnx.load(tiny_onnx("llama"))
    (_in_many if many else _in_one)(model, path, folder if many else f"{folder}model.bin")
    source = load_source(str(path), workdir=tmp_path)
    tensors = [value.const_value for value in source.model.graph.initializers.values()]
    large = [tensor for tensor in tensors if tensor is not None and tensor.nbytes > 1024]
    assert large and all(isinstance(tensor, ir.ExternalTensor) for tensor in large)
    graphrot.convert(path, output=tmp_path / "out.onnx", recipe="rotate-only", certificate="off")
    assert graphrot.verify(path, tmp_path / "out.onnx").ok
    assert sorted(f.name for f in tmp_path.iterdir() if f.name.startswith("out")) == [
        "out.graphrot.json", "out.onnx", "out.onnx.data", "out.plan.json",
    ]  # fmt: skip


def test_each_file_counts_for_the_hash(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    _in_many(onnx.load(tiny_onnx("llama")), path, "w/")
    before = load_source(str(path), workdir=tmp_path).sha256
    victim = max((tmp_path / "w").iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[5] ^= 1
    victim.write_bytes(content)
    assert load_source(str(path), workdir=tmp_path).sha256 != before
