"""The whole way on tiny models, through the command line: files, JSON, exit codes, refusals."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphrot
from graphrot.cli.main import run
from graphrot.errors import CheckFailed, InputRefused, UsageError
from graphrot.evaluate.session import open_decoder
from tests.exported import tiny_onnx, with_tokenizer, write_tokenizer
from tests.tiny import tiny

MANIFEST_KEYS = {
    "graphrot_version", "source", "recipe", "plan", "certificate", "sizes", "quantized", "cache", "seconds", "versions",
    "half", "tokenizer_files", "other_files", "calibration", "learning", "choices", "outliers", "evaluations",
}  # fmt: skip
METADATA = {"graphrot.version", "graphrot.plan", "graphrot.online", "graphrot.kv", "graphrot.recipe"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied tiny Llama with a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("source")
    return with_tokenizer("llama_tied", folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 20, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def converted(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default recipe, gptq included."""
    output = tmp_path_factory.mktemp("converted") / "out"
    graphrot.convert(source, output=output, calibration=text)
    return output


@pytest.fixture(scope="module")
def rotated(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("rotated") / "rotated.onnx"
    graphrot.convert(source, output=output, recipe="rotate-only")
    return output


def call(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, Any, str]:
    """Run with --json; stdout must be one JSON object or nothing."""
    capsys.readouterr()
    code = run([*arguments, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def test_json_of_convert(source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    code, manifest, err = call(
        ["convert", str(source), "-o", str(output), "--solver", "clip", "--calibration", str(text)], capsys
    )
    assert code == 0, err
    assert set(manifest) == MANIFEST_KEYS
    assert manifest == json.loads((output / "graphrot.json").read_text(encoding="utf-8"))
    assert manifest["source"]["kind"] == "onnx"
    assert len(manifest["source"]["sha256"]) == 64
    rotations = manifest["plan"]["rotations"]
    assert [r["kind"] for r in rotations] == ["R1", "R2", "R4", "R2", "R4"]
    assert {r["placement"] for r in rotations if r["kind"] == "R4"} == {"online"}
    assert all(
        set(r) == {"kind", "space", "placement", "dim", "matrix", "producers", "consumers"} and r["producers"]
        for r in rotations
    )
    assert set(manifest["certificate"]) == {
        "mode", "max_abs", "relative", "top1", "tolerance", "dtype", "tokens", "control_relative",
    }  # fmt: skip
    assert set(manifest["cache"]) == {"bits", "layout", "rotated", "scales", "shared_buffers"}
    entry = manifest["quantized"][0]
    assert set(entry) == {"tensor", "node", "bits", "group", "error", "error_without_rotation"}
    assert len(manifest["quantized"]) == 7 * 2 + 2  # so small a table is cheaper twice than with a matrix
    compared = [q for q in manifest["quantized"] if q["bits"] == 4]
    assert all(0 < q["error_without_rotation"] < 0.2 and q["error_without_rotation"] != q["error"] for q in compared)
    assert manifest["sizes"]["model_bytes"] == sum(
        (output / name).stat().st_size for name in ("model.onnx", "model.onnx.data")
    )
    assert {"export", "analysis", "plan", "rotate", "certificate", "quantize"} <= set(manifest["seconds"])


def test_the_folder_is_complete(converted: Path, source: Path) -> None:
    names = {path.name for path in converted.iterdir()}
    assert {"model.onnx", "model.onnx.data", "graphrot.json", "plan.json", "tokenizer.json"} <= names
    assert "chat_template.jinja" in names
    assert not [path for path in converted.parent.iterdir() if path.name.startswith(".")], "scratch was left behind"
    model = onnx.load(converted / "model.onnx")
    properties = {p.key: p.value for p in model.metadata_props}
    assert set(properties) >= METADATA
    assert properties["graphrot.online"] == "R4.0,R4.1"
    assert json.loads(properties["graphrot.recipe"])["name"] == "w4a8"


def test_from_a_hugging_face_folder(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, output = tmp_path / "tiny-qwen2", tmp_path / "out"
    tiny("qwen2").save_pretrained(folder)
    write_tokenizer(folder)
    code, manifest, err = call(["convert", str(folder), "-o", str(output), "--calibration", str(text)], capsys)
    assert code == 0, err
    assert (manifest["source"]["kind"], manifest["source"]["name"]) == ("hf", "tiny-qwen2")
    assert manifest["certificate"]["dtype"] == "float64"
    assert (output / "tokenizer.json").exists()
    assert call(["generate", str(output), "--prompt", "It was", "--max-new-tokens", "3"], capsys)[0] == 0


def test_inputs_and_outputs_stay(converted: Path, rotated: Path, source: Path) -> None:
    def signature(path: Path) -> list[tuple[str, Any]]:
        graph = ir.load(path).graph
        return [(v.name or "", v.dtype) for v in (*graph.inputs, *graph.outputs)]

    assert signature(rotated) == signature(source) == signature(converted / "model.onnx")


def test_four_bit_weights_are_stored_in_four_bits(converted: Path) -> None:
    model = ir.load(converted / "model.onnx")
    matmuls = [n for n in model.graph if n.op_type == "RotatedMatMul"]
    assert sorted(n.attributes["bits"].as_int() for n in matmuls) == [4] * 14 + [8]
    assert sorted(n.attributes["rotate"].as_int() for n in matmuls) == [0] * 13 + [1] * 2
    assert not {"MatMulNBits", "HadamardTransform", "QuantizeLinear"} & {n.op_type for n in model.graph}
    assert list(model.functions) == [("graphrot", "RotatedMatMul", "")]
    assert json.loads((converted / "graphrot.json").read_text())["sizes"]["bits_per_weight"] < 6


def test_the_library_and_the_function_agree(converted: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 131, (1, 20))
    kernel, _ = open_decoder(converted).run(tokens)
    function, _ = open_decoder(converted, library=False).run(tokens)
    assert np.abs(kernel - function).max() <= 2e-2 * np.abs(function).max()


def test_the_file_form(rotated: Path) -> None:
    assert {path.name for path in rotated.parent.iterdir()} == {
        "rotated.onnx", "rotated.onnx.data", "rotated.graphrot.json", "rotated.plan.json",
    }  # fmt: skip


def test_the_float64_certificate(rotated: Path) -> None:
    certificate = json.loads((rotated.parent / "rotated.graphrot.json").read_text())["certificate"]
    assert certificate["dtype"] == "float64"
    assert certificate["relative"] <= 1e-12
    assert certificate["top1"] == 1.0
    assert certificate["control_relative"] > 0.01


def test_verify(source: Path, rotated: Path, converted: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, same, _ = call(["verify", str(source), str(rotated), "--text", str(text)], capsys)
    assert (code, same["ok"]) == (0, True)
    assert set(same) == {"ok", "max_abs", "relative", "top1", "tokens", "dtype"} and same["dtype"] == "float32"
    assert same["tokens"] > 1000
    code, other, _ = call(["verify", str(source), str(converted)], capsys)
    assert (code, other["ok"]) == (1, False)
    assert other["relative"] > 0.01


def test_verify_of_different_vocabularies(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(source), str(tiny_onnx("llama"))]) == 1
    capsys.readouterr()
    assert run(["verify", str(source), "absent.onnx"]) == 3
    assert "There is no such model" in capsys.readouterr().err


def test_eval(converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "other.txt"
    text.write_text("Whether I shall turn out to be the hero of my own life, these pages must show. " * 12)
    code, result, _ = call(["eval", str(converted), "--text", str(text), "--window", "64", "--windows", "2"], capsys)
    assert code == 0
    assert set(result) == {"perplexity", "tokens", "window", "windows"}
    assert (result["window"], result["windows"], result["tokens"]) == (64, 2, 126)
    assert run(["eval", str(converted), "--text", str(text), "--window", "100000"]) == 3


def test_generate(converted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["generate", str(converted), "--prompt", "It was", "--max-new-tokens", "5", "--greedy"]
    code, result, _ = call(options, capsys)
    assert code == 0
    assert set(result) == {"text", "tokens"}
    assert 0 < len(result["tokens"]) <= 5
    assert run(options) == 0
    assert capsys.readouterr().out.rstrip("\n") == result["text"].rstrip("\n")
    assert call([*options, "--no-library"], capsys)[1]["tokens"] == result["tokens"]
    assert call([*options, "--chat"], capsys)[0] == 0


def test_inspect(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = call(["inspect", str(source)], capsys)
    assert code == 0
    assert set(found) == {"sites", "refused", "nodes", "opset"}
    assert sorted(site["kind"] for site in found["sites"]) == ["R1", "R2", "R2", "R3", "R3", "R4", "R4"]
    r4 = next(site for site in found["sites"] if site["kind"] == "R4")
    assert set(r4) == {"kind", "placement", "dim", "blocks", "producers", "consumers"}
    assert (r4["placement"], r4["dim"]) == ("online", 112)
    assert run(["inspect", str(source)]) == 0
    out = capsys.readouterr().out
    assert "R1     1 sites  merged" in out
    assert "O      2 sites  online  size 48, 2 producers, 2 consumers; an option: --only R1,R2,R3,R4,O\n" in out


def test_an_existing_output_is_kept(
    source: Path, rotated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rotated.read_bytes()
    command = ["convert", str(source), "-o", str(rotated), "--recipe", "rotate-only"]
    assert run(command) == 2
    assert "--force" in capsys.readouterr().err
    assert rotated.read_bytes() == before
    assert run([*command, "--force"]) == 0
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "precious.txt").write_text("keep me", encoding="utf-8")
    assert run(["convert", str(source), "-o", str(foreign), "--recipe", "rotate-only", "--force"]) == 2
    assert (foreign / "precious.txt").exists()


def test_a_converted_model_is_no_source(
    rotated: Path, converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (rotated, converted):
        assert run(["convert", str(source), "-o", str(tmp_path / "again")]) == 3
        assert "already converted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "name"), [(b"not a model", "broken.onnx"), (None, "absent.onnx"), (None, "absent"), (b"x", "model.txt")]
)
def test_bad_sources_exit_with_3(
    content: bytes | None, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert run(["convert", str(path), "-o", str(tmp_path / "out")]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("input refused: ")
    assert [p.name for p in tmp_path.iterdir()] == ([name] if content else [])


def test_gptq_without_a_tokenizer_is_refused_before_work_starts(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="There is no tokenizer") as caught:
        graphrot.convert(tiny_onnx("llama"), output=tmp_path / "out")
    assert "--tokenizer" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_text_needs_a_reader(source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["convert", str(source), "-o", str(tmp_path / "out"), "--calibration"]
    assert run([*command, str(text), "--solver", "clip", "--certificate", "off"]) == 2
    assert "Nothing would read the calibration text" in capsys.readouterr().err
    assert run([*command, "absent.txt"]) == 3
    assert "There is no such text file" in capsys.readouterr().err
    assert run(["convert", str(tiny_onnx("llama")), *command[2:], str(text), "--solver", "rtn"]) == 3
    assert "There is no tokenizer" in capsys.readouterr().err


def test_a_model_of_one_fixed_batch(tmp_path: Path) -> None:
    """Its certificate and its checks run with that batch."""
    model = ir.load(tiny_onnx("llama"))
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape([1, *value.shape[1:]])
    path = tmp_path / "one.onnx"
    ir.save(model, path, external_data="one.onnx.data")
    result = graphrot.convert(path, recipe="rotate-only")
    assert result.certificate is not None
    assert result.certificate.relative <= 1e-12
    assert graphrot.verify(path, path).ok


def test_a_plan_can_be_replayed(
    source: Path, rotated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = rotated.with_suffix(".plan.json")
    again = tmp_path / "again.onnx"
    command = ["convert", str(source), "-o", str(again), "--recipe", "rotate-only", "--plan", str(plan)]
    assert run(command) == 0
    assert (tmp_path / "again.onnx.data").read_bytes() == rotated.with_name("rotated.onnx.data").read_bytes()
    capsys.readouterr()
    assert run([*command, "--force", "--seed", "3"]) == 2
    assert "--seed and --plan contradict each other" in capsys.readouterr().err
    plain = ["convert", str(source), "--solver", "rtn", "-o"]
    assert run([*plain, str(tmp_path / "none.onnx"), "--rotations", "none"]) == 0
    assert run([*plain, str(tmp_path / "same.onnx"), "--plan", str(tmp_path / "none.plan.json")]) == 0
    assert json.loads((tmp_path / "same.graphrot.json").read_text())["plan"]["rotations"] == []
    capsys.readouterr()
    other = ["convert", str(tiny_onnx("qwen2")), "-o", str(tmp_path / "x"), "--solver", "clip", "--plan", str(plan)]
    assert run(other) == 2
    assert "made for another source" in capsys.readouterr().err
    broken = tmp_path / "broken.json"
    broken.write_text("{}", encoding="utf-8")
    assert run([*command[:-1], str(broken), "--force"]) == 2


def test_seeds_change_weights_and_repeat(source: Path) -> None:
    def weights(seed: int) -> list[bytes]:
        model = graphrot.convert(source, recipe="rotate-only", certificate="off", seed=seed, only="R1").model
        return [v.const_value.tobytes() for v in model.graph.initializers.values() if v.const_value is not None]

    first, again, other = weights(0), weights(0), weights(1)
    assert first == again
    assert first != other


def test_the_scratch_folder_lives_as_long_as_the_model(source: Path) -> None:
    model = graphrot.convert(source, recipe="rotate-only", certificate="off", only="R1").model
    folders = {Path(tensor.path).parent for tensor in _external(model)}
    assert all(folder.exists() for folder in folders)
    made = [folder for folder in folders if folder.name == "rotated"]
    del model
    gc.collect()
    assert made and not any(folder.exists() for folder in made)


def _external(model: ir.Model) -> list[ir.ExternalTensor]:
    tensors = (value.const_value for value in model.graph.initializers.values())
    return [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]


def test_without_an_output_nothing_is_written_until_save(source: Path, tmp_path: Path) -> None:
    result = graphrot.convert(source, recipe="rotate-only", certificate="off")
    assert result.certificate is None
    assert result.report.certificate is None
    assert not list(tmp_path.iterdir())
    path = result.save(tmp_path / "out")
    assert path == tmp_path / "out" / "model.onnx"
    assert result.report.sizes.model_bytes > 0
    with pytest.raises(UsageError, match="already exists"):
        result.save(tmp_path / "out")


def test_nothing_is_left_behind_after_a_failure(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphrot.evaluate import certificate

    def fail(*_: object, **__: object) -> None:
        raise CheckFailed("no")

    monkeypatch.setattr(certificate, "certify", fail)
    with pytest.raises(CheckFailed):
        graphrot.convert(source, output=tmp_path / "out", recipe="rotate-only")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        ["--recipe", "w4a16", "--solver", "rtn"],
        ["--recipe", "w4a16", "--asymmetric", "--solver", "clip"],
        ["--weights", "int8", "--solver", "rtn"],
        ["--weights", "int8", "--group", "64", "--solver", "clip"],
        ["--weights", "none", "--activations", "int4"],
        ["--weights", "int4", "--group", "64", "--activations", "int4", "--solver", "rtn", "--head", "none"],
        ["--solver", "rtn", "--embedding", "none", "--head", "none"],
        ["--solver", "rtn", "--embedding", "int4", "--head", "int4"],
        ["--solver", "rtn", "--rotations", "none"],
        ["--solver", "rtn", "--rotations", "random", "--seed", "5"],
        ["--solver", "rtn", "--rotations", "block-hadamard", "--only", "R1,R2,R3"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("target", ["ort", "portable"])
def test_every_recipe_writes_a_model_that_runs(
    source: Path, tmp_path: Path, options: list[str], target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    command = ["convert", str(source), "-o", str(output), "--target", target, "--certificate", "off", *options]
    assert run(command) == 0, capsys.readouterr().err
    logits, _ = open_decoder(output).run(np.arange(24)[None] + 5)
    expected, _ = open_decoder(source).run(np.arange(24)[None] + 5)
    assert np.isfinite(logits).all()
    assert np.corrcoef(logits.ravel(), expected.ravel())[0, 1] > 0.6
