"""What Optimum and its like write: positions and caches are taken, what lies outside the graph is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphrot
from graphrot.errors import InputRefused
from graphrot.model.load import load_source
from tests.exported import tiny_onnx
from tests.tiny import tiny_llama


@pytest.fixture
def decoder() -> onnx.ModelProto:
    """A Llama with caches and positions, as Optimum names them."""
    return onnx.load(tiny_onnx("llama"))


def _refused(model: onnx.ModelProto) -> str:
    with pytest.raises(InputRefused) as inspected:
        graphrot.inspect(model)
    with pytest.raises(InputRefused) as caught:
        graphrot.convert(model, recipe="rotate-only")
    assert str(inspected.value) == str(caught.value)
    return str(caught.value)


def _rename(model: onnx.ModelProto, old: str, new: str) -> None:
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = new if value.name == old else value.name
    for node in model.graph.node:
        for names in (node.input, node.output):
            for k, name in enumerate(names):
                names[k] = new if name == old else name


def _pasts(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    return [value for value in model.graph.input if value.name.startswith("past_key_values")]


def _filled(past: onnx.ValueInfoProto, tokens: int) -> onnx.TensorProto:
    _, heads, _, width = past.type.tensor_type.shape.dim
    shape = (1, heads.dim_value, tokens, width.dim_value)
    return numpy_helper.from_array(np.random.default_rng(0).standard_normal(shape).astype(np.float32), past.name)


def test_position_ids_and_caches_are_supported(decoder: onnx.ModelProto) -> None:
    assert [value.name for value in decoder.graph.input][:4] == [
        "input_ids", "attention_mask", "position_ids", "past_key_values.0.key",
    ]  # fmt: skip
    made = graphrot.convert(decoder, recipe="rotate-only")
    assert {rotation.kind for rotation in made.report.plan.rotations} == {"R1", "R2", "R3", "R4"}
    assert [value.name for value in made.to_proto().graph.input] == [value.name for value in decoder.graph.input]


@pytest.mark.parametrize("name", ["use_cache_branch", "first_step"])
@pytest.mark.parametrize("through_cast", [False, True])
def test_a_merged_decoder_is_refused_by_its_switch(decoder: onnx.ModelProto, name: str, through_cast: bool) -> None:
    graph = decoder.graph
    branches = []
    for branch in ("then", "else"):
        body = helper.make_graph(copy.deepcopy(graph.node), branch, [], copy.deepcopy(graph.output))
        for node in body.node:
            for names in (node.input, node.output):
                for k, tensor in enumerate(names):
                    if tensor and any(tensor in other.output for other in graph.node):
                        names[k] = f"{branch}.{tensor}"
        for value in body.output:
            value.name = f"{branch}.{value.name}"
        branches.append(body)
    switch = helper.make_tensor_value_info(name, TensorProto.INT64 if through_cast else TensorProto.BOOL, [1])
    condition = f"{name}.bool" if through_cast else name
    merged = helper.make_node(
        "If", [condition], [value.name for value in graph.output], "optimum::if",
        then_branch=branches[0], else_branch=branches[1],
    )  # fmt: skip
    cast = [helper.make_node("Cast", [name], [condition], to=TensorProto.BOOL)] if through_cast else []
    del graph.node[:]
    graph.node.extend([*cast, merged])
    graph.input.append(switch)
    del graph.value_info[:]
    message = _refused(decoder)
    assert "If node 'optimum::if'" in message and repr(name) in message and "decoder_with_past_model.onnx" in message


def test_an_if_on_sizes_is_no_switch() -> None:
    """What TorchScript writes for models whose rotary tables depend on the length."""
    model = onnx.load(tiny_onnx("llama"))
    logits = model.graph.output[0]
    _rename(model, logits.name, "inner")
    model.graph.output[0].name = "logits"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("a", "b")]
    branches = [
        helper.make_graph([helper.make_node("Identity", ["inner"], [end.name])], end.name, [], [end]) for end in ends
    ]
    model.graph.node.extend(
        [
            helper.make_node("Shape", ["input_ids"], ["size"]),
            helper.make_node("ReduceProd", ["size"], ["count"], keepdims=0),
            helper.make_node("Cast", ["count"], ["some"], to=TensorProto.BOOL),
            helper.make_node("If", ["some"], ["logits"], then_branch=branches[0], else_branch=branches[1]),
        ]
    )
    found = graphrot.inspect(model)
    assert {site.kind for site in found.sites} == {"R1", "R2", "R3", "R4"}


@pytest.mark.parametrize("transposed", [False, True])
def test_adapter_weights_as_inputs_are_refused(decoder: onnx.ModelProto, transposed: bool) -> None:
    """x @ W + (x @ A) @ B, with A and B given at run time."""
    graph = decoder.graph
    target = next(n for n in graph.node if n.op_type == "MatMul" and n.input[1].endswith("up_proj.weight"))
    a, b = ("adapter.A", "adapter.B")
    shapes = {a: ["rank", 48] if transposed else [48, "rank"], b: ["rank", 112]}
    graph.input.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, shapes[n]) for n in (a, b))
    plain = target.output[0]
    target.output[0] = "base"
    added = [
        helper.make_node("Transpose", [a], ["a"], perm=[1, 0])
        if transposed
        else helper.make_node("Identity", [a], ["a"]),
        helper.make_node("MatMul", [target.input[0], "a"], ["low"], "lora_A"),
        helper.make_node("MatMul", ["low", b], ["high"], "lora_B"),
        helper.make_node("Add", ["base", "high"], [plain]),
    ]
    place = list(graph.node).index(target) + 1
    nodes = [*graph.node[:place], *added, *graph.node[place:]]
    nodes = [copy.deepcopy(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(nodes)
    message = _refused(decoder)
    assert "adapter (LoRA)" in message and f"input {a!r}, the weight of MatMul node 'lora_A'" in message
    assert "merge the adapter" in message


def test_exchangeable_weights_are_refused(decoder: onnx.ModelProto) -> None:
    """Adapters with a default, or keep_initializers_as_inputs: a graph input that is an initializer too."""
    weight = next(t for t in decoder.graph.initializer if t.name.endswith("up_proj.weight"))
    decoder.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims)))
    message = _refused(decoder)
    assert "A weight of the model is also its input" in message and weight.name in message


def test_old_files_list_their_weights_as_inputs_and_are_taken(tmp_path: Path) -> None:
    model = onnx.load(tiny_onnx("gpt2"))
    expected = [s.kind for s in graphrot.inspect(model).sites]
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    model.ir_version = 3
    onnx.save(model, tmp_path / "old.onnx")
    assert [s.kind for s in graphrot.inspect(tmp_path / "old.onnx").sites] == expected
    assert graphrot.convert(model, recipe="rotate-only", certificate="off").report.source.kind == "object"
    made = graphrot.convert(tmp_path / "old.onnx", output=tmp_path / "new.onnx", recipe="rotate-only")
    assert made.certificate is not None
    assert graphrot.verify(tmp_path / "old.onnx", tmp_path / "new.onnx").ok


@pytest.mark.parametrize("expanded", [False, True])
def test_a_prefix_inside_the_graph_is_refused(decoder: onnx.ModelProto, expanded: bool) -> None:
    past = _pasts(decoder)[0]
    decoder.graph.initializer.append(_filled(past, 4))
    decoder.graph.input.remove(past)
    if expanded:
        _rename(decoder, past.name, "used")
        decoder.graph.initializer[-1].name = past.name
        decoder.graph.initializer.append(numpy_helper.from_array(np.array([2, 1, 1, 1]), "repeats"))
        decoder.graph.node.insert(0, helper.make_node("Expand", [past.name, "repeats"], ["used"]))
    message = _refused(decoder)
    assert "carries a saved prefix" in message and past.name in message and "Concat node" in message


def test_a_filled_default_of_a_cache_is_refused_and_an_empty_one_is_not(decoder: onnx.ModelProto) -> None:
    empty = copy.deepcopy(decoder)
    for past in _pasts(empty):
        empty.graph.initializer.append(_filled(past, 0))
    decoder.graph.initializer.append(_filled(_pasts(decoder)[1], 3))
    message = _refused(decoder)
    assert "carries a filled key/value cache" in message and "past_key_values.0.value" in message
    assert "[1, 1, 3, 16]" in message
    made = graphrot.convert(empty, recipe="rotate-only", only="R1,R4")
    assert {rotation.kind for rotation in made.report.plan.rotations} == {"R1", "R4"}


def test_folders_of_other_tools_are_answered_with_their_files(tmp_path: Path) -> None:
    tiny_llama(layers=1).config.save_pretrained(tmp_path)
    names = ("decoder_model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx")
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(InputRefused) as caught:
        load_source(str(tmp_path), workdir=tmp_path / "work")
    message = str(caught.value)
    assert "several .onnx files" in message and all(str(tmp_path / name) in message for name in names)
    for name in names[1:]:
        (tmp_path / name).unlink()
    (tmp_path / "config.json").rename(tmp_path / "genai_config.json")
    with pytest.raises(InputRefused, match=r"give the \.onnx file itself"):
        load_source(str(tmp_path), workdir=tmp_path / "work")
