"""A script as people have it: onnxruntime-genai's Model, Tokenizer and Generator, and nothing of ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og

PROMPT = (5, 46, 7, 8, 61)


def load(folder: Path, **search: Any) -> og.Model:
    """A model whose search options replace those of the folder's config."""
    config = og.Config(str(folder))
    if search:
        config.overlay(json.dumps({"search": search}))
    return og.Model(config)


def generate(
    folder: Path, chunks: Sequence[Sequence[int]] = (PROMPT,), *, length: int = 30, shared: bool | None = None
) -> list[int]:
    """The tokens that follow a prompt, given in chunks, greedily; one that ends the text is left out."""
    model = load(folder, **({} if shared is None else {"past_present_share_buffer": shared}))
    generator = _generator(model, length=length)
    for chunk in chunks:
        generator.append_tokens(np.array(chunk, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    tokens = [int(token) for token in generator.get_sequence(0)][sum(len(chunk) for chunk in chunks) :]
    ends = config(folder)["model"]["eos_token_id"]
    return tokens[:-1] if tokens and tokens[-1] in np.atleast_1d(ends) else tokens


def rewound(folder: Path, keep: int, *, shared: bool, length: int = 20) -> tuple[list[int], list[int]]:
    """What follows ``PROMPT`` and two tokens more: after a rewind to ``keep`` tokens, and without one."""
    model = load(folder, past_present_share_buffer=shared)
    first = _generator(model, length=length, minimum=length)
    first.append_tokens(np.array(PROMPT, np.int32))
    for _ in range(6):
        first.generate_next_token()
    first.rewind_to(keep)
    second = _generator(model, length=length, minimum=length)
    second.append_tokens(np.array(PROMPT[:keep], np.int32))
    for generator in (first, second):
        generator.append_tokens(np.array([9, 10], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
    return [int(t) for t in first.get_sequence(0)], [int(t) for t in second.get_sequence(0)]


def batch(
    folder: Path, rows: Sequence[Sequence[int]], *, length: int = 24, shared: bool | None = None
) -> list[list[int]]:
    """What the rows become together, the shorter ones padded on the right."""
    model = load(folder, **({} if shared is None else {"past_present_share_buffer": shared}))
    generator = _generator(model, length=length, minimum=length, rows=len(rows))
    pad, longest = config(folder)["model"]["pad_token_id"], max(map(len, rows))
    generator.append_tokens(np.array([[*row, *[pad] * (longest - len(row))] for row in rows], np.int32).ravel())
    while not generator.is_done():
        generator.generate_next_token()
    return [[int(token) for token in generator.get_sequence(row)] for row in range(len(rows))]


def config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    return content


def without_library(folder: Path, place: Path) -> Path:
    """A copy of a folder as it is used where there is no library."""
    shutil.copytree(folder, place)
    content = config(place)
    (place / content["model"]["decoder"]["session_options"].pop("custom_ops_library")).unlink()
    (place / "genai_config.json").write_text(json.dumps(content), encoding="utf-8")
    return place


def _generator(model: og.Model, *, length: int, minimum: int = 0, rows: int = 1) -> og.Generator:
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=length, min_length=minimum, batch_size=rows, do_sample=False)
    return og.Generator(model, parameters)
