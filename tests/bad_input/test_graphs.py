"""Graphs that cannot be followed, run, or rotated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphrot.cli.main import run
from tests.bad_input.conftest import Refuse

Edit = Callable[[Callable[[onnx.ModelProto], object]], Path]
COMMANDS = ("convert", "inspect")
UNUSABLE = "The file is not a usable ONNX model"


def _write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[int | str]]],
    outputs: dict[str, tuple[int, list[int | str]]],
    weights: Sequence[TensorProto] = (),
    opset: int = 21,
    functions: Sequence[onnx.FunctionProto] = (),
) -> Path:
    def infos(values: dict[str, tuple[int, list[int | str]]]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in values.items()]

    graph = helper.make_graph(nodes, "g", infos(inputs), infos(outputs), weights)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("example.org", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.fixture
def perceptron(tmp_path: Path) -> Path:
    """Two linears and a Relu: an .onnx file that runs and is no decoder."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((12, 12)).astype(np.float32), n) for n in ("a", "b")]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "b"], ["y"], name="second"),
    ]
    shape: list[int | str] = ["n", 12]
    return _write(tmp_path / "mlp.onnx", nodes, {"x": (1, shape)}, {"y": (1, shape)}, weights)


@pytest.mark.parametrize("recipe", ["rotate-only", "w4a8"])
def test_not_a_transformer(recipe: str, perceptron: Path, refuse: Refuse) -> None:
    refuse(3, ["convert", perceptron, "--recipe", recipe], "is not a decoder", "none is called input_ids")


def test_not_a_transformer_elsewhere(perceptron: Path, refuse: Refuse, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("inputs and outputs are not those of a decoder", "give a decoder with input_ids")
    refuse(3, ["verify", perceptron, perceptron], *words)
    refuse(3, ["eval", perceptron, "--text", __file__], *words)
    refuse(3, ["generate", perceptron, "--prompt", "x"], *words)
    assert run(["inspect", str(perceptron)]) == 0
    found = capsys.readouterr().out  # what happens to be rotatable in it; there is no stream of tokens to explain
    assert "R4     1 sites  online" in found and "R1" not in found


def test_a_network_of_convolutions(tmp_path: Path, refuse: Refuse) -> None:
    weight = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("GlobalAveragePool", ["c"], ["y"]),
    ]
    path = _write(tmp_path / "cnn.onnx", nodes, {"x": (1, [1, 3, 8, 8])}, {"y": (1, [1, 4, 1, 1])}, [weight])
    refuse(3, ["convert", path], "Nothing in this model can be rotated")


def test_no_rotation_possible(edit: Edit, refuse: Refuse) -> None:
    """A decoder, but something in the residual stream lets no rotation pass."""

    def spoil(proto: onnx.ModelProto) -> None:
        table = proto.graph.node[0]
        proto.graph.node.insert(1, helper.make_node("Erf", [table.output[0]], ["bent"], name="bender"))
        proto.graph.node.insert(2, helper.make_node("Add", [table.output[0], "bent"], ["spoiled"], name="spoiler"))
        for node in proto.graph.node[3:]:
            for place, name in enumerate(node.input):
                if name == table.output[0]:
                    node.input[place] = "spoiled"

    path = edit(spoil)
    refuse(3, ["convert", path, "--only", "R1"], "Nothing in this model can be rotated", "Erf")
    words = ("Not everything that was asked for can be rotated", "R1 at bent (Erf)", "--allow-partial")
    refuse(3, ["convert", path], *words)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_cycle(command: str, edit: Edit, refuse: Refuse) -> None:
    def turn(proto: onnx.ModelProto) -> None:
        nodes = proto.graph.node
        add = next(node for node in nodes if node.op_type == "Add")
        add.input[0] = nodes[-1].output[0]

    refuse(3, [command, edit(turn)], UNUSABLE, "its nodes form a cycle: ", " -> ", "take the edge")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_node_that_reads_itself(command: str, edit: Edit, refuse: Refuse) -> None:
    def turn(proto: onnx.ModelProto) -> None:
        proto.graph.node[3].input[0] = proto.graph.node[3].output[0]

    refuse(3, [command, edit(turn)], UNUSABLE, "its nodes form a cycle")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_that_nothing_makes(command: str, edit: Edit, refuse: Refuse) -> None:
    def cut(proto: onnx.ModelProto) -> None:
        proto.graph.node[5].input[0] = "nowhere"

    refuse(3, [command, edit(cut)], UNUSABLE, "reads 'nowhere', which nothing makes", "a weight or a node is missing")


@pytest.mark.parametrize("command", ["convert", "inspect", "verify"])
def test_a_weight_that_is_gone(command: str, edit: Edit, refuse: Refuse) -> None:
    names: list[str] = []

    def drop(proto: onnx.ModelProto) -> None:
        names.append(proto.graph.initializer[3].name)
        del proto.graph.initializer[3]

    path = edit(drop)
    refuse(3, [command, path, *([path] if command == "verify" else [])], UNUSABLE, f"reads {names[0]!r}")


def test_an_output_that_nothing_makes(edit: Edit, refuse: Refuse) -> None:
    def rename(proto: onnx.ModelProto) -> None:
        proto.graph.output[0].name = "absent"

    refuse(3, ["convert", edit(rename)], UNUSABLE, "its output 'absent' is made by no node")


@pytest.mark.parametrize("command", COMMANDS)
def test_nodes_that_are_not_sorted(command: str, edit: Edit, refuse: Refuse) -> None:
    def reverse(proto: onnx.ModelProto) -> None:
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in proto.graph.node]
        del proto.graph.node[:]
        proto.graph.node.extend(reversed(nodes))

    refuse(3, [command, edit(reverse)], UNUSABLE, "its nodes are not sorted", "before it is made", "toposort()")


@pytest.mark.parametrize("kind", ["input", "initializer"])
def test_names_given_twice(kind: str, edit: Edit, refuse: Refuse) -> None:
    def double(proto: onnx.ModelProto) -> None:
        values = getattr(proto.graph, kind)
        values.append(values[0])

    refuse(3, ["convert", edit(double)], UNUSABLE, f"two of its {kind}s are called")


def test_a_tensor_made_twice(edit: Edit, refuse: Refuse) -> None:
    def double(proto: onnx.ModelProto) -> None:
        proto.graph.node[7].output[0] = proto.graph.node[6].output[0]

    refuse(3, ["convert", edit(double)], UNUSABLE, "two parts of it make the tensor", "a name of its own")


def test_a_weight_with_the_name_of_a_tensor(edit: Edit, refuse: Refuse) -> None:
    def double(proto: onnx.ModelProto) -> None:
        proto.graph.initializer[0].name = proto.graph.node[6].output[0]

    refuse(3, ["convert", edit(double)], UNUSABLE, "two parts of it make the tensor", "an input or initializer")


def test_inside_a_subgraph(tmp_path: Path, refuse: Refuse) -> None:
    def branch(name: str) -> onnx.GraphProto:
        node = helper.make_node("Neg", [name], ["z"], name="inner")
        return helper.make_graph([node], "branch", [], [helper.make_tensor_value_info("z", 1, [2])])

    choose = helper.make_node("If", ["c"], ["y"], name="choose", then_branch=branch("x"), else_branch=branch("nowhere"))
    inputs: dict[str, tuple[int, list[int | str]]] = {"x": (1, [2]), "c": (TensorProto.BOOL, [])}
    path = _write(tmp_path / "if.onnx", [choose], inputs, {"y": (1, [2])})
    refuse(3, ["inspect", path], UNUSABLE, "If 'choose' reads 'nowhere', which nothing makes")


def test_functions_that_call_themselves(tmp_path: Path, refuse: Refuse) -> None:
    def function(name: str, calls: str) -> onnx.FunctionProto:
        node = helper.make_node(calls, ["x"], ["y"], domain="example.org")
        return helper.make_function("example.org", name, ["x"], ["y"], [node], [helper.make_opsetid("example.org", 1)])

    node = helper.make_node("One", ["x"], ["y"], domain="example.org")
    functions = [function("One", "Two"), function("Two", "One")]
    path = _write(tmp_path / "f.onnx", [node], {"x": (1, [2])}, {"y": (1, [2])}, functions=functions)
    refuse(3, ["inspect", path], UNUSABLE, "calls itself")


@pytest.mark.parametrize("command", ["convert", "inspect", "verify"])
def test_an_operator_that_nobody_defines(command: str, edit: Edit, refuse: Refuse) -> None:
    def change(proto: onnx.ModelProto) -> None:
        proto.opset_import.append(helper.make_opsetid("example.org", 1))
        proto.graph.node[4].domain, proto.graph.node[4].op_type = "example.org", "Mystery"

    path = edit(change)
    line = [command, path, *([path] if command == "verify" else [])]
    refuse(3, line, "an operator that nothing here defines: example.org::Mystery", "standard operators")


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_operator_that_does_not_exist(command: str, domain: str, edit: Edit, refuse: Refuse) -> None:
    def change(proto: onnx.ModelProto) -> None:
        proto.graph.node[4].domain, proto.graph.node[4].op_type = domain, "Mystery"

    refuse(3, [command, edit(change)], "Mystery")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (1, ("opset 1 is not supported", "opset 7 and later", "export the model again")),
        (6, ("opset 6 is not supported",)),
        (99, ("opset 99 is not supported", "knows opsets up to", "pip install -U onnx onnxruntime")),
        (0, (UNUSABLE, "it imports version 0")),
        (-1, (UNUSABLE, "it imports version -1")),
    ],
)
@pytest.mark.parametrize("command", ["convert", "inspect", "verify"])
def test_unsupported_opsets(command: str, version: int, words: tuple[str, ...], edit: Edit, refuse: Refuse) -> None:
    def change(proto: onnx.ModelProto) -> None:
        proto.opset_import[0].version = version

    path = edit(change)
    refuse(3, [command, path, *([path] if command == "verify" else [])], *words)


def test_an_opset_too_old_for_quantizing(model: Path, edit: Edit, refuse: Refuse) -> None:
    """The graph itself runs at that opset; the operators that quantization writes do not exist in it."""
    rng = np.random.default_rng(0)
    table = numpy_helper.from_array(rng.standard_normal((37, 24)).astype(np.float32), "table")
    head = numpy_helper.from_array(rng.standard_normal((24, 37)).astype(np.float32), "head")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"]),
        helper.make_node("MatMul", ["x", "head"], ["logits"]),
    ]
    inputs: dict[str, tuple[int, list[int | str]]] = {"input_ids": (TensorProto.INT64, ["b", "s"])}
    path = _write(model, nodes, inputs, {"logits": (1, ["b", "s", 37])}, [table, head], opset=11)
    refuse(3, ["convert", path, "--solver", "rtn", "--certificate", "off"], "cannot be moved from opset 11 to 21")


def test_two_opsets_of_one_domain(edit: Edit, refuse: Refuse) -> None:
    refuse(3, ["convert", edit(lambda p: p.opset_import.append(helper.make_opsetid("", 11)))], "two opsets")


def test_no_opset(edit: Edit, refuse: Refuse) -> None:
    def drop(proto: onnx.ModelProto) -> None:
        del proto.opset_import[:]

    refuse(3, ["convert", edit(drop)], UNUSABLE, "it holds no graph with operators")


def test_an_ir_version_of_the_future(edit: Edit, refuse: Refuse) -> None:
    def change(proto: onnx.ModelProto) -> None:
        proto.ir_version = 99

    refuse(3, ["convert", edit(change)], "IR version 99 is not supported", "pip install -U onnx onnxruntime")


@pytest.mark.parametrize(
    "op", ["QuantizeLinear", "MatMulNBits", "DynamicQuantizeLinear", "MatMulInteger", "GatherBlockQuantized"]
)
def test_quantized_already(op: str, model: Path, tmp_path: Path, refuse: Refuse) -> None:
    """By the name of an operator, wherever it stands; whether the rest fits is not asked."""
    x: tuple[int, list[int | str]] = (1, [2, 32])
    i8: tuple[int, list[int | str]] = (TensorProto.INT8, [2, 32])
    u8: tuple[int, list[int | str]] = (TensorProto.UINT8, [2, 32])
    scale = numpy_helper.from_array(np.float32(1), "scale")
    packed = numpy_helper.from_array(np.zeros((4, 1, 16), np.uint8), "packed")
    scales = numpy_helper.from_array(np.ones(4, np.float32), "scales")
    order = numpy_helper.from_array(np.zeros(32, np.int32), "order")
    weight = numpy_helper.from_array(np.zeros((32, 4), np.int8), "w")
    makers: dict[str, Callable[[], Path]] = {
        "QuantizeLinear": lambda: _write(
            tmp_path / "q.onnx",
            [helper.make_node(op, ["x", "scale"], ["y"], name="round")],
            {"x": x}, {"y": u8}, [scale],
        ),
        "MatMulInteger": lambda: _write(
            tmp_path / "q.onnx",
            [helper.make_node(op, ["x", "w"], ["y"], name="round")],
            {"x": u8}, {"y": (TensorProto.INT32, [2, 4])}, [weight],
        ),
        "DynamicQuantizeLinear": lambda: _write(
            tmp_path / "q.onnx",
            [helper.make_node(op, ["x"], ["y", "s", "z"], name="round")],
            {"x": x}, {"y": u8},
        ),
        "MatMulNBits": lambda: _write(
            tmp_path / "q.onnx",
            [helper.make_node(op, ["x", "packed", "scales", "", "order"], ["y"], name="round", domain="com.microsoft",
                              K=32, N=4, bits=4, block_size=32)],
            {"x": x}, {"y": (1, [2, 4])}, [packed, scales, order],
        ),
        "GatherBlockQuantized": lambda: _write(
            tmp_path / "q.onnx",
            [helper.make_node(op, ["w", "i", "s"], ["y"], name="round", domain="com.microsoft")],
            {"w": i8, "i": (TensorProto.INT64, [1]), "s": (1, [2, 1])}, {"y": (1, [1, 32])},
        ),
    }  # fmt: skip
    path = makers[op]()
    if "com.microsoft" in path.read_bytes().decode("latin-1"):
        proto = onnx.load(path)
        proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        onnx.save(proto, path)
    refuse(3, ["convert", path], "The model is already quantized", op, "'round'", "give the float model")


def test_a_converted_and_quantized_model_without_its_marks(model: Path, tmp_path: Path, refuse: Refuse) -> None:
    for target in ("ort", "portable"):
        path = tmp_path / f"{target}.onnx"
        options = ["--solver", "rtn", "--target", target, "--certificate", "off", "--allow-partial"]
        assert run(["convert", str(model), "-o", str(path), *options]) == 0
        proto = onnx.load(path)
        del proto.metadata_props[:]
        onnx.save(proto, tmp_path / "bare.onnx")
        refuse(3, ["convert", tmp_path / "bare.onnx"], "The model is already quantized", "give the float model")
