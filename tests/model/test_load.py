"""What is taken as a source, and the words with which the rest is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from graphrot.errors import InputRefused
from graphrot.model.load import load_onnx, load_source
from graphrot.model.onnxfile import OWN_MARK
from graphrot.model.save import save_model
from tests.exported import tiny_onnx, write_tokenizer
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    tiny_llama(tied=True, layers=1).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A private copy of an exported model."""
    path = tmp_path / "private" / "model.onnx"
    path.parent.mkdir()
    save_model(ir.load(tiny_onnx("llama")), path)
    return path


def _refused(spec: str | Path, workdir: Path) -> str:
    with pytest.raises(InputRefused) as caught:
        load_source(str(spec), workdir=workdir)
    return str(caught.value)


def _edit_config(folder: Path, target: Path, **changes: object) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    (target / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None}), encoding="utf-8"
    )
    return target


def test_a_folder_is_exported_into_the_workdir(hf: Path, tmp_path: Path) -> None:
    source = load_source(str(hf), workdir=tmp_path / "work")
    assert (source.kind, source.name, source.tokenizer_dir) == ("hf", "tiny", hf)
    assert source.path.is_relative_to(tmp_path / "work") and source.path.is_file()
    assert source.model.graph.outputs[0].name == "logits"
    assert sorted(p.name for p in hf.iterdir() if p.suffix == ".onnx") == []


def test_half_precision_folders_are_exported_in_float32(tmp_path: Path) -> None:
    tiny_llama(layers=1).bfloat16().save_pretrained(tmp_path / "half")
    source = load_source(str(tmp_path / "half"), workdir=tmp_path / "work")
    assert source.tokenizer_dir is None
    types = {v.const_value.dtype for v in source.model.graph.initializers.values() if v.const_value is not None}
    assert types <= {ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL}


def test_the_hash_follows_weights_and_config_only(hf: Path, tmp_path: Path) -> None:
    from graphrot.model.hf import hash_of

    before = hash_of(hf)
    other = _edit_config(hf, tmp_path / "other", rms_norm_eps=1e-4)
    assert hash_of(other) != before
    same = _edit_config(hf, tmp_path / "same")
    (same / "config.json").write_bytes((hf / "config.json").read_bytes())
    (same / "README.md").write_text("hello", encoding="utf-8")
    assert hash_of(same) == before


def test_an_onnx_file_is_taken_without_torch(copy: Path) -> None:
    write_tokenizer(copy.parent)
    code = (
        "import sys\nfrom pathlib import Path\nfrom graphrot.model.load import load_source\n"
        f"source = load_source({str(copy)!r}, workdir=Path('.'))\n"
        f"assert source.kind == 'onnx' and source.path == Path({str(copy)!r})\n"
        f"assert source.tokenizer_dir == Path({str(copy.parent)!r})\n"
        "assert not {'torch', 'transformers', 'onnxruntime'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_hash_of_an_onnx_file_covers_its_weights(copy: Path, tmp_path: Path) -> None:
    before = load_source(str(copy), workdir=tmp_path).sha256
    data = copy.with_name("model.onnx.data")
    content = bytearray(data.read_bytes())
    content[0] ^= 1
    data.write_bytes(content)
    assert load_source(str(copy), workdir=tmp_path).sha256 != before


def test_unknown_things_are_refused(tmp_path: Path) -> None:
    assert "there is no such file or folder" in _refused(tmp_path / "nothing", tmp_path)
    text = tmp_path / "a.txt"
    text.write_text("x", encoding="utf-8")
    assert "it is not an .onnx or .gguf file" in _refused(text, tmp_path)
    assert "There is no such file" in _refused(tmp_path / "x.onnx", tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "The folder holds no config.json" in _refused(empty, tmp_path)
    (empty / "model.onnx").write_bytes(b"")
    assert "give the .onnx file itself" in _refused(empty, tmp_path)


def test_broken_folders_are_refused(hf: Path, tmp_path: Path) -> None:
    encoder = _edit_config(hf, tmp_path / "encoder", model_type="bert", architectures=["BertForMaskedLM"])
    assert "transformers does not know the model as a decoder" in _refused(encoder, tmp_path)
    unknown = _edit_config(hf, tmp_path / "unknown", model_type="nobody", architectures=["NobodyForCausalLM"])
    assert "without code from the folder" in _refused(unknown, tmp_path)
    both = _edit_config(hf, tmp_path / "both", is_encoder_decoder=True)
    assert "is_encoder_decoder is true" in _refused(both, tmp_path)
    nameless = _edit_config(hf, tmp_path / "nameless", architectures=None)
    assert "names no architecture" in _refused(nameless, tmp_path)
    quantized = _edit_config(hf, tmp_path / "quantized", quantization_config={"quant_method": "gptq"})
    assert "already quantized" in _refused(quantized, tmp_path)
    light = _edit_config(hf, tmp_path / "light")
    (light / "model.safetensors").unlink()
    assert "The folder holds no weights" in _refused(light, tmp_path)
    (light / "config.json").write_text("{", encoding="utf-8")
    assert "config.json does not parse" in _refused(light, tmp_path)
    cut = _edit_config(hf, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes()[:1000])
    assert "The model's weights are corrupt" in _refused(cut, tmp_path)


def test_broken_onnx_files_are_refused(copy: Path, tmp_path: Path) -> None:
    data = copy.with_name("model.onnx.data")
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    assert "external data is too short" in _refused(copy, tmp_path)
    data.unlink()
    message = _refused(copy, tmp_path)
    assert "external data is missing" in message and "put the file beside the model" in message
    data.write_bytes(whole)
    copy.write_bytes(copy.read_bytes()[:5000])
    assert "not a usable ONNX model" in _refused(copy, tmp_path)
    copy.write_bytes(b"")
    assert "it holds no graph with operators" in _refused(copy, tmp_path)
    copy.write_bytes(b"this is no protobuf at all")
    assert "not a usable ONNX model" in _refused(copy, tmp_path)


def test_an_invalid_graph_is_refused(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Neg", ["nowhere"], ["y"])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [y])), tmp_path / "bad.onnx")
    assert "reads 'nowhere', which nothing makes" in _refused(tmp_path / "bad.onnx", tmp_path)


def test_weights_outside_the_folder_are_refused(copy: Path, tmp_path: Path) -> None:
    proto = onnx.load(copy, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../model.onnx.data"
    onnx.save(proto, copy)
    copy.with_name("model.onnx.data").rename(tmp_path / "model.onnx.data")
    assert "lies outside its folder" in _refused(copy, tmp_path)


def test_own_models_are_refused_as_sources_and_can_be_looked_at(copy: Path, tmp_path: Path) -> None:
    model = ir.load(copy)
    model.metadata_props[OWN_MARK] = "0.1.0"
    path = tmp_path / "own.onnx"
    save_model(model, path)
    assert "already converted by graphrot" in _refused(path, tmp_path)
    assert load_onnx(path).metadata_props[OWN_MARK] == "0.1.0"
    (copy.parent / "graphrot.json").write_text("{}", encoding="utf-8")
    assert "already converted by graphrot" in _refused(copy.parent, tmp_path)
