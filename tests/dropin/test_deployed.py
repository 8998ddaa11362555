"""A converted file takes the place of the deployed one: what is not ours to change stays as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import graphrot
from graphrot.errors import InputRefused, UsageError
from tests.dropin.deployed import DOMAIN, IDLE, METADATA, deployed, feeds, write
from tests.exported import write_tokenizer

RECIPES = ("rotate-only", "w4a16", "w4a8")
TARGETS = ("ort", "portable")
ROUNDED = 0.35
"""Logits of a random one-layer model of width 24 in 4 bits; a model that is wrong is off by more than 1."""

SCRIPT = """
import sys
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
names = [value.name for value in session.get_outputs()]
feeds = [dict(np.load(name)) for name in sys.argv[3:]]
first = dict(zip(names, session.run(None, feeds[0])))
feeds[1].update({f"past_key_values.0.{kind}": first[f"present.0.{kind}"] for kind in ("key", "value")})
second = dict(zip(names, session.run(None, feeds[1])))
np.savez(sys.argv[2], *(result["logits"] for result in (first, second)))
"""
"""Somebody's service: it opens its file by path, feeds by name and goes on with its own cache."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_tokenizer(folder)
    return write(deployed(), folder / "deployed.onnx", data="weights.bin")


@pytest.fixture(scope="module", params=[(r, t) for r in RECIPES for t in TARGETS], ids="-".join)
def converted(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe, target = request.param
    output = tmp_path_factory.mktemp("made") / "new.onnx"
    result = graphrot.convert(source, output=output, recipe=recipe, target=target)
    assert result.certificate is not None and result.certificate.relative < 6.1e-5
    assert {r.space.kind for r in result.plan.rotations} >= {"R1", "R2", "R4"}
    return output


def _quantized(path: Path) -> bool:
    return any(t.data_type not in (1, 7) for t in onnx.load(path, load_external_data=False).graph.initializer)


def _logits(path: Path) -> list[np.ndarray]:
    session = ort.InferenceSession(str(path))
    names = [value.name for value in session.get_outputs()]
    first = dict(zip(names, session.run(None, feeds(0)), strict=True))
    second = session.run(["logits"], feeds(1, first))
    return [first["logits"], second[0]]


def _error(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(f - e).max() / np.abs(e).max()) for f, e in zip(found, expected, strict=True))


def test_inputs_and_outputs_stay_name_by_name(source: Path, converted: Path) -> None:
    """Names, order, types, ranks, names of dimensions and notes: the protobufs are equal."""
    before, after = onnx.load(source).graph, onnx.load(converted).graph
    assert list(after.input) == list(before.input)
    assert list(after.output) == list(before.output)
    assert IDLE in [value.name for value in after.input]


def test_who_made_the_model_and_what_it_says_of_itself_stay(source: Path, converted: Path) -> None:
    before, after = onnx.load(source), onnx.load(converted)
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        assert getattr(after, field) == getattr(before, field) != type(getattr(before, field))()
    assert (after.graph.name, after.graph.doc_string) == (before.graph.name, before.graph.doc_string)
    props = {entry.key: entry.value for entry in after.metadata_props}
    ours = {key for key in props if key.startswith("graphrot.")}
    assert {key: value for key, value in props.items() if key not in ours} == METADATA and ours
    assert list(after.graph.metadata_props) == list(before.graph.metadata_props)


def test_nodes_that_are_not_ours_stay(source: Path, converted: Path) -> None:
    """The If, the Loop, the Scan and the calls of the model's own function, with all that hangs on them."""
    kinds = ("If", "Loop", "Scan", "Gate")
    before, after = _nodes(source, kinds), _nodes(converted, kinds)
    assert set(before) == set(kinds)
    if _quantized(converted):
        # What the gate makes may be the same tensor under another name; its subgraphs are compared whole.
        before.pop("Gate"), after.pop("Gate")
    assert after == before
    (gate,) = [f for f in onnx.load(converted).functions if f.domain == DOMAIN]
    (was,) = onnx.load(source).functions
    assert list(gate.node) == list(was.node) and gate.doc_string == was.doc_string
    assert list(gate.metadata_props) == list(was.metadata_props)


def _nodes(path: Path, kinds: Sequence[str]) -> dict[str, onnx.NodeProto]:
    found = {node.op_type: node for node in onnx.load(path).graph.node if node.op_type in kinds}
    for node in found.values():
        if not node.domain:
            node.ClearField("domain")  # "" and no domain are the same
    return found


def test_notes_on_nodes_stay(converted: Path) -> None:
    nodes = onnx.load(converted).graph.node
    assert sum(entry.key == "acme.note" for node in nodes for entry in node.metadata_props) == 3


def test_the_opset_rises_only_where_something_is_quantized(source: Path, converted: Path) -> None:
    before, after = ({o.domain: o.version for o in onnx.load(p).opset_import} for p in (source, converted))
    assert after.pop("graphrot") == 1
    standard = after.pop("")
    assert before.pop("") == 17 and standard == (21 if _quantized(converted) else 17)
    assert after == before


@pytest.mark.parametrize(("opset", "written"), [(13, 15), (14, 15), (15, 15), (18, 18), (21, 21), (23, 23)])
def test_rotation_alone_raises_the_opset_to_that_of_its_function(opset: int, written: int, tmp_path: Path) -> None:
    proto = deployed(opset)
    proto.ir_version = 8
    output = tmp_path / "new.onnx"
    graphrot.convert(write(proto, tmp_path / "old.onnx"), output=output, recipe="rotate-only", certificate="off")
    made = onnx.load(output)
    assert {o.domain: o.version for o in made.opset_import}[""] == written and made.ir_version == 8
    assert _error(_logits(output), _logits(tmp_path / "old.onnx")) <= 2e-5


def test_outputs_that_are_no_results_stay(source: Path, converted: Path) -> None:
    session, was = ort.InferenceSession(str(converted)), ort.InferenceSession(str(source))
    names = [value.name for value in was.get_outputs()]
    expected, found = (dict(zip(names, s.run(None, feeds(0)), strict=True)) for s in (was, session))
    kept = [name for name in names if name != "logits" and not name.startswith("present")]
    assert len(kept) == 2
    for name in kept:
        np.testing.assert_array_equal(found[name], expected[name])


def test_it_replaces_the_file_under_a_script(source: Path, converted: Path, tmp_path: Path) -> None:
    """The script is the same before and after; a session that is open goes on with the file that it has opened."""
    for file in (*source.parent.iterdir(), *converted.parent.iterdir()):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    place = tmp_path / source.name
    running = ort.InferenceSession(str(place))
    first = _script(place, tmp_path / "before.npz")
    (tmp_path / "new.onnx").replace(place)
    second = _script(place, tmp_path / "after.npz")
    assert _error(second, first) <= (ROUNDED if _quantized(converted) else 2e-5)
    still = running.run(["logits"], feeds(0))[0]
    np.testing.assert_array_equal(still, _logits(source)[0])


def _script(model: Path, result: Path) -> list[np.ndarray]:
    inputs = [result.with_name(f"step{step}.npz") for step in (0, 1)]
    np.savez(inputs[0], **feeds(0))
    np.savez(inputs[1], **feeds(1, {f"present.0.{kind}": np.zeros(0) for kind in ("key", "value")}))
    command = [sys.executable, "-c", SCRIPT, str(model), str(result), *map(str, inputs)]
    subprocess.run(command, check=True, timeout=300)
    with np.load(result) as arrays:
        return [arrays[name] for name in arrays.files]


@pytest.mark.parametrize("force", [False, True])
def test_the_source_is_never_the_output(source: Path, tmp_path: Path, force: bool) -> None:
    """By its own name, by a link, and by the name of its weights' file."""
    for file in source.parent.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    place = tmp_path / source.name
    (tmp_path / "link.onnx").symlink_to(place)
    other = write(deployed(), tmp_path / "other.onnx", data="named.onnx.data")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for given, output in ((place, place), (place, tmp_path / "link.onnx"), (other, tmp_path / "named.onnx")):
        with pytest.raises(UsageError, match="would replace a file that the conversion reads"):
            graphrot.convert(given, output=output, recipe="rotate-only", certificate="off", force=force)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_weights_that_are_inputs_too_by_an_old_format(tmp_path: Path) -> None:
    """IR version 3 lists every weight among the inputs: a session never took them for inputs to be fed."""
    proto = deployed()
    del proto.functions[:], proto.graph.metadata_props[:]
    for node in proto.graph.node:
        del node.metadata_props[:]
        if node.domain == DOMAIN:
            node.domain, node.op_type = "", "Mul"
    proto.ir_version = 3
    for tensor in proto.graph.initializer:
        proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    source = write(proto, tmp_path / "old.onnx")
    fed = [value.name for value in ort.InferenceSession(str(source)).get_inputs()]
    output = tmp_path / "new.onnx"
    graphrot.convert(source, output=output, recipe="rotate-only")
    assert [value.name for value in ort.InferenceSession(str(output)).get_inputs()] == fed
    assert onnx.load(output).ir_version == 8  # the first with functions
    assert _error(_logits(output), _logits(source)) <= 2e-5


def _with_input(name: str, kind: onnx.TypeProto, *, read: bool) -> onnx.ModelProto:
    proto = deployed()
    proto.graph.input.append(onnx.helper.make_value_info(name, kind))
    if read:
        node = onnx.helper.make_node("SequenceLength", [name], ["count"])
        proto.graph.node.append(node)
        proto.graph.output.append(onnx.helper.make_tensor_value_info("count", onnx.TensorProto.INT64, []))
    return proto


_TENSOR = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, ["n"])
KINDS = {
    "a sequence": onnx.helper.make_sequence_type_proto(_TENSOR),
    "an optional": onnx.helper.make_optional_type_proto(_TENSOR),
    "texts": onnx.helper.make_tensor_type_proto(onnx.TensorProto.STRING, ["n"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_nothing_reads_may_be_of_any_type(kind: str, tmp_path: Path) -> None:
    source = write(_with_input("extra", KINDS[kind], read=False), tmp_path / "source.onnx")
    output = tmp_path / "new.onnx"
    result = graphrot.convert(source, output=output, recipe="w4a8", solver="clip")
    assert result.certificate is not None and result.certificate.relative < 6.1e-5
    assert list(onnx.load(output).graph.input) == list(onnx.load(source).graph.input)
    assert graphrot.verify(source, source).ok


def test_a_sequence_that_is_read_is_refused_by_name(tmp_path: Path) -> None:
    source = write(_with_input("history", KINDS["a sequence"], read=True), tmp_path / "source.onnx")
    with pytest.raises(InputRefused, match="graph input 'history' is not a tensor of numbers") as caught:
        graphrot.convert(source, output=tmp_path / "new.onnx", recipe="rotate-only")
    assert "SequenceLength 'count'" in str(caught.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["source.onnx"]
