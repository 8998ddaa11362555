"""Texts and tokenizers: what is read, and the words with which the rest is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from graphrot.errors import InputRefused
from graphrot.evaluate.text import Tokenizer, default_calibration_text, encode_file, find_tokenizer, read_text
from tests.exported import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "words")
    return tmp_path / "words"


def test_text_files(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    with pytest.raises(InputRefused, match="There is no such text file"):
        read_text(file)
    file.write_text(" \n", encoding="utf-8")
    with pytest.raises(InputRefused, match="The text is empty"):
        read_text(file)
    file.write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(InputRefused, match="The text is not UTF-8") as caught:
        read_text(file)
    assert "byte 3" in str(caught.value)
    file.write_text("caf\u00e9", encoding="utf-8")
    assert read_text(file) == "caf\u00e9"


def test_encoding_and_decoding(folder: Path) -> None:
    words = Tokenizer(folder)
    ids = words.encode("the caf\u00e9\n")
    assert words.decode(ids) == "the caf\u00e9\n"
    assert words.encode("the caf\u00e9\n", special=True) == [1, *ids]
    assert len(words.encode("th")) == 1
    assert words.size == 102


def test_equals_transformers(folder: Path) -> None:
    import transformers

    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )
    other = transformers.AutoTokenizer.from_pretrained(folder)
    words = Tokenizer(folder)
    text = "there\nand </s> back"
    assert words.encode(text) == other(text, add_special_tokens=False)["input_ids"]
    messages = [{"role": "user", "content": text}]
    assert words.render_chat(messages) == other.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )


def test_truncation_set_in_the_file_is_off(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert len(Tokenizer(folder).encode("abcdefgh")) == 8


def test_end_tokens(folder: Path) -> None:
    assert Tokenizer(folder).end_tokens == {2}
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}', encoding="utf-8")
    assert Tokenizer(folder).end_tokens == {2, 7}
    added = {"eos_token": {"__type": "AddedToken", "content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(added), encoding="utf-8")
    assert Tokenizer(folder).end_tokens == {2, 7}
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}', encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    assert Tokenizer(folder).end_tokens == {9}


def test_tokenizers_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match=r"There is no tokenizer\.json"):
        Tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputRefused, match=r"tokenizer_config\.json does not parse"):
        Tokenizer(folder)
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputRefused, match=r"tokenizer\.json does not parse"):
        Tokenizer(folder)


def test_finding_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "models" / "m.onnx"
    elsewhere.parent.mkdir()
    assert find_tokenizer(None, beside=(elsewhere, folder)).folder == folder
    assert find_tokenizer(None, beside=(folder / "m.onnx",)).folder == folder
    assert find_tokenizer(folder, beside=(elsewhere,)).folder == folder
    with pytest.raises(InputRefused, match="There is no tokenizer") as caught:
        find_tokenizer(None, beside=(elsewhere,))
    assert "--tokenizer" in str(caught.value) and str(elsewhere.parent) in str(caught.value)


def test_encoding_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abcdef", encoding="utf-8")
    whole = encode_file(tmp_path / "t.txt", folder)
    assert whole.tolist() == Tokenizer(folder).encode("abcdef")
    assert encode_file(tmp_path / "t.txt", None, beside=(folder,), limit=4).tolist() == whole[:4].tolist()


@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_places_of_a_chat_template(folder: Path, place: str) -> None:
    config = folder / "tokenizer_config.json"
    if place != "file":
        (folder / "chat_template.jinja").unlink()
        template = "<{{ messages[0]['content'] }}>"
        listed = [{"name": "tools", "template": "no"}, {"name": "default", "template": template}]
        config.write_text(json.dumps({"chat_template": template if place == "config" else listed}), encoding="utf-8")
    text = Tokenizer(folder).render_chat([{"role": "user", "content": "hi"}])
    assert text == ("[user]hi</s>[answer]" if place == "file" else "<hi>")


@pytest.mark.parametrize(
    ("template", "why"), [("{{ raise_exception('no system role') }}", "no system role"), ("{% for %}", "Expected")]
)
def test_failing_chat_templates_are_refused(folder: Path, template: str, why: str) -> None:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(InputRefused, match="The chat template fails") as caught:
        Tokenizer(folder).encode_chat("hi")
    assert why in str(caught.value)


def test_a_chat_template_cannot_reach_out(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}", encoding="utf-8")
    with pytest.raises(InputRefused, match="The chat template fails"):
        Tokenizer(folder).encode_chat("hi")


def test_the_default_calibration_text() -> None:
    text = default_calibration_text()
    assert text == default_calibration_text()
    assert len(text) > 100_000 and "assert" in text[:2000]


def test_running_a_model_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "import graphrot.evaluate.session, graphrot.evaluate.generate, graphrot.evaluate.perplexity\n"
        f"from graphrot.evaluate.text import Tokenizer\nTokenizer(Path({str(folder)!r})).encode_chat('hi')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
