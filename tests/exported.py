"""The tiny decoders as ONNX files, each exported once per test run, and a tiny tokenizer for them."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from graphrot.model.export import Road, export_decoder
from tests.tiny import VOCAB, tiny, tiny_llama

_FOLDER = Path(tempfile.mkdtemp(prefix="graphrot-tests-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)

CHAT_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}[answer]"


@functools.cache
def tiny_onnx(name: str) -> Path:
    """Path of the export of ``tiny(name)``; its weights lie beside it. Do not change the files."""
    path = _FOLDER / name / "model.onnx"
    path.parent.mkdir(exist_ok=True)
    export_decoder(tiny(name), path)
    return path


@functools.cache
def one_layer_onnx(road: Road) -> Path:
    """Path of what one of torch's exporters writes of a tied Llama of one layer. Do not change the files."""
    path = _FOLDER / f"one-layer-{road}" / "model.onnx"
    path.parent.mkdir()
    export_decoder(tiny_llama(layers=1, tied=True), path, roads=(road,))
    return path


def with_tokenizer(name: str, folder: Path) -> Path:
    """Path of a copy of :func:`tiny_onnx` in a folder, with a tokenizer beside it."""
    source = tiny_onnx(name)
    for file in source.parent.iterdir():
        shutil.copyfile(file, folder / file.name)
    write_tokenizer(folder)
    return folder / source.name


def write_tokenizer(folder: Path, *, chat: bool = True) -> None:
    """Write a byte-level tokenizer of fewer than ``VOCAB`` tokens: ASCII, and the two bytes of e-acute.

    ``<s>`` (1) goes in front where special tokens are asked for; ``</s>`` (2) ends a text.
    """
    letters = [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(c))[0][0] for c in range(32, 127)]
    newline = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\n")[0][0]
    accent = list(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\u00e9")[0][0])
    tokens = ["<unk>", "<s>", "</s>", *letters, newline, *accent, letters[84] + letters[72]]
    assert len(tokens) < VOCAB
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [(letters[84], letters[72])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if chat:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
