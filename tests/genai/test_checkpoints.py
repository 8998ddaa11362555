"""Target genai from what has no genai_config.json: Hugging Face folders, GGUF files, .onnx files with a config."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime_genai as og
import pytest

import graphrot
from graphrot.emit.genai_config import made_config
from graphrot.emit.genai_model import caches_of
from graphrot.emit.genai_tokenizer import mended_config
from graphrot.errors import InputRefused, UsageError
from graphrot.evaluate.text import Tokenizer
from tests.exported import tiny_onnx, write_tokenizer
from tests.genai import scripts
from tests.model.gguf_files import write_gguf
from tests.tiny import tiny, tiny_qwen2

OPTIONS: dict[str, Any] = {"target": "genai", "recipe": "rotate-only", "certificate": None}


def beside(folder: Path, name: str) -> Path:
    """An exported tiny model with its config and its tokenizer, as a folder of Optimum has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in tiny_onnx(name).parent.iterdir():
        shutil.copy(file, folder)
    tiny(name).config.save_pretrained(folder)
    write_tokenizer(folder)
    return folder / "model.onnx"


@functools.cache
def converted(name: str, kv: str | None = None) -> Path:
    """An exported tiny model as a folder of target genai. Do not change the files."""
    place = Path(tempfile.mkdtemp(prefix="graphrot-genai-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    graphrot.convert(beside(place / "in", name), output=place / "out", kv=kv, **OPTIONS)
    return place / "out"


@pytest.mark.parametrize(
    ("name", "kind", "kv"), [("llama", "llama", None), ("llama", "llama", "int4"), ("gpt2", "decoder", "int8")]
)
def test_exports_answer_like_our_own_command(name: str, kind: str, kv: str | None, tmp_path: Path) -> None:
    """With positions as inputs; a type that onnxruntime-genai does not run as a decoder is called one."""
    ours = converted(name, kv)
    assert scripts.config(ours)["model"]["type"] == kind
    shared = kv is not None
    assert scripts.config(ours)["search"]["past_present_share_buffer"] == shared
    assert "position_ids" in scripts.config(ours)["model"]["decoder"]["inputs"]
    prompt = "It was the best of times"
    tokens = Tokenizer(ours).encode(prompt, special=True)
    chunks = [tokens[:7], tokens[7:]]
    for folder, kernels in ((ours, True), (scripts.without_library(ours, tmp_path / "plain"), False)):
        expected = graphrot.generate(ours, prompt=prompt, max_new_tokens=20, greedy=True, library=kernels).tokens
        assert scripts.generate(folder, [tokens], length=len(tokens) + 20) == list(expected)
        assert scripts.generate(folder, chunks, length=len(tokens) + 20, shared=False) == list(expected)
    for buffer in {shared, False}:
        after, anew = scripts.rewound(ours, 3, shared=buffer)
        assert after == anew


@pytest.mark.parametrize("kv", [None, "int4"])
def test_rows_of_several_lengths_do_not_see_each_other(kv: str | None) -> None:
    rows = ((5, 46, 7), (8, 9, 10, 11, 12), (61,))
    together = scripts.batch(converted("llama", kv), rows, length=16)
    for row, found in zip(rows, together, strict=True):
        alone = scripts.batch(converted("llama", kv), [row], length=16)[0]
        assert found[5 : 5 + 8] == alone[len(row) : len(row) + 8]


def test_a_checkpoint_and_a_gguf_file(tmp_path: Path) -> None:
    model = tiny_qwen2(layers=1)
    model.save_pretrained(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    write_gguf(model, tmp_path / "x.gguf")
    folders = [tmp_path / "from_hf", tmp_path / "from_gguf"]
    for source, folder in zip((tmp_path / "hf", tmp_path / "x.gguf"), folders, strict=True):
        graphrot.convert(source, output=folder, **OPTIONS)
    first, second = (scripts.config(folder)["model"] for folder in folders)
    assert first == second
    assert (first["type"], first["eos_token_id"], first["context_length"]) == ("qwen2", 2, 256)
    assert scripts.generate(folders[0]) == scripts.generate(folders[1])


def test_the_stock_cache_runs_in_its_place(tmp_path: Path) -> None:
    """ONNX Runtime's own attention over 8 bits: fixed scales, no graphrot operator but the transforms."""
    graphrot.convert(beside(tmp_path / "in", "llama"), output=tmp_path / "out", kv="int8", kernels="ort", **OPTIONS)
    assert scripts.config(tmp_path / "out")["model"]["decoder"]["head_size"] == 16
    tokens = Tokenizer(tmp_path / "out").encode("It was", special=True)
    expected = graphrot.generate(tmp_path / "out", prompt="It was", max_new_tokens=20, greedy=True).tokens
    for shared in (True, False):
        found = scripts.generate(tmp_path / "out", [tokens], length=len(tokens) + 20, shared=shared)
        assert found == list(expected)


def test_the_tokenizer_reads_and_its_chat_template_renders() -> None:
    """Ours has no ``tokenizer_class``, without which onnxruntime-genai reads no template."""
    folder = converted("llama")
    messages = [{"role": "user", "content": "It was"}]
    theirs = og.Tokenizer(str(folder))
    assert theirs.apply_chat_template(json.dumps(messages)) == Tokenizer(folder).render_chat(messages)
    text = "It was the best of times"
    assert list(theirs.encode(text)) == Tokenizer(folder).encode(text)


@pytest.mark.parametrize("inside", [True, False])
def test_one_of_several_chat_templates_is_taken(inside: bool, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat=not inside)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8")) | {"tokenizer_class": "X"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert mended_config(tmp_path) is None
    named = [{"name": "tool_use", "template": "T"}] + [{"name": "default", "template": "D"}] * inside
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}), encoding="utf-8")
    mended = mended_config(tmp_path)
    assert mended is not None
    assert json.loads(mended) == config | ({"chat_template": "D"} if inside else {})


def made(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation or {}), encoding="utf-8")
    model = ir.load(tiny_onnx("llama"))
    return made_config(model, caches_of(model), folder, folder)


def test_what_the_config_says(tmp_path: Path) -> None:
    config = {"model_type": "llama", "n_positions": 77, "eos_token_id": 5, "n_embd": 48, "n_head": 3}
    content = made(tmp_path, config, {"eos_token_id": [7, 9], "pad_token_id": 4, "do_sample": True, "top_k": 20})
    model = content["model"]
    assert model["eos_token_id"] == [7, 9, 2], "generation_config.json's, and the tokenizer's own"
    assert (model["bos_token_id"], model["pad_token_id"], model["vocab_size"]) == (1, 4, 131)
    assert model["context_length"] == content["search"]["max_length"] == 77
    decoder = model["decoder"]
    assert (decoder["num_hidden_layers"], decoder["num_key_value_heads"], decoder["head_size"]) == (2, 1, 16)
    assert (decoder["hidden_size"], decoder["num_attention_heads"]) == (48, 3)
    search = content["search"]
    assert (search["do_sample"], search["top_k"], search["temperature"]) == (True, 20, 1.0)
    assert search["past_present_share_buffer"] is False, "float caches that are concatenated grow"
    (tmp_path / "genai_config.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer(tmp_path).end_tokens == {2, 7, 9}, "our own commands stop where onnxruntime-genai does"


def test_what_the_config_must_say(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="does not say how long a text may be"):
        made(tmp_path, {"model_type": "llama"})
    model = ir.load(tiny_onnx("llama"))
    caches = caches_of(model)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputRefused, match=r"config\.json does not parse"):
        made_config(model, caches, tmp_path, tmp_path)
    plain = made(tmp_path, {"max_position_embeddings": 10**30, "n_ctx": 9, "model_type": "bert"})
    assert (plain["model"]["context_length"], plain["model"]["type"]) == (9, "decoder")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("caches", "not a decoder with a key/value cache"),
        ("present", "does not give back the cache"),
        ("extra", "would not feed an input"),
        ("numbers", "no names that onnxruntime-genai could count"),
    ],
)
def test_models_that_onnxruntime_genai_could_not_feed(change: str, words: str) -> None:
    model = ir.load(tiny_onnx("llama"))
    if change == "caches":
        for value in [v for v in model.graph.inputs if (v.name or "").startswith("past")]:
            model.graph.inputs.remove(value)
    elif change == "present":
        model.graph.outputs.pop()
    elif change == "extra":
        next(v for v in model.graph.inputs if v.name == "position_ids").name = "token_type_ids"
    else:
        next(v for v in model.graph.inputs if v.name == "past_key_values.1.key").name = "past_key_values.2.key"
    with pytest.raises(InputRefused, match=words):
        caches_of(model)


def test_what_lacks_a_config_or_a_tokenizer_is_refused_before_it_is_read(tmp_path: Path) -> None:
    bare = tmp_path / "bare" / "model.onnx"
    bare.parent.mkdir()
    bare.write_bytes(b"not read")
    with pytest.raises(InputRefused, match="has no config for onnxruntime-genai"):
        graphrot.convert(bare, output=tmp_path / "out", **OPTIONS)
    with pytest.raises(InputRefused, match="has no config for onnxruntime-genai"):
        graphrot.convert(ir.load(tiny_onnx("llama")), **OPTIONS)
    (bare.parent / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputRefused, match="has no tokenizer for onnxruntime-genai"):
        graphrot.convert(bare, output=tmp_path / "out", **OPTIONS)
    with pytest.raises(InputRefused, match="has no tokenizer for onnxruntime-genai"):
        graphrot.convert(bare.parent, output=tmp_path / "out", **OPTIONS)
    with pytest.raises(UsageError, match="The genai target writes a folder"):
        graphrot.convert("demo", output=tmp_path / "out.onnx", **OPTIONS)


def test_the_folder_of_the_tokenizer_may_hold_the_config(tmp_path: Path) -> None:
    beside(tmp_path / "words", "llama")
    (tmp_path / "words" / "model.onnx").unlink()
    result = graphrot.convert(ir.load(tiny_onnx("llama")), tokenizer=tmp_path / "words", **OPTIONS)
    result.save(tmp_path / "out")
    assert scripts.generate(tmp_path / "out") == scripts.generate(converted("llama"))
