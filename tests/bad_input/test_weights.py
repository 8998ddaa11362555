"""Weights that are no numbers, of the wrong type, or not as many as their shape says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphrot.cli.main import run
from graphrot.model import finite
from graphrot.model.finite import first_not_finite, refuse_not_finite
from tests.bad_input.conftest import QUICK, Refuse

Edit = Callable[[Callable[[onnx.ModelProto], object]], Path]


def _weight(proto: onnx.ModelProto) -> TensorProto:
    """The largest matrix."""
    return max(proto.graph.initializer, key=lambda tensor: len(tensor.raw_data))


def _spoil(tensor: TensorProto, index: tuple[int, ...], number: float) -> None:
    array = numpy_helper.to_array(tensor).copy()
    array[index] = number
    tensor.raw_data = array.tobytes()


@pytest.mark.parametrize("options", [("--certificate", "off"), ("--solver", "rtn"), ("--recipe", "rotate-only")])
@pytest.mark.parametrize(("number", "word"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_not_finite(number: float, word: str, options: tuple[str, ...], edit: Edit, refuse: Refuse) -> None:
    names: list[str] = []

    def spoil(proto: onnx.ModelProto) -> None:
        tensor = _weight(proto)
        names.append(tensor.name)
        _spoil(tensor, (3, 5), number)
        _spoil(tensor, (4, 0), number)

    path = edit(spoil)
    rotate = ("--recipe", "rotate-only") if options[0] == "--certificate" else ()
    refuse(3, ["convert", path, *rotate, *options], f"A weight of the model is {word}\n", f"{names[0]!r} at [3, 5]")


def test_not_finite_in_external_data(split: Path, refuse: Refuse) -> None:
    proto = onnx.load(split, load_external_data=False)
    tensor = next(t for t in proto.graph.initializer if t.external_data and list(t.dims) == [24, 37])
    offset = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
    data = split.with_name("split.onnx.data")
    content = bytearray(data.read_bytes())
    content[offset + 4 * 110 : offset + 4 * 111] = np.float32(np.nan).tobytes()
    data.write_bytes(content)
    refuse(3, ["convert", split], f"tensor {tensor.name!r} at [2, 36]", "A weight of the model is nan")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("index", [(0, 0), (999, 12), (777, 3)])
def test_every_place_of_a_large_tensor_is_seen(
    dtype: type, index: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory and in a file, which is read in chunks that end anywhere."""
    monkeypatch.setattr(finite, "_CHUNK", 4096)
    array = np.random.default_rng(0).standard_normal((1000, 13)).astype(dtype)
    array[index] = np.nan
    (tmp_path / "w.bin").write_bytes(b"head" * 4 + array.tobytes() + b"tail")
    kind = ir.DataType.from_numpy(array.dtype)
    stored = ir.ExternalTensor(
        "w.bin", 16, array.nbytes, kind, shape=ir.Shape(array.shape), name="w", base_dir=tmp_path
    )
    for tensor in (stored, ir.Tensor(array, name="w")):
        found = first_not_finite(tensor)
        assert found is not None and found[0] == index
    array[index] = 0
    (tmp_path / "w.bin").write_bytes(b"head" * 4 + array.tobytes() + b"tail")
    assert first_not_finite(stored) is None
    assert first_not_finite(ir.Tensor(array, name="w")) is None


def test_numbers_whose_sum_is_too_large_are_still_numbers() -> None:
    assert first_not_finite(ir.Tensor(np.full(100, 3e38, np.float32))) is None


def _masked(numbers: np.ndarray, op: str) -> ir.Model:
    x = ir.Value(name="x", shape=ir.Shape(["b", 4]), type=ir.TensorType(ir.DataType.FLOAT))
    mask = ir.Value(name="mask", const_value=ir.tensor(numbers, name="mask"))
    node = ir.node(op, [x, mask])
    node.outputs[0].name = "y"
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[mask], opset_imports={"": 21}, name="g")
    return ir.Model(graph, ir_version=10)


def test_masks_may_be_infinite() -> None:
    """A table that is added, or one number; but no factor, no vector, and never NaN."""
    mask = np.triu(np.full((4, 4), -np.inf, np.float32), 1)
    refuse_not_finite(_masked(mask, "Add"))
    refuse_not_finite(_masked(np.array(-np.inf, np.float32), "Add"))
    mask[0, 0] = np.nan
    for numbers, op in (
        (np.triu(np.full((4, 4), -np.inf, np.float32), 1), "MatMul"),
        (np.full(4, np.inf, np.float32), "Add"),
        (mask, "Add"),
    ):
        with pytest.raises(Exception, match="A weight of the model is"):
            refuse_not_finite(_masked(numbers, op))


def test_answers_that_are_no_numbers(edit: Edit, words: Path, tmp_path: Path, refuse: Refuse) -> None:
    """The commands that only run a model do not read its weights: they look at what comes out."""
    path = edit(lambda proto: _spoil(_weight(proto), (4, 5), np.nan))  # the row of the exclamation mark
    (tmp_path / "text.txt").write_text("!!" * 100, encoding="utf-8")
    further = ["--tokenizer", words]
    text = ["--text", tmp_path / "text.txt"]
    refuse(1, ["eval", path, *text, "--window", "16", *further], "no perplexity", "logits are not finite")
    for options in ([], ["--greedy"]):
        refuse(1, ["generate", path, "--prompt", "!!", *further, *options], "logits are not finite")
    assert run(["verify", str(path), str(path)]) == 1


@pytest.mark.parametrize("command", ["convert", "inspect", "verify"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (TensorProto.INT64, ("as int64 of shape", "bytes, and it has")),
        (TensorProto.FLOAT16, ("as float16 of shape", "bytes, and it has")),
        (TensorProto.INT4, ("as int4 of shape",)),
        (0, ("its data type is 0, which is none",)),
        (99, ("its data type is 99, which is none",)),
    ],
)
def test_a_type_of_another_width(command: str, kind: int, words: tuple[str, ...], edit: Edit, refuse: Refuse) -> None:
    names: list[str] = []

    def change(proto: onnx.ModelProto) -> None:
        tensor = _weight(proto)
        names.append(tensor.name)
        tensor.data_type = kind

    path = edit(change)
    line = [command, path, *([path] if command == "verify" else [])]
    refuse(3, line, "A tensor of the model is not usable", repr(names[0]), *words)


@pytest.mark.parametrize("command", ["convert", "inspect"])
@pytest.mark.parametrize("external", [False, True])
def test_a_type_of_the_same_width(command: str, external: bool, model: Path, split: Path, refuse: Refuse) -> None:
    """All bytes are there; but a matmul of floats by integers does not exist."""
    path = split if external else model
    proto = onnx.load(path, load_external_data=False)
    tensor = next(t for t in proto.graph.initializer if list(t.dims) == [24, 37])
    tensor.data_type = TensorProto.INT32
    path.write_bytes(proto.SerializeToString())
    refuse(3, [command, path], "ONNX Runtime does not load the graph", "Type Error", "onnx.checker")


@pytest.mark.parametrize("change", [-4, 4, -1])
def test_more_or_less_than_the_shape_says(change: int, edit: Edit, refuse: Refuse) -> None:
    def alter(proto: onnx.ModelProto) -> None:
        tensor = _weight(proto)
        tensor.raw_data = tensor.raw_data[:change] if change < 0 else tensor.raw_data + bytes(change)

    refuse(3, ["convert", edit(alter)], "A tensor of the model is not usable", "bytes, and it has")


@pytest.mark.parametrize("count", [0, 5, 7])
def test_numbers_that_are_not_raw(count: int, edit: Edit, refuse: Refuse) -> None:
    def alter(proto: onnx.ModelProto) -> None:
        proto.graph.initializer.append(helper.make_tensor("odd", TensorProto.FLOAT, [2, 3], [0.0] * 6))
        del proto.graph.initializer[-1].float_data[:]
        proto.graph.initializer[-1].float_data.extend([0.0] * count)

    refuse(3, ["convert", edit(alter)], "tensor 'odd'", f"takes 6 numbers, and it has {count}")


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.INT4, TensorProto.BOOL, TensorProto.COMPLEX64])
def test_numbers_of_every_field_are_counted(kind: int, edit: Edit, tmp_path: Path) -> None:
    def add(proto: onnx.ModelProto) -> None:
        proto.graph.initializer.append(helper.make_tensor("extra", kind, [3], [0, 1, 1]))

    assert run(["convert", str(edit(add)), "-o", str(tmp_path / "out"), *QUICK]) == 0


def test_a_negative_shape(edit: Edit, refuse: Refuse) -> None:
    def alter(proto: onnx.ModelProto) -> None:
        _weight(proto).dims[0] = -1

    refuse(3, ["convert", edit(alter)], "A tensor of the model is not usable", "its shape is [-1")


@pytest.mark.parametrize("command", ["convert", "inspect", "verify"])
@pytest.mark.parametrize("kind", [0, 99])
@pytest.mark.parametrize("field", ["input", "output", "value_info"])
def test_a_declared_type_that_is_none(command: str, kind: int, field: str, edit: Edit, refuse: Refuse) -> None:
    def declare(proto: onnx.ModelProto) -> None:
        inner = helper.make_tensor_value_info(proto.graph.node[0].output[0], TensorProto.FLOAT, [None, None, 24])
        proto.graph.value_info.append(inner)
        getattr(proto.graph, field)[0].type.tensor_type.elem_type = kind

    path = edit(declare)
    refuse(3, [command, path, *([path] if command == "verify" else [])], f"with data type {kind}, which is none")


def test_a_declared_type_that_is_wrong(edit: Edit, refuse: Refuse) -> None:
    """ONNX Runtime would refuse the file that is written, with the same words."""

    def declare(proto: onnx.ModelProto) -> None:
        output = proto.graph.node[0].output[0]
        proto.graph.value_info.append(helper.make_tensor_value_info(output, TensorProto.UINT32, None))

    refuse(3, ["convert", edit(declare)], "does not match expected type")
