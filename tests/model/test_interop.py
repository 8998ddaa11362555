"""Models in memory: three kinds go in and stay as they are, three kinds come out and answer alike."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnx_graphsurgeon.ir.tensor import LazyValues

import graphrot
from graphrot.converted import Converted
from graphrot.errors import InputRefused, UsageError
from graphrot.model import interop
from tests.exported import tiny_onnx


@pytest.fixture(scope="module")
def proto() -> onnx.ModelProto:
    """Do not change it."""
    model = onnx.load(tiny_onnx("llama"))
    model.metadata_props.add(key="made.by", value="a test")
    return model


@pytest.fixture(scope="module")
def surgeon(proto: onnx.ModelProto) -> gs.Graph:
    """Do not change it."""
    return gs.import_onnx(proto)


@pytest.fixture(scope="module")
def portable(surgeon: gs.Graph) -> Converted:
    """Rotated, with INT4 weights and a function, made from a graphsurgeon graph."""
    return graphrot.convert(surgeon, recipe="w4a16", solver="rtn", target="portable")


def _bytes(proto: onnx.ModelProto) -> bytes:
    return proto.SerializeToString(deterministic=True)


def _logits(model: onnx.ModelProto) -> np.ndarray:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {}
    for value in session.get_inputs():
        if "past" in value.name:
            feeds[value.name] = np.zeros((2, value.shape[1], 0, value.shape[3]), np.float32)
        elif value.name == "position_ids":
            feeds[value.name] = np.tile(np.arange(5), (2, 1))
        else:
            feeds[value.name] = np.arange(10).reshape(2, 5) if value.name == "input_ids" else np.ones((2, 5), np.int64)
    return np.asarray(session.run(["logits"], feeds)[0])


@pytest.mark.parametrize("kind", ["proto", "ir", "surgeon"])
def test_every_kind_converts_to_the_same_model(
    kind: str, proto: onnx.ModelProto, surgeon: gs.Graph, portable: Converted
) -> None:
    source = {"proto": proto, "ir": ir.load(tiny_onnx("llama")), "surgeon": surgeon}[kind]
    made = graphrot.convert(source, recipe="w4a16", solver="rtn", target="portable")
    assert made.report.source.kind == "object" and "main_graph" in made.report.source.name
    assert made.certificate is not None and made.certificate.relative < 1e-9
    np.testing.assert_array_equal(_logits(made.to_proto()), _logits(portable.to_proto()))


def test_an_object_gives_what_its_file_gives(proto: onnx.ModelProto, tmp_path: Path) -> None:
    made = [
        graphrot.convert(source, output=tmp_path / name, recipe="rotate-only")
        for source, name in ((proto, "a.onnx"), (tiny_onnx("llama"), "b.onnx"))
    ]
    np.testing.assert_array_equal(_logits(made[0].to_proto()), _logits(made[1].to_proto()))
    assert graphrot.verify(tmp_path / "a.onnx", proto).ok


def test_the_given_proto_stays(proto: onnx.ModelProto) -> None:
    before = _bytes(proto)
    graphrot.convert(proto, recipe="rotate-only", certificate="off")
    graphrot.inspect(proto)
    assert graphrot.verify(proto, proto).max_abs == 0
    assert _bytes(proto) == before


def test_the_given_ir_model_stays() -> None:
    model = ir.load(tiny_onnx("llama"))
    before, names = _bytes(ir.to_proto(model)), [v.const_value for v in model.graph.initializers.values()]
    graphrot.convert(model, recipe="rotate-only", certificate="off")
    graphrot.inspect(model)
    assert _bytes(ir.to_proto(model)) == before
    assert all(a is b.const_value for a, b in zip(names, model.graph.initializers.values(), strict=True))


def test_the_given_graph_stays(proto: onnx.ModelProto) -> None:
    model = copy.deepcopy(proto)
    graph = gs.import_onnx(model)
    graph.import_domains = None
    tensors = graph.tensors()
    weight = next(t for t in tensors.values() if isinstance(t, gs.Constant) and len(t.shape) == 2)
    weight.name = "renamed"  # gs.export_onnx would rename it in `model` too
    before = _bytes(model)
    graphrot.convert(graph, recipe="rotate-only", certificate="off")
    assert _bytes(model) == before
    assert graph.import_domains is None
    lazy = [t for t in tensors.values() if isinstance(t, gs.Constant) and isinstance(t._values, LazyValues)]
    assert len(lazy) == sum(isinstance(t, gs.Constant) for t in tensors.values()), "weights were read into arrays"


def test_all_commands_take_all_kinds(surgeon: gs.Graph, proto: onnx.ModelProto) -> None:
    expected = graphrot.inspect(tiny_onnx("llama"))
    for model in (surgeon, proto, ir.load(tiny_onnx("llama"))):
        found = graphrot.inspect(model)
        assert [s.kind for s in found.sites] == [s.kind for s in expected.sites]
        assert graphrot.verify(tiny_onnx("llama"), model).max_abs == 0


def test_a_rotated_graph_comes_out_and_graphsurgeon_exports_it(portable: Converted) -> None:
    graph = portable.to_graphsurgeon()
    types = {str(t.dtype) for t in graph.tensors().values() if isinstance(t, gs.Constant)}
    assert "int4" in types and [(f.domain, f.name) for f in graph.functions] == [("graphrot", "HadamardTransform")]
    exported = gs.export_onnx(graph)
    onnx.checker.check_model(exported)
    np.testing.assert_array_equal(_logits(exported), _logits(portable.to_proto()))
    assert not exported.metadata_props


def test_our_export_keeps_metadata_and_four_bits(portable: Converted) -> None:
    graph = portable.to_graphsurgeon()
    exported = graphrot.export_graphsurgeon(graph)
    kept = {entry.key: entry.value for entry in exported.metadata_props}
    assert kept == portable.model.metadata_props and "graphrot.version" in kept
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant):
            assert tensor.values is not None  # from now on an array, which gs.export_onnx writes wrongly
    again = graphrot.export_graphsurgeon(graph)
    onnx.checker.check_model(again)
    np.testing.assert_array_equal(_logits(again), _logits(portable.to_proto()))
    with pytest.raises(InputRefused, match="already converted by graphrot"):
        graphrot.convert(graph)


def test_a_graph_can_be_changed_and_converted(surgeon: gs.Graph) -> None:
    """What deployment scripts do: name an inner tensor an output, in a graph whose nodes are out of order."""
    graph = surgeon.copy()
    scale = gs.Constant("scale", np.array(2, np.float32))
    doubled = gs.Variable("doubled", np.float32, graph.outputs[0].shape)
    graph.nodes.insert(0, gs.Node("Mul", "twice", inputs=[graph.outputs[0], scale], outputs=[doubled]))
    graph.outputs[0] = doubled
    exported = graphrot.export_graphsurgeon(graph)
    assert exported.graph.node[-1].name == "twice"
    expected = _logits(graphrot.export_graphsurgeon(surgeon))
    session = ort.InferenceSession(exported.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.get_outputs()[0].name == "doubled"
    renamed = graph.copy()
    renamed.outputs[0].name = "logits"
    np.testing.assert_array_equal(_logits(graphrot.export_graphsurgeon(_named(renamed))), 2 * expected)


def _named(graph: gs.Graph) -> gs.Graph:
    for node in graph.nodes:
        if node.name == "twice":
            node.inputs[0].name = "before"
    return graph


def _everything() -> onnx.ModelProto:
    """Attributes of every kind, a subgraph that reads outer values, an omitted input, a nested function."""
    inner = helper.make_function(
        "mine", "Scaled", ["X"], ["Y"],
        [
            helper.make_node("Constant", [], ["zero"], value=helper.make_tensor("z", TensorProto.FLOAT, [1], [0.0])),
            onnx.parser.parse_node("T = Elu <alpha: float = @alpha> (X)"),
            helper.make_node("Add", ["T", "zero"], ["Y"]),
        ],
        [helper.make_opsetid("", 21)], ["alpha"], [],
    )  # fmt: skip
    then = helper.make_graph(
        [helper.make_node("Scaled", ["x"], ["a"], domain="mine", alpha=0.5)],
        "then", [], [helper.make_tensor_value_info("a", TensorProto.FLOAT, None)],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["b"])],
        "else", [], [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)],
    )  # fmt: skip
    nodes = [
        helper.make_node("If", ["flag"], ["c"], "branch", then_branch=then, else_branch=other),
        helper.make_node("Clip", ["c", "", "top"], ["d"]),
        helper.make_node("Transpose", ["d"], ["e"], perm=[1, 0]),
        helper.make_node("Cast", ["e"], ["f"], to=TensorProto.FLOAT16),
        helper.make_node("DequantizeLinear", ["q", "s"], ["g"], axis=0, block_size=16),
        helper.make_node("MatMul", ["d", "g"], ["h"]),
    ]
    initializers = [
        helper.make_tensor("w", TensorProto.FLOAT, [16], [0.25] * 16),
        helper.make_tensor("top", TensorProto.FLOAT, [], [0.75]),
        helper.make_tensor("q", TensorProto.INT4, [16, 3], [(i % 15) - 7 for i in range(48)]),
        helper.make_tensor("s", TensorProto.FLOAT, [1, 3], [0.5, 1.0, 2.0]),
    ]
    graph = helper.make_graph(
        nodes, "all",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("f", TensorProto.FLOAT16, [16, "n"]),
            helper.make_tensor_value_info("h", TensorProto.FLOAT, ["n", 3]),
        ],
        initializers,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("mine", 3)]
    model = helper.make_model(graph, functions=[inner], opset_imports=opsets, ir_version=10)
    model.metadata_props.add(key="k", value="v")
    onnx.checker.check_model(model)
    return model


def _run(model: onnx.ModelProto, flag: bool) -> list[Any]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    return list(session.run(None, {"x": x, "flag": np.array(flag)}))


@pytest.mark.parametrize("touch", [False, True])
def test_graphs_keep_everything(touch: bool) -> None:
    model = _everything()
    graph = interop.to_graphsurgeon(model)
    if touch:
        for tensor in graph.tensors().values():
            if isinstance(tensor, gs.Constant):
                assert tensor.values is not None
    back = graphrot.export_graphsurgeon(graph)
    onnx.checker.check_model(back)
    assert [(o.domain, o.version) for o in back.opset_import] == [("", 21), ("mine", 3)]
    assert (back.ir_version, back.metadata_props[0].value) == (10, "v")
    for flag in (False, True):
        for a, b in zip(_run(model, flag), _run(back, flag), strict=True):
            np.testing.assert_array_equal(a, b)


def test_overloads_become_functions_of_their_own() -> None:
    def overloaded(name: str, op: str) -> onnx.FunctionProto:
        nodes = [helper.make_node(op, ["X"], ["Y"])]
        return helper.make_function("mine", "F", ["X"], ["Y"], nodes, [helper.make_opsetid("", 21)], overload=name)

    nodes = [
        helper.make_node("F", ["x"], ["a"], domain="mine", overload="neg"),
        helper.make_node("F", ["a"], ["y"], domain="mine", overload="abs"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:]),
        functions=[overloaded("neg", "Neg"), overloaded("abs", "Abs")],
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("mine", 1)],
        ir_version=10,
    )
    before = _bytes(model)
    exported = gs.export_onnx(interop.to_graphsurgeon(model))
    assert _bytes(model) == before
    session = ort.InferenceSession(exported.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.array([1, -2], np.float32)})[0].tolist() == [1, 2]


def test_external_data_is_read_from_the_current_folder_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    light = onnx.load(tiny_onnx("llama"), load_external_data=False)
    monkeypatch.chdir(tmp_path)
    for model in (light, gs.import_onnx(light)):
        with pytest.raises(InputRefused) as caught:
            graphrot.inspect(model)
        assert "there is no such file" in str(caught.value) and "onnx.load(path)" in str(caught.value)
    monkeypatch.chdir(tiny_onnx("llama").parent)
    for model in (light, gs.import_onnx(light)):
        assert graphrot.verify(model, tiny_onnx("llama")).max_abs == 0


def test_a_shortened_file_behind_a_model_is_refused(tmp_path: Path) -> None:
    source = tiny_onnx("llama")
    (tmp_path / "model.onnx").write_bytes(source.read_bytes())
    data = source.with_name("model.onnx.data").read_bytes()
    (tmp_path / "model.onnx.data").write_bytes(data)
    model = ir.load(tmp_path / "model.onnx")
    (tmp_path / "model.onnx.data").write_bytes(data[:-10])
    with pytest.raises(InputRefused, match="it ends before byte"):
        graphrot.convert(model)


def test_the_files_behind_a_model_are_never_replaced(tmp_path: Path) -> None:
    source = tiny_onnx("llama")
    for file in source.parent.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match="would replace a file that the conversion reads"):
        graphrot.convert(ir.load(tmp_path / "model.onnx"), output=tmp_path / "model.onnx", force=True)


def test_bad_objects_are_refused(surgeon: gs.Graph) -> None:
    with pytest.raises(UsageError, match="a dict"):
        graphrot.convert({"model": 1})
    with pytest.raises(InputRefused, match=r"onnx\.ModelProto"):
        graphrot.convert(onnx.ModelProto())
    cycle = gs.Graph(opset=21, ir_version=10)
    a, b = gs.Variable("a", np.float32, [2]), gs.Variable("b", np.float32, [2])
    cycle.nodes = [gs.Node("Neg", inputs=[b], outputs=[a]), gs.Node("Neg", inputs=[a], outputs=[b])]
    cycle.outputs = [a]
    with pytest.raises(InputRefused, match=r"onnx_graphsurgeon\.Graph"):
        graphrot.convert(cycle)
    hollow = ir.load(tiny_onnx("llama"))
    name, weight = next(iter(hollow.graph.initializers.items()))
    weight.const_value = None
    with pytest.raises(InputRefused, match="A weight has no numbers") as caught:
        graphrot.convert(hollow)
    assert name in str(caught.value)


def test_objects_need_neither_torch_nor_graphsurgeon() -> None:
    code = (
        "import sys, onnx, graphrot\n"
        f"model = onnx.load({str(tiny_onnx('llama'))!r})\n"
        "graphrot.convert(model, recipe='rotate-only', certificate='off').to_proto()\n"
        "sys.exit(bool({'torch', 'transformers', 'onnx_graphsurgeon'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
