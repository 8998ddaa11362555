"""Weight files of Hugging Face folders: shards, narrow types, and what a broken download leaves behind."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import PreTrainedModel

import graphrot
from graphrot.errors import InputRefused
from graphrot.evaluate.session import open_decoder
from graphrot.model.checkpoint import check_weights, weight_files
from graphrot.model.hf import hash_of
from graphrot.model.inputs import Inputs
from graphrot.model.load import load_source
from tests.tiny import tiny_gpt2, tiny_llama

INDEX = "model.safetensors.index.json"


def _save(folder: Path, *, torch_files: bool = False, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Save a model in shards of at most 40 kB; returns it as float32 with the saved numbers."""
    model = tiny_llama(layers=1)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder, max_shard_size="40KB")
    if torch_files:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        for file in sorted(folder.glob("model-*.safetensors")):
            name = file.name.replace("model", "pytorch_model").replace("safetensors", "bin")
            torch.save(safetensors.torch.load_file(file), folder / name)
            file.unlink()
        index["weight_map"] = {
            tensor: name.replace("model", "pytorch_model").replace("safetensors", "bin")
            for tensor, name in index["weight_map"].items()
        }
        (folder / INDEX).unlink()
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def _refused(folder: Path, tmp_path: Path) -> str:
    with pytest.raises(InputRefused) as caught:
        load_source(str(folder), workdir=tmp_path / "work")
    assert not list((tmp_path / "work").rglob("*.onnx"))
    return str(caught.value)


@pytest.mark.parametrize("torch_files", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shards_of_every_type_convert_and_agree_with_torch_in_float32(
    torch_files: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = _save(tmp_path / "hf", torch_files=torch_files, dtype=dtype)
    assert len(weight_files(tmp_path / "hf")) > 1
    made = graphrot.convert(tmp_path / "hf", output=tmp_path / "x.onnx", recipe="rotate-only", certificate="off")
    assert made.notes == ()
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    logits, _ = open_decoder(tmp_path / "x.onnx").run(ids.numpy())
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_checkpoint_verifies_against_its_float32_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    model = _save(tmp_path / "narrow", dtype=dtype)
    model.save_pretrained(tmp_path / "wide")
    for name in ("narrow", "wide"):
        graphrot.convert(tmp_path / name, output=tmp_path / f"{name}.onnx", recipe="rotate-only")
    assert graphrot.verify(tmp_path / "wide.onnx", tmp_path / "narrow.onnx").max_abs == 0


@pytest.mark.parametrize("torch_files", [False, True])
def test_every_shard_is_hashed_and_protected(torch_files: bool, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    _save(folder, torch_files=torch_files)
    shards = weight_files(folder)
    assert set(shards) <= set(Inputs.of(str(folder)).files())
    before = hash_of(folder)
    content = bytearray(shards[-1].read_bytes())
    content[-30] ^= 1
    shards[-1].write_bytes(content)
    assert hash_of(folder) != before


def _lose(file: Path) -> None:
    file.unlink()


def _shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + bytes(8))


def _scribble(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[:16] = b"<!DOCTYPE html> "
    file.write_bytes(content)


def _pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 40\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_lose, "A part of the model's weights is missing"),
        (_shorten, "The model's weights are corrupt"),
        (_empty, "The model's weights are corrupt"),
        (_scribble, "The model's weights are corrupt"),
        (_pointer, "The model's weights are corrupt"),
    ],
)
@pytest.mark.parametrize("torch_files", [False, True])
def test_a_broken_shard_is_named(
    torch_files: bool, damage: Callable[[Path], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path / "hf", torch_files=torch_files)
    victim = weight_files(tmp_path / "hf")[1]
    damage(victim)
    monkeypatch.setitem(sys.modules, "torch", None)  # whoever asks torch now, fails
    message = _refused(tmp_path / "hf", tmp_path)
    assert words in message and str(victim) in message


def test_more_than_the_header_says_is_corrupt(tmp_path: Path) -> None:
    _save(tmp_path / "hf")
    _lengthen(weight_files(tmp_path / "hf")[0])
    assert "its header describes" in _refused(tmp_path / "hf", tmp_path)


def test_shards_that_changed_places_are_noticed(tmp_path: Path) -> None:
    _save(tmp_path / "hf")
    first, second, *_ = weight_files(tmp_path / "hf")
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    assert "not the one that its index means" in _refused(tmp_path / "hf", tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b.safetensors"}}', "[]"],
)
def test_a_broken_index_is_named(text: str, tmp_path: Path) -> None:
    _save(tmp_path / "hf")
    (tmp_path / "hf" / INDEX).write_text(text, encoding="utf-8")
    message = _refused(tmp_path / "hf", tmp_path)
    assert "The index of the weights is not usable" in message and INDEX in message


def test_one_file_comes_before_shards_and_safetensors_before_torch(tmp_path: Path) -> None:
    _save(tmp_path)
    assert len(weight_files(tmp_path)) > 2
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "consolidated.safetensors").touch()
    assert all(file.name.startswith("model-0") for file in weight_files(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]


def test_weights_that_the_checkpoint_lacks_are_not_made_up(tmp_path: Path) -> None:
    model = tiny_llama(layers=1)
    model.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    del weights["model.layers.0.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    message = _refused(tmp_path / "hf", tmp_path)
    assert "lacks weights" in message and "model.layers.0.mlp.up_proj.weight" in message


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    tiny_gpt2(layers=1).save_pretrained(tmp_path / "hf")
    assert "lm_head.weight" not in safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert load_source(str(tmp_path / "hf"), workdir=tmp_path / "work").kind == "hf"


def test_torch_s_old_file_format_is_read(tmp_path: Path) -> None:
    model = tiny_llama(layers=1)
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    file = tmp_path / "hf" / "pytorch_model.bin"
    torch.save(model.state_dict(), file, _use_new_zipfile_serialization=False)
    check_weights(tmp_path / "hf")
    torch.save(model.state_dict(), file)
    assert load_source(str(tmp_path / "hf"), workdir=tmp_path / "work").kind == "hf"


def test_eight_bit_floats_are_refused(tmp_path: Path) -> None:
    tiny_llama(layers=1).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    message = _refused(tmp_path / "hf", tmp_path)
    assert "already quantized" in message and name in message and "F8_E4M3" in message


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], *, torch_file: bool = False) -> None:
    """Change the tensors of a checkpoint of one file, and make it one of torch's own if wished."""
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    change(weights)
    if torch_file:
        file.unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        safetensors.torch.save_file(weights, file, {"format": "pt"})


def _configure(folder: Path, **settings: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | settings), encoding="utf-8")


@pytest.mark.parametrize("torch_files", [False, True])
def test_a_tensor_in_two_shards_is_refused(torch_files: bool, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    _save(folder, torch_files=torch_files)
    first, *_, last = weight_files(folder)
    load, save = (torch.load, torch.save) if torch_files else (safetensors.torch.load_file, safetensors.torch.save_file)
    name, tensor = next(iter(load(first).items()))
    save({**load(last), name: tensor + 1}, last)
    message = _refused(folder, tmp_path)
    assert "stands in two files" in message
    assert all(word in message for word in (name, str(first), last.name))


LAYER = "model.layers.0"
MORE = {
    "a layer": "model.layers.1.mlp.up_proj.weight",
    "a bias": f"{LAYER}.self_attn.q_proj.bias",
    "a norm": f"{LAYER}.self_attn.q_norm.weight",
    "a norm of the body": "model.embedding_norm.weight",
    "a bias of the head": "lm_head.bias",
    "the body alone": "layers.1.mlp.up_proj.weight",
}


@pytest.mark.parametrize("torch_file", [False, True])
@pytest.mark.parametrize("name", MORE.values(), ids=MORE)
def test_weights_that_the_model_would_leave_out_are_refused(name: str, torch_file: bool, tmp_path: Path) -> None:
    tiny_llama(layers=1).save_pretrained(tmp_path / "hf")
    _rewrite(tmp_path / "hf", lambda weights: weights.update({name: torch.ones(48)}), torch_file=torch_file)
    message = _refused(tmp_path / "hf", tmp_path)
    assert "holds weights that its model does not use" in message and name in message


def test_a_config_with_fewer_layers_than_the_weights_is_refused(tmp_path: Path) -> None:
    tiny_gpt2(layers=2).save_pretrained(tmp_path / "hf")
    _configure(tmp_path / "hf", n_layer=1)
    message = _refused(tmp_path / "hf", tmp_path)
    assert "holds weights that its model does not use" in message and "transformer.h.1." in message


def test_buffers_of_old_checkpoints_and_heads_beside_the_decoder_are_left_out(tmp_path: Path) -> None:
    mask = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    old: dict[str, dict[str, torch.Tensor]] = {
        "llama": {
            f"{LAYER}.self_attn.rotary_emb.inv_freq": torch.ones(8, dtype=torch.float64),
            "model.embeddings.position_ids": torch.arange(8),
            "v_head.summary.weight": torch.ones(1, 48),
            f"{LAYER}.self_attn.bias": mask,
        },
        "gpt2": {
            "transformer.h.0.attn.bias": mask,
            "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
            "lm_head.weight": torch.empty(0),
        },
    }
    for name, build in (("llama", tiny_llama), ("gpt2", tiny_gpt2)):
        folder = tmp_path / name
        build(layers=1).save_pretrained(folder)

        def add(weights: dict[str, torch.Tensor], more: dict[str, torch.Tensor] = old[name]) -> None:
            if "lm_head.weight" in more:
                more["lm_head.weight"] = weights["transformer.wte.weight"].clone()
            weights.update(more)

        _rewrite(folder, add)
        source = load_source(str(folder), workdir=tmp_path / f"work-{name}")
        assert source.notes == ()


@pytest.mark.parametrize("torch_file", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.int64, torch.bool])
def test_integers_are_no_weights(dtype: torch.dtype, torch_file: bool, tmp_path: Path) -> None:
    tiny_llama(layers=1).save_pretrained(tmp_path / "hf")
    name = f"{LAYER}.mlp.up_proj.weight"
    _rewrite(tmp_path / "hf", lambda w: w.update({name: (w[name] * 100).to(dtype)}), torch_file=torch_file)
    message = _refused(tmp_path / "hf", tmp_path)
    assert "weights are no floats" in message and name in message


@pytest.mark.parametrize("torch_file", [False, True])
def test_float64_weights_are_rounded_and_it_is_said(torch_file: bool, tmp_path: Path) -> None:
    model = tiny_llama(layers=1)
    model.save_pretrained(tmp_path / "hf")
    name = f"{LAYER}.mlp.up_proj.weight"
    _rewrite(tmp_path / "hf", lambda w: w.update({name: w[name].double()}), torch_file=torch_file)
    source = load_source(str(tmp_path / "hf"), workdir=tmp_path / "work")
    assert source.notes == ("1 tensors of the source are float64; they were rounded to float32",)
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    logits, _ = open_decoder(source.path).run(ids.numpy())
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"architectures": [1]}, "architectures in config.json is not a list of texts"),
        ({"architectures": "LlamaForCausalLM"}, "it is 'LlamaForCausalLM'"),
        ({"architectures": {"LlamaForCausalLM": 1}}, "architectures in config.json is not a list of texts"),
        ({"model_type": ["llama"]}, "model_type in config.json is not a text"),
        ({"model_type": 3}, "model_type in config.json is not a text"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers"),
        ({"num_hidden_layers": float("nan")}, "num_hidden_layers"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"intermediate_size": 10**10}, "intermediate_size"),
    ],
)
@pytest.mark.parametrize("torch_file", [False, True])
def test_a_config_with_odd_values_is_refused(
    settings: dict[str, object], words: str, torch_file: bool, tmp_path: Path
) -> None:
    tiny_llama(layers=1).save_pretrained(tmp_path / "hf")
    _rewrite(tmp_path / "hf", lambda weights: None, torch_file=torch_file)
    _configure(tmp_path / "hf", **settings)
    message = _refused(tmp_path / "hf", tmp_path)
    assert words in message and "config.json" in message and "transformers cannot load" not in message


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[]", "3", "null", '"llama"'])
def test_a_config_that_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    tiny_llama(layers=1).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(text, encoding="utf-8")
    words = "does not parse" if len(text) > 1000 else "holds no table of settings"
    assert words in _refused(tmp_path / "hf", tmp_path)


def test_deep_nesting_in_headers_and_indexes_is_refused(tmp_path: Path) -> None:
    _save(tmp_path / "hf")
    file = weight_files(tmp_path / "hf")[0]
    file.write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000)
    assert "The model's weights are corrupt" in _refused(tmp_path / "hf", tmp_path)
    (tmp_path / "hf" / INDEX).write_text("[" * 100_000, encoding="utf-8")
    assert "The index of the weights is not usable" in _refused(tmp_path / "hf", tmp_path)


def test_an_adapter_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "adapter_model.safetensors").touch()
    message = _refused(tmp_path, tmp_path)
    assert "The folder holds an adapter and no model" in message and "merge_and_unload" in message
