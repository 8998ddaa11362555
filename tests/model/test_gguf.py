"""GGUF files: whole ones convert, quantized ones say so, and what would go wrong in silence is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx_ir as ir
import pytest
import torch

import graphrot
from graphrot.errors import EnvironmentProblem, InputRefused
from graphrot.evaluate.session import open_decoder
from graphrot.evaluate.text import Tokenizer
from graphrot.model import gguf as reading
from graphrot.model.load import load_source
from tests.exported import CHAT_TEMPLATE
from tests.model.gguf_files import F16, F32, Q8, write_gguf
from tests.tiny import VOCAB, tiny_llama, tiny_qwen2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Llama. Do not change it."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(tiny_llama(layers=1), path)
    return path


def _refused(path: Path, tmp_path: Path) -> str:
    with pytest.raises(InputRefused) as caught:
        load_source(str(path), workdir=tmp_path / "work")
    assert str(path) in str(caught.value)
    assert not list((tmp_path / "work").rglob("*.onnx"))
    return str(caught.value)


def _worst(path: Path | ir.Model, model: torch.nn.Module) -> float:
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    logits, _ = open_decoder(path).run(ids.numpy())
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("kind", [F32, F16])
def test_floats_of_all_widths_convert_without_a_remark(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    model = tiny_llama(layers=1)
    if kind == F16:
        for parameter in model.parameters():
            parameter.data = parameter.data.half().float()
    write_gguf(model, tmp_path / "a.gguf", kind=kind)
    made = graphrot.convert(tmp_path / "a.gguf", output=tmp_path / "out", recipe="rotate-only", certificate="off")
    assert made.report.source.kind == "gguf" and made.report.source.name == "a.gguf" and made.notes == ()
    assert _worst(tmp_path / "out", model) < 1e-5


def test_a_quantized_file_says_so(tmp_path: Path) -> None:
    model = tiny_qwen2(layers=1)
    write_gguf(model, tmp_path / "a.gguf", kind=Q8)
    made = graphrot.convert(tmp_path / "a.gguf", recipe="rotate-only")
    assert "the source was quantized already: Q8_0 (1 matrices)" in made.notes[0]
    rounded = reading.load_gguf(tmp_path / "a.gguf")
    assert made.certificate is not None and made.certificate.relative < 1e-9
    assert 1e-4 < _worst(made.model, model) < 0.05
    assert _worst(made.model, rounded) < 1e-5


def test_the_tokenizer_comes_along(whole: Path, tmp_path: Path) -> None:
    graphrot.convert(whole, output=tmp_path / "out", recipe="rotate-only", certificate="off")
    words, given = Tokenizer(tmp_path / "out"), Tokenizer(whole.parent / "tiny.words")
    text = "Th\u00e9 capital of France is\n"
    assert words.encode(text) == given.encode(text) and words.decode(words.encode(text)) == text
    assert (tmp_path / "out" / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE
    assert graphrot.generate(tmp_path / "out", prompt="The", greedy=True, max_new_tokens=3).tokens


def test_the_demo_s_folder_is_written_without_a_word(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from graphrot.model import demo

    demo._dequantize(whole, tmp_path / "hf")
    assert tuple(capfd.readouterr()) == ("", "")
    source = load_source(str(tmp_path / "hf"), workdir=tmp_path / "work")
    assert source.tokenizer_dir == tmp_path / "hf" and _worst(source.path, tiny_llama(layers=1)) < 1e-5


def test_without_a_tokenizer_it_converts_and_says_so(tmp_path: Path) -> None:
    write_gguf(tiny_llama(layers=1), tmp_path / "a.gguf", tokenizer=False)
    made = graphrot.convert(tmp_path / "a.gguf", recipe="rotate-only", certificate="off")
    assert made.notes == ("the GGUF file holds no tokenizer: give --tokenizer DIR",)
    with pytest.raises(InputRefused, match="There is no tokenizer"):
        graphrot.convert(tmp_path / "a.gguf", recipe="w4a8")


def test_the_hash_is_the_file_s(whole: Path, tmp_path: Path) -> None:
    from graphrot.model.files import sha256_of

    assert load_source(str(whole), workdir=tmp_path).sha256 == sha256_of([whole])


def test_factors_of_rotary_frequencies_are_applied(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(tiny_llama(layers=1), tmp_path / "a.gguf", extra={"rope_freqs.weight": factors})
    model = tiny_llama(layers=1)
    exported = load_source(str(tmp_path / "a.gguf"), workdir=tmp_path / "work").path
    plain = _worst(exported, model)
    model.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    assert _worst(exported, model) < 1e-5 < plain
    write_gguf(tiny_llama(layers=1), tmp_path / "b.gguf", extra={"rope_freqs.weight": factors[:5]})
    assert "do not fit the model" in _refused(tmp_path / "b.gguf", tmp_path / "b")


def test_what_transformers_leaves_out_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(layers=1)
    write_gguf(model, tmp_path / "a.gguf", extra={"rope_factors_long.weight": np.ones(8, np.float32)})
    assert "rope_factors_long.weight" in _refused(tmp_path / "a.gguf", tmp_path)
    write_gguf(model, tmp_path / "b.gguf", scaling=gguf.RopeScalingType.YARN)
    assert "llama.rope.scaling.type = yarn" in _refused(tmp_path / "b.gguf", tmp_path)


def test_missing_tensors_are_refused_and_not_made_up(tmp_path: Path) -> None:
    write_gguf(tiny_llama(layers=1), tmp_path / "a.gguf", leave_out="blk.0.ffn_up.weight")
    message = _refused(tmp_path / "a.gguf", tmp_path)
    assert "lacks weights of its model" in message and "mlp.up_proj.weight" in message


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_norm.bias", "blk.1.ffn_up.weight"])
def test_weights_that_the_model_would_leave_out_are_refused(name: str, tmp_path: Path) -> None:
    write_gguf(tiny_llama(layers=1), tmp_path / "a.gguf", extra={name: np.ones(48, np.float32)}, tokenizer=False)
    message = _refused(tmp_path / "a.gguf", tmp_path)
    assert "holds weights that its model does not use" in message and name in message


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    write_gguf(tiny_llama(layers=1), tmp_path / "a.gguf", architecture="nobody")
    assert "architecture 'nobody'" in _refused(tmp_path / "a.gguf", tmp_path)


def test_parts_are_refused(tmp_path: Path) -> None:
    write_gguf(tiny_llama(layers=1), tmp_path / "a-00001-of-00002.gguf", parts=2)
    assert "split.count = 2" in _refused(tmp_path / "a-00001-of-00002.gguf", tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 0.3, 0.6, 0.999])
def test_short_files_are_refused(whole: Path, tmp_path: Path, keep: float) -> None:
    content = whole.read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    assert "not a usable GGUF model" in _refused(short, tmp_path)


def test_corrupt_files_are_refused(whole: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    for position in (4, 8, 16, 24, 40):
        content = bytearray(whole.read_bytes())
        content[position : position + 4] = b"\xff\xff\xff\xff"
        bad.write_bytes(content)
        assert "GGUF" in _refused(bad, tmp_path)
    bad.write_bytes(whole.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0ll\xffma", 1))
    assert "general.architecture is no text" in _refused(bad, tmp_path)
    bad.write_bytes(b"PK\x03\x04 something else")
    assert "does not begin with the four letters GGUF" in _refused(bad, tmp_path)
    assert "There is no such file" in _refused(tmp_path / "nowhere.gguf", tmp_path)


@pytest.mark.parametrize("package", ["gguf", "accelerate", "torch"])
def test_missing_packages_are_named(whole: Path, tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    with pytest.raises(EnvironmentProblem) as caught:
        load_source(str(whole), workdir=tmp_path)
    assert package in str(caught.value) and "graphrot[hf]" in str(caught.value)


def test_a_file_inside_a_folder_is_pointed_at(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputRefused) as caught:
        load_source(str(tmp_path), workdir=tmp_path / "work")
    assert "tiny.gguf" in str(caught.value) and "given by its own path" in str(caught.value)


def test_vocabularies_agree(whole: Path) -> None:
    assert reading.read_header(whole).quantized is None
    assert reading.load_gguf(whole).config.vocab_size == VOCAB
