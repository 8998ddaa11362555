"""Greedy and sampled continuation, streamed text, ends, and chat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphrot.errors import InputRefused, UsageError
from graphrot.evaluate import generate as module
from graphrot.evaluate.generate import Generation, Sampling, generate, stream
from graphrot.evaluate.session import open_decoder
from graphrot.evaluate.text import Tokenizer
from tests.contrib.built import built
from tests.exported import tiny_onnx, write_tokenizer
from tests.tiny import tiny

END = 2


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder)
    return Tokenizer(folder)


class _Script:
    """A decoder that says given tokens one after the other, whatever it is asked."""

    def __init__(self, tokens: Sequence[int], *, vocabulary: int = 131) -> None:
        self.tokens = list(tokens)
        self.vocabulary = vocabulary
        self.asked: list[list[int]] = []

    def run(self, tokens: np.ndarray, cache: Any = None) -> tuple[np.ndarray, int]:
        self.asked.append(tokens[0].tolist())
        said = cache or 0
        logits = np.zeros((1, tokens.shape[1], self.vocabulary), dtype=np.float32)
        logits[0, -1, self.tokens[said]] = 9
        return logits, said + 1


def test_greedy_equals_torch(words: Tokenizer) -> None:
    prompt = words.encode("hello", special=True)
    model = tiny("llama")
    with torch.no_grad():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    wanted = [t for t in expected[0, len(prompt) :].tolist() if t != END]
    found = generate(open_decoder(tiny_onnx("llama"), threads=1), words, "hello", max_new_tokens=12)
    assert found.tokens == wanted


@pytest.mark.parametrize("limit", [4, 30])
def test_the_cache_is_written_in_place_where_that_goes(
    limit: int, words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is made once, for the prompt and what may come; the tokens are those of a cache that grows."""
    monkeypatch.setattr(module, "_ROOM", 16)
    model = open_decoder(built("llama") / "model.onnx", threads=1)
    capacities: list[int | None] = []
    run = model.run

    def watched(tokens: np.ndarray, cache: Any = None) -> tuple[np.ndarray, Any]:
        logits, left = run(tokens, cache)
        capacities.append(left.capacity)
        return logits, left

    monkeypatch.setattr(model, "run", watched)
    found = generate(model, words, "hello", max_new_tokens=limit).tokens
    prompt = len(words.encode("hello", special=True))
    assert capacities[0] == prompt + min(limit, 16) and set(capacities) <= {prompt + min(limit, 16), 2 * (prompt + 16)}
    monkeypatch.setattr(model, "reserve", lambda batch, capacity: None)
    capacities.clear()
    assert generate(model, words, "hello", max_new_tokens=limit).tokens == found
    assert set(capacities) == {None}


def test_the_prompt_runs_once_and_then_token_by_token(words: Tokenizer) -> None:
    said = words.encode("thin")
    script = _Script([*said, END])
    found = generate(script, words, "ab")
    assert found == Generation("thin", said)
    assert script.asked == [words.encode("ab", special=True), *([t] for t in said)]
    assert script.asked[0][0] == 1  # the beginning-of-text token


def test_stops_at_the_limit(words: Tokenizer) -> None:
    script = _Script(words.encode("abcdef"))
    assert generate(script, words, "x", max_new_tokens=3).text == "abc"
    assert len(script.asked) == 3


def test_text_comes_as_soon_as_a_character_is_whole(words: Tokenizer) -> None:
    tokens = words.encode("a\u00e9b")
    assert len(tokens) == 4
    pieces = list(stream(_Script([*tokens, END]), words, "x"))
    assert [(p.token, p.text) for p in pieces] == [
        (tokens[0], "a"),
        (tokens[1], ""),
        (tokens[2], "\u00e9"),
        (tokens[3], "b"),
    ]
    heard: list[str] = []
    generate(_Script([*tokens, END]), words, "x", on_text=heard.append)
    assert heard == ["a", "\u00e9", "b"]


def test_half_a_character_at_the_end_is_not_lost(words: Tokenizer) -> None:
    half = words.encode("\u00e9")[:1]
    for script, limit in ((_Script([*half, END]), 9), (_Script(half), 1)):
        found = generate(script, words, "x", max_new_tokens=limit)
        assert (found.text, found.tokens) == ("\ufffd", half)


def test_sampling_follows_its_seed(words: Tokenizer) -> None:
    decoder = open_decoder(tiny_onnx("llama"), threads=1)

    def run(seed: int) -> list[int]:
        return generate(decoder, words, "hello", max_new_tokens=8, sampling=Sampling(temperature=2.0, seed=seed)).tokens

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in range(4)}) > 1


def test_sampling_keeps_to_the_likeliest_tokens(words: Tokenizer) -> None:
    class Two:
        def run(self, tokens: np.ndarray, cache: Any = None) -> tuple[np.ndarray, Any]:
            probabilities = np.full(131, 0.1 / 129)
            probabilities[[40, 41]] = 0.6, 0.3
            return np.log(probabilities)[None, None].astype(np.float32), cache

    def tokens(sampling: Sampling) -> list[int]:
        return generate(Two(), words, "x", max_new_tokens=300, sampling=sampling).tokens

    only = tokens(Sampling(temperature=1.0, top_p=0.6 - 1e-6, seed=0))
    assert set(only) == {40}
    both = tokens(Sampling(temperature=1.0, top_p=0.9 - 1e-6, seed=0))
    assert set(both) == {40, 41}
    assert 0.55 < both.count(40) / len(both) < 0.78  # 2/3 expected
    cold = tokens(Sampling(temperature=0.05, top_p=1.0, seed=0))
    assert set(cold) == {40}


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_sampling_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="sampling is not possible"):
        Sampling(**wrong)


def test_chat_uses_the_template(words: Tokenizer) -> None:
    script = _Script([END])
    generate(script, words, "hi", chat=True)
    assert words._tokenizer.decode(script.asked[0], skip_special_tokens=False) == "[user]hi</s>[answer]"


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat=False)
    with pytest.raises(InputRefused, match="has no chat template") as caught:
        generate(_Script([END]), Tokenizer(tmp_path), "hi", chat=True)
    assert "generate without --chat" in str(caught.value)


def test_an_empty_prompt_is_refused(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "encode", lambda text, special=False: [])
    with pytest.raises(InputRefused, match="The prompt is empty"):
        generate(_Script([END]), words, "")
