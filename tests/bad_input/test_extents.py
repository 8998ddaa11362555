"""Small files that would run without bounds, and weights that are none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphrot.errors import InputRefused
from graphrot.model.extents import unfolded
from graphrot.model.onnxfile import open_onnx
from tests.bad_input.conftest import Refuse

Edit = Callable[[Callable[[onnx.ModelProto], object]], Path]
INT, FLOAT = TensorProto.INT64, TensorProto.FLOAT


def _append(proto: onnx.ModelProto, *nodes: onnx.NodeProto, **constants: np.ndarray) -> None:
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    proto.graph.node.extend(nodes)


@pytest.mark.parametrize("size", [-5, 2**60])
def test_an_input_of_impossible_size(size: int, edit: Edit, refuse: Refuse) -> None:
    def change(proto: onnx.ModelProto) -> None:
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = size

    refuse(3, ["convert", edit(change)], "input_ids", str(size))


def _calls(proto: onnx.ModelProto, count: int, each: int, *, backwards: bool = False) -> None:
    """Functions of which each calls the one before."""
    opsets = [*proto.opset_import, helper.make_opsetid("mine", 1)]
    made = [helper.make_function("mine", "f0", ["a"], ["b"], [helper.make_node("Identity", ["a"], ["b"])], opsets)]
    for number in range(1, count):
        names = ["a", *(f"t{k}" for k in range(1, each)), "b"]
        nodes = [helper.make_node(f"f{number - 1}", [x], [y], domain="mine") for x, y in pairwise(names)]
        made.append(helper.make_function("mine", f"f{number}", ["a"], ["b"], nodes, opsets))
    proto.functions.extend(reversed(made) if backwards else made)
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    proto.graph.node.append(helper.make_node(f"f{count - 1}", ["logits"], ["more"], domain="mine"))


def test_functions_that_unfold_without_bounds(edit: Edit, refuse: Refuse) -> None:
    refuse(3, ["convert", edit(lambda proto: _calls(proto, 40, 2))], "unfolded it has 1.65e+12 nodes")


@pytest.mark.parametrize("backwards", [False, True])
def test_functions_that_call_each_other_too_deeply(backwards: bool, edit: Edit) -> None:
    path = edit(lambda proto: _calls(proto, 3000, 1, backwards=backwards))
    with pytest.raises(InputRefused, match="not a usable ONNX model") as caught:
        open_onnx(path)
    assert "call each other in a row" in str(caught.value.why)


def test_how_many_nodes_calls_unfold_to(model: Path) -> None:
    proto = onnx.load(model)
    before = unfolded(proto, {})
    _calls(proto, 4, 2)
    assert unfolded(proto, {(f.domain, f.name): f for f in proto.functions}) == before + 15 + 8


def test_a_few_calls_pass(edit: Edit) -> None:
    assert len(open_onnx(edit(lambda proto: _calls(proto, 5, 2))).functions) == 5


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("kind", "names", "words"),
    [
        ("ConstantOfShape", ["shape"], "shape [65536, 65536]"),
        ("Expand", ["one", "shape"], "shape [65536, 65536]"),
        ("Range", ["zero", "many", "one"], "counts from 0 to"),
    ],
)
def test_a_constant_that_fills_the_memory(kind: str, names: list[str], words: str, inside: bool, edit: Edit) -> None:
    constants = {
        "shape": np.array([2**16, 2**16]),
        "zero": np.array(0),
        "one": np.array(1),
        "many": np.array(2**40),
        "yes": np.array(True),
    }
    node = helper.make_node(kind, names, ["full"])

    def change(proto: onnx.ModelProto) -> None:
        if inside:
            branch = helper.make_graph([node], "b", [], [helper.make_tensor_value_info("full", INT, None)])
            outer = helper.make_node("If", ["yes"], ["all"], then_branch=branch, else_branch=branch)
            _append(proto, outer, **constants)
        else:
            _append(proto, node, **constants)

    with pytest.raises(InputRefused) as caught:
        open_onnx(edit(change))
    assert words in str(caught.value.why)


def test_a_loop_without_end(edit: Edit) -> None:
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Identity", ["v"], ["w"])],
        "body",
        [info("i", INT, []), info("c", TensorProto.BOOL, []), info("v", FLOAT, None)],
        [info("d", TensorProto.BOOL, []), info("w", FLOAT, None)],
    )
    loop = helper.make_node("Loop", ["rounds", "yes", "logits"], ["more"], body=body)
    path = edit(lambda proto: _append(proto, loop, rounds=np.array(2**60), yes=np.array(True)))
    with pytest.raises(InputRefused) as caught:
        open_onnx(path)
    assert f"{2**60} rounds" in str(caught.value.why)


def test_a_sparse_initializer(edit: Edit, refuse: Refuse) -> None:
    def change(proto: onnx.ModelProto) -> None:
        numbers = numpy_helper.from_array(np.ones(1, np.float32), "thin")
        places = numpy_helper.from_array(np.zeros(1, np.int64), "places")
        proto.graph.sparse_initializer.append(helper.make_sparse_tensor(numbers, places, [37]))
        _append(proto, helper.make_node("Add", ["logits", "thin"], ["more"]))

    refuse(3, ["convert", edit(change)], "holds a sparse initializer", "'thin'")


@pytest.mark.parametrize("name", ["model.onnx", "circle"])
def test_weights_in_no_file_of_their_own(name: str, edit: Edit, refuse: Refuse, place: Path) -> None:
    (place / "circle").symlink_to("circle")

    def change(proto: onnx.ModelProto) -> None:
        tensor = max(proto.graph.initializer, key=lambda tensor: len(tensor.raw_data))
        tensor.ClearField("raw_data")
        tensor.dims[:] = [1]
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=name)

    words = {"model.onnx": "is the model file itself", "circle": "lies outside its folder"}
    refuse(3, ["convert", edit(change)], words[name], repr(name))
