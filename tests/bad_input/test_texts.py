"""Texts and tokenizers that do not serve, or belong to another model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from graphrot.cli.main import run
from tests.bad_input.conftest import Refuse

SMALL = "()*+,-./0123456789:;<=>?@A" * 40
"""Characters whose tokens the model has."""


def _text(tmp_path: Path, content: str | bytes = SMALL) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _readers(model: Path, text: Path, words: Path) -> list[list[str | Path]]:
    """Every command line that reads a text."""
    return [
        ["convert", model, "--solver", "gptq", "--calibration", text, "--tokenizer", words],
        ["convert", model, "--recipe", "rotate-only", "--calibration", text, "--tokenizer", words],
        ["verify", model, model, "--text", text, "--tokenizer", words],
        ["eval", model, "--text", text, "--tokenizer", words],
    ]


@pytest.mark.parametrize("reader", range(4))
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "There is no such text file"),
        (b"", "The text is empty"),
        (b" \n\t", "The text is empty"),
        (b"caf\xe9", "The text is not UTF-8"),
        (b"\xff\xfew\x00o\x00", "The text is not UTF-8"),
    ],
)
def test_texts(
    reader: int, content: bytes | None, what: str, model: Path, words: Path, tmp_path: Path, refuse: Refuse
) -> None:
    path = tmp_path / "text.txt" if content is None else _text(tmp_path, content)
    refuse(3, _readers(model, path, words)[reader], what, str(path))


@pytest.mark.parametrize("reader", range(4))
def test_a_folder_instead_of_a_text(reader: int, model: Path, words: Path, refuse: Refuse) -> None:
    refuse(3, _readers(model, words, words)[reader], "The text is a folder", str(words), "give one file")


def test_shorter_than_a_window(model: Path, words: Path, tmp_path: Path, refuse: Refuse) -> None:
    line = ["eval", model, "--text", _text(tmp_path), "--tokenizer", words]
    refuse(3, line, "The text is too short", "3 windows of 1024 tokens need 3072", "fewer or smaller windows")
    refuse(3, [*line, "--window", "1000", "--windows", "2"], "2 windows of 1000 tokens need 2000")


def test_too_short_to_calibrate(model: Path, words: Path, tmp_path: Path, refuse: Refuse) -> None:
    text = _text(tmp_path, "()*+,-./" * 7)
    line = ["convert", model, "--solver", "gptq", "--certificate", "off", "--calibration", text, "--tokenizer", words]
    refuse(3, line, "The calibration text is too short", "text.txt: 56 tokens", "on 64 tokens at least")


@pytest.mark.parametrize("command", ["convert", "verify", "eval", "generate"])
def test_no_tokenizer(command: str, model: Path, tmp_path: Path, refuse: Refuse) -> None:
    lines: dict[str, list[str | Path]] = {
        "convert": [model, "--solver", "gptq"],
        "verify": [model, model, "--text", _text(tmp_path)],
        "eval": [model, "--text", _text(tmp_path)],
        "generate": [model, "--prompt", "x"],
    }
    refuse(3, [command, *lines[command]], "There is no tokenizer", "--tokenizer")


@pytest.fixture
def with_tokenizer(model: Path) -> Callable[[Path], list[list[str | Path]]]:
    """Command lines that read the tokenizer of a folder."""

    def lines(folder: Path) -> list[list[str | Path]]:
        text = _text(model.parent)
        return [
            ["convert", model, "--solver", "gptq", "--tokenizer", folder],
            ["convert", model, "--recipe", "rotate-only", "--tokenizer", folder],
            ["verify", model, model, "--text", text, "--tokenizer", folder],
            ["eval", model, "--text", text, "--tokenizer", folder],
            ["generate", model, "--prompt", "x", "--tokenizer", folder],
        ]

    return lines


Lines = Callable[[Path], list[list[str | Path]]]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("name", ["nowhere", "empty", "other format"])
def test_a_folder_without_tokenizer(
    number: int, name: str, with_tokenizer: Lines, tmp_path: Path, refuse: Refuse
) -> None:
    folder = tmp_path / name
    if name != "nowhere":
        folder.mkdir()
    if name == "other format":
        (folder / "tokenizer.model").write_bytes(b"sentencepiece")
    if name == "nowhere":
        refuse(3, with_tokenizer(folder)[number], "There is no such folder", str(folder), "tokenizer.json")
    else:
        refuse(3, with_tokenizer(folder)[number], "There is no tokenizer.json", str(folder), "save_pretrained")


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer(number: int, content: bytes, with_tokenizer: Lines, words: Path, refuse: Refuse) -> None:
    (words / "tokenizer.json").write_bytes(content)
    refuse(3, with_tokenizer(words)[number], "tokenizer.json does not parse", "download it again")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_broken_files_beside_it(name: str, with_tokenizer: Lines, words: Path, refuse: Refuse) -> None:
    (words / name).write_text("{", encoding="utf-8")
    refuse(3, with_tokenizer(words)[4], f"{name} does not parse", "download it again")


def test_of_another_model(with_tokenizer: Lines, words: Path, tmp_path: Path, refuse: Refuse) -> None:
    """The tokenizer has 102 tokens, the model 37; what counts is whether the text has one of those."""
    lines = with_tokenizer(words)
    for line in lines[:2]:  # Python's help topics have all letters
        refuse(3, line, "The tokenizer is not the model's own", "102 tokens", "the model knows 37 tokens")
    text = _text(tmp_path, "zebra")
    for line in (["verify", lines[2][1], lines[2][2]], ["eval", lines[3][1]]):
        words_of = ["--text", text, "--tokenizer", words]
        refuse(3, [*line, *words_of], "The tokenizer is not the model's own", "the text has token 9", "--tokenizer")
    refuse(3, [*lines[4][:2], "--prompt", "zebra", "--tokenizer", words], "not the model's own")


def test_a_much_smaller_tokenizer_is_mentioned(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocabulary = {"[UNK]": 0, "a": 1, "b": 2}
    made: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "small"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    words = ["--tokenizer", str(folder)]
    note = "the tokenizer has 3 tokens and the model 37: check that they belong together"
    assert run(["convert", str(model), "-o", str(tmp_path / "out"), "--recipe", "rotate-only", *words]) == 0
    assert note in capsys.readouterr().out
    text = _text(tmp_path, "a b " * 50)
    line = ["eval", str(model), "--text", str(text), "--window", "8", *words]
    assert run([*line, "--json"]) == 0
    out, err = capsys.readouterr()
    assert note in err and set(json.loads(out)) == {"perplexity", "tokens", "window", "windows"}
    assert run(["generate", str(model), "--prompt", "a", "--max-new-tokens", "2", *words]) == 0
    assert note in capsys.readouterr().err


def test_no_prompt(model: Path, words: Path, refuse: Refuse) -> None:
    content = json.loads((words / "tokenizer.json").read_text(encoding="utf-8"))
    content["post_processor"] = None
    (words / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    refuse(3, ["generate", model, "--prompt", "", "--tokenizer", words], "The prompt is empty")


def test_no_chat_template(model: Path, words: Path, refuse: Refuse) -> None:
    (words / "chat_template.jinja").unlink()
    refuse(3, ["generate", model, "--prompt", "x", "--chat", "--tokenizer", words], "has no chat template")


def test_a_tokenizer_that_panics(with_tokenizer: Lines, words: Path, refuse: Refuse) -> None:
    """Its file parses, but it names a token that it does not have; the package's own code breaks on it."""
    content = json.loads((words / "tokenizer.json").read_text(encoding="utf-8"))
    content["post_processor"]["single"][0]["SpecialToken"]["id"] = "nowhere"
    (words / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    refuse(3, with_tokenizer(words)[4], "tokenizer.json", "download it again")
