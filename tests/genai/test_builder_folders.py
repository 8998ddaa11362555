"""A folder that onnxruntime-genai's builder made becomes a rotated one: same files, same script, same answers."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import onnx
import pytest

import graphrot
from graphrot.errors import InputRefused, UsageError
from graphrot.evaluate.text import Tokenizer
from graphrot.model.genai import read_genai
from graphrot.ops import library
from tests.contrib.built import built
from tests.genai import scripts

ROWS = ((5, 46, 7), (8, 9, 10, 11, 12), (61,))
CACHES = (None, "int8", "int4")


@functools.cache
def rotated(kv: str | None, *, kernels: bool = True) -> Path:
    """The builder's Llama, rotated, its weights as they were; with our library or without. Do not change the files."""
    place = Path(tempfile.mkdtemp(prefix="graphrot-genai-")) / "out"
    atexit.register(shutil.rmtree, place.parent, ignore_errors=True)
    if not kernels:
        return scripts.without_library(rotated(kv), place)
    graphrot.convert(built("llama"), output=place, recipe="rotate-only", kv=kv, certificate=None)
    return place


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("kv", CACHES)
def test_the_same_script_goes_on_working(kv: str | None, kernels: bool) -> None:
    """Grown caches and shared buffers, a prompt in one piece and in two, and rows of several lengths."""
    source, ours = built("llama"), rotated(kv, kernels=kernels)
    answer = scripts.generate(ours)
    pieces = [scripts.PROMPT[:2], scripts.PROMPT[2:]]
    assert [scripts.generate(ours, pieces), scripts.generate(ours, shared=False)] == [answer, answer]
    together = scripts.batch(ours, ROWS)
    assert scripts.batch(ours, ROWS, shared=False) == together
    if kv != "int4":  # which rounds too much for random weights
        assert answer == scripts.generate(source) and together == scripts.batch(source, ROWS)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("kv", CACHES)
def test_it_answers_like_our_own_command(kv: str | None, kernels: bool) -> None:
    prompt, ours = "It was the best of times", rotated(kv, kernels=kernels)
    tokens = Tokenizer(ours).encode(prompt, special=True)
    expected = graphrot.generate(ours, prompt=prompt, max_new_tokens=30, greedy=True, library=kernels).tokens
    assert scripts.generate(ours, [tokens], length=len(tokens) + 30) == list(expected)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kv", CACHES)
def test_a_rewind_forgets_what_came_after(kv: str | None, shared: bool) -> None:
    for keep in (1, 3, 5):
        after, anew = scripts.rewound(rotated(kv), keep, shared=shared)
        assert after == anew


def test_what_lies_in_the_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(built("llama"), source)
    for name in ("special_tokens_map.json", "processor_config.json"):
        (source / name).write_text("{}", encoding="utf-8")
    (source / "stale.onnx.data").write_bytes(b"old weights")
    options = {"recipe": "rotate-only", "kv": "int4", "certificate": None}
    result = graphrot.convert(source, output=tmp_path / "out", **options)
    made = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    kept = {file.name: file.read_bytes() for file in source.iterdir()}
    changed = {"genai_config.json", "model.onnx", "model.onnx.data", "stale.onnx.data"}
    own = {"graphrot.json", "plan.json", library.file_name()}
    assert made.keys() == kept.keys() - {"stale.onnx.data"} | own
    assert all(made[name] == kept[name] for name in kept.keys() - changed)
    assert result.report.recipe["target"] == "genai" and result.report.source.kind == "genai"
    assert any("not carried over from source: stale.onnx.data" in note for note in result.notes)

    before, after = scripts.config(source), scripts.config(tmp_path / "out")
    decoder = after["model"]["decoder"]
    assert decoder["session_options"].pop("custom_ops_library") == library.file_name()
    assert decoder.pop("head_size") == 16 // 2 + 4 and before["model"]["decoder"].pop("head_size") == 16
    assert after == before and after["search"]["past_present_share_buffer"]

    with pytest.raises(UsageError, match="already exists"):
        graphrot.convert(source, output=tmp_path / "out", **options)
    graphrot.convert(source, output=tmp_path / "out", force=True, **options)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}.keys() == made.keys()
    (tmp_path / "out" / "processor_config.json").write_text('{"mine": 1}', encoding="utf-8")
    with pytest.raises(UsageError, match="were changed since") as caught:
        graphrot.convert(source, output=tmp_path / "out", force=True, **options)
    assert "processor_config.json" in str(caught.value.where)


def test_other_targets_and_files_are_still_to_be_had(tmp_path: Path) -> None:
    options = {"recipe": "rotate-only", "certificate": None}
    graphrot.convert(built("llama"), output=tmp_path / "x.onnx", **options)
    graphrot.convert(built("llama"), output=tmp_path / "plain", target="ort", **options)
    assert not any((folder / "genai_config.json").exists() for folder in (tmp_path, tmp_path / "plain"))
    result = graphrot.convert(built("llama"), **options)
    with pytest.raises(UsageError, match="The genai target writes a folder"):
        result.save(tmp_path / "y.onnx")
    assert result.save(tmp_path / "later").parent.joinpath("genai_config.json").is_file()


def test_names_of_inputs_and_outputs_are_those_of_the_config(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(built("llama"), source)
    model = onnx.load(source / "model.onnx", load_external_data=False)
    words = {"input_ids": "tokens", "logits": "scores", "past_key_values": "old", "present": "new"}

    def called(name: str) -> str:
        first, dot, rest = name.partition(".")
        return words.get(first, first) + dot + rest

    for value in (*model.graph.input, *model.graph.output):
        value.name = called(value.name)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [called(n) if n in words or n.startswith(("past_key_values.", "present.")) else n for n in names]
    onnx.save(model, source / "decoder.onnx")
    (source / "model.onnx").unlink()
    config = scripts.config(source)
    decoder = config["model"]["decoder"] | {"filename": "decoder.onnx"}
    decoder["inputs"] |= {"input_ids": "tokens", "past_key_names": "old.%d.key", "past_value_names": "old.%d.value"}
    decoder["outputs"] = {"logits": "scores", "present_key_names": "new.%d.key", "present_value_names": "new.%d.value"}
    config["model"]["decoder"] = decoder
    (source / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    graphrot.convert(source, output=tmp_path / "out", recipe="rotate-only", kv="int8", certificate="full")
    assert scripts.generate(tmp_path / "out") == scripts.generate(source) == scripts.generate(built("llama"))
    inputs = [value.name for value in onnx.load(tmp_path / "out" / "model.onnx").graph.input]
    assert inputs == [value.name for value in model.graph.input] and "tokens" in inputs


def test_another_library_of_the_source_stays_the_one(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(built("llama"), source)
    shutil.copy(library.library_path(), source / "libtheirs.so")
    config = scripts.config(source)
    config["model"]["decoder"]["session_options"] |= {
        "custom_ops_library": "libtheirs.so", "provider_options": [{"cuda": {}}],
    }  # fmt: skip
    (source / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    result = graphrot.convert(source, output=tmp_path / "out", recipe="rotate-only", certificate=None)
    options = scripts.config(tmp_path / "out")["model"]["decoder"]["session_options"]
    assert (options["custom_ops_library"], options["provider_options"]) == ("libtheirs.so", [])
    assert (tmp_path / "out" / "libtheirs.so").is_file() and not (tmp_path / "out" / library.file_name()).exists()
    notes = " ".join(result.notes)
    assert "libtheirs.so stays it" in notes and "for the CPU: cuda is no longer in genai_config.json" in notes


def test_without_an_installed_library_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(library.OVERRIDE, str(tmp_path / "absent.so"))
    result = graphrot.convert(built("llama"), output=tmp_path / "out", recipe="rotate-only", certificate=None)
    assert "custom_ops_library" not in scripts.config(tmp_path / "out")["model"]["decoder"]["session_options"]
    assert any("its operators run as functions" in note for note in result.notes)
    assert scripts.generate(tmp_path / "out") == scripts.generate(built("llama"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder": None}, "not one of onnxruntime-genai"),
        ({"decoder": {"filename": ""}}, "not one of onnxruntime-genai"),
        ({"decoder": {"filename": "model.onnx", "inputs": 3}}, "not one of onnxruntime-genai"),
        ({"decoder": {"filename": "absent.onnx"}}, "is not there"),
        ({"decoder": {"filename": "../model.onnx"}}, "is not there"),
        ({"decoder": {"filename": "model.onnx", "pipeline": [{}]}}, "holds several models"),
        ({"vision": {"filename": "vision.onnx"}}, "holds several models"),
        ({"tokenizer_dir": "words"}, "tokenizer lies elsewhere"),
    ],
)
def test_configs_that_are_refused(change: dict[str, object], words: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    config = {"decoder": {"filename": "model.onnx"}} | change
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": config}), encoding="utf-8")
    with pytest.raises(InputRefused, match=words):
        read_genai(tmp_path)
    with pytest.raises(InputRefused, match=words):
        graphrot.convert(tmp_path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "[]", "{", "{}"])
def test_a_config_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputRefused, match="not one of onnxruntime-genai"):
        graphrot.convert(tmp_path, output=tmp_path / "out")


def test_names_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(built("llama"), source)
    config = scripts.config(source)
    config["model"]["decoder"]["inputs"]["past_key_names"] = "cache.%d.key"
    (source / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputRefused, match="does not have what genai_config") as caught:
        graphrot.convert(source, output=tmp_path / "out")
    assert "past_key_names is 'cache.%d.key'" in str(caught.value.why)
