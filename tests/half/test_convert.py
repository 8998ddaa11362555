"""Whole conversions in half types: accuracy, inputs and outputs, sources, caches, quantized models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import graphrot
from graphrot import half as half_module
from graphrot.cli.main import app
from graphrot.errors import CheckFailed
from graphrot.evaluate.compare import Reference, random_probes
from graphrot.evaluate.session import open_decoder
from graphrot.model.save import save_model
from tests.exported import tiny_onnx, write_tokenizer
from tests.half.graphs import BF16, F16, F32, narrowed, run_literally
from tests.tiny import VOCAB

NAMES = {"float16": F16, "bfloat16": BF16, "float32": F32}


def ends(model: ir.Model) -> dict[str, ir.DataType | None]:
    floats = (F16, BF16, F32)
    return {str(v.name): v.dtype for v in (*model.graph.inputs, *model.graph.outputs) if v.dtype in floats}


def relative(source: Path, ours: Path) -> float:
    reference = open_decoder(source)
    with Reference(reference, random_probes(reference.vocabulary)) as probes:
        return probes.compare(open_decoder(ours)).relative


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "phi3"])
def test_float16_is_within_twice_the_plain_cast(name: str, tmp_path: Path) -> None:
    source, output = tiny_onnx(name), tmp_path / "half"
    result = graphrot.convert(source, output=output, recipe="rotate-only", dtype="float16")
    plain = ir.load(source)
    caches = [end for end in ends(plain) if end != "logits"]
    save_model(narrowed(plain, F16, tmp_path, *caches), tmp_path / "plain.onnx")
    error, cast = relative(source, output), relative(source, tmp_path / "plain.onnx")
    assert 0 < error <= 2 * cast < 0.01
    half = result.report.half
    assert half is not None and half.dtype == "float16"
    assert half.relative == pytest.approx(error) and half.plain_relative == pytest.approx(cast)
    stored = {v.const_value.dtype for v in ir.load(output / "model.onnx").graph.initializers.values() if v.const_value
              and len(v.const_value.shape) == 2}  # fmt: skip
    assert stored == {F16}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_checkpoint_gets_half_caches_and_float32_logits(dtype: str, tmp_path: Path) -> None:
    output = tmp_path / "half"
    result = graphrot.convert(tiny_onnx("qwen3"), output=output, recipe="rotate-only", dtype=dtype)
    found = ends(ir.load(output / "model.onnx"))
    assert found.pop("logits") == F32 and set(found.values()) == {NAMES[dtype]} and len(found) == 12
    report = json.loads((output / "graphrot.json").read_text())
    assert (report["recipe"]["dtype"], report["cache"]["bits"], report["cache"]["layout"]) == (dtype, 16, "float")
    assert report["sizes"]["bits_per_weight"] == 16
    assert report["half"]["relative"] <= 2 * report["half"]["plain_relative"] and report["half"]["top1"] > 0.9
    check = graphrot.verify(tiny_onnx("qwen3"), output)
    assert check.ok and check.dtype == dtype and check.relative == pytest.approx(report["half"]["relative"])
    assert check.tolerance == {"float16": 2.0**-6, "bfloat16": 2.0**-3}[dtype]
    assert any("the key/value cache is" in note for note in result.notes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_caches_go_on(dtype: str, tmp_path: Path) -> None:
    """Token by token on its own cache, a model answers like all at once."""
    output = tmp_path / "half"
    graphrot.convert(tiny_onnx("gpt2"), output=output, recipe="rotate-only", dtype=dtype, certificate=None)
    decoder = open_decoder(output)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 9))
    whole, cache = decoder.run(tokens)
    assert whole.dtype == np.float32 and cache.tensors[0].data_type() == f"tensor({dtype})"
    steps, cache = decoder.run(tokens[:, :1])
    for position in range(1, 9):
        step, cache = decoder.run(tokens[:, position : position + 1], cache)
        steps = np.concatenate([steps, step], axis=1)
    assert np.abs(steps - whole).max() < np.abs(whole).max() * (4e-3 if dtype == "float16" else 4e-2)


@pytest.fixture(scope="module")
def half_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model whose weights, caches and logits are half, with float32 islands around its norms."""
    found = {}
    for name in ("float16", "bfloat16"):
        folder = tmp_path_factory.mktemp(name)
        model = ir.load(tiny_onnx("llama_tied"))
        found[name] = folder / "model.onnx"
        save_model(narrowed(model, NAMES[name], folder / "weights", *ends(model)), found[name])
    return found


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_half_source_keeps_its_types(name: str, half_sources: dict[str, Path], tmp_path: Path) -> None:
    source = half_sources[name]
    result = graphrot.convert(source, output=tmp_path / "same", recipe="rotate-only")
    assert ends(ir.load(tmp_path / "same" / "model.onnx")) == ends(ir.load(source))
    assert set(ends(ir.load(source)).values()) == {NAMES[name]}
    assert result.report.recipe["dtype"] == name
    assert result.certificate is not None and result.certificate.relative < 1e-9
    assert graphrot.verify(source, tmp_path / "same").ok
    assert result.report.sizes.source_bytes < 0.6 * sum(
        v.const_value.nbytes for v in ir.load(tiny_onnx("llama_tied")).graph.initializers.values() if v.const_value
    )


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_half_source_is_inspected_like_a_float32_one(name: str, half_sources: dict[str, Path]) -> None:
    kinds = [
        [site.kind for site in graphrot.inspect(path).sites] for path in (half_sources[name], tiny_onnx("llama_tied"))
    ]
    assert kinds[0] == kinds[1] and "R1" in kinds[0]


def test_a_half_source_becomes_what_is_asked_for(half_sources: dict[str, Path], tmp_path: Path) -> None:
    wide = graphrot.convert(half_sources["float16"], output=tmp_path / "wide", recipe="rotate-only", dtype="float32")
    assert set(ends(ir.load(tmp_path / "wide" / "model.onnx")).values()) == {F32}
    assert wide.report.half is None and wide.report.cache.bits == 32
    assert any("float32" in note for note in wide.notes)
    other = graphrot.convert(half_sources["bfloat16"], output=tmp_path / "other", recipe="rotate-only", dtype="float16")
    assert set(ends(ir.load(tmp_path / "other" / "model.onnx")).values()) == {F16}
    assert other.report.half is not None and other.report.half.relative < 4e-3


QUANTIZED: dict[str, dict[str, Any]] = {
    "w4a8": {"recipe": "w4a8", "solver": "rtn"},
    "w4a8 portable": {"recipe": "w4a8", "solver": "rtn", "target": "portable"},
    "w4a16 asymmetric": {"recipe": "w4a16", "solver": "rtn", "symmetric": False},
    "int4 tables": {"recipe": "w4a16", "solver": "rtn", "embedding": "int4", "head": "int4"},
    "a4": {"recipe": "w4a8", "solver": "rtn", "activations": "int4"},
    "int8": {"recipe": "w4a16", "weights": "int8", "solver": "rtn"},
}


@pytest.mark.parametrize("options", QUANTIZED.values(), ids=QUANTIZED)
def test_quantized_models_answer_as_in_float32(options: dict[str, Any], tmp_path: Path) -> None:
    source = tiny_onnx("llama_tied")
    graphrot.convert(source, output=tmp_path / "single", certificate=None, **options)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (1, 24))
    expected, _ = open_decoder(tmp_path / "single").run(tokens)
    # Rounded activations fall to the other side of a step now and then; 4-bit steps are large.
    bounds = {"float16": 0.5, "bfloat16": 0.5} if "activations" in options else {"float16": 0.05, "bfloat16": 0.15}
    for dtype, allowed in bounds.items():
        graphrot.convert(source, output=tmp_path / dtype, certificate=None, dtype=dtype, **options)
        found, _ = open_decoder(tmp_path / dtype).run(tokens)
        assert np.abs(found - expected).max() < allowed * np.abs(expected).max()


def test_packed_sums_stay_in_float16(tmp_path: Path) -> None:
    """One scale per channel, 4 bits: without the common scale, sums of codes times 20,000 leave the range."""
    output = tmp_path / "half"
    graphrot.convert(
        tiny_onnx("gpt2"),
        output=output,
        recipe="w4a16",
        group="channel",
        solver="rtn",
        dtype="float16",
        certificate=None,
    )
    model = ir.load(output / "model.onnx")
    scales = [node.inputs[2] for node in model.graph if node.op_type == "MatMulNBits"]
    numbers = [value.const_value.numpy() for value in scales if value is not None and value.const_value is not None]
    assert len(numbers) == 9 and all(array.dtype == np.float16 for array in numbers if array.shape[0] != VOCAB)
    body = [array for array in numbers if array.shape[0] != VOCAB]
    assert all((array == array.flat[0]).all() and array.flat[0] < 0.1 for array in body)


def test_the_portable_file_runs_literally(tmp_path: Path) -> None:
    """In ``onnx.reference``, where every operator rounds to float16."""
    source, output = tiny_onnx("gpt2"), tmp_path / "half"
    options = {"recipe": "rotate-only", "target": "portable", "certificate": None}
    graphrot.convert(source, output=output, dtype="float16", **options)
    model = ir.load(output / "model.onnx")
    tokens = np.random.default_rng(2).integers(0, VOCAB, (1, 7))
    feeds: dict[str, np.ndarray] = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    feeds["position_ids"] = np.arange(7)[None]
    feeds |= {name: np.zeros((1, 5, 0, 16), np.float16) for name in ends(model) if name.startswith("past")}
    names = {value.name for value in model.graph.inputs}
    found = run_literally(model, tmp_path, {name: array for name, array in feeds.items() if name in names})[0]
    expected, _ = open_decoder(source).run(tokens)
    assert np.abs(found - expected).max() < 4e-3 * np.abs(expected).max()


def test_what_is_not_finite_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow_model = half_module.narrow_model

    def spoiled(model: ir.Model, *arguments: Any, **options: Any) -> None:
        narrow_model(model, *arguments, **options)
        for value in model.graph.initializers.values():
            if value.dtype == F16 and value.const_value is not None and len(value.const_value.shape) == 2:
                value.const_value = ir.tensor(np.full_like(value.const_value.numpy(), np.inf))

    monkeypatch.setattr(half_module, "narrow_model", spoiled)
    for certificate, whose in (("full", "float16"), (None, "converted")):
        with pytest.raises(CheckFailed, match=f"The {whose} model's logits are not finite"):
            graphrot.convert(
                tiny_onnx("gpt2"),
                output=tmp_path / "half",
                recipe="rotate-only",
                dtype="float16",
                certificate=certificate,
            )
        assert not (tmp_path / "half").exists()


def test_the_command_line(tmp_path: Path) -> None:
    words = tmp_path / "words"
    write_tokenizer(words)
    output = tmp_path / "half"
    arguments = [str(tiny_onnx("llama_tied")), "-o", str(output), "--dtype", "bfloat16", "--tokenizer", str(words)]
    done = CliRunner().invoke(app, ["convert", *arguments, "--recipe", "rotate-only"])
    assert done.exit_code == 0, done.output
    line = next(line for line in done.output.splitlines() if line.startswith("bfloat16"))
    assert "relative error" in line and "the source only cast" in line
    said = CliRunner().invoke(
        app, ["generate", str(output), "--prompt", "a b", "--max-new-tokens", "5", "--greedy", "--json"]
    )
    assert said.exit_code == 0 and json.loads(said.stdout)["tokens"]
