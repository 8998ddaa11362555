"""Nodes of somebody else's library: the library is given, the nodes stay, and rotations stop in front of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import graphrot
from graphrot.cli.main import run
from graphrot.errors import EnvironmentProblem, InputRefused, UsageError
from tests.dropin.deployed import deployed, feeds, write
from tests.exported import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    assert compiler, "a C++ compiler is not on PATH; the native library needs one, too"
    made = tmp_path_factory.mktemp("acme") / "libacme.so"
    source = Path(__file__).with_name("custom_op.cc")
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{ROOT / 'custom_ops'}",
        str(source),
        "-o",
        str(made),
    ]
    subprocess.run(command, check=True, timeout=300)
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its gate ends in an operator that ONNX Runtime does not know."""
    proto = deployed(residual=None)
    (gate,) = [node for node in proto.graph.node if node.op_type == "Gate"]
    place = list(proto.graph.node).index(gate)
    custom = onnx.helper.make_node("Softsign", ["gated"], [gate.output[0]], "acme node", domain="acme.ops")
    custom.doc_string = "ours"
    gate.output[0] = "gated"
    proto.graph.node.insert(place + 1, custom)
    proto.opset_import.append(onnx.helper.make_opsetid("acme.ops", 1))
    folder = tmp_path_factory.mktemp("source")
    write_tokenizer(folder)
    return write(proto, folder / "model.onnx")


def _logits(model: Path, library: Path) -> np.ndarray:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library))
    return np.asarray(ort.InferenceSession(str(model), options).run(["logits"], feeds(0))[0])


@pytest.mark.parametrize(("recipe", "bound"), [("rotate-only", 2e-5), ("w4a16", 0.35), ("w4a8", 0.35)])
def test_the_node_stays_and_the_rest_is_rotated(
    recipe: str, bound: float, source: Path, library: Path, tmp_path: Path
) -> None:
    output = tmp_path / "new.onnx"
    with graphrot.custom_ops(library):
        result = graphrot.convert(source, output=output, recipe=recipe)
    assert result.certificate is not None and {r.space.kind for r in result.plan.rotations} >= {"R1", "R2", "R4"}
    (before,), (after,) = (
        [node for node in onnx.load(path).graph.node if node.domain == "acme.ops"] for path in (source, output)
    )
    if recipe == "rotate-only":
        assert after == before
    assert (after.op_type, after.name, after.doc_string) == (before.op_type, before.name, before.doc_string)
    expected = _logits(source, library)
    assert np.abs(_logits(output, library) - expected).max() / np.abs(expected).max() <= bound


def test_the_commands_take_the_library(
    source: Path, library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "new.onnx")
    given = ["--custom-ops", str(library)]
    assert run(["inspect", str(source), *given]) == 0
    assert "R1" in capsys.readouterr().out
    assert run(["convert", str(source), "-o", output, "--recipe", "rotate-only", *given]) == 0
    assert run(["verify", str(source), output, *given]) == 0
    assert run(["verify", str(source), output]) == 3


def test_without_the_library_the_node_is_named_and_the_way_out_told(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match=r"nothing here defines: acme\.ops::Softsign") as caught:
        graphrot.convert(source, output=tmp_path / "new.onnx", recipe="rotate-only")
    assert "acme node" in str(caught.value) and "--custom-ops FILE" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_is_no_library_of_operators_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such library"), graphrot.custom_ops(tmp_path / "missing.so"):
        pass
    other = tmp_path / "other.so"
    other.write_bytes(b"no library")
    with graphrot.custom_ops(other), pytest.raises(EnvironmentProblem, match="refused a library of custom operators"):
        graphrot.inspect(source)
    with pytest.raises(InputRefused, match="nothing here defines"):  # the block is over
        graphrot.inspect(source)
