"""The tokenizer's files as onnxruntime-genai reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graphrot.errors import InputRefused

_FILE = "tokenizer_config.json"
_CLASS = "PreTrainedTokenizerFast"
"""What is written in tokenizer.json alone; without a class no chat template is read."""


def mended_config(folder: Path) -> str | None:
    """A new tokenizer_config.json where onnxruntime-genai could not read the one of a folder; None: it can.

    It wants the file, with a ``tokenizer_class`` in it, and one chat template as a text, not a list of named ones.
    """
    config = read_json(folder / _FILE)
    changed = dict(config)
    changed.setdefault("tokenizer_class", _CLASS)
    templates = config.get("chat_template")
    if isinstance(templates, list):
        named = [entry for entry in templates if isinstance(entry, dict)]
        first = next((entry for entry in named if entry.get("name") == "default"), None)
        del changed["chat_template"]
        if first is not None and isinstance(first.get("template"), str):
            changed["chat_template"] = first["template"]
    if changed == config:
        return None
    return json.dumps(changed, indent=2, ensure_ascii=False) + "\n"


def special_token(folder: Path, name: str) -> int | None:
    """The id of a token that tokenizer_config.json names, as ``eos_token``; None: it names none."""
    token = read_json(folder / _FILE).get(name)
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        return None
    words = read_json(folder / "tokenizer.json")
    for entry in words.get("added_tokens") or []:
        if isinstance(entry, dict) and entry.get("content") == token and isinstance(entry.get("id"), int):
            return int(entry["id"])
    model = words.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary.get(token) if isinstance(vocabulary, dict) else None
    return found if isinstance(found, int) else None


def read_json(file: Path) -> dict[str, Any]:
    """A file's table; empty where there is no file.

    Raises:
        InputRefused: it does not parse.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputRefused(
            f"{file.name} does not parse", where=str(file), why=str(error), do="save it again by transformers"
        ) from error
    return content if isinstance(content, dict) else {}
